"""Triton kernel of `wire_stand_in`. Imported only where Triton is installed.

Axes: B = bytes.
"""

# Triton takes annotations for globals:
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WORDS = 4096
"""Of 4 bytes, that a block copies at a time."""


@triton.jit
def _copy_kernel(from_ptr, to_ptr, words, blocks, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    for _ in range(tl.cdiv(words, BLOCK * blocks)):
        inside = at < words
        value = tl.load(from_ptr + at, mask=inside, other=0, eviction_policy="evict_first")
        tl.store(to_ptr + at, value, mask=inside, eviction_policy="evict_first")
        at += BLOCK * blocks


def copy(from_B: torch.Tensor, to_B: torch.Tensor, *, blocks: int) -> None:
    """Copy all whole words by this many thread blocks, on the current stream."""
    words = from_B.numel() // 4
    source = from_B[: 4 * words].view(torch.int32)
    target = to_B[: 4 * words].view(torch.int32)
    _copy_kernel[(blocks,)](source, target, words, blocks, BLOCK=_WORDS, num_warps=16)
