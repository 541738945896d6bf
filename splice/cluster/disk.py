"""Tells when a run's disk will be full, from how its free bytes went down."""

from __future__ import annotations

import shutil
from collections import deque
from pathlib import Path

LOOK_EVERY_S = 60.0
WINDOW_S, LEAST_S = 6 * 3600.0, 600.0
"""Length of the time that counts, and the shortest that says anything."""
WARN_S = 24 * 3600.0
"""`splice status` warns of a disk that will be full earlier."""


class DiskForecast:
    """Free bytes of a folder's disk over the last hours.

    Args:
        folder: on the disk.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: deque[tuple[float, int]] = deque()

    def look(self, now_s: float) -> bool:
        """Note the free bytes if it is time; returns whether it was."""
        if self._seen and now_s - self._seen[-1][0] < LOOK_EVERY_S:
            return False
        self.note(now_s, shutil.disk_usage(self._folder).free)
        return True

    def note(self, now_s: float, free_bytes: int) -> None:
        """Note how many bytes were free."""
        self._seen.append((now_s, free_bytes))
        while now_s - self._seen[0][0] > WINDOW_S:
            self._seen.popleft()

    def found(self) -> dict[str, float]:
        """`free_bytes` and, if they go down, `full_in_s`, the seconds until none are left."""
        if not self._seen:
            return {}
        (began_s, before), (now_s, free) = self._seen[0], self._seen[-1]
        found = {"free_bytes": float(free)}
        if now_s - began_s >= LEAST_S and before > free:
            found["full_in_s"] = free * (now_s - began_s) / (before - free)
        return found


def warning(found: dict[str, float]) -> str | None:
    """Return what to say of `DiskForecast.found`, if the disk will be full within a day."""
    left_s = found.get("full_in_s")
    if left_s is None or left_s > WARN_S:
        return None
    return (
        f"the disk will be full in {left_s / 3600:.1f} hours "
        f"({found['free_bytes'] / 2**30:.1f} GiB are free): free some, or keep fewer versions and "
        "samples (orchestrator.keep_versions, loop.keep_samples)"
    )
