"""Ends a process when its parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: int = signal.SIGKILL, *, parent: int | None = None) -> None:
    """Have the kernel send `number` to this process when the thread that started it ends.

    If it has ended already, the signal comes at once. On systems other than Linux this does
    nothing.

    Args:
        parent: the parent's process id, if known from before the fork; None: the present parent's.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
