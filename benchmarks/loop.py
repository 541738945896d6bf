"""The asynchronous loop (`splice.rl`, max_staleness = 1) next to the strict one (0): whole RL steps
on one cluster, rollouts from the served alias, training and publication.

    tokens_per_s    prompt and answer tokens of trained steps over wall-clock
    step_s          from one new version to the next
    trainer_idle    share of the step in which the trainer neither trains, saves nor sends
    save_share      share in which it saves without training on the next batch meanwhile
    inference_idle  share in which no request is with vLLM, or vLLM is paused
    staleness_max   most versions between a token and the step that trains on it
    discarded       rollouts that were asked for and not trained on, found by `splice.rl.checker`

The peer of each is the strict loop, in the same run. Shapes from SPLICE_BENCH_SHAPES (8b on cuda,
tiny else), each as SHAPE or SHAPE/LORA (`30b-a3b/lora-attn`, whose trainer fits on 80 GB). A step
has SPLICE_BENCH_PROMPTS prompts (24; 8 on a CPU), each with 4 answers of SPLICE_BENCH_ANSWER_TOKENS
(512; 32 on a CPU) tokens. Answers have a fixed length, so no step waits for a long one.

The two sides' work should balance. vLLM decodes many short answers in less time than few long ones,
and the trainer's time grows with all tokens: a fast trainer wants many prompts and short answers.
Longer prompts cost the trainer more than vLLM, which computes a prompt once for all its answers: on
a GPU, a few strict steps with prompts of three lengths come first, and the length is chosen from
their times. One side or the other waits for a save, so steps should be long compared with it.
SPLICE_BENCH_PROMPT_TOKENS sets it: as many random token ids, or 0 for a short sentence. Steps from
SPLICE_BENCH_SAMPLES (7). SPLICE_BENCH_QUANTIZATION is vLLM's `--quantization`, and
SPLICE_BENCH_VLLM_ARGS further options, as of all benchmarks that start a cluster.
SPLICE_BENCH_PAUSE_MODE is the run's: `keep` (default) computes the KV cache of running answers
again after each publication, `keep_kv` keeps it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np

from benchmarks import clusters, turns
from benchmarks.harness import Case
from orchestrator.protocol.messages import InitialSync, LossSpec, OptimParams, PauseMode
from splice.client.batches import Completion
from splice.client.clients import SpliceClient
from splice.cluster import Cluster
from splice.rl import Loop, LoopConfig, SamplingConfig, Step, checker, decisions
from splice.smoke import rollouts

GROUP_SIZE, LR = 4, 1e-4
LENGTHS = (128, 640)
"""Tokens of prompts of the steps that the balance is found with."""
LONGEST = 4096
PROMPTS = {"cpu": 8, "cuda": 24}
ANSWER_TOKENS = {"cpu": 32, "cuda": 512}
MODES = {"strict": 0, "async": 1}
"""Name -> max_staleness."""
PHASES = ("train", "save", "ahead", "send", "pause")
"""Of a job."""
Measured = dict[str, tuple[float, ...]]
Row = dict[str, Any]


def run(*, device: str, small: bool) -> list[Case]:
    """One trainer and one inference GPU, or the CPU."""
    usual = "tiny" if small or device == "cpu" else "8b"
    shapes = usual if small else os.environ.get("SPLICE_BENCH_SHAPES", usual)
    steps = 3 if small else int(os.environ.get("SPLICE_BENCH_SAMPLES", "7"))
    pause_mode = os.environ.get("SPLICE_BENCH_PAUSE_MODE", "keep")
    cases: list[Case] = []
    for plan in shapes.split(","):
        shape, _, lora = plan.partition("/")
        lora = lora or "lora-all"
        count = int(os.environ.get("SPLICE_BENCH_PROMPTS", PROMPTS[device]))
        with TemporaryDirectory(prefix="splice-bench-") as name:
            folder = Path(name)
            cluster_config = clusters.cluster_config(
                shape,
                folder,
                device=device,
                lora=lora,
                max_num_seqs=max(64, GROUP_SIZE * count),  # as `max_in_flight`
                pause_mode=cast(PauseMode, pause_mode),  # PublicationConfig checks it
                micro_batch_tokens="auto",
                keep_versions=3,
            )
            with turns.started(Cluster(cluster_config)) as cluster, turns.alone():
                cluster.client.run(InitialSync())
                config = loop_config(device, MODES["strict"], count)
                length = _length(cluster.client, folder, device, config)
                rows = make_rows(count, length)
                found = {}
                for mode, stale in MODES.items():
                    config = loop_config(device, stale, count)
                    found[mode] = _measure(cluster.client, folder / mode, config, rows, steps)
        settings = config.model_dump(mode="json")
        settings |= {"pause_mode": pause_mode, "prompt_tokens": length or "a sentence"}
        cases += _cases(f"{shape}/{lora}/1to1", found, settings)
    return cases


def _length(client: SpliceClient, folder: Path, device: str, config: LoopConfig) -> int:
    """Tokens of a prompt with which rollouts and pause take as long as training, saving and
    sending: found from two lengths, and corrected by a third one. See `balanced`."""
    given = os.environ.get("SPLICE_BENCH_PROMPT_TOKENS", "0" if device == "cpu" else "")
    if given:
        return int(given)

    def measured(length: int) -> tuple[int, float, float]:
        rows = make_rows(config.groups_per_step, length)
        taken = first_steps(client, folder / f"strict-{length}", config, rows, 2)
        seconds = taken[-1].seconds  # the first one loads kernels
        rollouts_s = seconds["trainer_waits"]
        return length, rollouts_s + seconds["job.pause"], seconds["step"] - rollouts_s

    short, long = (measured(length) for length in LENGTHS)
    third = measured(balanced(short, long))
    nearest = min(short, long, key=lambda found: abs(found[0] - third[0]))
    chosen = balanced(*sorted((nearest, third)))
    print(f"tokens, seconds of either side: {short, long, third}; {chosen} chosen", flush=True)
    return chosen


def balanced(one: tuple[int, float, float], two: tuple[int, float, float]) -> int:
    """Tokens of a prompt with which both sides take the same time, from (tokens, seconds of one
    side, of the other) of two lengths, by straight lines through both; the first length where these
    do not meet. Pure.
    """
    (a, *seconds_a), (b, *seconds_b) = one, two
    gap_a, gap_b = seconds_a[0] - seconds_a[1], seconds_b[0] - seconds_b[1]
    if gap_a <= gap_b:  # longer prompts do not help
        return a
    return min(LONGEST, max(1, round(a + gap_a * (b - a) / (gap_a - gap_b))))


def loop_config(device: str, max_staleness: int, prompts: int) -> LoopConfig:
    """Of the answers' fixed length."""
    length = int(os.environ.get("SPLICE_BENCH_ANSWER_TOKENS", ANSWER_TOKENS[device]))
    return LoopConfig(
        max_staleness=max_staleness,
        group_size=GROUP_SIZE,
        groups_per_step=prompts,
        sampling=SamplingConfig(max_tokens=length, extra={"ignore_eos": True}),
        max_in_flight=GROUP_SIZE * prompts,
    )


def first_steps(
    client: SpliceClient,
    folder: Path,
    config: LoopConfig,
    rows: Sequence[Row],
    count: int,
    *,
    lr: float = LR,
) -> list[Step]:
    """The first `count` steps of a new loop over `rows`."""
    return asyncio.run(_taken(client, folder, config, rows, count, lr))


async def _taken(
    client: SpliceClient,
    folder: Path,
    config: LoopConfig,
    rows: Sequence[Row],
    count: int,
    lr: float,
) -> list[Step]:
    taken: list[Step] = []
    loop = Loop(
        client,
        folder,
        prompts=rows,
        reward=_reward,
        config=config,
        loss=LossSpec(name="grpo"),
        optim=OptimParams(lr=lr),
    )
    async with loop:
        async for step in loop:
            taken.append(step)
            if len(taken) == count:
                break
    return taken


def make_rows(count: int, length: int) -> list[Row]:
    """A row for each prompt, of `length` random token ids; 0: of a short sentence."""
    if length:
        ids = np.random.default_rng(1).integers(10, 200, (count, length))
        return [{"prompt": row} for row in ids.tolist()]
    return [{"prompt": text} for text in rollouts.choose_prompts(count=count, seed=1)]


def _measure(
    client: SpliceClient, folder: Path, config: LoopConfig, rows: Sequence[Row], count: int
) -> Measured:
    """Each metric, a value for each step."""
    warm = 1 + config.max_staleness  # kernels are loaded, and the loop begins to overlap
    taken = first_steps(client, folder, config, rows, warm + count)
    log = checker.check(decisions.read(folder / decisions.LOG))
    if log.violations:
        raise RuntimeError(f"the loop's log breaks its promises: {log.violations[:3]}")
    steps = taken[warm:]
    for step in steps:
        print(step.number, {name: round(s, 3) for name, s in step.seconds.items()}, flush=True)
        print({k: v for k, v in step.metrics.items() if k.startswith("seconds_")}, flush=True)
    return {
        "tokens_per_s": tuple(tokens_of(s) / s.seconds["step"] for s in steps),
        "step_s": tuple(s.seconds["step"] for s in steps),
        "trainer_idle": tuple(_idle(s.seconds, "train", "save", "send") for s in steps),
        "inference_idle": tuple(
            (s.seconds["sampler_waits"] + s.seconds["job.pause"]) / s.seconds["step"] for s in steps
        ),
        "save_share": tuple(
            (s.seconds["job.save"] - s.seconds["job.ahead"]) / s.seconds["step"] for s in steps
        ),
        "staleness_max": tuple(s.metrics["staleness_max"] for s in steps),
        "discarded": (float(log.dropped + log.asked_again),),
        **{f"{name}_s": tuple(s.seconds[f"job.{name}"] for s in steps) for name in PHASES},
    }


def _reward(_: Mapping[str, Any], completion: Completion) -> float:
    """The share of even token ids: random weights solve nothing else."""
    return fmean(i % 2 == 0 for i in completion.answer_ids)


def tokens_of(step: Step) -> int:
    """Prompts and answers."""
    return sum(
        len(r.completion.prompt_ids) + len(r.completion.answer_ids)
        for group in step.groups
        for r in group
    )


def _idle(seconds: Mapping[str, float], *busy: str) -> float:
    return max(0.0, 1.0 - sum(seconds[f"job.{name}"] for name in busy) / seconds["step"])


UNITS: dict[str, str] = {
    "tokens_per_s": "tokens/s",
    "trainer_idle": "share",
    "save_share": "share",
    "inference_idle": "share",
    "staleness_max": "versions",
    "discarded": "rollouts",
}


def _cases(name: str, found: Mapping[str, Measured], settings: dict[str, Any]) -> list[Case]:
    return [
        Case(
            name=name,
            metric=metric,
            unit=UNITS.get(metric, "s"),
            samples=samples,
            peer="the strict loop (max_staleness = 0)",
            peer_samples=found["strict"][metric],
            settings=settings if metric == "tokens_per_s" else {},
        )
        for metric, samples in found["async"].items()
    ]
