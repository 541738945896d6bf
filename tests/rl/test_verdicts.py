"""What a report says of a plot's numbers."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from splice import report
from splice.verdicts import NOTES, number, verdict


def series(of: Callable[[int], float], *, steps: int = 40) -> dict[int, float]:
    return {step: of(step) for step in range(1, steps + 1)}


def test_a_trend_is_told_from_noise() -> None:
    noise = random.Random(1)
    flat = series(lambda step: 0.5 + noise.gauss(0, 0.1))
    assert re.fullmatch(r"Steady: 0\.[45]\d* on average\.", verdict("Reward", flat))
    rising = series(lambda step: step / 50 + noise.gauss(0, 0.1))
    assert re.fullmatch(r"Rises from 0\.\d+ to 0\.[67]\d*\.", verdict("Reward", rising))
    assert verdict("Loss", series(lambda step: 2.0)) == "Steady: 2 on average."
    assert verdict("Reward", {1: 0.0, 2: 0.25}) == "0.25 at last; a trend needs 6 steps."


@pytest.mark.parametrize(
    ("title", "of", "said"),
    [
        ("Entropy (nats)", lambda step: 2 / step, "answers become alike"),
        ("Answers cut off (share)", lambda step: 0.5, "raise sampling.max_tokens"),
        ("Groups whose rewards are all equal (share)", lambda step: 0.9, "loop.dynamic_sampling"),
        ("Clipped tokens (share)", lambda step: step / 40, "lower optim.lr"),
        ("Update in the served weights (share)", lambda step: 0.2, "lose a part"),
        ("Trainer (tokens/s)", lambda step: 20_000 - 400 * step, "has become slower"),
        ("KL (nats)", lambda step: step / 10, "far from its reference"),
        ("Gradient norm", lambda step: 90.0 if step == 9 else 1.0, "one step had 90"),
    ],
)
def test_what_it_means(title: str, of: Callable[[int], float], said: str) -> None:
    assert said in verdict(title, series(of))
    assert said not in verdict(title, series(lambda step: 0.001 if "share" in title else 1.0)) or (
        title == "Update in the served weights (share)"
    )


def test_every_note_is_of_a_plot() -> None:
    assert set(NOTES) <= set(report.PLOTS)


def test_numbers_as_readers_write_them() -> None:
    assert [number(v) for v in (15440.2, 0.01234, -3, 0.0)] == ["15,440", "0.0123", "-3", "0"]


def test_axes() -> None:
    """Zero is shown where it is near, and a line that hardly changes is flat."""
    plots = report.Plots()
    _, axis = plots.figure(width=2, height=2)
    axis.plot([1, 2], [0.2, 0.9])
    report._set_limits(axis, [0.2, 0.9])
    assert axis.get_ylim()[0] == 0
    _, axis = plots.figure(width=2, height=2)
    axis.plot([1, 2], [0.5, 0.5001])
    report._set_limits(axis, [0.5, 0.5001])
    low, high = axis.get_ylim()
    assert low < 0.46 and high > 0.54


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_number_that_is_none_says_so(odd):
    assert verdict("", {n: odd if n == 3 else 1.0 for n in range(10)}) == (
        "Steady: 1 on average; 1 of 10 are not finite."
    )
    assert verdict("", {1: odd}) == "Not finite."
