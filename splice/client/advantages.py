"""Advantages from rewards: how much better an answer is than others. No value model.

For `gae` the batch brings rewards, and the trainer's value head makes the advantages:
`trainer_node/training/gae.py`.

Symbols: r = an answer's reward, G = number of answers in its group.

| name | advantage | paper |
| --- | --- | --- |
| grpo | (r - mean of the group) / (std of the group + 1e-6) | arXiv:2402.03300, 4.1.2 |
| dr_grpo | r - mean of the group | arXiv:2503.20783, 3.2 |
| rloo | r - mean of the others = G / (G - 1) (r - mean of the group) | arXiv:2402.14740, 3.3 |
| reinforce_pp | (r - mean of the batch) / (std of the batch + 1e-6) | arXiv:2501.03262 |
| reinforce_pp_baseline | a = r - mean of the group, then a / (std of a + 1e-6) | arXiv:2501.03262 |

REINFORCE++ takes the KL from the reward: `LossSpec.kl` with `in_reward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Literal

AdvantageName = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae"]
GAE: AdvantageName = "gae"
WITHOUT_GROUP: tuple[AdvantageName, ...] = ("reinforce_pp", GAE)
"""Those that need no group: a single answer to a prompt has an advantage."""
_TINY = 1e-6


def group_advantages(rewards: Sequence[float], *, divides_by_std: bool = True) -> list[float]:
    """Group-relative advantages: `grpo`, or without the division `dr_grpo`."""
    mean = fmean(rewards)
    scale = pstdev(rewards) + _TINY if divides_by_std else 1.0
    return [(r - mean) / scale for r in rewards]


def advantages_of(
    groups: Sequence[Sequence[float]], name: AdvantageName = "grpo"
) -> list[list[float]]:
    """Return each answer's advantage, from the rewards of all groups of a batch."""
    if name == "grpo":
        return [group_advantages(group) for group in groups]
    if name == "reinforce_pp":
        every = [reward for group in groups for reward in group]
        mean, scale = fmean(every), pstdev(every) + _TINY
        return [[(reward - mean) / scale for reward in group] for group in groups]
    centred = [group_advantages(group, divides_by_std=False) for group in groups]
    if name == "rloo":
        return [[a * len(own) / max(1, len(own) - 1) for a in own] for own in centred]
    if name == "reinforce_pp_baseline":
        scale = pstdev([a for own in centred for a in own]) + _TINY
        return [[a / scale for a in own] for own in centred]
    return centred
