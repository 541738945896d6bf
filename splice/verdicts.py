"""One sentence on each plot of a report: what the numbers do, and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import fmean, pstdev

FEWEST = 6
"""Steps from which a trend is told."""
SURE = 3.0
"""Standard errors by which the last steps must differ from the first ones."""
_Note = Callable[[float, float], str]
"""What follows from the first and the last steps' means; empty: nothing."""


def _high(limit: float, text: str) -> _Note:
    return lambda first, last: text if last > limit else ""


def _shrunk(to: float, text: str) -> _Note:
    return lambda first, last: text if last < to * first else ""


NOTES: dict[str, _Note] = {
    "Entropy (nats)": _shrunk(0.3, "answers become alike, and exploration ends"),
    "KL (nats)": _high(1.0, "the policy is far from its reference"),
    "Answers cut off (share)": _high(0.2, "raise sampling.max_tokens, or see loop.overlong"),
    "Groups whose rewards are all equal (share)": _high(
        0.5, "they teach nothing: other prompts, or loop.dynamic_sampling"
    ),
    "Clipped tokens (share)": _high(0.3, "the steps are large: lower optim.lr or loop.epochs"),
    "Update in the served weights (share)": lambda first, last: (
        "the served weights lose a part of each update" if last < 0.5 else ""
    ),
    "Trainer (tokens/s)": _shrunk(0.7, "the trainer has become slower"),
}
"""Title of a plot -> what its numbers mean."""


def verdict(title: str, values: Mapping[int, float]) -> str:
    """Return the sentence on a plot's first line.

    Args:
        values: step -> number.
    """
    numbers = [value for _, value in sorted(values.items()) if math.isfinite(value)]
    if not numbers:
        return "Not finite."
    if len(numbers) < FEWEST:
        return f"{number(numbers[-1])} at last; a trend needs {FEWEST} steps."
    size = max(2, len(numbers) // 5)
    first, last = fmean(numbers[:size]), fmean(numbers[-size:])
    # Neighbours differ by noise; a trend hardly counts in their differences.
    noise = pstdev([b - a for a, b in pairwise(numbers)]) / 2**0.5
    if abs(last - first) <= SURE * noise * (2 / size) ** 0.5 or first == last:
        found = f"Steady: {number(fmean(numbers))} on average"
    else:
        found = f"{'Rises' if last > first else 'Falls'} from {number(first)} to {number(last)}"
    note = NOTES[title](first, last) if title in NOTES else ""
    median = sorted(numbers)[len(numbers) // 2]
    if title == "Gradient norm" and max(numbers) > 10 * median:
        note = f"one step had {number(max(numbers))}"
    if len(numbers) < len(values):
        note = f"{len(values) - len(numbers)} of {len(values)} are not finite"
    return f"{found}; {note}." if note else f"{found}."


def number(value: float) -> str:
    """Return it as a reader wants it: 15,440, 0.0123."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
