"""The CPU's attention where a sequence brings more keys than queries; a separate process, because
Megatron needs its stand-ins first."""

from __future__ import annotations

import types
from itertools import product

import torch

from trainer_node.backends.cpu_attention import attend


def check(window: int | None, *, has_sink: bool) -> None:
    """Four of nine tokens, and then three of three, attend as among all of theirs."""
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


if __name__ == "__main__":
    for one_window, sink in product((None, 3), (False, True)):
        check(one_window, has_sink=sink)
