"""One run: an orchestrator, fake nodes and clients as processes and threads, a nemesis, and the
history of it all.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from orchestrator.errors import JobFailed, NodeLost
from orchestrator.protocol import frames
from orchestrator.protocol.messages import (
    Forward,
    ForwardBackward,
    InitialSync,
    JobSpec,
    LoadCheckpoint,
    OptimStep,
    Publish,
    Resync,
    SaveCheckpoint,
    TrainLora,
    TrainMerged,
    batch_specs,
    forward_specs,
    new_id,
)
from orchestrator.storage.journal import Journal
from splice.client.clients import SpliceClient
from tests.chaos.history import History
from tests.chaos.links import Links
from tests.chaos.nodes import BASE, LONG, MODEL, POISON
from tests.chaos.processes import ROOT, Process
from tests.orchestrator.serving import run_file

WAITS_S = {
    "join_timeout_s": 60.0,
    "plan_timeout_s": 60.0,
    "transfer_timeout_s": 60.0,
    "commit_timeout_s": 30.0,
    "recovery_timeout_s": 90.0,
}
BATCH = batch_specs(num_sequences=1, num_tokens=2)
FORWARD = forward_specs(num_sequences=1, num_tokens=2)
JOB_WITHIN_S = 240.0
"""After its submission or the last fault that was healed, whichever is later, a job has its
outcome. Real pace; divided by the run's.
"""
HEALTHY_WITHIN_S = 240.0
DISK_BYTES = 24 * 2**20
FIRST_JOB_S = 60.0
KINDS = {
    "TrainMerged": 30,
    "Publish": 8,
    "Resync": 4,
    "Forward": 8,
    "ForwardBackward": 14,
    "OptimStep": 10,
    "SaveCheckpoint": 6,
    "LoadCheckpoint": 4,
    "TrainLora": 6,
}
"""Kind of job -> how often, relatively."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What one seed stands for."""

    seed: str
    minutes: float
    pace: float = 4.0
    """Every wait of the orchestrator is divided by it."""
    replicas: int
    clients: int
    mode: str
    changed_only: bool
    send: str
    noise: float
    small_disk: bool


def settings_of(seed: str, minutes: float) -> Settings:
    """All choices that are made before the first process starts."""
    dice = random.Random(f"{seed} settings")
    return Settings(
        seed=seed,
        minutes=minutes,
        replicas=dice.choice((1, 2, 2, 3)),
        clients=dice.choice((2, 3, 4)),
        mode=dice.choice(("in_place", "shadow")),
        changed_only=dice.random() < 0.5,
        noise=dice.choice((0.0, 0.0, 0.05)),
        small_disk=dice.random() < 0.5,
        send=dice.choice(("tensors", "elements")),
    )


class Run:
    """Everything that is started is ended by `__exit__`; the history stays in `folder`."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings, self.folder, self.token = settings, folder, secrets.token_hex(16)
        folder.mkdir(parents=True)
        (folder / MODEL).write_text(BASE)
        self.history = History(folder / "history", "harness")
        self.links, self.batches, self._lock = Links(), 0, threading.Lock()
        self.healed_s = 0.0
        self.jobs_done = 0
        self.stopping = threading.Event()
        self.processes: dict[str, Process] = {}
        self._clients: dict[str, SpliceClient] = {}
        self._twins: list[subprocess.Popen[bytes]] = []
        self._shm_before = set(os.listdir("/dev/shm"))

    # ------------------------------------------------------------ start and end

    def __enter__(self) -> Run:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        settings = self.settings
        self.run_dir = self.folder / "run"
        self._mount()
        names = [f"inference-{i}" for i in range(settings.replicas)]
        orchestrator = self._process("orchestrator")
        orchestrator.argv = ["-m", "tests.chaos.serving", "serve", str(self._file()), "--resume"]
        orchestrator.env = {"SPLICE_CHAOS_PACE": str(settings.pace)}
        orchestrator.start()
        self.endpoint = self._endpoint()
        port = int(self.endpoint.rsplit(":", 1)[1])
        with socket.create_server(("127.0.0.1", 0)) as free:
            data_port = int(free.getsockname()[1])
        data_via = {name: self.links.add(f"data {name}", data_port).port for name in names}
        self._node(
            "trainer",
            "trainer",
            port,
            ["--data-port", str(data_port), "--data-via", json.dumps(data_via)],
        )
        for name in names:
            self._node(name, "inference", port, [])
        self._watch = threading.Thread(target=self._look_after, name="watch", daemon=True)
        self._watch.start()

    def _file(self) -> Path:
        """The run's file. Every wait of the orchestrator is shorter."""
        settings, pace = self.settings, self.settings.pace
        return run_file(
            self.run_dir,
            inference={"replicas": settings.replicas},
            orchestrator={
                "keep_versions": 3,
                "ready_timeout_s": 120.0 / pace,
                "train_timeout_s": 120.0 / pace,
            },
            publication={
                "mode": settings.mode,
                "send": settings.send,
                **{k: s / pace for k, s in WAITS_S.items()},
            },
        )

    def _process(self, name: str) -> Process:
        self.processes[name] = Process(
            name, history=self.history, log=self.folder / f"{name}.log", token=self.token
        )
        return self.processes[name]

    def _node(self, name: str, role: str, port: int, more: list[str]) -> None:
        settings, link = self.settings, self.links.add(f"control {name}", port)
        node = self._process(name)
        node.argv = [
            "-m",
            "tests.chaos.nodes",
            role,
            "--folder",
            str(self.folder),
            "--endpoint",
            f"tcp://127.0.0.1:{link.port}",
            "--node-id",
            name,
            "--seed",
            settings.seed,
            "--life",
            "LIFE",
            "--noise",
            str(settings.noise),
            "--pace",
            str(settings.pace),
            "--work-s",
            "0.01",
            *(["--changed-only"] if settings.changed_only else []),
            *more,
        ]
        node.start()

    def _mount(self) -> None:
        """Its own disk, small enough to be filled, where that is allowed."""
        self.run_dir.mkdir()
        self.is_mounted = False
        if self.settings.small_disk and os.geteuid() == 0:
            argv = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "chaos", str(self.run_dir)]
            self.is_mounted = subprocess.run(argv, capture_output=True, check=False).returncode == 0

    def _endpoint(self) -> str:
        file, until = self.run_dir / "endpoint", time.monotonic() + 60
        while not file.exists():
            if time.monotonic() > until:
                raise TimeoutError(f"no endpoint; see {self.folder}/orchestrator.log")
            time.sleep(0.02)
        return file.read_text()

    def _look_after(self) -> None:
        """Launchers and init system in one: what has ended is started again; the orchestrator is
        measured.
        """
        next_probe_s = 0.0
        while not self.stopping.wait(0.05):
            for process in list(self.processes.values()):
                process.look_after()
            if time.monotonic() > next_probe_s:
                next_probe_s = time.monotonic() + 1.0
                self._probe()

    def start_twin(self) -> Callable[[], None]:
        """A second orchestrator in the run folder; what is to be called when it should
        have ended.
        """
        argv = [sys.executable, "-m", "splice", "serve", str(self._file()), "--resume"]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "SPLICE_RUN_TOKEN": self.token}
        twin, first = (
            subprocess.Popen(argv, cwd=ROOT, env=env, stderr=subprocess.DEVNULL),
            self.processes["orchestrator"].popen,
        )
        self._twins.append(twin)

        def look() -> None:
            try:
                code = twin.wait(180)  # a busy machine takes its time to import
            except subprocess.TimeoutExpired:
                code = None
                twin.kill()
                twin.wait()
            if (
                first is not None and first is self.processes["orchestrator"].popen
            ):  # else it may have come to be the only one
                self.history.note("twin", code=code)

        return look

    def move(self) -> None:
        """Everything ends, the run's folder gets another name, and everything starts again."""
        if self.is_mounted:
            return
        for process in self.processes.values():
            process.hold_down()
        for twin in self._twins:  # one of them may have taken the orchestrator's place
            twin.kill()
            twin.wait()
        before, after = self.run_dir, self.folder / f"run-{new_id('moved')}"
        before.rename(after)
        self.run_dir, orchestrator = after, self.processes["orchestrator"]
        orchestrator.argv[3] = str(self._file())
        for process in self.processes.values():
            process.start()

    def _probe(self) -> None:
        process = self.processes["orchestrator"]
        with contextlib.suppress(psutil.Error):
            seen = psutil.Process(process.pid)
            with seen.oneshot():
                self.history.note(
                    "probe",
                    life=process.life,
                    rss=seen.memory_info().rss,
                    descriptors=seen.num_fds(),
                    threads=seen.num_threads(),
                    jobs=self.jobs_done,
                )

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        for name in list(self._clients):
            self._drop_client(name)
        for process in self.processes.values():
            process.hold_down()
        self.links.close()
        if getattr(self, "is_mounted", False):
            shutil.copytree(
                self.run_dir,
                self.folder / "run-was",
                ignore=shutil.ignore_patterns("fill"),
                dirs_exist_ok=True,
            )
            subprocess.run(["umount", "-l", str(self.run_dir)], check=False)
        self.history.close()

    # ------------------------------------------------------------ clients

    def client(self, name: str) -> SpliceClient:
        link = self.links.by_name.get(f"client {name}") or self.links.add(
            f"client {name}", int(self.endpoint.rsplit(":", 1)[1])
        )
        return SpliceClient(
            endpoint=f"tcp://127.0.0.1:{link.port}", run_token=self.token, client_id=name
        )

    def job(self, kind: str, dice: random.Random) -> tuple[JobSpec, list[bytes], dict[str, Any]]:
        """(job, buffers, what the history says of it)."""
        with self._lock:
            self.batches += 1
            number = self.batches
        harm = dice.choices((0, POISON, LONG), weights=(96, 2, 2))[0]
        buffers = [struct.pack("<ii", number, harm), *(bytes(s.nbytes) for s in BATCH[1:])]
        folder = str(self.folder / "saved" / str(dice.randrange(4)))
        of_batch = {"TrainMerged": TrainMerged, "ForwardBackward": ForwardBackward}
        if kind in of_batch:
            return of_batch[kind](tensors=BATCH), buffers, {"batch": f"b{number}"}
        if kind == "TrainLora":
            return TrainLora(tensors=BATCH, output_dir=folder), buffers, {"batch": f"b{number}"}
        if kind == "Forward":
            return Forward(tensors=FORWARD), buffers[:2], {}
        if kind in ("SaveCheckpoint", "LoadCheckpoint"):
            spec = SaveCheckpoint if kind == "SaveCheckpoint" else LoadCheckpoint
            return spec(checkpoint_dir=folder), [], {"folder": folder}
        plain = {
            "InitialSync": InitialSync,
            "Publish": Publish,
            "Resync": Resync,
            "OptimStep": OptimStep,
        }
        return plain[kind](), [], {}

    def do(
        self, name: str, kind: str, dice: random.Random, *, cancel: bool = False
    ) -> dict[str, Any] | None:
        """Submit one job and wait for its outcome, through whatever happens; its
        result, or None.
        """
        job, buffers, facts = self.job(kind, dice)
        job_id = new_id("job")
        self.history.note("submit", job=job_id, kind=kind, client=name, **facts)
        while not self.stopping.is_set():
            try:
                client = self._client_of(name)
                client.submit(job, buffers=buffers, job_id=job_id)
                if cancel:
                    client.cancel(job_id)
                while not self.stopping.is_set():
                    with contextlib.suppress(TimeoutError):
                        return self._told(
                            job_id, lambda client=client: client.wait(job_id, timeout_s=1.0)
                        )  # type: ignore[misc]
            except NodeLost:  # no orchestrator for longer than a client waits: the same id again
                self._drop_client(name)
        return None

    def _client_of(self, name: str) -> SpliceClient:
        if name not in self._clients:
            self._clients[name] = self.client(name).__enter__()
        return self._clients[name]

    def _drop_client(self, name: str) -> None:
        client = self._clients.pop(name, None)
        if client is not None:
            client.__exit__()

    def _told(self, job_id: str, wait: Callable[[], Any]) -> Any:
        try:
            result = wait()
        except JobFailed as error:
            said = "cancelled" if error.code == "cancelled" else "failed"
            if error.code == "too_many_jobs":
                raise TimeoutError from error
            self.history.note(
                "outcome", job=job_id, outcome=said, code=error.code, message=error.message[:600]
            )
            self.jobs_done += 1
            return None
        self.jobs_done += 1
        self.history.note(
            "outcome",
            job=job_id,
            outcome="completed",
            version=getattr(result, "version", None),
            attempts=getattr(result, "attempts", None),
        )
        return result

    def work(self, name: str, until_s: float) -> None:
        """A client's life."""
        dice = random.Random(f"{self.settings.seed} {name}")
        while time.monotonic() < until_s and not self.stopping.is_set():
            kind = dice.choices(list(KINDS), weights=list(KINDS.values()))[0]
            self.do(name, kind, dice, cancel=dice.random() < 0.05)
            time.sleep(dice.uniform(0.0, 0.02))

    # ------------------------------------------------------------ faults are over

    def note_healed(self) -> None:
        self.healed_s = time.monotonic()
        self.history.note("healed")

    def wait_healthy(self, *, within_s: float | None = None) -> float | None:
        """Seconds until a new version is published and every replica serves it; None:
        not in time.
        """
        began = time.monotonic()
        until = began + (HEALTHY_WITHIN_S / self.settings.pace if within_s is None else within_s)
        dice, want = random.Random(0), None
        while time.monotonic() < until:
            done = self.do("last", "TrainMerged", dice)
            if done is not None:
                want = done.version
                break
        while time.monotonic() < until:
            if want is not None and all(
                self.served().get(n) == want for n in self.processes if n.startswith("inference")
            ):
                return time.monotonic() - began
            time.sleep(0.1)
        return None

    def served(self) -> dict[str, int | None]:
        """What each replica says that it serves."""
        last: dict[str, int | None] = {}
        for name in (n for n in self.processes if n.startswith("inference")):
            newest = max(
                (self.folder / "history").glob(f"{name}-*.jsonl"),
                key=lambda f: f.stat().st_mtime_ns,
                default=None,
            )
            lines = [] if newest is None else newest.read_text().splitlines()
            last[name] = json.loads(lines[-1]).get("version") if lines else None
        return last

    def end(self) -> None:
        """StopRun, then see what is left."""
        with contextlib.suppress(NodeLost, TimeoutError), self.client("end") as client:
            client.stop_run(timeout_s=20)
        for process in self.processes.values():
            process.is_down = True  # it is to end by itself
        until = time.monotonic() + 20
        while any(p.is_running for p in self.processes.values()) and time.monotonic() < until:
            time.sleep(0.05)
        for name, process in self.processes.items():
            if process.is_running:
                self.history.note("left", kind="process", name=name)
        if (self.run_dir / "endpoint").exists():
            self.history.note("left", kind="endpoint", name="RUN_DIR/endpoint")
        for name in set(os.listdir("/dev/shm")) - self._shm_before:
            if "splice" in name:
                self.history.note("left", kind="shared memory", name=name)
        self._note_journal()

    def _note_journal(self) -> None:
        """What the run's memory says; that it can be opened shows that no lock and no broken file
        is left.
        """
        try:
            journal = Journal(self.run_dir / "journal.sqlite", run_token=self.token, name="m")
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what the checker is to say
            self.history.note("left", kind="journal", name=f"{type(error).__name__}: {error}")
            return
        rows = journal._db.execute("SELECT job_id FROM jobs ORDER BY rowid").fetchall()
        for number, (job_id,) in enumerate(rows):
            row = journal.job(job_id)
            assert row is not None
            outcome: Any = None if row.outcome is None else frames.decode(row.outcome).message
            self.history.note(
                "journaled",
                job=job_id,
                kind=row.kind,
                number=number,
                outcome=row.state,
                code=getattr(outcome, "code", None),
                message=str(getattr(outcome, "message", ""))[:600],
            )
        for version, state in journal.publication_steps():
            if state == "committed":
                self.history.note("committed", version=version)
        journal.close()


def scratch() -> Path:
    """Where runs keep their folders."""
    return Path(tempfile.mkdtemp(prefix="splice-chaos-"))
