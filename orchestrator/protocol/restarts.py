"""How often a process is started again before it is given up: so many times within an hour.

A run of weeks must not end by crashes that lie days apart, and a process that cannot live must not be started for ever.
"""

from __future__ import annotations

from collections import deque

RESTART_WINDOW_S = 3600.0


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
