"""Round trips of a job through client, orchestrator, journal (fsync) and a node that does nothing, on loopback.

The peer hands the same empty job over in a directory that the worker looks into once a second, as trainers that watch a folder do.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory

from benchmarks.harness import Case
from orchestrator.client import SpliceClient
from orchestrator.protocol.messages import Hello, Ready, TrainLoraJob, batch_specs
from orchestrator.protocol.node_link import NodeLink
from orchestrator.publisher import PublicationConfig
from orchestrator.server import Orchestrator, OrchestratorConfig

TOKEN = "benchmark-" + uuid.uuid4().hex
POLL_S = 1.0


def run(*, device: str, small: bool) -> list[Case]:
    """p50 and p99 in milliseconds."""
    del device
    jobs, polls = (50, 2) if small else (1000, 10)
    ours = sorted(_round_trips(jobs))
    peer = sorted(_polled_round_trips(polls))
    settings = {"jobs": jobs, "journal": "SQLite WAL, synchronous=FULL", "payload_bytes": sum(s.nbytes for s in _specs())}
    return [
        Case(name="control/empty-job", metric="round_trip_s", unit="s", samples=tuple(ours), peer=f"directory polled every {POLL_S:g} s",
             peer_samples=tuple(peer), settings=settings),
        Case(name="control/empty-job-p99", metric="round_trip_p99_s", unit="s", samples=(quantiles(ours, n=100)[98],), settings=settings),
    ]  # fmt: skip


def _specs():  # type: ignore[no-untyped-def]
    return batch_specs(num_sequences=4, num_tokens=64)


def _round_trips(count: int) -> list[float]:
    with TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        config = OrchestratorConfig(run_dir=run_dir, run_token=TOKEN, name="m", publication=PublicationConfig(transport="gloo"))
        thread = threading.Thread(target=lambda: asyncio.run(Orchestrator(config).serve()), daemon=True)
        thread.start()
        while not (run_dir / "endpoint").exists():
            time.sleep(0.01)
        endpoint = (run_dir / "endpoint").read_text()
        node = threading.Thread(target=_do_nothing, args=(endpoint,), daemon=True)
        node.start()
        buffers = [bytes(s.nbytes) for s in _specs()]
        job = TrainLoraJob(tensors=_specs(), output_dir=folder)
        samples = []
        with SpliceClient(endpoint=endpoint, run_token=TOKEN) as client:
            for _ in range(count + 10):
                started = time.perf_counter()
                client.run(job, buffers=buffers)
                samples.append(time.perf_counter() - started)
            client.stop_run()
        thread.join(timeout=20)
        node.join(timeout=20)
    return samples[10:]


def _do_nothing(endpoint: str) -> None:
    hello = Hello(role="trainer", node_id="trainer", incarnation=uuid.uuid4().hex, run_token=TOKEN)
    with NodeLink(endpoint=endpoint, hello=hello) as link:
        link.send(Ready(node_id="trainer"))
        while True:
            envelope = link.recv(timeout_s=1.0)
            if envelope is None:
                continue
            if envelope.message.kind == "Shutdown":
                return
            link.complete(envelope.message.request_id)  # type: ignore[union-attr]


def _polled_round_trips(count: int) -> list[float]:
    samples = []
    with TemporaryDirectory() as folder:
        box, stop = Path(folder), threading.Event()

        def worker() -> None:
            while not stop.is_set():
                for job in box.glob("*.job"):
                    job.rename(job.with_suffix(".done"))
                stop.wait(POLL_S)

        thread = threading.Thread(target=worker, daemon=True)
        thread.start()
        for number in range(count):
            time.sleep(0.37 * (number % 3))  # not in step with the poller
            started = time.perf_counter()
            (box / f"{number}.job").touch()
            while not (box / f"{number}.done").exists():
                time.sleep(0.001)
            samples.append(time.perf_counter() - started)
        stop.set()
        thread.join(timeout=5)
    return samples
