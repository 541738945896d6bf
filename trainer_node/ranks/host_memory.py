"""How much of its host's memory a rank may take for copies of what is on its GPU."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil
import torch

SHARE = 0.5
"""Most of the host's free memory that the copies of all its ranks may take."""
CGROUP, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Where control groups have their limits, and where those of this process are named."""
_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Folder of a hierarchy, of version 2 and 1 -> its limit, its usage, and what can go of that."""


def room_bytes(*, pinned: bool = False) -> int:
    """Bytes of host memory that this rank's copies may take, if all ranks of the host copy at the
    same time; 0 if the free memory is unknown.

    Args:
        pinned: 0 also where none can be pinned, as on some virtual GPUs.
    """
    free = 0
    if pinned and not _pins():
        return 0
    with contextlib.suppress(OSError):
        free = min(psutil.virtual_memory().available, _below_limit())
    return int(SHARE * free / int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _pins() -> bool:
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError:
        return False
    return True


def _below_limit() -> float:
    """Bytes that this process's control groups may still take; infinite if none has a limit. A
    container sees its own group as the root, a batch job is in a group below it."""
    left = [float("inf")]
    for line in OWN_GROUPS.read_text().splitlines():
        _, controller, path = line.split(":", 2)
        if controller in _FILES:
            folder = CGROUP / controller
            for name in ("", *Path(path).parts[1:]):
                folder /= name
                left.append(_below_limit_of(folder, *_FILES[controller]))
    return min(left)


def _below_limit_of(folder: Path, limit: str, usage: str, idle: str) -> float:
    try:
        most = (folder / limit).read_text().strip()
        if most == "max":
            return float("inf")
        used = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return float("inf")
    return int(most) - used + int(stat[idle])
