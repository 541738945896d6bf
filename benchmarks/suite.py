"""Every GPU test and benchmark, one command: tasks are put on free GPUs in their order, each within
a time limit, whatever becomes of the others.

Tests share GPUs with each other (their models are tiny and most of their time is imports); a
benchmark has its GPUs for itself.

    python -m benchmarks suite --gpus 0,1,2,3 --out DIR [--only sync,train] [--limit-s 3000]

DIR gets NAME.log of every task and NAME.json of every benchmark. A task that outlives its limit, or
the whole suite's, is ended with all its processes, so that the next one finds the GPU's memory
free.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness import inference_python
from orchestrator.processes.launch import NodeProcess

POLL_S = 0.2
TERM_GRACE_S = 5.0
BESIDE_AT_ONCE = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A command line; {trainer}, {inference}, {out} and {inference_python} stand for its first GPU,
    its second, its JSON file and vLLM's interpreter.
    """

    name: str
    gpus: int
    limit_s: float
    command: str
    env: Mapping[str, str] = field(default_factory=dict)
    by_number: bool = False
    """Its processes choose among all GPUs by number (a cluster does); else it sees its own only."""
    beside: bool = False
    """It takes little of a GPU and measures no time: it shares its GPUs with others of the kind."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of a task. `code` None: it was ended by a limit, or never begun."""

    task: Task
    gpus: tuple[int, ...] = ()
    began_s: float = 0.0
    seconds: float = 0.0
    code: int | None = None
    node: NodeProcess | None = None

    def said(self) -> str:
        """One word."""
        if self.node is None:
            return "not run"
        return (
            "over its limit"
            if self.code is None
            else ("ok" if self.code == 0 else f"exit code {self.code}")
        )


def _test(
    name: str,
    gpus: int,
    what: str,
    limit_s: float,
    *,
    python: str = "{python}",
    by_number: bool = False,
) -> Task:
    command = f"{python} -m pytest -m gpu{gpus} {what}"
    return Task(
        name=name, gpus=gpus, limit_s=limit_s, command=command, by_number=by_number, beside=True
    )


def _bench(
    name: str, benchmark: str, gpus: int, limit_s: float, *, by_number: bool = False, **env: str
) -> Task:
    command = f"{{python}} -m benchmarks {benchmark} --device cuda --out {{out}}"
    return Task(
        name=name, gpus=gpus, limit_s=limit_s, command=command, env=env, by_number=by_number
    )


def _cluster(name: str, benchmark: str, limit_s: float, **env: str) -> Task:
    return _bench(name, benchmark, 2, limit_s, by_number=True, **env)


SMOKE = (
    "{python} -m splice smoke --set device=cuda --set trainer.gpus=[{trainer}] "
    "--set inference.gpus=[{inference}] --set inference.python={inference_python} --report {out}"
)
LARGE = (
    "{python} -m trainer_node.tools.make_checkpoint "
    "--arch qwen3_moe --shape qwen3-30b-a3b --config-only --out {out}.model"
)
TASKS = (
    _test(
        "tests-gpu2-graphs-in-place",
        2,
        "tests/e2e/test_cuda_graphs.py -k in_place",
        260,
        by_number=True,
    ),
    _test(
        "tests-gpu2-graphs-shadow",
        2,
        "tests/e2e/test_cuda_graphs.py -k shadow",
        260,
        by_number=True,
    ),
    *(
        _test(
            f"tests-gpu2-parity-{cell}",
            2,
            f"tests/trainer_node/training/test_parity_bf16.py -k {cell}",
            260,
        )
        for cell in (
            "dense_tied-tp2",
            "dense_untied-dp2",
            "dense_tied-cp2",
            "moe-tp2ep2",
            "moe-tp2-etp2",
        )
    ),
    _test("tests-gpu2-gather", 2, "tests/trainer_node/export/test_gather.py", 260),
    _test("tests-gpu2-transfer", 2, "tests/weight_transfer/test_gpu.py", 260),
    _test("tests-gpu1-trainer", 1, "tests/trainer_node tests/weight_transfer", 260),
    _test(
        "tests-gpu1-inference",
        1,
        "tests/inference_node/worker/test_direct.py tests/inference_node/worker/test_parts.py",
        260,
        python="{inference_python}",
    ),
    _test("tests-gpu4", 4, "tests/trainer_node/training/test_parity_bf16.py", 400),
    Task(name="smoke-tiny-moe", gpus=2, limit_s=400, command=SMOKE, by_number=True),
    Task(
        name="smoke-30b-a3b",
        gpus=2,
        limit_s=400,
        by_number=True,
        command=f"sh -c '{LARGE} && {SMOKE} --model {{out}}.model "
        "--set trainer.init=random --no-proof'",
    ),
    _cluster("sync-30b-a3b", "sync", 600, SPLICE_BENCH_SYNC="30b-a3b/lora-all,30b-a3b/lora-attn"),
    _cluster("sync-8b", "sync", 300, SPLICE_BENCH_SYNC="8b/lora-all"),
    _cluster("pause-shadow", "pause", 500, SPLICE_BENCH_PAUSE="shadow"),
    _cluster("pause-30b-a3b", "pause", 600, SPLICE_BENCH_PAUSE="keep,keep_kv,stock"),
    _bench("train-8b", "train", 1, 300, SPLICE_BENCH_SHAPES="8b"),
    _bench("train-30b-a3b", "train", 1, 500, SPLICE_BENCH_SHAPES="30b-a3b"),
    _bench("long-8b", "long", 1, 580, SPLICE_BENCH_SHAPES="8b"),
    _bench("long-30b-a3b", "long", 1, 580, SPLICE_BENCH_SHAPES="30b-a3b"),
    _bench(
        "long-mixed-8b",
        "long",
        1,
        580,
        SPLICE_BENCH_SHAPES="8b",
        SPLICE_BENCH_LENGTHS="",
        SPLICE_BENCH_TREES="",
        SPLICE_BENCH_MIXED="50",
    ),
    _bench(
        "train-2-30b-a3b",
        "train",
        2,
        500,
        SPLICE_BENCH_SHAPES="30b-a3b",
        SPLICE_BENCH_KINDS="rl",
        SPLICE_BENCH_TOPOLOGIES="ep2,dp2",
    ),
    _bench(
        "train-2-8b",
        "train",
        2,
        300,
        SPLICE_BENCH_SHAPES="8b",
        SPLICE_BENCH_KINDS="rl",
        SPLICE_BENCH_TOPOLOGIES="dp2,tp2",
    ),
    _bench(
        "train-4-30b-a3b",
        "train",
        4,
        600,
        SPLICE_BENCH_SHAPES="30b-a3b",
        SPLICE_BENCH_KINDS="rl",
        SPLICE_BENCH_TOPOLOGIES="dp4,ep4,tp2dp2",
    ),
    _bench(
        "train-4-8b",
        "train",
        4,
        400,
        SPLICE_BENCH_SHAPES="8b",
        SPLICE_BENCH_KINDS="rl",
        SPLICE_BENCH_TOPOLOGIES="dp4,tp2dp2",
    ),
    # The contenders side by side; as many tokens as the slower ones get through in minutes.
    _bench(
        "train-sft-8b",
        "train",
        2,
        400,
        SPLICE_BENCH_SHAPES="8b",
        SPLICE_BENCH_KINDS="sft",
        SPLICE_BENCH_TOKENS="24576",
    ),
    _bench(
        "train-sft-30b-a3b",
        "train",
        2,
        500,
        SPLICE_BENCH_SHAPES="30b-a3b",
        SPLICE_BENCH_KINDS="sft",
        SPLICE_BENCH_TOKENS="32768",
        SPLICE_BENCH_SAMPLES="3",
    ),
    _cluster("loop-8b", "loop", 400, SPLICE_BENCH_SHAPES="8b", SPLICE_BENCH_PROMPT_TOKENS="512"),
    _cluster("soak", "soak", 900),
    _bench("wire", "wire", 2, 120, by_number=True),
    *(
        _bench(name, name, 1, 240)
        for name in ("merge", "experts", "export", "logits", "save", "arrival")
    ),
)


def run_all(
    tasks: Sequence[Task], *, gpus: Sequence[int], out: Path, limit_s: float, console: Console
) -> list[Outcome]:
    """Run the tasks; one outcome each, in their order. Those that want more GPUs than there are, or
    for which no time is left, are not run.
    """
    out.mkdir(parents=True, exist_ok=True)
    outcomes = [Outcome(task=t) for t in tasks]
    waiting = [o for o in outcomes if o.task.gpus <= len(gpus)]
    running: list[Outcome] = []
    until_s = time.monotonic() + limit_s
    try:
        while running or (waiting and time.monotonic() < until_s):
            for outcome in [o for o in running if _has_ended(o, until_s)]:
                running.remove(outcome)
                console.print(
                    f"{outcome.task.name}: {outcome.said()} after {outcome.seconds:.0f} s"
                )
            # In their order: one that wants four GPUs is not passed by later ones for ever.
            while (
                waiting
                and time.monotonic() < until_s
                and (place := _place(waiting[0].task, running, gpus))
            ):
                outcome = waiting.pop(0)
                _start(outcome, place, out)
                running.append(outcome)
            time.sleep(POLL_S)
    finally:
        for outcome in running:
            if outcome.node is not None:
                outcome.node.stop(grace_s=TERM_GRACE_S)
    return outcomes


def _place(task: Task, running: Sequence[Outcome], gpus: Sequence[int]) -> tuple[int, ...]:
    """Where the task can run now: GPUs without another task, or with few that share theirs as it
    does. Empty: nowhere.
    """
    held = {gpu: [o.task for o in running if gpu in o.gpus] for gpu in gpus}
    fit = [
        g for g in gpus if not held[g] or (task.beside and all(other.beside for other in held[g]))
    ]
    fit.sort(key=lambda gpu: len(held[gpu]))
    if len(fit) < task.gpus or len(running) >= BESIDE_AT_ONCE:
        return ()
    return tuple(sorted(fit[: task.gpus]))


def _start(outcome: Outcome, gpus: tuple[int, ...], out: Path) -> None:
    task, listed = outcome.task, ",".join(map(str, gpus))
    places = {
        "trainer": gpus[0],
        "inference": gpus[-1],
        "out": out / f"{task.name}.json",
        "python": sys.executable,
        "inference_python": inference_python(),
    }
    env = {"SPLICE_BENCH_GPUS": listed, "SPLICE_BENCH_TRAIN_GPUS": listed}
    if not task.by_number:
        env["CUDA_VISIBLE_DEVICES"] = listed
    log = out / f"{task.name}.log"
    log.unlink(missing_ok=True)
    outcome.node = NodeProcess(
        name=task.name,
        argv=shlex.split(task.command.format(**places)),
        env={**env, **task.env},
        log_file=log,
    )
    outcome.node.start()
    outcome.gpus, outcome.began_s = gpus, time.monotonic()


def _has_ended(outcome: Outcome, until_s: float) -> bool:
    assert outcome.node is not None
    assert outcome.node.process is not None
    outcome.seconds = time.monotonic() - outcome.began_s
    outcome.code = outcome.node.process.poll()
    if (
        outcome.code is None
        and outcome.seconds < outcome.task.limit_s
        and time.monotonic() < until_s
    ):
        return False
    outcome.node.stop(grace_s=TERM_GRACE_S)
    return True


def print_outcomes(outcomes: Sequence[Outcome], console: Console) -> None:
    """One row per task."""
    table = Table("task", "GPUs", "seconds", "outcome", title="suite")
    for o in outcomes:
        table.add_row(o.task.name, ",".join(map(str, o.gpus)), f"{o.seconds:.0f}", o.said())
    console.print(table)
