"""How far two computations of a tiny family's log-probs and gradients may differ."""

from __future__ import annotations

import torch

from tests.numerics import decoder_roundings
from tests.trainer_node.families import FAMILIES, LENGTHS, VOCAB

SMALL = 1e-3
"""Part of the largest element of all gradients below which a tensor's own is rounding: the gradient
of a key's bias is 0.
"""


def roundings(family: str, dtype: torch.dtype = torch.float32) -> int:
    """Of a log-prob: the tiny decoder's, and those of gated delta layers."""
    settings = FAMILIES[family].settings
    count = decoder_roundings(
        dtype,
        layers=2,
        hidden=64,
        inner=128,
        head_dim=32,
        attention=128,
        length=max(LENGTHS),
        vocab=VOCAB,
    )
    if "linear_attention" in settings.get("layer_types", ()):
        # Each token's row is solved from those of all tokens before it: as many sums as tokens. In
        # bfloat16 each of those tokens brings a rounded key, value, decay and beta.
        count += 4 * max(LENGTHS) if dtype is torch.bfloat16 else max(LENGTHS) ** 2
    return count
