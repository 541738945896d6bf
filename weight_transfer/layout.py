"""The layout of a chunk: tensors end to end, row-major, without padding.

Pure functions and views. Axes: B = bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from orchestrator.protocol.messages import DTYPE_BYTES, Dtype, Manifest, TensorSpec

VECTOR_BYTES = 16
"""Bytes of one read or write of a kernel, where addresses allow it."""
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}


def torch_dtype(name: Dtype) -> torch.dtype:
    """The torch dtype of a manifest's dtype name."""
    return _DTYPES[name]


def in_vectors(units: Sequence[Sequence[int]], manifest: Manifest) -> tuple[int, ...]:
    """A chunk's tensors in an order in which each is aligned, and most to VECTOR_BYTES.

    Those of whole vectors come first. An FP8 scale of 4 bytes would shift all that follow it.

    Args:
        units: indices; those of a unit that have one dtype follow each other.
    """
    specs = manifest.tensors

    def place(unit: Sequence[int], index: int) -> tuple[bool, int]:
        dtype = specs[index].dtype
        alike = (specs[i].nbytes for i in unit if specs[i].dtype == dtype)
        return any(n % VECTOR_BYTES for n in alike), -DTYPE_BYTES[dtype]

    placed = [(place(unit, index), index) for unit in units for index in unit]
    return tuple(index for _, index in sorted(placed, key=lambda pair: pair[0]))


def chunk_offsets(specs: Iterable[TensorSpec]) -> list[int]:
    """Offset in bytes of each tensor of a chunk."""
    offsets, at = [], 0
    for spec in specs:
        offsets.append(at)
        at += spec.nbytes
    return offsets


def views_of(buffer_B: torch.Tensor, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """The tensors of a chunk, each as `view_of` returns it."""
    return [view_of(buffer_B, s, at) for s, at in zip(specs, chunk_offsets(specs), strict=True)]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in row-major order, as flat uint8; a view if it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def view_of(buffer_B: torch.Tensor, spec: TensorSpec, offset: int) -> torch.Tensor:
    """The tensor at `offset` of a chunk: a view, or a copy if the offset is misaligned."""
    flat_B = buffer_B[offset : offset + spec.nbytes]
    if (buffer_B.storage_offset() + offset) % DTYPE_BYTES[spec.dtype]:
        flat_B = flat_B.clone()
    return flat_B.view(torch_dtype(spec.dtype)).view(spec.shape)
