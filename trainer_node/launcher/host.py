"""Launches the trainer's ranks on one host: starts, restarts and ends them, also on request.

    splice trainer run.toml                                  on one host
    ... --nodes 2 --node-rank K --rendezvous host0:29400    on each of two hosts

The ranks are children of one process, `trainer_node.launcher.ranks`. The launcher speaks to it over
its stdin and stdout. By default that process is a template: it has imported everything, so a
restart is quick. It outlives the ranks, also in memory mode `exit`.

The launcher has its own control socket, so it can confirm that all ranks have ended (memory
mode `exit`). Its command may have a prefix, such as `docker run --rm --init -i --network host --ipc
host --gpus all -e SPLICE_RUN_TOKEN image`. Without docker's `-i` the ranks end at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import psutil

from orchestrator.errors import ConfigError, LinkLost
from orchestrator.processes.child import ChildProcess, descendants
from orchestrator.processes.interfaces import refuse_loopback_name
from orchestrator.processes.python import python_command
from orchestrator.processes.restarts import (
    EXIT_AFRESH,
    EXIT_CONFIG,
    EXIT_LINK_LOST,
    JOB_FAILS,
    BackOff,
    RestartBudget,
)
from orchestrator.protocol import memory
from orchestrator.protocol.config import Tier, TrainerConfig, check_model_folder
from orchestrator.protocol.messages import (
    AnyMessage,
    EndedDuring,
    ErrorCode,
    Hello,
    NodeEnded,
    Ready,
    Shutdown,
    StartTrainer,
    StopTrainer,
    check_node_id,
)
from orchestrator.protocol.messages.mistakes import read_json
from orchestrator.protocol.node_link import NodeLink

log = logging.getLogger("splice.launcher")
POLL_S = 0.1
ORDERLY_END_S = 20.0
RECONNECT_S = 5.0
ORPHAN_S = 600.0
"""Time without an orchestrator after which the launcher ends, in seconds."""
IMPORT_S = 300.0
"""Timeout for the template's imports, in seconds."""
PING_S, SILENT_S = 5.0, 30.0
"""Interval of the pings to the process that starts the ranks, and the timeout for an answer, in
seconds."""
KILLED_S = 5.0
CAUSE_S = 10.0
"""Most time between a crash and the message that tells its cause, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLaunch:
    """How to start the ranks on this host.

    Attributes:
        python: interpreter of the trainer environment, as the prefix's command sees it.
        prefix: comes before the command line; must pass on stdin and stdout.
        rendezvous: host:port of node rank 0, the same on every host; empty with one node.
        max_restarts: restarts after crashes within an hour, since the trainer last trained. Starts
            for the next job, after a lost link, or after a crash in a job that fails by itself
            (`trainer_killed`), do not count.
        template: whether ranks are forks of a process that has imported everything.
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
    template: bool = True

    @property
    def launcher_id(self) -> str:
        """The launcher's own id on the control socket."""
        return f"{self.node_id}-launcher-{self.node_rank}"


def ranks_command(
    launch: TrainerLaunch, *, world_size: int, tier: Tier, template: bool
) -> list[str]:
    """Return the command line for this host.

    Raises:
        ConfigError: the ranks do not divide over the nodes, or several nodes lack a rendezvous.
            Names the option.
    """
    if not 0 <= launch.node_rank < launch.nodes:
        raise ConfigError(
            f"--node-rank {launch.node_rank} is not one of 0 to {launch.nodes - 1} (--nodes "
            f"{launch.nodes})"
        )
    if world_size % launch.nodes:
        raise ConfigError(
            f"parallel.world_size {world_size} ranks do not divide over --nodes {launch.nodes}"
        )
    here, master = world_size // launch.nodes, []
    if launch.nodes > 1:
        target = urlsplit(f"//{launch.rendezvous}")
        if not target.hostname or target.port is None:
            raise ConfigError(
                f"--nodes {launch.nodes} needs --rendezvous HOST:PORT of node rank 0, got "
                f"{launch.rendezvous!r}"
            )
        if launch.node_rank == 0:
            refuse_loopback_name(target.hostname, what="--rendezvous")
        master = ["--master", f"{target.hostname}:{target.port}"]
    return [
        *launch.prefix, *python_command(launch.python, "-m", "trainer_node.launcher.ranks"),
        "--ranks", str(here),
        "--world", str(world_size), "--first", str(here * launch.node_rank), *master,
        *(["--template", tier] if template else []), launch.module,
        "--endpoint", launch.endpoint, "--node-id", launch.node_id, "--config", str(launch.config),
    ]  # fmt: skip # a command line


class RanksProcess:
    """The launcher's end of `trainer_node.launcher.ranks`, which it starts when needed.

    If a template does not come up, or does not fork, the next ranks start as new interpreters.
    """

    def __init__(self, launch: TrainerLaunch, *, config: TrainerConfig) -> None:
        self._launch, self._config = launch, config
        self._is_template = launch.template
        self._starter = self._make()
        self._pending = b""
        self._deadline_s: float | None = None
        """Deadline for its next line, on the monotonic clock; None: no line is due."""
        self._next_ping_s = 0.0
        self._first_family: list[psutil.Process] = []
        """Processes that ran below the prefix before any rank: its own and the template."""
        self._is_ready = self._is_starting = False
        self.are_running = False
        """Whether the ranks have been started, or are starting, and have not ended."""
        self.start_id = ""
        """Id of the last start, which its ranks know too."""

    def _make(self) -> ChildProcess:
        argv = ranks_command(
            self._launch,
            world_size=self._config.parallel.world_size,
            tier=self._config.tier,
            template=self._is_template,
        )
        return ChildProcess(argv=argv, env={}, log_file=None, is_piped=True)

    def start(self) -> None:
        """Start the ranks, unless they run."""
        if self.are_running:
            return
        if not self._starter.is_running or self._is_template != self._launch.template:
            self._spawn(template=self._launch.template)
        self._ask_to_start()

    def _spawn(self, *, template: bool) -> None:
        self.stop()
        self._is_template, self._is_ready, self._pending = template, False, b""
        self._first_family = []
        self._starter = self._make()
        self._starter.start()
        self._deadline_s = time.monotonic() + IMPORT_S
        os.set_blocking(self._pipes()[1].fileno(), False)

    def _ask_to_start(self) -> None:
        """Start the ranks, once the process is ready."""
        self.are_running = self._is_starting = True
        self.start_id = uuid.uuid4().hex
        if self._is_ready:
            self._say_start()

    def _say_start(self) -> None:
        self._say(f"start {self.start_id}")

    def look(self) -> int | None:
        """Return the exit code of ranks that have ended since the last call, once.

        A negative code is a signal's number.
        """
        ended = self._read()
        if ended is not None or self._starter.process is None:
            return ended
        if not self._starter.is_running or (
            self._deadline_s is not None and time.monotonic() > self._deadline_s
        ):
            return self._replace()
        if self._is_ready and time.monotonic() >= self._next_ping_s:
            self._next_ping_s = time.monotonic() + PING_S
            self._say("ping")
        return None

    def _read(self) -> int | None:
        """Read its lines. Returns the exit code of ranks that have ended."""
        ended = None
        for line in self._lines():
            self._deadline_s = None
            word, _, code = line.partition(" ")
            if word == "ready" and self._starter.pid is not None:
                self._is_ready, self._first_family = True, descendants(self._starter.pid)
                if self._is_starting:
                    self._say_start()
            elif word == "started":
                self._is_starting = False
            elif word == "ended":
                ended, self.are_running = int(code), False
        return ended

    def _replace(self) -> int | None:
        """Replace a process that has ended or is stuck. Returns the exit code of its ranks."""
        were_running, was_starting, was_ready = self.are_running, self._is_starting, self._is_ready
        code = self._starter.exit_code
        what = (
            f"has been silent for {SILENT_S:.0f} s"
            if code is None
            else f"has ended with code {code}"
        )
        log.warning("the process that starts the ranks %s", what)
        self.stop()
        if was_starting and self._is_template:
            log.warning("starting the ranks without a template this time")
            self._spawn(template=False)
            self._ask_to_start()
        elif were_running:
            return code or 1
        elif was_ready and self._is_template:
            self._spawn(template=True)
        return None

    def end(self, *, grace_s: float, is_hurried: Callable[[], bool]) -> list[int]:
        """Let the ranks end, then kill them; a template stays. Returns who does not end."""
        family = [] if self._starter.pid is None else descendants(self._starter.pid)
        self._wait(grace_s, is_hurried)
        if self.are_running:
            self._say("end")
            self._wait(KILLED_S, lambda: False)
        if self.are_running or not self._is_template:
            self.stop()
        else:
            family = [p for p in family if p not in self._first_family]
        _, alive = psutil.wait_procs(family, timeout=5.0)
        return [p.pid for p in alive if p.status() != psutil.STATUS_ZOMBIE]

    def _wait(self, timeout_s: float, is_hurried: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + timeout_s
        while (
            self.are_running
            and self._starter.is_running
            and time.monotonic() < deadline_s
            and not is_hurried()
        ):
            self._read()
            time.sleep(0.02)

    def stop(self) -> None:
        """End the ranks and the process."""
        self._starter.stop()
        self.are_running = self._is_starting = self._is_ready = False
        self._deadline_s = None
        for pipe in () if self._starter.process is None else self._pipes():
            with contextlib.suppress(OSError):
                pipe.close()
        self._starter.process = None

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        process = self._starter.process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        return process.stdin, process.stdout

    def _say(self, line: str) -> None:
        if self._deadline_s is None:
            self._deadline_s = time.monotonic() + SILENT_S
        with contextlib.suppress(OSError):  # `look` finds that it has ended
            self._pipes()[0].write(f"{line}\n".encode())
            self._pipes()[0].flush()

    def _lines(self) -> list[str]:
        """Return its lines since the last call."""
        if self._starter.process is None:
            return []
        with contextlib.suppress(BlockingIOError):
            while read := os.read(self._pipes()[1].fileno(), 1 << 12):
                self._pending += read
        *lines, self._pending = self._pending.split(b"\n")
        return [line.decode() for line in lines]


class TrainerHost:
    """Runs until `Shutdown`, too many crashes, or `ORPHAN_S` without an orchestrator.

    Raises:
        ConfigError, LinkLost: from `serve`; see `NodeLink.start`.
    """

    def __init__(self, launch: TrainerLaunch, *, config: TrainerConfig, run_token: str) -> None:
        self._launch = launch
        self._detail = {
            "memory": config.memory,
            "node_rank": launch.node_rank,
            "num_nodes": launch.nodes,
        }
        self._ranks = RanksProcess(launch, config=config)
        self._wanted = True
        self._restarts, self._pauses = RestartBudget(launch.max_restarts), BackOff()
        self._starts_at_s: float | None = None
        """When the ranks restart after a lost link, on the monotonic clock."""
        self._crash: tuple[int, float] | None = None
        """Exit code and time of a crash for which no start is left, unless its cause is known."""
        self._told: tuple[str, float] | None = None
        """Cause of a crash that has yet to show on this host, and when it was told."""
        self._stop = False
        self._hello = Hello(
            role="launcher",
            node_id=check_node_id(launch.launcher_id),
            incarnation=uuid.uuid4().hex,
            run_token=run_token,
            pid=os.getpid(),
        )
        self._meter = memory.meter(config.device)
        self._link = self._new_link()
        self._lost_s: float | None = None
        """When the link was lost, on the monotonic clock."""

    def _new_link(self) -> NodeLink:
        return NodeLink(endpoint=self._launch.endpoint, hello=self._hello, meter=self._meter)

    def stop(self) -> None:
        """End `serve`; callable from a signal handler."""
        self._stop = True

    def serve(self) -> int:
        """Serve. Returns 0, `EXIT_LINK_LOST`, or the code of a trainer that crashed too often."""
        self._link.start()
        try:
            self._ranks.start()
            self._link.send(Ready(node_id=self._launch.launcher_id, detail=self._detail))
            return self._loop()
        finally:
            self._ranks.stop()
            self._link.close()
            self._meter.close()

    def _loop(self) -> int:
        while not self._stop:
            message = self._next()
            if isinstance(message, Shutdown):
                # The trainer was told as well.
                self._ranks.end(grace_s=ORDERLY_END_S, is_hurried=self._is_stopped)
                return 0
            if isinstance(message, StartTrainer | StopTrainer):
                self._answer(message)
            elif isinstance(message, EndedDuring):
                cause = JOB_FAILS if message.is_counted else message.cause
                self._on_cause(cause, has_trained=message.has_trained)
            if (code := self._watch()) is not None:
                return self._give_up(code)
            if self._lost_s is not None and time.monotonic() - self._lost_s > ORPHAN_S:
                log.error(
                    "no orchestrator at %s for %.0f s; the launcher ends",
                    self._launch.endpoint,
                    ORPHAN_S,
                )
                return EXIT_LINK_LOST
        return 0

    def _is_stopped(self) -> bool:
        return self._stop

    def _next(self) -> AnyMessage | None:
        """Return the orchestrator's next message, or None for now.

        After a lost link the launcher opens a new connection.
        """
        if self._lost_s is not None:
            self._reconnect()
            return None
        try:
            envelope = self._link.recv(timeout_s=POLL_S)
        except LinkLost as error:
            log.warning("%s; the launcher continues and looks for it for %.0f s", error, ORPHAN_S)
            self._lost_s = time.monotonic()
            return None
        return None if envelope is None else envelope.message

    def _reconnect(self) -> None:
        self._link.close()
        self._link = self._new_link()
        with contextlib.suppress(LinkLost):
            self._link.start(timeout_s=RECONNECT_S)
            self._link.send(Ready(node_id=self._launch.launcher_id, detail=self._detail))
            self._lost_s = None
            log.info("the orchestrator at %s is there again", self._launch.endpoint)

    def _answer(self, message: StartTrainer | StopTrainer) -> None:
        self._starts_at_s = None
        self._wanted = isinstance(message, StartTrainer)
        if isinstance(message, StartTrainer):
            self._ranks.start()
            self._link.complete(message.request_id)
            return
        left = self._ranks.end(grace_s=message.grace_s, is_hurried=self._is_stopped)
        if left:
            self._link.fail(
                message.request_id,
                code=ErrorCode.INTERNAL,
                phase="ending the trainer",
                message=f"processes {left} do not end",
                remedy="they hold device memory; end them by hand",
            )
        else:
            self._link.complete(message.request_id)

    def _watch(self) -> int | None:
        """Restart ended ranks. Returns the exit code once they have crashed too often."""
        if self._starts_at_s is not None and time.monotonic() >= self._starts_at_s:
            self._starts_at_s = None
            self._ranks.start()
        if self._crash is not None and time.monotonic() - self._crash[1] > CAUSE_S:
            return self._crash[0]
        code = self._ranks.look()
        if code is None or not self._wanted:
            return None
        if code == 0:
            self._wanted = False
            return None
        if self._launch.node_rank == 0:  # the host of rank 0, which answers the orchestrator
            self._link.send(
                NodeEnded(node_id=self._launch.node_id, start_id=self._ranks.start_id, code=code)
            )
        now_s = time.monotonic()
        if code == EXIT_AFRESH:
            log.warning("the trainer ended itself after a failed request; it is started again")
            self._ranks.start()
            return None
        if code != EXIT_LINK_LOST:
            return self._after_crash(code, now_s)
        pause_s = self._pauses.next_s(now_s)
        log.warning(
            "the trainer lost the orchestrator, or its other ranks; it is started again in %.0f s",
            pause_s,
        )
        self._starts_at_s = now_s + pause_s
        return None

    def _after_crash(self, code: int, now_s: float) -> int | None:
        if code == EXIT_CONFIG:
            return code
        cause, self._told = self._told, None
        is_recent = cause is not None and now_s - cause[1] <= CAUSE_S
        if self._restarts.take(now_s, cause[0] if cause is not None and is_recent else ""):
            self._start_again(code, now_s)
        else:
            self._crash = (code, now_s)
        return None

    def _on_cause(self, cause: str, *, has_trained: bool) -> None:
        """Hear in which request the ranks crashed: further crashes in it do not count, and in a
        job that fails by itself none does. Nor do crashes so far, if these ranks had trained."""
        now_s = time.monotonic()
        if has_trained:
            self._restarts.renew()
        if self._crash is not None:
            code, at_s = self._crash
            if self._restarts.take(now_s, cause):
                self._crash = None
                self._start_again(code, now_s)
            else:
                self._crash = (code, at_s - CAUSE_S)
        elif cause and not self._restarts.explain(cause, since_s=now_s - CAUSE_S):
            self._told = (cause, now_s)

    def _start_again(self, code: int, now_s: float) -> None:
        log.warning(
            "the trainer ended with code %d; start %d of at most %d within an hour (those in a "
            "training job do not count)",
            code,
            self._restarts.used(now_s),
            self._restarts.most,
        )
        self._ranks.start()

    def _give_up(self, code: int) -> int:
        """Say why the launcher ends. Returns its exit code."""
        why = (
            "its configuration is wrong, which a restart would not change"
            if code == EXIT_CONFIG
            else f"it ended with code {code}, {self._restarts.used(time.monotonic())} starts after "
            "a crash"
        )
        log.error("the trainer is given up, and the launcher ends: %s", why)
        told = f"{why}; read its log, then start it again with `splice trainer`"
        self._link.send(NodeEnded(node_id=self._launch.node_id, code=code, given_up=told))
        return code if code > 0 else 1


def run(launch: TrainerLaunch, *, run_token: str) -> int:
    """Run the process until `Shutdown`, SIGTERM or Ctrl-C.

    Raises:
        ConfigError: the configuration or the model's folder is wrong. Checked first.
    """
    config = read_json(launch.config, TrainerConfig)
    if not launch.prefix:  # a container has its own folders
        check_model_folder(config.model)
    host = TrainerHost(launch, config=config, run_token=run_token)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: host.stop())
    try:
        return host.serve()
    except LinkLost as error:
        log.error("%s", error)
        return EXIT_LINK_LOST


def split_prefix(text: str) -> Sequence[str]:
    """Split a prefix as a shell does."""
    import shlex

    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--prefix {text!r} is not a command line: {error}") from error
