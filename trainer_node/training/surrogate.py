"""What several losses are made of. Shapes and symbols: `losses.py`."""

from __future__ import annotations

import torch


def clipped(
    ratio: torch.Tensor, advantage: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`r A`, and the clipped surrogate `min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`."""
    plain = ratio * advantage
    return plain, torch.minimum(plain, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
