"""A pretrained model learns sums by every loss and every way to make advantages, one after another
in one cluster: reward of the samples and held-out accuracy of each, next to those of
`truncated_importance_sampling` with GRPO's advantages.

    accuracy       of greedy answers to held-out problems, after the last step
    reward_last_3  mean reward of the samples of the last three steps
    reward_all     of all steps

The task is the recipe `arithmetic`: its rows, reward and sampling. LoRA trains the attention's
linears only, because publications of all linears would take most of a CPU's time. The loop samples
one version ahead and takes four optimizer steps on each batch, so that losses which treat old
answers differently do differ. Every arm begins with the same fresh adapter and the same prompts;
their accuracy before the first step is the first arm's.

`cross_entropy` trains on those sampled answers which are right. `dpo` pairs a right and a wrong
answer to the same problem, by two forward passes, in one optimizer step.

SPLICE_BENCH_MODEL is the model's folder (`examples/arithmetic/convert.py` writes one).
SPLICE_BENCH_ARMS names some arms, SPLICE_BENCH_STEPS and SPLICE_BENCH_LR their steps and learning
rate. With SPLICE_BENCH_CURVES, a folder, every step is on disk at once, and an arm that is whole
is not made again. `settings["curve"]` has all steps; `python -m benchmarks plot RESULT PNG` draws
them.
"""

from __future__ import annotations

import asyncio
import json
import os
import runpy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import splice
from benchmarks import clusters
from benchmarks.clusters import TARGETS
from benchmarks.harness import Case, Result, inference_python
from benchmarks.learning import Curve, Found, trained
from benchmarks.learning_task import Row, Task
from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import InitialSync, LossSpec, OptimParams
from splice.client.advantages import AdvantageName
from splice.client.batches import Batch, Completion, grpo_batch, sft_batch
from splice.client.clients import SpliceClient
from splice.client.preferences import dpo_batch
from splice.client.run_file import RunFile
from splice.cluster import Cluster
from splice.rl import Loop, LoopConfig, SamplingConfig

Groups = Sequence[Sequence[tuple[Any, float]]]
BASE = "truncated_importance_sampling"
LAST, HELD_OUT, SEED = 3, 100, 1
WHOLE = 2**20
"""Sequences of a mini-batch that has the whole batch."""
TASK = Task(steps=10, evaluate_every=10, lora_lr=4e-4, max_tokens=6)
SMALL = replace(TASK, steps=2, evaluate_every=2, num_prompts=2, group_size=4)
MINI_BATCHES = 4


def _right(_: SpliceClient, groups: Groups) -> Batch:
    """Those sampled answers which are right; all of them if none is."""
    pairs = [pair for group in groups for pair in group]
    return sft_batch([answer for answer, reward in pairs if reward > 0] or [a for a, _ in pairs])


def _preferred(client: SpliceClient, groups: Groups) -> Batch:
    """DPO's batch of right and wrong answers to the same problem.

    Raises:
        ConfigError: there is no such pair in the whole batch.
    """
    pairs = list(_pairs(groups))
    if not pairs:
        raise ConfigError("dpo: no problem has a right and a wrong answer; use a larger group")
    asked = sft_batch([answer for pair in pairs for answer in pair])
    policy = client.forward(asked).logprobs
    return dpo_batch(pairs, policy, client.forward(asked, adapters=False).logprobs, beta=0.1)


def _pairs(groups: Groups) -> Iterator[tuple[Completion, Completion]]:
    for group in groups:
        right, wrong = ([a for a, r in group if (r > 0) is is_right] for is_right in (True, False))
        yield from zip(right, wrong, strict=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A way to learn from the same prompts.

    Attributes:
        make_batch: from the client and groups of (answer, reward); None: the loop's.
    """

    loss: LossSpec
    advantages: AdvantageName = "grpo"
    make_batch: Callable[[SpliceClient, Groups], Batch] | None = None
    mini_batches: int = MINI_BATCHES


def _of_loss(name: str) -> Arm:
    return Arm(loss=LossSpec(name=name))


def _of_advantages(name: AdvantageName) -> Arm:
    return Arm(loss=LossSpec(name=BASE), advantages=name)


LOSSES = (
    *(BASE, "importance_sampling", "linear", "ppo", "grpo", "dapo", "cispo", "gspo"),
    *("masked_importance_sampling", "icepop", "token_rejection", "sequence_rejection", "dppo"),
)
ADVANTAGES: tuple[AdvantageName, ...] = (
    *("dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"),
)
ARMS = {
    **{name: _of_loss(name) for name in LOSSES},
    **{name: _of_advantages(name) for name in ADVANTAGES},
    "cross_entropy": Arm(loss=LossSpec(name="cross_entropy"), make_batch=_right),
    "dpo": Arm(
        loss=LossSpec(name="linear", normalize_by="sequences"),
        make_batch=_preferred,
        mini_batches=1,
    ),
}
METRICS: dict[str, Callable[[Found], float]] = {
    "accuracy": lambda c: float(c["evaluations"][-1]["accuracy"]),
    f"reward_last_{LAST}": lambda c: fmean(s["reward"] for s in c["steps"][-LAST:]),
    "reward_all": lambda c: fmean(s["reward"] for s in c["steps"]),
}


def run(*, device: str, small: bool) -> Iterator[Case]:
    """The arms of SPLICE_BENCH_ARMS that have no whole curve yet; the cases of all curves."""
    named = os.environ.get("SPLICE_BENCH_ARMS")
    arms = list(ARMS)[:2] if small else named.split(",") if named else list(ARMS)
    if unknown := sorted(set(arms) - set(ARMS)):
        raise ConfigError(f"SPLICE_BENCH_ARMS: {unknown} are no arms; these are: {sorted(ARMS)}")
    task = SMALL if small else _task()
    with TemporaryDirectory(prefix="splice-bench-") as name:
        folder = Path(name)
        curves = Path(os.environ.get("SPLICE_BENCH_CURVES", folder / "curves"))
        curves.mkdir(parents=True, exist_ok=True)
        if small:
            model = clusters.make_model("tiny-dense", folder / "model")
        else:
            model = Path(os.environ["SPLICE_BENCH_MODEL"])
        missing = [arm for arm in arms if not _found(curves, arm).get("done")]
        if missing:
            with Cluster(_cluster_config(model, folder, task, device=device)) as cluster:
                cluster.client.run(InitialSync())
                for arm in missing:
                    _train(arm, cluster.client, task, folder / arm, curves / f"{arm}.json")
        yield from cases_of(curves, task)


def _task() -> Task:
    given = os.environ
    lr = float(given.get("SPLICE_BENCH_LR", TASK.lora_lr))
    steps = int(given.get("SPLICE_BENCH_STEPS", TASK.steps))
    return replace(TASK, lora_lr=lr, steps=steps, evaluate_every=steps)


def _found(curves: Path, arm: str) -> Found:
    path = curves / f"{arm}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _train(name: str, client: SpliceClient, task: Task, folder: Path, path: Path) -> None:
    """One arm with a fresh adapter."""
    arm = ARMS[name]
    client.new_adapter(seed=SEED)
    client.publish()
    recipe = runpy.run_path(str(Path(splice.__file__).with_name("recipes") / "arithmetic.py"))
    right: Callable[[Mapping[str, Any], Completion], float] = recipe["right"]
    held_out: list[Row] = recipe["held_out"]()[:HELD_OUT]
    curve, make_batch = Curve(path), arm.make_batch
    loop = Loop(
        client,
        folder,
        prompts=recipe["training"](),
        reward=right,
        config=_loop_config(arm, task),
        loss=arm.loss,
        optim=OptimParams(lr=task.lora_lr),
        make_batch=grpo_batch if make_batch is None else lambda groups: make_batch(client, groups),
    )
    asyncio.run(trained(loop, curve, held_out, task, right, is_new=name == BASE))
    curve.found["done"] = True
    curve.write()


def _loop_config(arm: Arm, task: Task) -> LoopConfig:
    sequences = task.num_prompts * task.group_size
    return LoopConfig(
        max_staleness=1,
        group_size=task.group_size,
        groups_per_step=task.num_prompts,
        advantages=arm.advantages,
        mini_batch_sequences=WHOLE if arm.mini_batches == 1 else sequences // arm.mini_batches,
        steps=task.steps,
        shuffle_seed=SEED,
        sampling=SamplingConfig(max_tokens=task.max_tokens, extra={"stop": [".", "\n"]}),
        sinks=(),
        keep_samples=0,
    )


def _cluster_config(model: Path, folder: Path, task: Task, *, device: str) -> RunFile:
    cuda = device == "cuda"
    trainer_gpu, inference_gpu = clusters.gpus() if cuda else (0, 1)
    return RunFile(
        name="losses",
        model=model.absolute(),
        run_dir=folder / "run",
        device="cuda" if cuda else "cpu",
        orchestrator={"keep_versions": 2},
        trainer={
            "admission": "skip",
            "lora": {"rank": task.rank, "alpha": task.alpha, "targets": TARGETS["lora-attn"]},
            "micro_batch_tokens": task.micro_batch_tokens,
            "gpus": (trainer_gpu,) if cuda else (),
        },
        inference={
            "python": inference_python(),
            "load_format": "dummy",
            "gpus": (inference_gpu,) if cuda else (),
            "max_model_len": 512,
            "max_num_seqs": 2 * task.num_prompts * task.group_size,
            "enforce_eager": clusters.is_eager(device),
        },
    )


# ------------------------------------------------------------------ results


def cases_of(curves: Path, task: Task) -> Iterator[Case]:
    """The cases of all whole curves in a folder, in the order of ARMS."""
    found = {arm: _found(curves, arm) for arm in ARMS}
    whole = {arm: curve for arm, curve in found.items() if curve.get("done")}
    settings = {"task": asdict(task), "mini_batches": MINI_BATCHES}
    for arm, curve in whole.items():
        for metric, measure in METRICS.items():
            yield Case(
                name=arm,
                metric=metric,
                unit="share",
                samples=(measure(curve),),
                peer=BASE,
                peer_samples=(measure(whole[BASE]),) if BASE in whole else (),
                settings=settings | {"curve": curve} if metric == "accuracy" else {},
            )


def plot(result: Result, path: Path) -> None:
    """A picture of each arm: its reward and held-out accuracy, over those of BASE in grey."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves = {c.name: c.settings["curve"] for c in result.cases if "curve" in c.settings}
    columns = 5
    rows = -(-len(curves) // columns)
    figure, axes = plt.subplots(
        *(rows, columns), figsize=(13, 2.1 * rows), sharex=True, sharey=True, layout="constrained"
    )
    for axis in axes.flat[len(curves) :]:
        axis.set_axis_off()
    base = curves.get(BASE, next(iter(curves.values())))
    for axis, (arm, curve) in zip(axes.flat, curves.items(), strict=False):
        for of, colour in ((base, "0.7"), (curve, "tab:blue")):
            steps, points = of["steps"], [base["evaluations"][0], of["evaluations"][-1]]
            axis.plot([s["step"] for s in steps], [s["reward"] for s in steps], color=colour)
            at, accuracy = [p["step"] for p in points], [p["accuracy"] for p in points]
            axis.plot(at, accuracy, "o--", color=colour, markersize=4, linewidth=0.8)
        axis.set_title(arm, fontsize=9)
    figure.supxlabel("version", fontsize=9)
    figure.suptitle(
        f"line: reward of the samples; dots: held-out accuracy; grey: {BASE}. "
        f"{result.device}, {result.commit[:9]}",
        fontsize=9,
    )
    figure.savefig(path, dpi=100)
    plt.close(figure)
