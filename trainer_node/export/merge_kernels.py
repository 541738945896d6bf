"""Triton kernels of `wire_export`: W + scale * B @ A of many equally shaped tensors in one launch,
and copies of transposed ones. Imported only where Triton is installed.

    out[t, o, i] = round(W[t, o, i] + scale * sum_r B[t, o, r] * A[t, r, i])

Sum order: one chain of fp32 fused multiply-adds, r = 0, 1, ..., R - 1, from 0; then one
multiplication by `scale`, one addition of W and one rounding to W's dtype, never fused with each
other. The reference (`merge.merge_tensor`) does the same three steps after its matrix product. BLAS
libraries sum over r in the same order at small ranks but do not promise it, so the fp32 value
before the rounding may differ by the reordering of a sum of R terms; a rounded bf16 or fp16 then
differs only where the fp32 value is that close to a tie. Without a delta the bits are copied, NaN
payloads included.

Speed: bound by memory. A program makes one [BLOCK_O, BLOCK_I] tile: W is read once and `out`
written once in 16-byte pieces, A and B come out of the caches. Triton's "ieee" dot of fp32 is that
chain: it multiplies and adds in registers, r by r, and fetches A and B through shared memory once
for a tile (a test counts the multiply-adds in the PTX).

Axes: T = tensors of a launch, O = out features, I = in features, R = rank; W's rows may lie in
groups (q, k and v inside `linear_qkv`).
"""

# Triton takes annotations for globals:
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from weight_transfer.launches import Launches
from weight_transfer.layout import VECTOR_BYTES

ENTRY = 4
"""int64 words of a table row: addresses of W, A and B, offset in the output in bytes."""
DOT_RANK: Any = tl.constexpr(16)
"""Triton's smallest dot. A longer one takes registers of another program."""
BITS: dict[int, Any] = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}
FLOATS: dict[torch.dtype, Any] = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A program's block. `rows` and `columns` are powers of two."""

    rows: int
    columns: int
    num_warps: int


MERGE_TILE = Tile(rows=32, columns=128, num_warps=4)
COPY_TILE = Tile(rows=32, columns=256, num_warps=4)
FLAT_TILE = Tile(rows=1, columns=8192, num_warps=8)
TURN_TILE = Tile(rows=64, columns=64, num_warps=4)


@triton.jit
def offset_of(n, per_group, group_stride, stride, GROUPED: tl.constexpr):
    """Elements from the first to row or column `n`, which may lie in groups."""
    if GROUPED:
        offset = (n // per_group).to(tl.int64) * group_stride + (n % per_group).to(
            tl.int64
        ) * stride
    else:
        offset = n.to(tl.int64) * stride
    return offset


@triton.jit
def merged_tile(
    entry,
    o,
    first_i,
    i,
    left_i,
    inside,
    num_rows,
    num_columns,
    rows_per_group,
    group_stride,
    row_stride,
    scale,
    DTYPE: tl.constexpr,
    RANK: tl.constexpr,
    GROUPED: tl.constexpr,
    EVEN: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """The tile of rows `o` and columns `first_i + i` of the tensor of a table row, in `DTYPE`."""
    w_ptr = tl.load(entry).to(tl.pointer_type(DTYPE))
    if VECTOR > 1:  # addresses out of a table: what Triton cannot see, the plan has checked
        w_ptr = tl.multiple_of(w_ptr, 16)
    w_row = offset_of(o, rows_per_group, group_stride, row_stride, GROUPED)
    w_ptrs = w_ptr + first_i + w_row[:, None] + i[None, :]
    if EVEN:
        w = tl.load(w_ptrs, eviction_policy="evict_first")
    else:
        w = tl.load(w_ptrs, mask=inside, other=0, eviction_policy="evict_first")
    if RANK > 0:
        a_ptr = tl.load(entry + 1).to(tl.pointer_type(tl.float32))
        b_ptr = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
        if VECTOR > 1:
            a_ptr = tl.multiple_of(a_ptr, 16)
            b_ptr = tl.multiple_of(b_ptr, 16)
        a_ptrs = a_ptr + first_i + i
        b_ptrs = b_ptr + o.to(tl.int64) * RANK
        product = tl.zeros((BLOCK_O, BLOCK_I), dtype=tl.float32)
        for first_r in tl.static_range(0, RANK, DOT_RANK):
            r = first_r + tl.arange(0, DOT_RANK)
            b_OR = tl.load(
                b_ptrs[:, None] + r[None, :],
                mask=(o < num_rows)[:, None] & (r < RANK)[None, :],
                other=0.0,
            )
            a_RI = tl.load(
                a_ptrs[None, :] + r[:, None] * num_columns,
                mask=(r < RANK)[:, None] & (i < left_i)[None, :],
                other=0.0,
            )
            product = tl.dot(b_OR, a_RI, product, input_precision="ieee")
        w = (product * scale + w.to(tl.float32)).to(DTYPE)
    return w


@triton.jit
def _merge_kernel(
    table_ptr,
    out_ptr,
    num_rows,
    num_columns,
    rows_per_group,
    group_stride,
    row_stride,
    out_stride,
    tiles_across,
    tiles,
    scale,
    DTYPE: tl.constexpr,
    RANK: tl.constexpr,
    GROUPED: tl.constexpr,
    EVEN: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    program = tl.program_id(0)
    tile = program % tiles
    entry = table_ptr + (program // tiles).to(tl.int64) * 4
    o = (tile // tiles_across) * BLOCK_O + tl.arange(0, BLOCK_O)
    first_i = (tile % tiles_across).to(tl.int64) * BLOCK_I
    i = tl.arange(0, BLOCK_I)
    left_i = tl.minimum(num_columns - first_i, BLOCK_I).to(tl.int32)
    if VECTOR > 1:
        left_i = tl.multiple_of(left_i, VECTOR)
    inside = (o < num_rows)[:, None] & (i < left_i)[None, :]
    w = merged_tile(
        entry,
        o,
        first_i,
        i,
        left_i,
        inside,
        num_rows,
        num_columns,
        rows_per_group,
        group_stride,
        row_stride,
        scale,
        DTYPE,
        RANK,
        GROUPED,
        EVEN,
        VECTOR,
        BLOCK_O,
        BLOCK_I,
    )
    # After the product: addresses that wait beside it take registers of another program.
    out_offset = tl.load(entry + 3)
    if VECTOR > 1:
        out_offset = tl.multiple_of(out_offset, 16)
    out_ptrs = (
        (out_ptr + out_offset).to(tl.pointer_type(DTYPE))
        + first_i
        + o.to(tl.int64)[:, None] * out_stride
        + i[None, :]
    )
    if EVEN:
        tl.store(out_ptrs, w, eviction_policy="evict_first")
    else:
        tl.store(out_ptrs, w, mask=inside, eviction_policy="evict_first")


@triton.jit
def _turn_kernel(
    table_ptr,
    out_ptr,
    num_rows,
    num_columns,
    columns_per_group,
    column_group_stride,
    column_stride,
    out_stride,
    tiles_across,
    tiles,
    DTYPE: tl.constexpr,
    GROUPED: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    program = tl.program_id(0)
    tile = program % tiles
    entry = table_ptr + (program // tiles).to(tl.int64) * 4
    o = (tile // tiles_across) * BLOCK_O + tl.arange(0, BLOCK_O)
    i = (tile % tiles_across) * BLOCK_I + tl.arange(0, BLOCK_I)
    column = offset_of(i, columns_per_group, column_group_stride, column_stride, GROUPED)
    w_ptr, out_offset = tl.load(entry).to(tl.pointer_type(DTYPE)), tl.load(entry + 3)
    if VECTOR > 1:
        w_ptr, out_offset = tl.multiple_of(w_ptr, 16), tl.multiple_of(out_offset, 16)
    w_IO = tl.load(
        w_ptr + column[:, None] + o[None, :],
        mask=(i < num_columns)[:, None] & (o < num_rows)[None, :],
        other=0,
        eviction_policy="evict_first",
    )
    out_ptrs = (out_ptr + out_offset).to(tl.pointer_type(DTYPE)) + i[None, :]
    tl.store(
        out_ptrs + o.to(tl.int64)[:, None] * out_stride,
        tl.trans(w_IO),
        mask=(o < num_rows)[:, None] & (i < num_columns)[None, :],
        eviction_policy="evict_first",
    )


_launches = Launches(_merge_kernel)
_turns = Launches(_turn_kernel)


def launch(
    *,
    table_T4: torch.Tensor,
    out_B: torch.Tensor,
    shape: tuple[int, int],
    groups: tuple[int, int, int],
    out_stride: int,
    dtype: torch.dtype,
    rank: int,
    scale: float,
    vectors: bool,
    tile: Tile | None = None,
) -> None:
    """Merge or copy T tensors of one shape into `out_B`; queued on the current stream.

    Args:
        table_T4: int64 on the device; see `ENTRY`.
        shape: (O, I).
        groups: rows of a group of W, elements from a group to the next, from a row to the next.
        out_stride: elements from a row to the next in `out_B`.
        rank: 0 copies bits. A [R, I] and B [O, R] are fp32 and contiguous.
        vectors: addresses, strides and offsets all allow 16-byte pieces.
    """
    rows, columns = shape
    rows_per_group, group_stride, row_stride = groups
    tile = tile or default_tile(rows=rows, rank=rank)
    across, down = triton.cdiv(columns, tile.columns), triton.cdiv(rows, tile.rows)
    kind = (shape, groups, out_stride, dtype, rank, vectors, tile)
    constants = {
        "DTYPE": FLOATS[dtype] if rank else BITS[dtype.itemsize],
        "RANK": rank,
        "GROUPED": rows_per_group < rows,
        "EVEN": rows % tile.rows == 0 and columns % tile.columns == 0,
        "VECTOR": VECTOR_BYTES // dtype.itemsize if vectors else 1,
        "BLOCK_O": tile.rows,
        "BLOCK_I": tile.columns,
    }
    args = (
        table_T4,
        out_B,
        rows,
        columns,
        rows_per_group,
        group_stride,
        row_stride,
        out_stride,
        across,
        across * down,
        scale,
    )
    with torch.cuda.device_of(out_B):
        # The dot fuses its chain by itself; scale and W are not to be.
        options = {"num_warps": tile.num_warps, "enable_fp_fusion": False}
        _launches(kind, len(table_T4) * across * down, args, constants, **options)


def turn(
    *,
    table_T4: torch.Tensor,
    out_B: torch.Tensor,
    shape: tuple[int, int],
    columns: tuple[int, int, int],
    out_stride: int,
    dtype: torch.dtype,
    vectors: bool,
) -> None:
    """Copy T transposed tensors of one shape into `out_B`; as `launch`.

    A tile is read along W's runs, which are its columns, and written along its rows.

    Args:
        columns: columns of a group of W, elements from a group to the next, from a column to the
            next. From a row to the next it is one.
    """
    rows, width = shape
    tile = TURN_TILE
    across, down = triton.cdiv(width, tile.columns), triton.cdiv(rows, tile.rows)
    constants = {
        "DTYPE": BITS[dtype.itemsize],
        "GROUPED": columns[0] < width,
        "VECTOR": VECTOR_BYTES // dtype.itemsize if vectors else 1,
        "BLOCK_O": tile.rows,
        "BLOCK_I": tile.columns,
    }
    args = (table_T4, out_B, rows, width, *columns, out_stride, across, across * down)
    with torch.cuda.device_of(out_B):
        kind = (shape, columns, out_stride, dtype, vectors)
        grid = len(table_T4) * across * down
        _turns(kind, grid, args, constants, num_warps=tile.num_warps)


def default_tile(*, rows: int, rank: int) -> Tile:
    """The tile for a merge, a strided copy, or a flat one."""
    if rank:
        return MERGE_TILE
    return FLAT_TILE if rows == 1 else COPY_TILE
