"""How tensors lie in a bucket: end to end in manifest order, row-major, without padding. Pure functions and views. B = bytes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from orchestrator.protocol.messages import DTYPE_BYTES, Dtype, TensorSpec

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}


def torch_dtype(name: Dtype) -> torch.dtype:
    """The torch dtype of a manifest's dtype name."""
    return _DTYPES[name]


def bucket_layout(specs: Iterable[TensorSpec]) -> list[int]:
    """Offset in bytes of each tensor of a bucket."""
    offsets, at = [], 0
    for spec in specs:
        offsets.append(at)
        at += spec.nbytes
    return offsets


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements, row-major, as a flat uint8 tensor; a view where it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def view_of(buffer_B: torch.Tensor, spec: TensorSpec, offset: int) -> torch.Tensor:
    """The tensor at `offset` of a bucket: a view, or a copy where the offset is not aligned to the element size."""
    flat_B = buffer_B[offset : offset + spec.nbytes]
    if (buffer_B.storage_offset() + offset) % DTYPE_BYTES[spec.dtype]:
        flat_B = flat_B.clone()
    return flat_B.view(torch_dtype(spec.dtype)).view(spec.shape)
