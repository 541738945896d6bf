"""Starts a set of node processes, watches them, starts them again and ends them."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from dataclasses import dataclass, field

import psutil

from orchestrator.errors import NodeLost
from orchestrator.processes.child import TERM_GRACE_S, ChildProcess, descendants
from orchestrator.processes.restarts import EXIT_CONFIG, EXIT_LINK_LOST, BackOff, RestartBudget

log = logging.getLogger("splice.launch")
RETRY_S = 600.0
"""Pause before a node that was given up starts again, while another one of its group lives."""


@dataclass(slots=True, kw_only=True)
class NodeProcess(ChildProcess):
    """A node that is started again after it ends.

    Attributes:
        restarts: how often the launcher starts it again after a crash.
        is_supervisor: it starts its own children again, so its own exit code is final. Only a
            signal is a crash of it.
        group: nodes of one group do the same work, so one is enough; empty: it is in none.
        pauses: pauses before the starts after a lost link.
        starts_at_s: when it starts again after a pause, on the monotonic clock.
        stopping: whether `stop` was called after the last start.
    """

    name: str
    restarts: RestartBudget = field(default_factory=lambda: RestartBudget(0))
    is_supervisor: bool = False
    group: str = ""
    pauses: BackOff = field(default_factory=BackOff)
    starts_at_s: float | None = field(default=None, repr=False)
    stopping: bool = False

    def start(self) -> None:
        """Start the node."""
        self.stopping, self.starts_at_s = False, None
        ChildProcess.start(self)

    def stop(self, *, grace_s: float = TERM_GRACE_S) -> None:
        """End the node permanently; see `ChildProcess.stop`."""
        self.stopping = True
        ChildProcess.stop(self, grace_s=grace_s)

    def died(self) -> bool:
        """Whether it ended although nobody asked it to."""
        return self.exit_code is not None and not self.stopping

    def is_lost(self, now_s: float) -> bool:
        """Whether it died and will not start again."""
        is_crash = self.died() and self.exit_code != EXIT_LINK_LOST
        return is_crash and (self._is_final() or not self.restarts.has_left(now_s))

    def _is_final(self) -> bool:
        """Whether no restart follows this exit code, whatever the budget."""
        code = self.exit_code
        assert code is not None
        return code in (0, EXIT_CONFIG) or (
            self.is_supervisor and code > 0 and code != EXIT_LINK_LOST
        )

    def keep_alive(self, now_s: float) -> None:
        """Start the node again if it died and `restarts` allows it.

        After a lost link the node always starts again, after a pause. With a wrong configuration,
        or after the run's end, it never does.
        """
        if not self.died() or self._is_final():
            return
        if self.exit_code != EXIT_LINK_LOST:
            if self.restarts.take(now_s):
                self.start()
        elif self.starts_at_s is None:
            self.starts_at_s = now_s + self.pauses.next_s(now_s)
        elif now_s >= self.starts_at_s:
            self.start()

    def retry(self, now_s: float) -> None:
        """Start a node that was given up again, after a pause."""
        if self.starts_at_s is None:
            self.starts_at_s = now_s + RETRY_S
            log.error("%s; it starts again in %.0f s", self.end_text(), RETRY_S)
        elif now_s >= self.starts_at_s:
            self.start()

    def end_text(self) -> str:
        """Say how it ended, and quote its log."""
        return f"{self.name} ended with code {self.exit_code}.\n{self.log_tail()}"


class Launcher:
    """A set of node processes. Leaving the context ends them all, last started first.

    A node that was given up is not missed while another one of its group lives. It starts again
    every `RETRY_S`.
    """

    def __init__(self, *, measures_memory: bool = False) -> None:
        self.nodes: dict[str, NodeProcess] = {}
        self._watching = threading.Event()
        self._restarting = threading.Lock()
        """Held while a node restarts: after the restart is counted, the node looks dead for good.
        """
        self._peak_bytes, self._measures_memory = 0, measures_memory
        self._thread = threading.Thread(target=self._watch, name="splice-launcher", daemon=True)

    def start(self, node: NodeProcess) -> NodeProcess:
        """Start a node and watch it."""
        self.nodes[node.name] = node
        node.start()
        return node

    def check(self, *, each: bool = False) -> None:
        """Raise if a node died and will not start again.

        Args:
            each: every node of a group is needed.

        Raises:
            NodeLost: names it and quotes the end of its log.
        """
        for node in self.nodes.values():
            with self._restarting:
                now_s = time.monotonic()
                is_missed = node.is_lost(now_s) and (each or not self._has_others(node, now_s))
            if is_missed:
                raise NodeLost(node.end_text())

    def given_up(self) -> dict[str, str]:
        """Return how the nodes ended that start again later, because others do their work."""
        with self._restarting:
            now_s = time.monotonic()
            return {
                node.name: f"ended with code {node.exit_code}"
                for node in self.nodes.values()
                if self._is_spare(node, now_s)
            }

    def renew(self) -> None:
        """Forget all crashes so far: the run has made progress since."""
        with self._restarting:
            for node in self.nodes.values():
                node.restarts.renew()

    def _has_others(self, node: NodeProcess, now_s: float) -> bool:
        """Whether another node of its group lives, or is about to."""
        return any(
            other is not node and other.group == node.group != "" and not other.is_lost(now_s)
            for other in self.nodes.values()
        )

    def _is_spare(self, node: NodeProcess, now_s: float) -> bool:
        """Whether the node was given up, not told to end, and is not missed."""
        is_given_up = node.is_lost(now_s) and node.exit_code != 0
        return is_given_up and self._has_others(node, now_s)

    @property
    def peak_bytes(self) -> int:
        """Peak memory of all nodes and this process, as a sum of proportional set sizes.

        It is sampled once a second with `measures_memory`, which takes a sixth of a core.
        """
        return self._peak_bytes

    def __enter__(self) -> Launcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._watching.set()
        self._thread.join(timeout=10)
        # Ctrl-C must not interrupt the clean-up.
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
                    now_s = time.monotonic()
                    try:
                        node.keep_alive(now_s)
                        if self._is_spare(node, now_s):
                            node.retry(now_s)
                    except OSError as error:  # out of memory or processes: watch the others
                        log.warning("cannot start %s again: %s", node.name, error)
                with contextlib.suppress(OSError):
                    node.rotate_log()
            if self._measures_memory:
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
