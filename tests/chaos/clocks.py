"""A wall clock and a monotonic clock that can be stepped."""

from __future__ import annotations

import time
from collections.abc import Callable


def stepped_clocks() -> Callable[[list[str]], None]:
    """Put them in place of this process's. Returns what steps them: `WALL MONOTONIC`, seconds to
    add. A monotonic clock only ever goes forward."""
    steps = {"wall": 0.0, "monotonic": 0.0}
    wall, monotonic = time.time, time.monotonic
    time.time = lambda: wall() + steps["wall"]
    time.monotonic = lambda: monotonic() + steps["monotonic"]

    def step(words: list[str]) -> None:
        steps["wall"] += float(words[0])
        steps["monotonic"] += max(0.0, float(words[1]))

    return step
