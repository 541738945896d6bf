"""Triton kernels of `digest`: the same numbers as its torch path, at the memory's speed. Imported only where Triton is installed.

Each program mixes one block of elements, sums it and adds the sum to the tensor's digest with one 64-bit atomic; integer addition
commutes, so the result does not depend on the order. The kernels carry no annotations, which Triton would take for globals.
Axes: R = rows of a region, C = its columns; N = tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from weight_transfer import digest

GOLDEN: Any = tl.constexpr(digest.GOLDEN)
SPREAD: Any = tl.constexpr(digest.SPREAD)
MUL_1: Any = tl.constexpr(digest.MUL_1)
MUL_2: Any = tl.constexpr(digest.MUL_2)
BLOCK = 4096
PREPARED_BLOCK = 8192
UNSIGNED = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}


@triton.jit
def _mix(bits, index):
    x = (bits * SPREAD) ^ ((index.to(tl.uint64, bitcast=True) + 1) * GOLDEN)
    x = (x ^ (x >> 30)) * MUL_1
    x = (x ^ (x >> 27)) * MUL_2
    return (x ^ (x >> 31)).to(tl.int64, bitcast=True)


@triton.jit
def _region_kernel(
    bits_ptr,
    out_ptr,
    rows,
    columns,
    row_memory,
    column_memory,
    row_index,
    column_index,
    first_index,
    tiles_across,
    DTYPE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    r = (tile // tiles_across) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)[:, None]
    c = (tile % tiles_across) * BLOCK_C + tl.arange(0, BLOCK_C).to(tl.int64)[None, :]
    inside = (r < rows) & (c < columns)
    elements = bits_ptr.to(tl.pointer_type(DTYPE)) + r * row_memory + c * column_memory
    bits = tl.load(elements, mask=inside, other=0).to(tl.uint64)
    mixed = _mix(bits, first_index + r * row_index + c * column_index)
    mixed = tl.where(inside, mixed, tl.zeros_like(mixed))
    tl.atomic_add(out_ptr, tl.sum(tl.sum(mixed, axis=1), axis=0), sem="relaxed")


@triton.jit
def _many_kernel(table_ptr, block_table_ptr, out_ptr, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(block_table_ptr + 2 * program)
    block = tl.load(block_table_ptr + 2 * program + 1)
    address = tl.load(table_ptr + 3 * row)
    numel = tl.load(table_ptr + 3 * row + 1)
    out = tl.load(table_ptr + 3 * row + 2)
    i = block * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    inside = i < numel
    bits = tl.load(address.to(tl.pointer_type(DTYPE)) + i, mask=inside, other=0).to(tl.uint64)
    mixed = _mix(bits, i)
    mixed = tl.where(inside, mixed, tl.zeros_like(mixed))
    tl.atomic_add(out_ptr + out, tl.sum(mixed, axis=0), sem="relaxed")


@triton.jit
def _prepared_kernel(
    table_ptr, block_table_ptr, out_ptr, ELEMENT_BYTES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(block_table_ptr + 2 * program).to(tl.int64)
    block = tl.load(block_table_ptr + 2 * program + 1).to(tl.int64)
    address = tl.load(table_ptr + 3 * row)
    numel = tl.load(table_ptr + 3 * row + 1)
    out = tl.load(table_ptr + 3 * row + 2)
    start = block * BLOCK
    i = start + tl.arange(0, BLOCK).to(tl.int64)
    if ELEMENT_BYTES == 2:  # noqa: SIM108 - Triton: one branch is compiled, the types differ
        pointer = address.to(tl.pointer_type(tl.uint16))
    else:
        pointer = address.to(tl.pointer_type(tl.uint32))
    if ALIGNED:
        # 16-byte loads: the address and the length are multiples of 16 bytes.
        pointer = tl.multiple_of(pointer, 16)
        numel = tl.multiple_of(numel, 16)
    inside = i < numel
    bits = tl.load(pointer + i, mask=inside, other=0).to(tl.uint64)
    mixed = _mix(bits, i)
    mixed = tl.where(inside, mixed, tl.zeros_like(mixed))
    tl.atomic_add(out_ptr + out, tl.sum(mixed, axis=0), sem="relaxed")


def prepare(tensors: Sequence[torch.Tensor], rows: Sequence[int]) -> list[Callable[[torch.Tensor], None]]:
    """Launches that add each tensor's digest to its row of an output; tables are made and uploaded here, once."""
    kinds: dict[tuple[int, bool], list[list[int]]] = {}
    for tensor, row in zip(tensors, rows, strict=True):
        size = tensor.element_size()
        if size not in (2, 4):
            raise ValueError(f"prepared digests read elements of 2 or 4 bytes, got {tensor.dtype}")
        aligned = tensor.data_ptr() % 16 == 0 and tensor.numel() % 16 == 0
        if tensor.numel():
            kinds.setdefault((size, aligned), []).append([tensor.data_ptr(), tensor.numel(), row])
    return [_prepared_launch(table, size, aligned, tensors[0].device) for (size, aligned), table in kinds.items()]


def _prepared_launch(table: list[list[int]], size: int, aligned: bool, device: torch.device) -> Callable[[torch.Tensor], None]:
    table_R3 = torch.tensor(table, dtype=torch.int64)
    blocks_R = (table_R3[:, 1] + PREPARED_BLOCK - 1) // PREPARED_BLOCK
    rows_B = torch.repeat_interleave(torch.arange(len(blocks_R)), blocks_R)
    first_R = torch.cumsum(blocks_R, 0) - blocks_R
    block_table_B2 = torch.stack([rows_B, torch.arange(len(rows_B)) - first_R[rows_B]], dim=1).to(torch.int32)
    on_device = table_R3.to(device), block_table_B2.to(device)
    grid = (len(rows_B),)

    def launch(out_N: torch.Tensor) -> None:
        with torch.cuda.device_of(out_N):
            _prepared_kernel[grid](*on_device, out_N, ELEMENT_BYTES=size, ALIGNED=aligned, BLOCK=PREPARED_BLOCK, num_warps=8)

    return launch


def launch_region(*, bits_RC: torch.Tensor, first_index: int, index_strides: tuple[int, int], out: torch.Tensor) -> None:
    """Add the digest of an integer [R, C] region to out[0] (int64, zeroed by the caller); queued on the current stream."""
    rows, columns = bits_RC.shape
    block_c = min(BLOCK, triton.next_power_of_2(columns))
    block_r = BLOCK // block_c
    tiles_across = triton.cdiv(columns, block_c)
    with torch.cuda.device_of(bits_RC):
        _region_kernel[(triton.cdiv(rows, block_r) * tiles_across,)](
            bits_RC,
            out,
            rows,
            columns,
            *bits_RC.stride(),
            *index_strides,
            first_index,
            tiles_across,
            DTYPE=UNSIGNED[bits_RC.element_size()],
            BLOCK_R=block_r,
            BLOCK_C=block_c,
        )


def launch_many(*, table_R3: torch.Tensor, element_bytes: int, out_N: torch.Tensor) -> None:
    """Add the digest of each row's tensor to out_N; queued on the current stream.

    table_R3 (CPU, int64): address, number of elements and position in out_N of R tensors of one element size.
    """
    blocks_R = (table_R3[:, 1] + BLOCK - 1) // BLOCK
    rows_B = torch.repeat_interleave(torch.arange(len(blocks_R)), blocks_R)
    first_R = torch.cumsum(blocks_R, 0) - blocks_R
    block_table_B2 = torch.stack([rows_B, torch.arange(len(rows_B)) - first_R[rows_B]], dim=1)
    with torch.cuda.device_of(out_N):
        _many_kernel[(len(rows_B),)](
            _to_device(table_R3, out_N),
            _to_device(block_table_B2, out_N),
            out_N,
            DTYPE=UNSIGNED[element_bytes],
            BLOCK=BLOCK,
        )


def _to_device(table: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Copy without making the host wait for what the stream still has to do: from pinned memory."""
    return table.contiguous().pin_memory().to(like.device, non_blocking=True) if like.is_cuda else table.contiguous()
