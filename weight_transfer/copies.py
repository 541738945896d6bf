"""Copies strided parts of a byte buffer into fixed tensors: a whole chunk in a few launches.

Sources and targets are planned once. The buffer may change from launch to launch, so a ring of two
suffices. On CUDA a Triton kernel walks a table of all parts (`copy_kernels`). On the CPU, and
without Triton, `torch._foreach_copy_` does the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weight_transfer.launches import kernels
from weight_transfer.strides import Part


class PreparedCopy:
    """A reusable copy from a buffer to the targets of `parts`.

    Args:
        parts: all targets are on one device. They must neither move nor be freed while the copy is
            in use.

    Raises:
        ValueError: a part's offset is not a multiple of its element size.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if part.offset_bytes % part.target.element_size():
                raise ValueError(
                    f"a part of {part.target.dtype} would begin at byte {part.offset_bytes}, "
                    "which is not a multiple of its element size"
                )
        self._parts = [p for p in parts if p.target.numel()]
        made = kernels("copy_kernels") if self._parts and self._parts[0].target.is_cuda else None
        self._launches = [] if made is None else made.prepare(self._parts)

    def launch(self, buffer_B: torch.Tensor) -> None:
        """Queue the copy of every part on the current stream.

        `buffer_B` (uint8, on the targets' device) must live until the copy is done.
        """
        if self._launches:
            for launch in self._launches:
                launch(buffer_B)
            return
        for dtype, parts in self._by_dtype().items():
            flat = elements_of(buffer_B, dtype)
            sources = [p.source_in(flat) for p in parts]
            torch._foreach_copy_([p.target for p in parts], sources)

    def read(self, buffer_B: torch.Tensor) -> None:
        """Copy every target back to its part of the buffer, on the current stream."""
        for dtype, parts in self._by_dtype().items():
            flat = elements_of(buffer_B, dtype)
            torch._foreach_copy_([p.source_in(flat) for p in parts], [p.target for p in parts])

    def _by_dtype(self) -> dict[torch.dtype, list[Part]]:
        """The parts ordered by dtype, because only lists of one dtype are copied in few
        launches."""
        found: dict[torch.dtype, list[Part]] = {}
        for part in self._parts:
            found.setdefault(part.target.dtype, []).append(part)
        return found


def elements_of(buffer_B: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A buffer's bytes as elements; a remainder smaller than one is left out."""
    return buffer_B[: buffer_B.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
