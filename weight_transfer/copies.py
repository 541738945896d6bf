"""Copies of strided parts of a byte buffer into tensors that stay where they are: all of a chunk's in a few launches.

Where the parts lie and where they go is worked out once; the buffer may be another one each time, so that a ring of two does. On CUDA a
Triton kernel walks over a table of all parts (`copy_kernels`); without Triton, and on the CPU, it is `torch._foreach_copy_`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Elements of a buffer and the view they are copied to: the element at j of `target` is the one at offset + sum_d j_d * strides[d]."""

    target: torch.Tensor
    offset_bytes: int
    """Of the first element."""
    strides: tuple[int, ...]
    """In elements of the target's dtype."""


class PreparedCopy:
    """Copies from a buffer to the targets of `parts`, again and again.

    Args:
        parts: their targets must lie on one device, and neither move nor be freed while this is in use.

    Raises:
        ValueError: a part does not lie at a multiple of its element size.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if part.offset_bytes % part.target.element_size():
                raise ValueError(f"a part of {part.target.dtype} would lie at byte {part.offset_bytes} of its buffer")
        self._parts = [p for p in parts if p.target.numel()]
        kernels = _kernels() if self._parts and self._parts[0].target.is_cuda else None
        self._launches = [] if kernels is None else kernels.prepare(self._parts)

    def launch(self, buffer_B: torch.Tensor) -> None:
        """Copy every part; queued on the current stream. `buffer_B` (uint8, on the targets' device) must live until that is through."""
        if self._launches:
            for launch in self._launches:
                launch(buffer_B)
            return
        by_dtype: dict[torch.dtype, list[Part]] = {}
        for part in self._parts:
            by_dtype.setdefault(part.target.dtype, []).append(part)
        for dtype, parts in by_dtype.items():
            flat = buffer_B[: buffer_B.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
            sources = [
                flat.as_strided(p.target.shape, p.strides, flat.storage_offset() + p.offset_bytes // dtype.itemsize)
                for p in parts
            ]
            torch._foreach_copy_([p.target for p in parts], sources)


@functools.cache
def _kernels() -> ModuleType | None:
    """The Triton kernel, or None where Triton is not installed."""
    try:
        import triton  # noqa: F401  - only to see whether it is there
    except ImportError:
        return None
    from weight_transfer import copy_kernels

    return copy_kernels
