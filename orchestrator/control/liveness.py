"""Who is alive: pure functions of the clock, so that tests need neither sockets nor sleeps."""

from __future__ import annotations

from collections.abc import Mapping

HEARTBEAT_S = 1.0
LOST_AFTER_S = 15.0


def lost_peers(
    *, last_seen_s: Mapping[str, float], now_s: float, lost_after_s: float = LOST_AFTER_S
) -> tuple[str, ...]:
    """Return peers silent for more than `lost_after_s`, longest first. Times are monotonic."""
    silent = [
        (now_s - seen, peer) for peer, seen in last_seen_s.items() if now_s - seen > lost_after_s
    ]
    return tuple(peer for _, peer in sorted(silent, reverse=True))


def stalled(
    *,
    started_s: float,
    last_progress_s: float,
    now_s: float,
    deadline_s: float,
    stall_after_s: float,
) -> str | None:
    """Return why to give up an open request, or None.

    A rank's socket thread answers heartbeats while its GPUs hang. Each request therefore has a
    deadline and a progress watchdog.
    """
    if now_s - started_s > deadline_s:
        return f"it ran for {now_s - started_s:.0f} s; its deadline is {deadline_s:.0f} s"
    if now_s - last_progress_s > stall_after_s:
        return f"no progress for {now_s - last_progress_s:.0f} s (limit {stall_after_s:.0f} s)"
    return None
