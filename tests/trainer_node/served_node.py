"""The trainer node as real processes, driven over a real ROUTER."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import zmq

from orchestrator.protocol.config import LoraConfig, ParallelConfig, TrainerConfig
from orchestrator.protocol.curve import server_keys
from orchestrator.protocol.frames import decode, encode, from_wire, to_wire
from orchestrator.protocol.messages import Heartbeat, Welcome
from tests.trainer_node.conftest import REPO, Ranks, Started, child_env
from tests.trainer_node.data import asked

TOKEN = "a-token"


class Orchestrator:
    """The other end of the control socket: sends requests, collects answers."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        server_keys(TOKEN).secure(self._socket)
        self._peer = b""
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.progress: list[tuple[int, str, dict]] = []
        self.hello = self.ready = None

    def pump(self, *, until: type | str, deadline_s: float = 60.0, request_id: str = ""):
        """Handle what comes until a message of that kind (for that request)."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            self._send(Heartbeat(node_id="orchestrator")) if self.hello else None
            if not self._socket.poll(200):
                continue
            self._peer, *frames = self._socket.recv_multipart()
            envelope = decode(from_wire(frames))
            message = envelope.message
            if message.kind == "Hello":
                self.hello = message
                self._send(Welcome(heartbeat_s=0.5))
            if message.kind == "Progress":
                self.progress.append((message.sequence, message.phase, message.detail))
            wanted = getattr(
                message, "request_id", ""
            ) == request_id and message.kind in until.split("|")
            if wanted and (message.kind != "Progress" or message.phase == "listening"):
                return envelope
        raise AssertionError(f"no {until} within {deadline_s} s")

    def _send(self, message, buffers=()) -> None:
        self._socket.send_multipart([self._peer, *to_wire(encode(message, buffers))])

    def start(self, kind, buffers=(), *, deadline_s: float = 60.0, **fields) -> str:
        request_id = uuid.uuid4().hex
        self.progress = []
        message = asked(kind, request_id=request_id, deadline_s=deadline_s, **fields)
        self._send(message, buffers)
        return request_id

    def finish(self, request_id: str):
        envelope = self.pump(until="Completed|Failed", request_id=request_id)
        assert [s for s, *_ in self.progress] == list(range(len(self.progress)))
        return envelope

    def ask(self, kind, buffers=(), **fields):
        """A request to its end: (message, buffers)."""
        envelope = self.finish(self.start(kind, buffers, **fields))
        return envelope.message, envelope.buffers

    def ok(self, kind, buffers=(), **fields):
        message, answer = self.ask(kind, buffers, **fields)
        assert message.kind == "Completed", message
        return message.result, answer

    def refused(self, kind, buffers=(), **fields):
        message, _ = self.ask(kind, buffers, **fields)
        assert message.kind == "Failed", message
        assert message.remedy
        return message

    def urgent(self, message) -> None:
        self._send(message)

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextlib.contextmanager
def node(
    model: Path,
    folder: Path,
    forks: Ranks | None,
    *,
    ranks: int = 1,
    module: str = "trainer_node",
    collective_timeout_s: float = 30,
    admission: str = "skip",
    dtype: str | None = None,
    profile_versions: tuple[int, ...] = (),
    env: Mapping[str, str] | None = None,
    **parallel,
) -> Iterator[tuple[Orchestrator, subprocess.Popen | Started]]:
    """A trainer node whose ranks are forks; under torchrun if `forks` is None."""
    config = TrainerConfig(
        model=model,
        lora=LoraConfig(rank=4, alpha=8),
        parallel=ParallelConfig(world_size=ranks, **parallel),
        micro_batch_tokens=16,
        collective_timeout_s=collective_timeout_s,
        admission=admission,
        profile_versions=profile_versions,
        **({} if dtype is None else {"dtype": dtype}),
    )
    path = folder / "trainer.json"
    path.write_text(config.model_dump_json())
    control = Orchestrator()
    arguments = ["--endpoint", control.endpoint, "--node-id", "trainer", "--config", str(path)]
    env = {"SPLICE_RUN_TOKEN": TOKEN, **(env or {})}
    process: subprocess.Popen | Started
    if forks is not None:
        process = forks.start(ranks, module, *arguments, folder=folder, env=env)
    else:
        process = _under_torchrun(ranks, [module, *arguments], folder / "node.log", env)
    try:
        control.ready = control.pump(until="Ready", deadline_s=180.0).message
        yield control, process
    except BaseException:
        print((folder / "node.log").read_text()[-5000:])
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if isinstance(process, subprocess.Popen):
            process.wait(10)
        control.close()


def _under_torchrun(
    ranks: int, arguments: list[str], log: Path, env: dict[str, str]
) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=0"]
    command += [f"--nproc-per-node={ranks}", "-m", *arguments]
    env = child_env() | env
    with log.open("w") as file:
        return subprocess.Popen(
            command, cwd=REPO, env=env, stdout=file, stderr=file, start_new_session=True
        )


def rank_process(process: subprocess.Popen | Started, rank: int) -> psutil.Process:
    below = psutil.Process(process.pid).children(recursive=True)
    return next(p for p in below if p.name() == f"splice-rank-{rank}")
