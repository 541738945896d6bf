"""Triton kernels of `digest`: the numbers of its torch path, at memory speed.

Imported only where Triton is installed. Each program mixes and sums one block of elements. It adds
the sum to the tensor's digest with one 64-bit atomic. Integer addition commutes, so the order does
not matter. The kernels have no annotations, because Triton would take them for globals.
Axes: R = rows of a region, C = its columns; N = tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from weight_transfer import splitmix
from weight_transfer.launches import Launches
from weight_transfer.strides import Box, block_table, boxes_2d, tile_of

GOLDEN: Any = tl.constexpr(splitmix.GOLDEN)
SPREAD: Any = tl.constexpr(splitmix.SPREAD)
MUL_1: Any = tl.constexpr(splitmix.MUL_1)
MUL_2: Any = tl.constexpr(splitmix.MUL_2)
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
    table_ptr,
    block_table_ptr,
    out_ptr,
    ELEMENT_BYTES: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(block_table_ptr + 2 * program).to(tl.int64)
    block = tl.load(block_table_ptr + 2 * program + 1).to(tl.int64)
    address = tl.load(table_ptr + 4 * row)
    numel = tl.load(table_ptr + 4 * row + 1)
    out = tl.load(table_ptr + 4 * row + 2)
    first = tl.load(table_ptr + 4 * row + 3)
    start = block * BLOCK
    i = start + tl.arange(0, BLOCK).to(tl.int64)
    if ELEMENT_BYTES == 2:  # Triton compiles one branch; the types differ
        pointer = address.to(tl.pointer_type(tl.uint16))
    else:
        pointer = address.to(tl.pointer_type(tl.uint32))
    if ALIGNED:
        # 16-byte loads: the address and the length are multiples of 16 bytes.
        pointer = tl.multiple_of(pointer, 16)
        numel = tl.multiple_of(numel, 16)
    inside = i < numel
    bits = tl.load(pointer + i, mask=inside, other=0).to(tl.uint64)
    mixed = _mix(bits, first + i)
    mixed = tl.where(inside, mixed, tl.zeros_like(mixed))
    tl.atomic_add(out_ptr + out, tl.sum(mixed, axis=0), sem="relaxed")


@triton.jit
def _prepared_region_kernel(
    table_ptr,
    block_table_ptr,
    out_ptr,
    DTYPE: tl.constexpr,
    IS_DENSE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    entry = table_ptr + 9 * tl.load(block_table_ptr + 2 * program).to(tl.int64)
    tile = tl.load(block_table_ptr + 2 * program + 1).to(tl.int64)
    pointer = tl.load(entry).to(tl.pointer_type(DTYPE))
    out = tl.load(entry + 1)
    rows = tl.load(entry + 2)
    columns = tl.load(entry + 3)
    row_memory = tl.load(entry + 4)
    if ALIGNED:
        # 16-byte loads: address, rows and the distance between rows are multiples of 16 bytes.
        pointer = tl.multiple_of(pointer, 16)
        columns = tl.multiple_of(columns, 16)
        row_memory = tl.multiple_of(row_memory, 16)
    tiles_across = (columns + BLOCK_C - 1) // BLOCK_C
    r = (tile // tiles_across) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)[:, None]
    c = (tile % tiles_across) * BLOCK_C + tl.arange(0, BLOCK_C).to(tl.int64)[None, :]
    inside = (r < rows) & (c < columns)
    elements = pointer + r * row_memory
    if IS_DENSE:
        elements += c
    else:
        elements += c * tl.load(entry + 5)
    bits = tl.load(elements, mask=inside, other=0).to(tl.uint64)
    mixed = _mix(bits, tl.load(entry + 8) + r * tl.load(entry + 6) + c * tl.load(entry + 7))
    mixed = tl.where(inside, mixed, tl.zeros_like(mixed))
    tl.atomic_add(out_ptr + out, tl.sum(tl.sum(mixed, axis=1), axis=0), sem="relaxed")


_prepared, _prepared_region = Launches(_prepared_kernel), Launches(_prepared_region_kernel)


def prepare(
    tensors: Sequence[torch.Tensor],
    rows: Sequence[int],
    origins: Sequence[tuple[int, Sequence[int]]],
) -> list[Callable[[torch.Tensor], None]]:
    """Launches that add each region's digest to its row of an output.

    Their tables are made and uploaded here.
    """
    runs: dict[tuple[int, bool], list[list[int]]] = {}
    boxes: dict[_RegionKind, list[list[int]]] = {}
    for tensor, row, (first, strides) in zip(tensors, rows, origins, strict=True):
        size = tensor.element_size()
        for box in boxes_2d(tensor.shape, tensor.stride(), strides):
            address, at = tensor.data_ptr() + size * box.start[0], first + box.start[1]
            if size in (2, 4) and box.rows == 1 and box.column == (1, 1):
                aligned = address % 16 == 0 and box.columns % 16 == 0
                runs.setdefault((size, aligned), []).append([address, box.columns, row, at])
                continue
            sides = [*zip(box.row, box.column, strict=True)]
            entry = [address, row, box.rows, box.columns, *sides[0], *sides[1], at]
            boxes.setdefault(_RegionKind.of(box, address, size), []).append(entry)
    launches = [_prepared_launch(table, *kind, tensors[0].device) for kind, table in runs.items()]
    return launches + [
        _region_launch(table, kind, tensors[0].device) for kind, table in boxes.items()
    ]


@dataclass(frozen=True, slots=True)
class _RegionKind:
    """Properties that all boxes of one launch share."""

    size: int
    is_dense: bool
    aligned: bool
    tile: tuple[int, int]

    @staticmethod
    def of(box: Box, address: int, size: int) -> _RegionKind:
        is_dense = box.column[0] == 1
        aligned = is_dense and (address | box.columns | box.row[0]) % 16 == 0
        return _RegionKind(size, is_dense, aligned, tile_of(box.columns, PREPARED_BLOCK))


def _prepared_launch(
    table: list[list[int]], size: int, aligned: bool, device: torch.device
) -> Callable[[torch.Tensor], None]:
    table_R4 = torch.tensor(table, dtype=torch.int64)
    blocks_B2 = block_table(torch.ones_like(table_R4[:, 1]), table_R4[:, 1], (1, PREPARED_BLOCK))
    on_device, grid = (table_R4.to(device), blocks_B2.to(device)), len(blocks_B2)
    constants = {"ELEMENT_BYTES": size, "ALIGNED": aligned, "BLOCK": PREPARED_BLOCK}

    def launch(out_N: torch.Tensor) -> None:
        with torch.cuda.device_of(out_N):
            _prepared((size, aligned), grid, (*on_device, out_N), constants, num_warps=8)

    return launch


def _region_launch(
    table: list[list[int]], kind: _RegionKind, device: torch.device
) -> Callable[[torch.Tensor], None]:
    table_R9 = torch.tensor(table, dtype=torch.int64)
    blocks_B2 = block_table(table_R9[:, 2], table_R9[:, 3], kind.tile)
    on_device, grid = (table_R9.to(device), blocks_B2.to(device)), len(blocks_B2)
    constants = {
        "DTYPE": UNSIGNED[kind.size],
        "IS_DENSE": kind.is_dense,
        "ALIGNED": kind.aligned,
        "BLOCK_R": kind.tile[0],
        "BLOCK_C": kind.tile[1],
    }

    def launch(out_N: torch.Tensor) -> None:
        with torch.cuda.device_of(out_N):
            _prepared_region(kind, grid, (*on_device, out_N), constants, num_warps=8)

    return launch


def launch_region(
    *, bits_RC: torch.Tensor, first_index: int, index_strides: tuple[int, int], out: torch.Tensor
) -> None:
    """Queue, on the current stream, adding an integer [R, C] region's digest to out[0].

    out is int64; the caller zeroes it.
    """
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
    """Queue, on the current stream, adding the digest of each row's tensor to out_N.

    table_R3 (CPU, int64): address, number of elements and position in out_N of R tensors of one
    element size.
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
    """Copy from pinned memory, so that the host does not wait for the stream."""
    return (
        table.contiguous().pin_memory().to(like.device, non_blocking=True)
        if like.is_cuda
        else table.contiguous()
    )
