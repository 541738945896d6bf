"""How much of its host's memory a rank may take for copies of what is on its GPU."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

SHARE = 0.5
"""Most of the host's free memory that the copies of all its ranks may take."""
CGROUP = Path("/sys/fs/cgroup")
"""Where a container sees the limits of its own control group (version 2)."""


def room_bytes() -> int:
    """Bytes of host memory that this rank's copies may take, if all ranks of the host copy at the
    same time; 0 if the free memory is unknown."""
    free = 0
    with contextlib.suppress(OSError):
        free = min(psutil.virtual_memory().available, _below_limit())
    return int(SHARE * free / int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _below_limit() -> float:
    """Bytes that the container may still take; infinite if it has no limit."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return float("inf")
        used = int((CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return float("inf")
    return int(limit) - used + int(stat["inactive_file"])
