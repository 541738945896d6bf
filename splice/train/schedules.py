"""Learning-rate schedules by the names of transformers' `get_scheduler`.

Step n of N takes lr * factor(n). The formulas are those of transformers.optimization, with one
difference: there the first warm-up step has a learning rate of 0, and here the last one is whole.
"""

from __future__ import annotations

import math
from typing import Literal

ScheduleName = Literal["constant", "linear", "cosine", "inverse_sqrt"]


def factor(name: ScheduleName, step: int, *, steps: int, warmup: int, least: float) -> float:
    """Return the share of the learning rate that a step takes.

    Args:
        step: from 1 to `steps`.
        warmup: steps in which the rate rises evenly.
        least: share that linear and cosine fall to.
    """
    if step <= warmup:
        return step / warmup
    done = (step - 1 - warmup) / max(1, steps - warmup)
    if name == "linear":
        return least + (1 - least) * (1 - done)
    if name == "cosine":
        return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * done))
    if name == "inverse_sqrt":
        scale = warmup or 10_000  # transformers' timescale without a warm-up
        return 1 / math.sqrt((step - 1 + scale - warmup) / scale)
    return 1.0
