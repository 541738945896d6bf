"""The CPU's attention where a sequence brings more keys than queries."""

from __future__ import annotations

import types
from itertools import product

import pytest
import torch


@pytest.mark.parametrize(("window", "has_sink"), list(product((None, 3), (False, True))))
def test_queries_are_the_last_of_their_keys(window: int | None, has_sink: bool) -> None:
    """Four of nine tokens, and then three of three, attend as among all of theirs."""
    from trainer_node.backends import cpu_shims

    cpu_shims.apply()
    from trainer_node.backends.cpu_attention import attend

    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(12, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)
    )
    sink_A = torch.randn(4, generator=generator, dtype=torch.float64) if has_sink else None
    rules = {
        "scale": 0.3,
        "window": window,
        "sink_A": sink_A,
        "context_group": types.SimpleNamespace(size=lambda: 1, rank=lambda: 0),
    }
    whole = attend(query, key, value, [0, 9, 12], **rules)
    last = attend(query[5:], key, value, [0, 4, 7], key_bounds=[0, 9, 12], **rules)
    assert torch.allclose(last, whole[5:], rtol=0, atol=1e-14)
