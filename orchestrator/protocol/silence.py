"""How long the other end of a link has been silent, without time when this process was
suspended."""

from __future__ import annotations

import time

SUSPENDED_S = 10.0
"""Gap between two polls after which this process counts as suspended. Polls are a heartbeat apart.
"""


class Silence:
    """Measures it. The link's thread calls `heard` and `look`, another thread `seconds`.

    Attributes:
        last_frame: when any message came, also a refusal, on the monotonic clock.
    """

    def __init__(self) -> None:
        self.last_frame = self._last_heard = self._last_looked = time.monotonic()
        self._waited_s, self._looked_before = 0.0, 0.0

    def heard(self) -> None:
        """Note that the last frame came from an orchestrator that accepted this peer."""
        self._last_heard = self.last_frame

    def look(self) -> None:
        """Note that the thread has polled."""
        now_s = time.monotonic()
        if now_s - self._last_looked > SUSPENDED_S:
            self._last_heard = min(now_s, self._last_heard + now_s - self._last_looked)
            self.last_frame = min(now_s, self.last_frame + now_s - self._last_looked)
        self._last_looked = now_s

    def seconds(self, *, waited_s: float) -> float:
        """Return the length of the silence; `waited_s`: how long the caller has just waited.

        A stopped thread counts as silence; a suspended process does not.
        """
        if self._last_looked != self._looked_before:
            self._looked_before, self._waited_s = self._last_looked, 0.0
        self._waited_s += waited_s
        return self._last_looked - self._last_heard + self._waited_s
