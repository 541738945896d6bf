"""Decides when an ended process starts again.

| it ended with | which means | its launcher |
| --- | --- | --- |
| 0 | it was told to end | leaves it |
| `EXIT_CONFIG` | its configuration is wrong | leaves it: a restart changes nothing |
| `EXIT_LINK_LOST` | it lost the orchestrator or other ranks | starts it again after a pause |
| `EXIT_AFRESH` | a failed request, which it has answered, spoilt it | starts it again at once |
| anything else | it crashed | starts it again, at most `RestartBudget.most` times within an hour |

Crashes days apart must not end a run of weeks. A process that cannot start must not restart
forever. Crashes in one request, which is sent again, count as one. Crashes in a job that fails by
itself (`trainer_killed`) do not count. Crashes before the run's last progress do not count.
"""

from __future__ import annotations

from collections import deque

EXIT_CONFIG = 2
"""Exit code of a process whose configuration is wrong, or that the orchestrator has rejected."""
EXIT_LINK_LOST = 75
"""Exit code of a process that lost its connection and can start again: EX_TEMPFAIL of sysexits.h.
"""
EXIT_AFRESH = 76
"""Exit code of a trainer that ends itself after a failed request, because memory or state would be
wrong from then on. No crash: each start follows a request that was answered."""
START_ID = "SPLICE_START_ID"
"""Environment variable of a rank: the launcher's id of its start."""
JOB_FAILS = "a job that fails by itself"
"""Cause of crashes that the orchestrator counts: their job is not sent again for ever."""
RESTART_WINDOW_S = 3600.0
LONGEST_PAUSE_S = 30.0


class RestartBudget:
    """Counts starts after crashes; times on one monotonic clock.

    Args:
        most: starts allowed within any `within_s` seconds. Those with one cause count once, and
            those with the cause `JOB_FAILS` not at all.
    """

    def __init__(self, most: int, *, within_s: float = RESTART_WINDOW_S) -> None:
        self.most = most
        self._within_s = within_s
        self._taken: deque[tuple[float, str]] = deque()
        """Time and cause of each start; the cause is empty until it is known."""

    def used(self, now_s: float) -> int:
        """Return the number of starts within the window that ends now."""
        while self._taken and now_s - self._taken[0][0] > self._within_s:
            self._taken.popleft()
        causes = [cause for _, cause in self._taken]
        return causes.count("") + len({*causes} - {"", JOB_FAILS})

    def has_left(self, now_s: float, cause: str = "") -> bool:
        """Whether one more start is allowed, after a crash with this cause."""
        is_free = self.used(now_s) < self.most or cause == JOB_FAILS
        return is_free or any(cause == known for _, known in self._taken if known)

    def take(self, now_s: float, cause: str = "") -> bool:
        """Count one more start. Returns False, without counting, if it is not allowed."""
        if not self.has_left(now_s, cause):
            return False
        self._taken.append((now_s, cause))
        return True

    def explain(self, cause: str, *, since_s: float) -> bool:
        """Set the cause of the last start, if that start came after `since_s` and has no cause yet.
        Returns whether the cause was set."""
        if not self._taken or self._taken[-1][1] or self._taken[-1][0] < since_s:
            return False
        self._taken[-1] = (self._taken[-1][0], cause)
        return True

    def renew(self) -> None:
        """Forget the starts so far: there was progress since."""
        self._taken.clear()


class BackOff:
    """Pauses before starts after a lost link.

    The first is 1 s. Each further start within ten minutes doubles it, up to `LONGEST_PAUSE_S`.
    """

    def __init__(self) -> None:
        self._starts = RestartBudget(1 << 30, within_s=600.0)

    def next_s(self, now_s: float) -> float:
        """Return the pause before the next start, in seconds, and count that start."""
        before = self._starts.used(now_s)
        self._starts.take(now_s)
        return min(2.0 ** min(before, 10), LONGEST_PAUSE_S)
