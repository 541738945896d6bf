"""Work on a separate thread that can neither hold up nor end the loop.

A disk that is full, a service that is away or an API that hangs costs what was to be written there.
What was lost is counted, logged and part of `splice status`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

log = logging.getLogger("splice.rl")
MAX_WAITING = 10_000
"""Most calls that wait for the thread. Further ones are lost."""
SAY_EVERY_S = 60.0
"""Least time between two log lines about failures."""


class Background:
    """Runs calls in order.

    Args:
        name: what the calls write, for logs and status.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING)
        self._lock = threading.Lock()
        self._num_lost, self._why, self._said_s = 0, "", -SAY_EVERY_S
        self._thread = threading.Thread(target=self._work, name=f"splice-{name}", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` after those before it; returns at once."""
        try:
            self._calls.put_nowait(function)
        except queue.Full:
            self._lose(f"{MAX_WAITING} writes wait already")

    @property
    def problem(self) -> str:
        """How many calls were lost and why the last one was; empty if none was."""
        with self._lock:
            if not self._num_lost:
                return ""
            return f"{self.name}: {self._num_lost} writes lost, the last one because of {self._why}"

    def close(self, *, timeout_s: float) -> None:
        """Run what waits, for at most this long, and end the thread."""
        deadline_s = time.monotonic() + timeout_s
        try:
            self._calls.put(None, timeout=timeout_s)
        except queue.Full:
            pass
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            log.warning(
                "%s: %d writes are lost, because they took more than %.0f s at the end",
                self.name,
                self._calls.qsize(),
                timeout_s,
            )

    def _work(self) -> None:
        while (function := self._calls.get()) is not None:
            try:
                function()
            except Exception as error:  # noqa: BLE001  - loggers of others may raise anything
                self._lose(f"{type(error).__name__}: {error}"[:500])

    def _lose(self, why: str) -> None:
        with self._lock:
            self._num_lost, self._why = self._num_lost + 1, why
            is_due = time.monotonic() - self._said_s >= SAY_EVERY_S
            self._said_s = time.monotonic() if is_due else self._said_s
        if is_due:
            log.warning("%s; the loop continues without them", self.problem)
