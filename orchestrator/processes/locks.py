"""Locks on files: each ends with the last process that has the file open."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable

LOCK_S, LOCK_POLL_S = 0.5, 0.02
"""Longest wait for another's look at a lock, and between two attempts, in seconds."""


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Take the lock. Returns False if another process has it (with `shared`: has it
    exclusively)."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def soon(take: Callable[[], bool]) -> bool:
    """Return whether `take` succeeds within `LOCK_S`: `splice status` has a lock for a moment."""
    deadline_s = time.monotonic() + LOCK_S
    while not take():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(LOCK_POLL_S)
    return True
