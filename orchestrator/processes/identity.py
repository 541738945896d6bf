"""Which process a process id means, whatever the clock says and whoever has the id later."""

from __future__ import annotations

from pathlib import Path

_PROC = Path("/proc")


def identity(pid: int) -> str | None:
    """Return the host's boot and the process's start in ticks since then, or None if it has ended.

    A time of day does not identify a process: the kernel's start times move with every step of the
    clock.
    """
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may have spaces
    state, start_ticks = fields[0], fields[19]
    return None if state in "ZX" else f"{boot} {start_ticks}"
