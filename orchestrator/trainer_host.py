"""The trainer's launcher on one host: starts torchrun, starts it again after a crash, ends it and starts it when the orchestrator says so.

    splice trainer --endpoint tcp://host:40001 --config trainer.json                                           one host
    splice trainer --endpoint ... --config trainer.json --nodes 2 --node-rank K --rendezvous host0:29400       on each of two

It holds a control socket of its own, so it can say truthfully that no process of the trainer is left (memory mode `exit`). The command
that it runs may have a prefix, such as `docker run --rm --init --network host --ipc host --gpus all -e SPLICE_RUN_TOKEN image`.
"""

from __future__ import annotations

import logging
import os
import signal
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from orchestrator.errors import ConfigError, NodeLost
from orchestrator.launch import NodeProcess, descendants
from orchestrator.protocol.config import TrainerConfig
from orchestrator.protocol.messages import ErrorCode, Hello, NodeEnded, Ready, Shutdown, StartTrainer, StopTrainer
from orchestrator.protocol.node_link import NodeLink
from orchestrator.protocol.restarts import RestartBudget

log = logging.getLogger("splice.launcher")
POLL_S = 0.2
ORDERLY_END_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLaunch:
    """How torchrun is started on this host.

    Attributes:
        python: interpreter of the trainer environment, as the prefix's command sees it.
        prefix: put before the command line.
        rendezvous: host:port of node rank 0, the same on every host; empty with one node.
        max_restarts: after crashes, within an hour; being started for the next job does not count.
    """

    endpoint: str
    config: Path
    python: str
    module: str = "trainer_node"
    node_id: str = "trainer"
    nodes: int = 1
    node_rank: int = 0
    rendezvous: str = ""
    prefix: tuple[str, ...] = ()
    max_restarts: int = 2

    @property
    def launcher_id(self) -> str:
        """The launcher's own id on the control socket."""
        return f"{self.node_id}-launcher-{self.node_rank}"


def torchrun_command(launch: TrainerLaunch, *, world_size: int) -> list[str]:
    """The command line for this host.

    Raises:
        ConfigError: the ranks do not divide over the nodes, or several nodes have no rendezvous; names the option.
    """
    if not 0 <= launch.node_rank < launch.nodes:
        raise ConfigError(f"--node-rank {launch.node_rank} is not one of 0 to {launch.nodes - 1} (--nodes {launch.nodes})")
    if world_size % launch.nodes:
        raise ConfigError(f"parallel.world_size {world_size} ranks do not divide over --nodes {launch.nodes}")
    where = ["--standalone", "--nnodes=1"]
    if launch.nodes > 1:
        target = urlsplit(f"//{launch.rendezvous}")
        if not target.hostname or target.port is None:
            raise ConfigError(f"--nodes {launch.nodes} needs --rendezvous HOST:PORT of node rank 0, got {launch.rendezvous!r}")
        # The static rendezvous gives ranks by node rank: rank 0, which answers the orchestrator, is on node 0.
        where = [
            f"--nnodes={launch.nodes}", f"--node-rank={launch.node_rank}", "--rdzv-backend=static",
            f"--master-addr={target.hostname}", f"--master-port={target.port}",
        ]  # fmt: skip
    return [
        *launch.prefix, launch.python, "-m", "torch.distributed.run", *where,
        f"--nproc-per-node={world_size // launch.nodes}", "--max-restarts=0", "-m", launch.module,
        "--endpoint", launch.endpoint, "--node-id", launch.node_id, "--config", str(launch.config),
    ]  # fmt: skip


class TrainerHost:
    """Runs until told to shut down, or until the trainer has crashed too often.

    Raises:
        ConfigError, NodeLost: from `serve`: as `NodeLink.start` does.
    """

    def __init__(self, launch: TrainerLaunch, *, config: TrainerConfig, run_token: str) -> None:
        self._launch = launch
        self._detail = {"memory": config.memory, "node_rank": launch.node_rank, "num_nodes": launch.nodes}
        argv = torchrun_command(launch, world_size=config.parallel.world_size)
        self._trainer = NodeProcess(name="trainer", argv=argv, env={}, log_file=None)
        self._wanted = True
        self._restarts = RestartBudget(launch.max_restarts)
        self._stop = False
        hello = Hello(
            role="launcher", node_id=launch.launcher_id, incarnation=uuid.uuid4().hex, run_token=run_token, pid=os.getpid()
        )
        self._link = NodeLink(endpoint=launch.endpoint, hello=hello)

    def stop(self) -> None:
        """End `serve`; callable from a signal handler."""
        self._stop = True

    def serve(self) -> int:
        """Returns the exit code: 0, or that of a trainer that crashed too often."""
        with self._link.start():
            try:
                self._trainer.start()
                self._link.send(Ready(node_id=self._launch.launcher_id, detail=self._detail))
                return self._loop()
            finally:
                self._trainer.stop()

    def _loop(self) -> int:
        while not self._stop:
            try:
                envelope = self._link.recv(timeout_s=POLL_S)
            except NodeLost as error:
                log.warning("%s; the launcher ends", error)
                return 0
            message = None if envelope is None else envelope.message
            if isinstance(message, Shutdown):
                self._wait_for_end(ORDERLY_END_S)  # the trainer was told as well
                return 0
            if isinstance(message, StartTrainer | StopTrainer):
                self._answer(message)
            code = self._watch()
            if code is not None:
                return code
        return 0

    def _answer(self, message: StartTrainer | StopTrainer) -> None:
        if isinstance(message, StartTrainer):
            if not self._is_running():
                log.info("starting the trainer")
                self._trainer.start()
            self._wanted = True
            self._link.complete(message.request_id)
            return
        self._wanted = False
        left = self._end(message.grace_s)
        if left:
            self._link.fail(
                message.request_id, code=ErrorCode.INTERNAL, phase="ending the trainer", message=f"processes {left} do not end",
                remedy="they hold device memory; end them by hand",
            )  # fmt: skip
        else:
            self._link.complete(message.request_id)

    def _end(self, grace_s: float) -> list[int]:
        """Let the trainer end by itself, then end it. Returns what is left of it."""
        pid = self._trainer.pid
        family = [] if pid is None else descendants(pid, and_self=True)
        self._wait_for_end(grace_s)
        self._trainer.stop()
        _, alive = psutil.wait_procs([p for p in family if p.pid != pid], timeout=5.0)
        return [p.pid for p in alive if p.status() != psutil.STATUS_ZOMBIE]

    def _wait_for_end(self, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        while self._is_running() and time.monotonic() < deadline and not self._stop:
            time.sleep(0.05)

    def _is_running(self) -> bool:
        return self._trainer.process is not None and self._trainer.process.poll() is None

    def _watch(self) -> int | None:
        """Start a crashed trainer again; the exit code once it has crashed too often."""
        process = self._trainer.process
        if not self._wanted or process is None or process.poll() is None:
            return None
        if process.returncode == 0:  # told to end, in order
            self._wanted = False
            return None
        if self._launch.node_rank == 0:  # where rank 0 was, which answered the orchestrator
            self._link.send(NodeEnded(node_id=self._launch.node_id, code=process.returncode))
        now_s = time.monotonic()
        used = self._restarts.used(now_s)
        if not self._restarts.take(now_s):
            log.error("the trainer ended with code %d, %d starts after a crash; the launcher ends", process.returncode, used)
            return process.returncode if process.returncode > 0 else 1
        log.warning(
            "the trainer ended with code %d; start %d of at most %d within an hour",
            process.returncode, used + 1, self._launch.max_restarts,
        )  # fmt: skip
        self._trainer.start()
        return None


def run(launch: TrainerLaunch, *, run_token: str) -> int:
    """The process: until `Shutdown`, SIGTERM or Ctrl-C."""
    host = TrainerHost(launch, config=TrainerConfig.model_validate_json(launch.config.read_text()), run_token=run_token)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: host.stop())
    return host.serve()


def split_prefix(text: str) -> Sequence[str]:
    """A prefix as written in a shell."""
    import shlex

    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--prefix {text!r} is not a command line: {error}") from error
