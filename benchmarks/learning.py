"""A pretrained model learns a task of many tokens: the asynchronous loop, the strict one, full
parameters and FP8 rollouts, each next to a control in one process (`benchmarks.learning_control`).

    accuracy        on held-out problems, greedy, after the last step
    reward_last_20  mean reward of the samples of the last 20 steps
    reward_all      of all steps
    logprob_gap     median over the steps of the mean |log p(trainer) - log p(sampler)|, in nats
    steps_per_min   median

The peer of each is the control with the same seeds (of full parameters for `full`).
SPLICE_BENCH_MODEL is the model's folder, SPLICE_BENCH_ROWS the problems
(`python -m benchmarks.learning_task ROWS`). SPLICE_BENCH_RUNS says what runs (`async:0,control:0`),
SPLICE_BENCH_PARALLEL (1) how many at a time, on the GPUs of SPLICE_BENCH_GPUS,
SPLICE_BENCH_LIMIT_S how long each, SPLICE_BENCH_LR and SPLICE_BENCH_STEPS its learning rate and
steps. With SPLICE_BENCH_RESCORED (`1,5,20`), KL(trained, served) of these versions is computed in
fp32 (`benchmarks.fidelity`). On a GPU a control takes some 20 GB, splice's trainer 12
(`full`: 19) and its server 6. With SPLICE_BENCH_CURVES, a folder, every step is on disk at once,
and the runs of an earlier call are not repeated. `settings["curves"]` has all steps;
`python -m benchmarks plot RESULT PNG` draws them.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import clusters
from benchmarks.harness import Case, Result, inference_python
from benchmarks.learning_task import Row, Task, read, reward, row, task_of
from orchestrator.errors import ConfigError
from orchestrator.protocol.config import (
    FinetuningType,
    Numerics,
    RoundingMode,
)
from orchestrator.protocol.messages import InitialSync, LossSpec, OptimParams
from splice.client.batches import Completion
from splice.client.run_file import RunFile
from splice.cluster import Cluster
from splice.cluster.preflight import share_a_gpu
from splice.rl import Loop, LoopConfig, SamplingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A way to train.

    Attributes:
        control: key of its peer in ARMS; None: it is a control.
        loss: of splice's trainer. `linear` does not correct for the sampler's log-probs.
    """

    control: str | None = None
    finetuning_type: FinetuningType = "lora"
    max_staleness: int = 1
    loss: str = "truncated_importance_sampling"
    rounding: RoundingMode = "stochastic"
    numerics: Numerics = "adapters"
    vllm_args: tuple[str, ...] = ()


FP8 = ("--quantization", "fp8")
ARMS = {
    "control": Arm(),
    "strict": Arm(control="control", max_staleness=0),
    "strict-nearest": Arm(control="control", max_staleness=0, rounding="nearest"),
    "strict-served": Arm(control="control", max_staleness=0, numerics="served"),
    "async": Arm(control="control"),
    "async-served": Arm(control="control", numerics="served"),
    "fp8": Arm(control="control", vllm_args=FP8),
    "fp8-uncorrected": Arm(control="control", loss="linear", vllm_args=FP8),
    "control-full": Arm(finetuning_type="full"),
    "full": Arm(control="control-full", finetuning_type="full"),
}
DEFAULT_RUNS = ",".join(f"{arm}:{seed}" for arm in ARMS for seed in range(3))
LAST = 20
Found = dict[str, Any]
Score = Callable[[Mapping[str, Any], Completion], float]


class Curve:
    """Steps and evaluations with the seconds since the first line: a JSON file, always whole."""

    def __init__(self, path: Path) -> None:
        self.path, self._began_s = path, 0.0
        self.found: Found = {"steps": [], "evaluations": [], "rescored": [], "done": False}

    def add(self, kind: str, **line: Any) -> None:
        """Add a line and write the file."""
        self._began_s = self._began_s or time.monotonic()
        line = {"seconds": time.monotonic() - self._began_s, **line}
        self.found[kind].append({name: float(f"{value:.6g}") for name, value in line.items()})
        self.write()

    def write(self) -> None:
        """Replace the file."""
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.found))
        part.replace(self.path)


# ------------------------------------------------------------------ one run


async def trained(
    loop: Loop,
    curve: Curve,
    held_out: list[Row],
    task: Task,
    score: Score,
    *,
    is_new: bool = True,
) -> None:
    """All steps of a loop, with the task's evaluations.

    Args:
        is_new: evaluate before the first step, too.
    """

    async def evaluate(step: int) -> None:
        answers = await loop.sample(held_out, temperature=0.0)
        scores = [score(r, a) for r, (a,) in zip(held_out, answers, strict=True)]
        curve.add("evaluations", step=step, accuracy=fmean(scores))

    names = ("answer_tokens", "truncated", "staleness_mean", "staleness_max", "logprob_gap_mean")
    names += ("logprob_gap_max", "kl_sampler_mean", "entropy_mean", "grad_norm")
    async with loop:
        if is_new:
            await evaluate(0)
        async for step in loop:
            metrics = {n: step.metrics[n] for n in (*names, *OF_LORA) if n in step.metrics}
            metrics |= {f"{name}_s": step.seconds[f"job.{name}"] for name in ("send", "pause")}
            curve.add("steps", step=step.number, reward=step.metrics["reward_mean"], **metrics)
            if step.number % task.evaluate_every == 0 or step.number == task.steps:
                await evaluate(step.number)


def _score(problem: Mapping[str, Any], completion: Completion) -> float:
    return reward(dict(problem), completion.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run is given. It stops after `limit_s` seconds, as far as it came."""

    model: Path
    rows: Path
    seed: int
    device: str
    limit_s: float
    task: Task
    work: Path


def train(arm: Arm, run: Run, curve: Curve) -> None:
    """One run of one arm, in this process; its nodes live in `run.work`."""
    training, held_out = read(run.rows, run.seed)
    task = run.task
    if arm.control is None:
        from benchmarks.learning_control import Control
        from benchmarks.learning_control import run as run_control

        full = arm.finetuning_type == "full"
        control = Control(run.model, task, seed=run.seed, full=full, device=run.device)
        run_control(curve, training, held_out, control, limit_s=run.limit_s)
    else:
        lr = task.full_lr if arm.finetuning_type == "full" else task.lora_lr
        with Cluster(_cluster_config(arm, run)) as cluster:
            cluster.client.run(InitialSync())
            loop = Loop(
                cluster.client,
                run.work / "loop",
                prompts=training,
                reward=_score,
                config=_loop_config(arm, task),
                loss=LossSpec(name=arm.loss),
                optim=OptimParams(
                    lr=lr, beta1=task.beta1, beta2=task.beta2, max_grad_norm=task.max_grad_norm
                ),
            )
            asyncio.run(asyncio.wait_for(trained(loop, curve, held_out, task, _score), run.limit_s))
        _rescore(arm, run, curve)
    curve.found["done"] = True
    curve.write()


def _rescore(arm: Arm, run: Run, curve: Curve) -> None:
    """KL(trained, served) in fp32 of the versions that SPLICE_BENCH_RESCORED names."""
    versions = [int(v) for v in os.environ.get("SPLICE_BENCH_RESCORED", "").split(",") if v]
    if not versions:
        return
    from benchmarks.fidelity import Rescorer

    rescorer = Rescorer(run.model, device=run.device)
    for version in versions:
        adapter = run.work / "run" / "versions" / str(version) / "adapter"
        numbers = rescorer.numbers(adapter, mode=arm.rounding, seed=run.seed)
        curve.add("rescored", version=version, **numbers)


def _loop_config(arm: Arm, task: Task) -> LoopConfig:
    return LoopConfig(
        max_staleness=arm.max_staleness,
        group_size=task.group_size,
        groups_per_step=task.num_prompts,
        steps=task.steps,
        sampling=SamplingConfig(max_tokens=task.max_tokens),
        sinks=(),
        keep_samples=20,
    )


def _cluster_config(arm: Arm, run: Run) -> RunFile:
    device, task, model = run.device, run.task, run.model
    cuda = device == "cuda"
    trainer_gpu, inference_gpu = clusters.gpus() if cuda else (0, 1)
    shared = share_a_gpu((trainer_gpu,), [(inference_gpu,)])
    transport = {"transport": "nccl" if cuda and not shared else "tcp"}
    # Of several servers on a GPU each says how much it takes: none can measure what is free.
    memory = ("--kv-cache-memory-bytes", str(2**31)) if cuda else ()
    keeps_all = bool(os.environ.get("SPLICE_BENCH_RESCORED"))
    return RunFile(
        name="learning",
        model=model,
        run_dir=run.work / "run",
        device="cuda" if cuda else "cpu",
        orchestrator={"keep_versions": 1 + task.steps if keeps_all else 2},
        publication={"rounding": arm.rounding},
        trainer={
            "admission": "skip",
            "finetuning_type": arm.finetuning_type,
            "lora": {"rank": task.rank, "alpha": task.alpha},
            "numerics": arm.numerics,
            "micro_batch_tokens": task.micro_batch_tokens,
            "seed": run.seed,
            "gpus": (trainer_gpu,) if cuda else (),
            **transport,
        },
        inference={
            "python": inference_python(),
            "load_format": "dummy",
            "gpus": (inference_gpu,) if cuda else (),
            "max_model_len": 1024 if cuda else 512,
            "max_num_seqs": 2 * task.num_prompts * task.group_size,
            "gpu_memory_utilization": 0.06 if cuda else 0.85,
            "enforce_eager": clusters.is_eager(device),
            "extra_args": (*memory, *arm.vllm_args),
            **transport,
        },
    )


# ----------------------------------------------------------------- all runs


def run(*, device: str, small: bool) -> list[Case]:
    """The runs of SPLICE_BENCH_RUNS, each in its own process."""
    wanted = os.environ.get("SPLICE_BENCH_RUNS", DEFAULT_RUNS)
    with TemporaryDirectory(prefix="splice-bench-") as name:
        folder = Path(name)
        curves = Path(os.environ.get("SPLICE_BENCH_CURVES", folder / "curves")).absolute()
        curves.mkdir(parents=True, exist_ok=True)
        if small:
            wanted = "async:0,control:0"
            model = clusters.make_model("tiny-dense", folder / "model")
            rows = folder / "rows.json"
            rows.write_text(json.dumps([row(f"{a} + 1 =", str(a + 1)) for a in range(140)]))
        else:
            model, rows = (Path(os.environ[f"SPLICE_BENCH_{key}"]) for key in ("MODEL", "ROWS"))
        common = {"model": str(model.absolute()), "rows": str(rows.absolute()), "device": device}
        common |= {"small": small, "limit_s": os.environ.get("SPLICE_BENCH_LIMIT_S", "3600")}

        def one(key: str) -> None:
            arm, _, seed = key.partition(":")
            path = curves / f"{arm}-{seed}.json"
            if path.exists() and json.loads(path.read_text())["done"]:
                return
            settings = common | {"arm": arm, "seed": int(seed), "curve": str(path)}
            argv = [sys.executable, "-m", "benchmarks.learning", json.dumps(settings)]
            with path.with_suffix(".log").open("w") as log:
                subprocess.run(argv, stdout=log, stderr=log, check=False)

        with ThreadPoolExecutor(int(os.environ.get("SPLICE_BENCH_PARALLEL", "1"))) as pool:
            list(pool.map(one, wanted.split(",")))
        return cases_of(curves, task_of(small=small))


def cases_of(curves: Path, task: Task) -> list[Case]:
    """The cases of all arms in a folder of curves.

    Raises:
        ConfigError: a run wrote no step; names its log.
    """
    found: dict[str, dict[str, Found]] = {}
    for arm in ARMS:
        for path in sorted(curves.glob(f"{arm}-[0-9]*.json")):
            found.setdefault(arm, {})[path.stem.rpartition("-")[2]] = json.loads(path.read_text())
    for log in curves.glob("*.log"):
        arm, _, seed = log.stem.rpartition("-")
        if not found.get(arm, {}).get(seed, {"steps": []})["steps"]:
            raise ConfigError(f"the run {arm}:{seed} made no step; its log is {log}")
    gap = "logprob_gap"
    return [
        Case(
            name=arm,
            metric=metric,
            unit=unit,
            samples=tuple(measure(curve) for curve in runs.values()),
            peer=control,
            peer_samples=tuple(measure(c) for c in found.get(control or "", {}).values()),
            settings={"task": asdict(task), "curves": runs} if metric == "accuracy" else {},
        )
        for arm, runs in found.items()
        for metric, (unit, measure) in METRICS.items()
        for control in [ARMS[arm].control if metric != gap else None]
        if metric != gap or all(GAP in s for curve in runs.values() for s in curve["steps"])
    ]


def _rate(curve: Found) -> float:
    times = [0.0, *(step["seconds"] for step in curve["steps"])]
    return 60 / median(b - a for a, b in pairwise(times))


OF_LORA = ("served_share", "update_ratio", "gap_weights_mean", "gap_arithmetic_mean")
GAP = "logprob_gap_mean"
"""Of a step, where the loss takes the sampler's log-probs."""
METRICS: dict[str, tuple[str, Callable[[Found], float]]] = {
    "accuracy": ("share", lambda c: float(c["evaluations"][-1]["accuracy"])),
    f"reward_last_{LAST}": ("share", lambda c: fmean(s["reward"] for s in c["steps"][-LAST:])),
    "reward_all": ("share", lambda c: fmean(s["reward"] for s in c["steps"])),
    "logprob_gap": ("nats", lambda c: median(s[GAP] for s in c["steps"])),
    "steps": ("steps", lambda c: float(len(c["steps"]))),
    "steps_per_min": ("steps/min", _rate),
}


def plot(result: Result, path: Path) -> None:
    """Reward against the step and against wall-clock, a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = {c.name: c.settings for c in result.cases if "curves" in c.settings}
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for colour, (arm, settings) in zip(plt.get_cmap("tab10").colors, cases.items(), strict=False):
        for seed, curve in settings["curves"].items():
            steps = curve["steps"]
            label = arm if seed == min(settings["curves"]) else None
            smooth = [
                fmean(s["reward"] for s in steps[max(0, i - 4) : i + 5]) for i in range(len(steps))
            ]
            axes[0].plot([s["step"] for s in steps], smooth, color=colour, alpha=0.8, label=label)
            axes[1].plot([s["seconds"] / 60 for s in steps], smooth, color=colour, alpha=0.8)
    axes[0].set(xlabel="version", ylabel="reward of the samples, mean of nine steps")
    axes[1].set(xlabel="minutes")
    axes[0].legend(fontsize=8)
    figure.suptitle(f"{result.device}, {result.commit[:9]}", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _main(settings: Found) -> None:
    with TemporaryDirectory(prefix="splice-bench-") as work:
        train(
            ARMS[settings["arm"]],
            Run(
                model=Path(settings["model"]),
                rows=Path(settings["rows"]),
                seed=settings["seed"],
                device=settings["device"],
                limit_s=float(settings["limit_s"]),
                task=task_of(small=settings["small"]),
                work=Path(work),
            ),
            Curve(Path(settings["curve"])),
        )


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
