"""Starts node processes, watches them, and ends them: by process group, with a deadline, SIGKILL last.

A child that outlives its launcher is the usual leak, so every child is told by the kernel when its parent dies (Linux), and gets a session of its
own so that all of its descendants can be signalled together.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from orchestrator.errors import NodeLost
from orchestrator.protocol.parent import die_with_parent
from orchestrator.protocol.restarts import EXIT_LINK_LOST, BackOff, RestartBudget

TERM_GRACE_S = 15.0


@dataclass(slots=True, kw_only=True)
class NodeProcess:
    """One node's process group.

    Attributes:
        argv: command line.
        env: added to ours.
        log_file: stdout and stderr, appended; None: where ours go.
        piped: whether stdin and stdout are pipes to this process instead, and stderr goes where ours goes.
        restarts: how often the launcher starts it again after a crash.
        pauses: pauses before it is started again after a lost link.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log_file: Path | None
    piped: bool = False
    restarts: RestartBudget = field(default_factory=lambda: RestartBudget(0))
    pauses: BackOff = field(default_factory=BackOff)
    starts_at_s: float | None = field(default=None, repr=False)
    """When it is started again after a lost link, on the monotonic clock."""
    stopping: bool = False
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        """Start it."""
        self.stopping, self.starts_at_s = False, None
        with contextlib.ExitStack() as stack:
            log = None
            if self.log_file is not None:
                self.log_file.parent.mkdir(parents=True, exist_ok=True)
                log = stack.enter_context(self.log_file.open("ab"))
            self.process = subprocess.Popen(
                list(self.argv),
                env={**os.environ, **self.env},
                stdin=subprocess.PIPE if self.piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if self.piped else log,
                stderr=None if log is None else subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),
            )

    @property
    def pid(self) -> int | None:
        """Process id, or None."""
        return None if self.process is None else self.process.pid

    def died(self) -> bool:
        """Whether it ended although nobody asked it to."""
        return self.process is not None and self.process.poll() is not None and not self.stopping

    def is_lost(self, now_s: float) -> bool:
        """Whether it died and will not be started again."""
        if not self.died():
            return False
        assert self.process is not None
        return self.process.returncode != EXIT_LINK_LOST and not self.restarts.has_left(now_s)

    def keep_alive(self, now_s: float) -> None:
        """Start it again if it died and may be: after a lost link always, after a pause; after a crash as often as `restarts` allows."""
        if not self.died():
            return
        assert self.process is not None
        if self.process.returncode != EXIT_LINK_LOST:
            if self.restarts.take(now_s):
                self.start()
        elif self.starts_at_s is None:
            self.starts_at_s = now_s + self.pauses.next_s(now_s)
        elif now_s >= self.starts_at_s:
            self.start()

    def log_tail(self, lines: int = 25) -> str:
        """The last lines of its log."""
        with contextlib.suppress(OSError):
            if self.log_file is None:
                return "(its log is where ours is)"
            return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])
        return "(no log)"

    def stop(self, *, grace_s: float = TERM_GRACE_S) -> None:
        """SIGTERM to the group and to every descendant, wait, SIGKILL what is left. Safe to call twice."""
        self.stopping = True
        if self.process is None:
            return
        family = descendants(self.process.pid)
        _signal_group(self.process.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + grace_s
        while time.monotonic() < deadline_s and (self.process.poll() is None or any(p.is_running() for p in family)):
            time.sleep(0.05)
            family = [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        _signal_group(self.process.pid, signal.SIGKILL)
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)

    def kill(self) -> None:
        """SIGKILL to the whole group, as a crash would."""
        if self.process is not None:
            for process in descendants(self.process.pid):
                with contextlib.suppress(psutil.Error):
                    process.kill()
            _signal_group(self.process.pid, signal.SIGKILL)


class Launcher:
    """A set of node processes; leaving the context ends them all, last started first."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeProcess] = {}
        self._watching = threading.Event()
        self._restarting = threading.Lock()
        """From counting a restart until the new process is there: between the two a node looks dead for good."""
        self._peak_bytes = 0
        self._thread = threading.Thread(target=self._watch, name="splice-launcher", daemon=True)

    def start(self, node: NodeProcess) -> NodeProcess:
        """Start a node and keep it."""
        self.nodes[node.name] = node
        node.start()
        return node

    def check(self) -> None:
        """Raise if a node died and will not be restarted.

        Raises:
            NodeLost: names it and quotes the end of its log.
        """
        for node in self.nodes.values():
            with self._restarting:
                is_lost = node.is_lost(time.monotonic())
            if is_lost:
                code = node.process.returncode if node.process is not None else None
                raise NodeLost(f"{node.name} ended with code {code}; the end of {node.log_file}:\n{node.log_tail()}")

    @property
    def peak_bytes(self) -> int:
        """Largest sum of the proportional set sizes of all nodes' processes and this one, sampled once a second."""
        return self._peak_bytes

    def __enter__(self) -> Launcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._watching.set()
        self._thread.join(timeout=10)
        # Ctrl-C during the clean-up must not leave half of it undone.
        previous = signal.getsignal(signal.SIGINT)
        in_main = threading.current_thread() is threading.main_thread()
        if in_main:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for node in reversed(list(self.nodes.values())):
                node.stop()
        finally:
            if in_main:
                signal.signal(signal.SIGINT, previous)

    def _watch(self) -> None:
        while not self._watching.wait(1.0):
            for node in list(self.nodes.values()):
                with self._restarting:
                    node.keep_alive(time.monotonic())
            self._peak_bytes = max(self._peak_bytes, self._memory_bytes())

    def _memory_bytes(self) -> int:
        total = 0
        roots = [os.getpid(), *(n.pid for n in self.nodes.values() if n.pid is not None)]
        family = {p.pid: p for root in roots for p in descendants(root, and_self=True)}
        for process in family.values():
            with contextlib.suppress(psutil.Error):
                info = process.memory_full_info()
                total += getattr(info, "pss", info.rss)
        return total


def descendants(pid: int, *, and_self: bool = False) -> list[psutil.Process]:
    """The processes below `pid`, all the way down."""
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        return [*([root] if and_self else []), *root.children(recursive=True)]
    return []


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
