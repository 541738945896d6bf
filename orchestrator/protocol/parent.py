"""Processes that end with the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: int = signal.SIGKILL, *, parent: int | None = None) -> None:
    """Have the kernel send `number` to this process when the thread that started it ends; at once if it has. Linux only, elsewhere nothing happens.

    Args:
        parent: process id of the parent, where the caller knows it from before the fork; None: whoever is the parent now.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
