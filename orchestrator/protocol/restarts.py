"""When an ended process is started again.

| it ended with | which means | its launcher |
| --- | --- | --- |
| 0 | it was told to end | leaves it |
| `EXIT_LINK_LOST` | it lost the orchestrator, or its other ranks | starts it again after a pause (`BackOff`), for ever |
| anything else | it crashed | starts it again, at most `RestartBudget.most` times within an hour |

A run of weeks must not end by crashes that lie days apart, and a process that cannot live must not be started for ever.
"""

from __future__ import annotations

from collections import deque

EXIT_LINK_LOST = 75
"""EX_TEMPFAIL of sysexits.h. Exit code of a process that nobody told to end: it lost its connection and can be started again."""
RESTART_WINDOW_S = 3600.0
LONGEST_PAUSE_S = 30.0


class RestartBudget:
    """Counts starts after crashes; times on one monotonic clock.

    Args:
        most: starts allowed within any `within_s` seconds.
    """

    def __init__(self, most: int, *, within_s: float = RESTART_WINDOW_S) -> None:
        self.most = most
        self._within_s = within_s
        self._taken_s: deque[float] = deque()

    def used(self, now_s: float) -> int:
        """Starts within the window that ends now."""
        while self._taken_s and now_s - self._taken_s[0] > self._within_s:
            self._taken_s.popleft()
        return len(self._taken_s)

    def has_left(self, now_s: float) -> bool:
        """Whether one more would be allowed."""
        return self.used(now_s) < self.most

    def take(self, now_s: float) -> bool:
        """Count one more; False, and nothing counted, if it is not allowed."""
        if not self.has_left(now_s):
            return False
        self._taken_s.append(now_s)
        return True


class BackOff:
    """Pauses before starts after a lost link: 1 s, twice as long for each further start within ten minutes, at most `LONGEST_PAUSE_S`."""

    def __init__(self) -> None:
        self._starts = RestartBudget(1 << 30, within_s=600.0)

    def next_s(self, now_s: float) -> float:
        """Pause before the next start, in seconds; counts that start."""
        before = self._starts.used(now_s)
        self._starts.take(now_s)
        return min(2.0 ** min(before, 10), LONGEST_PAUSE_S)
