"""Jobs that fail, each followed by ordinary ones: is the trainer whole again, and when?

    healthy_s        from the failed job's answer to the end of the next ordinary job; peer: an
                     ordinary job
    failed_s         from the submission of the failed job to its answer
    memory_bytes     the trainer's tensors at their peak in the last ordinary job; peer: in the one
                     before the failure
    ordinary_jobs    those that succeeded after the failure, of SPLICE_BENCH_JOBS (20)

In the settings, `starts` counts how often the launcher started the trainer again,
`memory_after_failure` how often the trainer measured its memory, both within the case.

| case | what the failed job does |
| --- | --- |
| too-long | a sequence of SPLICE_BENCH_LONGEST tokens (40,000), with the measured pack size |
| out-of-memory | the same with a fixed pack size: nothing is known about memory beforehand |
| no-moments | nothing is left for AdamW's moments, in the first optimizer step |
| device-assert | an index beyond the end of a tensor, on the GPU |
| killed, killed-fixed | the loss ends the process; with the measured and the fixed pack size |

Each job trains on 16 x 512 tokens and is published (`SPLICE_BENCH_SHAPES`: 8b; tiny with --small).
A CPU runs no-moments, device-assert (there an ordinary error) and killed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import clusters
from benchmarks.failures_losses import LIMIT_S
from benchmarks.harness import Case
from orchestrator.errors import JobFailed
from orchestrator.protocol.messages import LossSpec, OptimParams, TrainMergedResult
from splice.client.batches import Batch
from splice.client.clients import SpliceClient
from splice.cluster import Cluster

LOSSES = {
    "no-moments": "leaves_no_memory_for_moments",
    "device-assert": "indexes_beyond_the_end",
    "killed": "ends_the_process",
    "killed-fixed": "ends_the_process",
}
EVENTS = {
    "starts": ("it is started again", "the trainer ended with code"),
    "memory_after_failure": ("memory_after_failure",),
}
"""What is counted -> its texts in the trainer's log."""
PACK_TOKENS = 8192


def run(*, device: str, small: bool) -> Iterator[Case]:
    """One trainer rank and one vLLM; a second cluster for the fixed pack size."""
    shape = "tiny" if small else os.environ.get("SPLICE_BENCH_SHAPES", "8b")
    jobs = int(os.environ.get("SPLICE_BENCH_JOBS", "3" if small else "20"))
    longest = int(os.environ.get("SPLICE_BENCH_LONGEST", "40000"))
    only = os.environ.get("SPLICE_BENCH_FAILURES", "measured,fixed").split(",")
    cuda = device == "cuda"
    for packs in only if cuda else ("measured",):
        # The first step of a run has no moments yet.
        measured = ("no-moments", "device-assert", "killed", "too-long")
        names = measured if packs == "measured" else ("out-of-memory", "killed-fixed")
        with TemporaryDirectory(prefix="splice-bench-") as folder:
            config = clusters.cluster_config(
                shape,
                Path(folder),
                device=device,
                micro_batch_tokens="auto" if packs == "measured" else PACK_TOKENS,
                loss_modules=("benchmarks.failures_losses",),
                keep_versions=2,
            )
            with Cluster(config) as cluster:
                bench = _Bench(cluster, shape=shape, jobs=jobs, packs=packs)
                cluster.client.initial_sync(timeout_s=600)
                for name in names:
                    if cuda or name in LOSSES:
                        yield from bench.cases(name, longest=longest)


class _Bench:
    """A cluster's jobs."""

    def __init__(self, cluster: Cluster, *, shape: str, jobs: int, packs: str) -> None:
        self._client: SpliceClient = cluster.client
        self._cluster, self._shape, self._jobs, self._packs = cluster, shape, jobs, packs
        self._batch = clusters.random_batch(16, 512 if shape != "tiny" else 32)
        self._before: list[tuple[float, float]] = []
        """Seconds and peak bytes of ordinary jobs before the next failure."""

    def cases(self, name: str, *, longest: int) -> Iterator[Case]:
        """Let one job fail, then run the ordinary ones."""
        if name != "no-moments" and not self._before:
            self._before = [self._ordinary() for _ in range(3)]
        batch = clusters.random_batch(1, longest) if name not in LOSSES else self._batch
        earlier = self._counts()
        began = time.monotonic()
        try:
            self._train(batch, LOSSES.get(name, "cross_entropy"))
        except JobFailed as error:
            failed, failed_s = error, time.monotonic() - began
        else:
            raise RuntimeError(f"{name}: the job did not fail")
        if name == "no-moments":  # until the allocator's limit is lifted
            time.sleep(2 * LIMIT_S)
        answered, healthy_s = time.monotonic(), 0.0
        after: list[tuple[float, float]] = []
        errors: list[str] = []
        for _ in range(self._jobs):
            try:
                after.append(self._ordinary())
                healthy_s = healthy_s or time.monotonic() - answered
            except JobFailed as error:
                errors.append(str(error)[:400])
        if not after:
            raise RuntimeError(f"{name}: no job after it succeeded: {errors[0]}")
        ordinary, peer_bytes = self._before or after[1:], [b for _, b in self._before[-1:]]
        self._before = after[1:]
        settings = {
            "packs": self._packs,
            "code": str(failed.code),
            "message": str(failed)[:400],
            "ordinary_errors": errors,
            **{name: count - earlier[name] for name, count in self._counts().items()},
        }

        def case(metric: str, unit: str, sample: float, *peer: float) -> Case:
            return Case(
                name=f"{self._shape}/{name}",
                metric=metric,
                unit=unit,
                samples=(sample,),
                peer="an ordinary job" if peer else None,
                peer_samples=peer,
                settings=settings,
            )

        seconds = [s for s, _ in ordinary]
        yield case("healthy_s", "s", healthy_s, *seconds)
        yield case("failed_s", "s", failed_s, *seconds)
        yield case("memory_bytes", "B", after[-1][1], *peer_bytes)
        yield case("ordinary_jobs", "jobs", float(len(after)))

    def _ordinary(self) -> tuple[float, float]:
        began = time.monotonic()
        result = self._train(self._batch, "cross_entropy")
        seconds = time.monotonic() - began
        return seconds, float(result.metrics.get("peak_memory_bytes", 0.0))

    def _train(self, batch: Batch, loss: str) -> TrainMergedResult:
        return self._client.train_merged(
            batch, LossSpec(name=loss), OptimParams(lr=1e-4), timeout_s=300
        )

    def _counts(self) -> dict[str, int]:
        """Events in the trainer's log so far."""
        log = (self._cluster.run.run_dir / "logs" / "trainer.log").read_text()
        return {name: sum(map(log.count, texts)) for name, texts in EVENTS.items()}
