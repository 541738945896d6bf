"""Hundreds of training jobs on one cluster while requests run, the trainer killed now and then:
what grows, what is lost.

    job_s                 the last tenth of the jobs; peer: the first tenth. Jobs in which the
                          trainer was killed are left out
    recovery_s            the job in which it was killed (SIGKILL, at a random moment) and the next,
                          which has the recovery where that was the job's last moment; together,
                          until `Completed`
    NODE_bytes            resident memory of orchestrator, trainer and inference node with all their
                          processes, after each tenth; peer: after the second tenth, when everything
                          has run once. Medians of both: a leak shows in `samples`, which are in
                          order
    NODE_descriptors      open descriptors, likewise; NODE_threads too
    journal_bytes_per_job, run_dir_bytes_per_job    growth of the journal, and of the whole run
                                                    folder, by job, from the second tenth on
    requests_lost         completions that ended with an error or short of tokens; 0 is the only
                          good value
    vllm_starts           processes that vLLM was; 1 is the only good value

One small LoRA job after another, each published, two checkpoints kept (`keep_versions`).
SPLICE_BENCH_JOBS says how many (300; 20 with --small), or SPLICE_BENCH_HOURS for how long;
SPLICE_BENCH_CRASH_EVERY after how many jobs the trainer is killed (50; 10 with --small);
SPLICE_BENCH_STREAMS how many requests run at any time (4).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil

from benchmarks import clusters, memory
from benchmarks.harness import Case
from benchmarks.stream import Streams
from orchestrator.processes.child import descendants
from orchestrator.protocol.messages import (
    InitialSync,
    LossSpec,
    OptimParams,
    TensorSpec,
    TrainMerged,
    batch_specs,
)
from splice.cluster import Cluster
from splice.cluster.preflight import read_model_config

NODES = {"orchestrator": "orchestrator", "trainer": "trainer", "inference": "inference-0"}
TENTHS = 10
SEQUENCES, TOKENS_EACH = 8, 64


@dataclass(slots=True)
class Seen:
    """What the run showed. One entry a job, or a tenth."""

    job_s: list[float] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    tenths: list[dict[str, int]] = field(default_factory=list)
    jobs_at: list[int] = field(default_factory=list)
    vllm: set[tuple[int, float]] = field(default_factory=set)
    lost: list[str] = field(default_factory=list)
    requests: int = 0


def run(*, device: str, small: bool) -> list[Case]:
    """Shape tiny; one trainer rank, one vLLM."""
    jobs = int(os.environ.get("SPLICE_BENCH_JOBS", "20" if small else "300"))
    crash_every = int(os.environ.get("SPLICE_BENCH_CRASH_EVERY", "10" if small else "50"))
    hours = float(os.environ.get("SPLICE_BENCH_HOURS", "0"))
    streams = int(os.environ.get("SPLICE_BENCH_STREAMS", "4"))
    if jobs < TENTHS or crash_every < 1:
        raise ValueError(
            f"{jobs} jobs with a crash every {crash_every}: at least {TENTHS} jobs and every 1 are "
            "needed"
        )
    with TemporaryDirectory(prefix="splice-bench-") as folder:
        seen = _soak(
            Path(folder),
            device=device,
            jobs=jobs,
            hours=hours,
            crash_every=crash_every,
            count=streams,
        )
    jobs = seen.jobs_at[-1]
    return _cases(
        seen,
        {
            "jobs": jobs,
            "hours": hours,
            "crash_every": crash_every,
            "sequences": SEQUENCES,
            "streams": streams,
        },
    )


def _soak(
    folder: Path, *, device: str, jobs: int, hours: float, crash_every: int, count: int
) -> Seen:
    """`jobs` jobs, or as many as fit into `hours` if that is not 0."""
    seen, dice = Seen(), random.Random(0)
    config = clusters.cluster_config(
        "tiny",
        folder,
        device=device,
        max_num_seqs=2 * count,
        keep_versions=2,
        max_restarts=10**6,
    )
    with Cluster(config) as cluster:
        cluster.client.run(InitialSync())
        vocab_size = int(read_model_config(config.trainer.model)["vocab_size"])
        streams = Streams(
            base_url=cluster.base_urls[0],
            model=clusters.NAME,
            count=count,
            prompt_tokens=16,
            min_tokens=32,
            max_tokens=64,
            vocab_size=vocab_size,
        )
        with streams:
            began = time.monotonic()
            for number in itertools.count(1):
                is_crash = number % crash_every == 0
                after_s = dice.uniform(0.0, min(seen.job_s[-5:])) if is_crash else None
                job_s = _run_job(cluster, dice, vocab_size=vocab_size, kill_after_s=after_s)
                if is_crash:
                    seen.recovery_s.append(job_s)
                elif number > 1 and (number - 1) % crash_every == 0:
                    seen.recovery_s[-1] += job_s
                else:
                    seen.job_s.append(job_s)
                done = (time.monotonic() - began) / (3600 * hours) if hours else number / jobs
                if done * TENTHS >= len(seen.tenths) + 1:
                    seen.tenths.append(_held(cluster))
                    seen.jobs_at.append(number)
                    print(
                        f"{number} jobs, {len(seen.recovery_s)} crashes: {seen.tenths[-1]}",
                        flush=True,
                    )
                    seen.vllm |= {
                        (p.pid, p.create_time())
                        for p in _processes(cluster, "inference")
                        if _is_server(p)
                    }
                if len(seen.tenths) == TENTHS:
                    break
        seen.lost, seen.requests = streams.lost(), len(streams.requests)
    return seen


def _run_job(
    cluster: Cluster, dice: random.Random, *, vocab_size: int, kill_after_s: float | None
) -> float:
    """Seconds of one job; the trainer's ranks are killed in it after this many."""
    specs, buffers = _batch(dice, vocab_size)
    job = TrainMerged(
        loss=LossSpec(name="cross_entropy"), optim=OptimParams(lr=1e-4), tensors=specs
    )
    with _killing(cluster, kill_after_s):
        began = time.monotonic()
        cluster.client.run(job, buffers=buffers, timeout_s=600)
        return time.monotonic() - began


@contextlib.contextmanager
def _killing(cluster: Cluster, after_s: float | None) -> Iterator[None]:
    if after_s is None:
        yield
        return
    timer = threading.Timer(
        after_s, lambda: [p.kill() for p in _processes(cluster, "trainer") if _is_rank(p)]
    )
    timer.start()
    try:
        yield
    finally:
        timer.join()


def _batch(dice: random.Random, vocab_size: int) -> tuple[tuple[TensorSpec, ...], list[bytes]]:
    """Random tokens, the first quarter of each sequence a prompt."""
    count, prompt = SEQUENCES * TOKENS_EACH, TOKENS_EACH // 4
    values = {
        "tokens": [dice.randrange(vocab_size) for _ in range(count)],
        "sequence_lengths": [TOKENS_EACH] * SEQUENCES,
        "loss_mask": ([0] * prompt + [1] * (TOKENS_EACH - prompt)) * SEQUENCES,
    }
    specs = batch_specs(num_sequences=SEQUENCES, num_tokens=count)
    return specs, [
        np.asarray(values.get(s.name, [0] * count), dtype=s.dtype).tobytes() for s in specs
    ]


# ------------------------------------------------------------ what is held


def _processes(cluster: Cluster, node: str) -> list[psutil.Process]:
    pid = cluster.launcher.nodes[NODES[node]].pid
    return [] if pid is None else descendants(pid, and_self=True)


def _is_rank(process: psutil.Process) -> bool:
    """A trainer rank: it names itself."""
    with contextlib.suppress(psutil.Error):
        return process.name().startswith("splice-rank")
    return False


def _is_server(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "inference_node.server" in process.cmdline()
    return False


def _held(cluster: Cluster) -> dict[str, int]:
    held: dict[str, int] = {}
    for node, name in NODES.items():
        pid = cluster.launcher.nodes[name].pid
        held[f"{node}_bytes"] = 0 if pid is None else memory.process_tree(pid)()
        held[f"{node}_descriptors"] = sum(_count(p.num_fds) for p in _processes(cluster, node))
        held[f"{node}_threads"] = sum(_count(p.num_threads) for p in _processes(cluster, node))
    run_dir = cluster.run.run_dir
    held["journal_bytes"] = sum(p.stat().st_size for p in run_dir.glob("journal.sqlite*"))
    held["run_dir_bytes"] = sum(p.stat().st_size for p in run_dir.rglob("*") if p.is_file())
    return held


def _count(read: Callable[[], int]) -> int:
    """0 for a process that has ended."""
    with contextlib.suppress(psutil.Error):
        return read()
    return 0


def _cases(seen: Seen, settings: dict[str, object]) -> list[Case]:
    def case(
        metric: str,
        unit: str,
        samples: list[float],
        peer: str | None = None,
        than: list[float] | None = None,
        **more: object,
    ) -> Case:
        return Case(
            name="tiny/soak",
            metric=metric,
            unit=unit,
            samples=tuple(samples),
            peer=peer,
            peer_samples=tuple(than or ()),
            settings=settings | more,
        )

    tenth, first, last = max(1, len(seen.job_s) // TENTHS), seen.tenths[1], seen.tenths[-1]
    cases = [
        case("job_s", "s", seen.job_s[-tenth:], "the first tenth", seen.job_s[:tenth]),
        case("recovery_s", "s", seen.recovery_s, "a job without a crash", seen.job_s),
    ]
    for node in NODES:
        for what, unit in (("bytes", "B"), ("descriptors", "descriptors"), ("threads", "threads")):
            samples = [float(held[f"{node}_{what}"]) for held in seen.tenths[2:]]
            cases.append(
                case(
                    f"{node}_{what}",
                    unit,
                    samples,
                    "after the second tenth",
                    [float(first[f"{node}_{what}"])],
                )
            )
    later = seen.jobs_at[-1] - seen.jobs_at[1]
    cases += [
        case(f"{what}_per_job", "B", [(last[what] - first[what]) / later])
        for what in ("journal_bytes", "run_dir_bytes")
    ]
    return [
        *cases,
        case(
            "requests_lost",
            "requests",
            [float(len(seen.lost))],
            requests=seen.requests,
            reasons=seen.lost[:10],
        ),
        case("vllm_starts", "processes", [float(len(seen.vllm))]),
    ]
