"""Round trips of a job through client, orchestrator, journal (fsync) and a node that does nothing,
on loopback.

Orchestrator (`splice serve`), node and client are three processes, as in a run.
`control/one-commit` is the floor that the disk sets: one durable commit of one row, by the same
journal in the same folder, after a pause as long as the one between a job's commits (back to back
they take less: disk and core are awake). A job makes two, one before it is acknowledged and one
before its outcome is sent.
Both are of a run that has been running for a while: a new journal's log first grows, and a commit
that makes a file longer takes twice as long.

The peer hands the same empty job over in a directory that the worker looks into once a second, as
trainers that watch a folder do.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory

from benchmarks.harness import Case
from orchestrator.processes.launch import NodeProcess
from orchestrator.protocol.messages import Hello, Ready, TrainLora, batch_specs
from orchestrator.protocol.node_link import NodeLink
from orchestrator.storage.journal import Journal
from splice.client.clients import SpliceClient
from splice.client.run_file import RunFile

TOKEN = "benchmark-" + uuid.uuid4().hex
POLL_S = 1.0
LOG_PAGES, WARM_UP_JOBS = 1000, 300
"""Pages of the log before SQLite writes it over from its start; a commit of one row makes one, a
job four.
"""
PAUSE_S = 0.0007
START_S = END_S = 30.0


def run(*, device: str, small: bool) -> list[Case]:
    """p50 and p99 in seconds."""
    del device
    jobs, polls = (50, 2) if small else (1000, 10)
    with TemporaryDirectory() as folder:
        ours = sorted(_round_trips(jobs, Path(folder)))
        commits = sorted(_commits(jobs, Path(folder)))
    peer = sorted(_polled_round_trips(polls))
    settings = {
        "jobs": jobs,
        "journal": "SQLite WAL, synchronous=FULL",
        "payload_bytes": sum(s.nbytes for s in _specs()),
        "processes": "orchestrator, node, client",
    }
    return [
        Case(
            name="control/empty-job",
            metric="round_trip_s",
            unit="s",
            samples=tuple(ours),
            peer=f"directory polled every {POLL_S:g} s",
            peer_samples=tuple(peer),
            settings=settings,
        ),
        Case(
            name="control/empty-job-p99",
            metric="round_trip_p99_s",
            unit="s",
            samples=(quantiles(ours, n=100)[98],),
            settings=settings,
        ),
        Case(
            name="control/one-commit",
            metric="commit_s",
            unit="s",
            samples=tuple(commits),
            settings={"journal": settings["journal"], "pause_s": PAUSE_S},
        ),
    ]


def _specs():  # type: ignore[no-untyped-def]
    return batch_specs(num_sequences=4, num_tokens=64)


def _round_trips(count: int, folder: Path) -> list[float]:
    run_dir = folder / "run"
    run = RunFile(name="m", model=folder, run_dir=run_dir, trainer={}, inference={})
    file = folder / "run.json"
    file.write_text(run.model_dump_json())
    with _python_process(
        ["splice", "serve", str(file)], log=folder / "orchestrator.log"
    ) as orchestrator:
        endpoint = _endpoint(run_dir, orchestrator)
        with _python_process(["benchmarks.control", endpoint], log=folder / "node.log"):
            buffers = [bytes(s.nbytes) for s in _specs()]
            job = TrainLora(tensors=_specs(), output_dir=str(folder / "adapter"))
            samples = []
            with SpliceClient(endpoint=endpoint, run_token=TOKEN) as client:
                for _ in range(count + WARM_UP_JOBS):
                    started = time.perf_counter()
                    client.run(job, buffers=buffers, timeout_s=60)
                    samples.append(time.perf_counter() - started)
                client.stop_run()
    return samples[WARM_UP_JOBS:]


@contextlib.contextmanager
def _python_process(words: list[str], *, log: Path) -> Iterator[NodeProcess]:
    """`python -m WORDS`; has ended by itself when the block does, or is killed."""
    node = NodeProcess(
        name=log.stem,
        argv=[sys.executable, "-m", *words],
        env={"SPLICE_RUN_TOKEN": TOKEN},
        log_file=log,
    )
    node.start()
    assert node.process is not None
    try:
        yield node
        node.process.wait(END_S)
    except BaseException:
        print(node.log_tail(), file=sys.stderr)
        raise
    finally:
        node.stop(grace_s=0.0)


def _endpoint(run_dir: Path, orchestrator: NodeProcess) -> str:
    deadline_s = time.monotonic() + START_S
    while not (run_dir / "endpoint").exists():
        if orchestrator.died() or time.monotonic() > deadline_s:
            raise RuntimeError(f"no orchestrator within {START_S:.0f} s")
        time.sleep(0.01)
    return (run_dir / "endpoint").read_text()


def _do_nothing(endpoint: str) -> None:
    """The node."""
    hello = Hello(
        role="trainer",
        node_id="trainer",
        incarnation=uuid.uuid4().hex,
        run_token=os.environ["SPLICE_RUN_TOKEN"],
    )
    with NodeLink(endpoint=endpoint, hello=hello) as link:
        link.send(Ready(node_id="trainer"))
        while True:
            envelope = link.recv(timeout_s=1.0)
            if envelope is None:
                continue
            if envelope.message.kind == "Shutdown":
                return
            link.complete(envelope.message.request_id)  # type: ignore[union-attr]


def _commits(count: int, folder: Path) -> list[float]:
    journal, samples = Journal(folder / "commits.sqlite", run_token=TOKEN, name="m"), []
    for number in range(count + LOG_PAGES):
        time.sleep(PAUSE_S)
        started = time.perf_counter()
        journal.set_facts({"trainer": {"steps": number}})
        samples.append(time.perf_counter() - started)
    journal.close()
    return samples[LOG_PAGES:]


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


if __name__ == "__main__":
    _do_nothing(sys.argv[1])
