"""What several losses are made of. Shapes and symbols: `losses.py`."""

from __future__ import annotations

import torch


def sequence_means(
    values_N: torch.Tensor, sequence_N: torch.Tensor, num_sequences: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sequence's mean, 0 without tokens, and its number of tokens: [S] each."""
    zeros_S = values_N.new_zeros(num_sequences)
    lengths_S = zeros_S.index_add(0, sequence_N, torch.ones_like(values_N))
    return zeros_S.index_add(0, sequence_N, values_N) / lengths_S.clamp(min=1), lengths_S


def clipped(
    ratio: torch.Tensor, advantage: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`r A`, and the clipped surrogate `min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`."""
    plain = ratio * advantage
    return plain, torch.minimum(plain, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
