"""Named parts of a reward: what a reward function may return in place of one number.

    def reward(row, completion): return {"correct": 1.0, "short": 0.2}     # the reward is 1.2

`rollout/rewards/NAME` is the mean of each part, and a sample's line has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class PartedReward(float):
    """A reward that remembers its parts. To everything else it is its number."""

    parts: dict[str, float]

    def __new__(cls, value: float, parts: Mapping[str, float]) -> PartedReward:
        """Keep the parts next to the number, which weights may make another than their sum."""
        made = super().__new__(cls, value)
        made.parts = dict(parts)
        return made

    def __getnewargs__(self) -> tuple[float, dict[str, float]]:  # type: ignore[override]
        return float(self), self.parts


def as_reward(given: Any) -> float:
    """Return a reward function's result as a number. A mapping becomes its sum, which keeps the
    parts.

    Raises:
        Exception: it, or one of its parts, is not a number, or there are no parts.
    """
    if isinstance(given, PartedReward):
        return given
    if isinstance(given, Mapping):
        if not given:
            raise TypeError(f"{given!r} has no part, so it is no number")
        parts = {str(name): _number(str(name), value) for name, value in given.items()}
        return PartedReward(sum(parts.values()), parts)
    return float(given)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"the reward's part {name!r} is {value!r:.100}, which is no number"
        ) from None


def parts_of(reward: float) -> dict[str, float]:
    """Return the parts of a reward; none if it is one number."""
    return reward.parts if isinstance(reward, PartedReward) else {}
