"""Triton kernels of `wire_export`: W + scale * B @ A of many tensors of one kind in one launch, and
copies of transposed ones. Imported only where Triton is installed.

    out[t, o, i] = round(W[t, o, i] + scale * sum_r B[t, o, r] * A[t, r, i])

`adapters.rounding` defines the sum's order and the rounding to the bit, and is the same on a CPU.
Triton's "ieee" dot of fp32 is the chain of fused multiply-adds r = 0, 1, ..., R - 1 from 0 that it
asks for (a test counts them in the PTX). The multiplication by `scale` and the addition of W
follow, never fused. Without a delta the bits are copied, NaN payloads included.

Speed: bound by memory. A program makes one [BLOCK_O, BLOCK_I] tile: W is read once and `out`
written once in 16-byte pieces, A and B come out of the caches. The dot multiplies and adds in
registers, r by r, and fetches A and B through shared memory once for a tile. Stochastic rounding
costs one multiplication and some ten other integer instructions an element.

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

from trainer_node.adapters.rounding import Corner, Rounding
from trainer_node.adapters.rounding_kernels import tile_thresholds, to_bf16, to_fp16
from weight_transfer.launches import Launches
from weight_transfer.layout import VECTOR_BYTES

ENTRY = 5
"""int64 words of a table row: addresses of W, A and B, offset in the output in bytes, and the word
that thresholds are counted from (`rounding.Corner.word`)."""
WORD: Any = tl.constexpr(4)
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
    rows_per_group,
    group_stride,
    row_stride,
    columns_per_group,
    column_group_stride,
    column_stride,
    a_row,
    a_column,
    b_row,
    b_column,
    scale,
    DTYPE: tl.constexpr,
    RANK: tl.constexpr,
    GROUPED: tl.constexpr,
    TURNED: tl.constexpr,
    COLUMNS_GROUPED: tl.constexpr,
    EVEN: tl.constexpr,
    VECTOR: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    WORD_AT: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """The tile of rows `o` and columns `first_i + i` of the tensor of a table row, in `DTYPE`."""
    w_ptr = tl.load(entry).to(tl.pointer_type(DTYPE))
    if VECTOR > 1:  # addresses out of a table: what Triton cannot see, the plan has checked
        w_ptr = tl.multiple_of(w_ptr, 16)
    if TURNED:
        column = offset_of(
            first_i + i, columns_per_group, column_group_stride, column_stride, COLUMNS_GROUPED
        )
        w_ptrs = w_ptr + o.to(tl.int64)[:, None] + column[None, :]
    else:
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
        a_ptrs = a_ptr + first_i * a_column + i * a_column
        b_ptrs = b_ptr + o.to(tl.int64) * b_row
        product = tl.zeros((BLOCK_O, BLOCK_I), dtype=tl.float32)
        for first_r in tl.static_range(0, RANK, DOT_RANK):
            r = first_r + tl.arange(0, DOT_RANK)
            b_OR = tl.load(
                b_ptrs[:, None] + r[None, :] * b_column,
                mask=(o < num_rows)[:, None] & (r < RANK)[None, :],
                other=0.0,
            )
            a_RI = tl.load(
                a_ptrs[None, :] + r[:, None] * a_row,
                mask=(r < RANK)[:, None] & (i < left_i)[None, :],
                other=0.0,
            )
            product = tl.dot(b_OR, a_RI, product, input_precision="ieee")
        delta = product * scale
        wide = w.to(tl.float32)
        total = tl.where(delta == 0.0, wide, delta + wide)  # -0 stays
        if STOCHASTIC and tl.bfloat16 == DTYPE:
            w = to_bf16(total, tile_thresholds(tl.load(entry + WORD_AT), o, first_i, i))
        elif STOCHASTIC and tl.float16 == DTYPE:
            w = to_fp16(total, tile_thresholds(tl.load(entry + WORD_AT), o, first_i, i) >> 3)
        else:
            w = total.to(DTYPE)
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
    columns_per_group,
    column_group_stride,
    column_stride,
    a_row,
    a_column,
    b_row,
    b_column,
    out_stride,
    tiles_across,
    tiles,
    scale,
    DTYPE: tl.constexpr,
    RANK: tl.constexpr,
    GROUPED: tl.constexpr,
    TURNED: tl.constexpr,
    COLUMNS_GROUPED: tl.constexpr,
    EVEN: tl.constexpr,
    VECTOR: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    program = tl.program_id(0)
    tile = program % tiles
    entry = table_ptr + (program // tiles).to(tl.int64) * 5
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
        rows_per_group,
        group_stride,
        row_stride,
        columns_per_group,
        column_group_stride,
        column_stride,
        a_row,
        a_column,
        b_row,
        b_column,
        scale,
        DTYPE,
        RANK,
        GROUPED,
        TURNED,
        COLUMNS_GROUPED,
        EVEN,
        VECTOR,
        STOCHASTIC,
        WORD,
        BLOCK_O,
        BLOCK_I,
    )
    # After the product: addresses that are loaded before it take registers of another program.
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
    entry = table_ptr + (program // tiles).to(tl.int64) * 5
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
    table_T5: torch.Tensor,
    out_B: torch.Tensor,
    shape: tuple[int, int],
    groups: tuple[int, int, int],
    out_stride: int,
    dtype: torch.dtype,
    rank: int,
    scale: float,
    vectors: bool,
    columns: tuple[int, int, int] | None = None,
    adapter: tuple[int, int, int, int] = (0, 1, 0, 1),
    stochastic: bool = False,
    tile: Tile | None = None,
) -> None:
    """Merge or copy T tensors of one shape into `out_B`; queued on the current stream.

    Args:
        table_T5: int64 on the device; see `ENTRY`.
        shape: (O, I).
        groups: rows of a group of W, elements from a group to the next, from a row to the next.
        out_stride: elements from a row to the next in `out_B`.
        rank: 0 copies bits. A [R, I] and B [O, R] are fp32.
        vectors: addresses, strides and offsets all allow 16-byte pieces.
        columns: W is transposed, its columns runs: as in `turn`. `groups` is not used then.
        adapter: elements from a row of A to the next, from a column to the next; likewise of B.
        stochastic: rounds by thresholds, else to nearest.
    """
    rows, width = shape
    rows_per_group, group_stride, row_stride = groups if columns is None else (rows, 0, 1)
    turned = columns or (width, 0, 1)
    tile = tile or default_tile(rows=rows, rank=rank)
    across, down = triton.cdiv(width, tile.columns), triton.cdiv(rows, tile.rows)
    kind = (
        shape, groups, columns, adapter, out_stride, dtype, rank, vectors, stochastic, tile
    )  # fmt: skip # one line
    constants = {
        "DTYPE": FLOATS[dtype] if rank else BITS[dtype.itemsize],
        "RANK": rank,
        "GROUPED": rows_per_group < rows,
        "TURNED": columns is not None,
        "COLUMNS_GROUPED": turned[0] < width,
        "EVEN": rows % tile.rows == 0 and width % tile.columns == 0,
        "VECTOR": VECTOR_BYTES // dtype.itemsize if vectors else 1,
        "STOCHASTIC": stochastic,
        "BLOCK_O": tile.rows,
        "BLOCK_I": tile.columns,
    }
    strides = (rows_per_group, group_stride, row_stride, *turned, *adapter, out_stride)
    args = (table_T5, out_B, rows, width, *strides, across, across * down, scale)
    with torch.cuda.device_of(out_B):
        # The dot fuses its chain by itself; scale and W are not to be.
        options = {"num_warps": tile.num_warps, "enable_fp_fusion": False}
        _launches(kind, len(table_T5) * across * down, args, constants, **options)


def merge(
    weight_OI: torch.Tensor,
    lora_B_OR: torch.Tensor,
    lora_A_RI: torch.Tensor,
    *,
    scale: float,
    rounding: Rounding,
    corner: Corner,
) -> torch.Tensor:
    """`rounding.merge_matrix` of a contiguous matrix on a GPU; queued on the current stream. A and
    B are fp32, with any strides."""
    out_OI = torch.empty_like(weight_OI)
    addresses = (weight_OI.data_ptr(), lora_A_RI.data_ptr(), lora_B_OR.data_ptr())
    rows, columns = weight_OI.shape
    (a_row, a_column), (b_row, b_column) = lora_A_RI.stride(), lora_B_OR.stride()
    every = columns * weight_OI.element_size() | 4 * a_row
    for address in (*addresses, out_OI.data_ptr()):
        every |= address
    table = torch.tensor([[*addresses, 0, corner.word(rounding)]], dtype=torch.int64)
    launch(
        table_T5=table.pin_memory().to(weight_OI.device, non_blocking=True),
        out_B=out_OI.view(-1).view(torch.uint8),
        shape=(rows, columns),
        groups=(rows, 0, columns),
        out_stride=columns,
        dtype=weight_OI.dtype,
        rank=lora_B_OR.shape[1],
        scale=scale,
        vectors=every % VECTOR_BYTES == 0,
        adapter=(a_row, a_column, b_row, b_column),
        stochastic=rounding.mode == "stochastic",
    )
    return out_OI


def turn(
    *,
    table_T5: torch.Tensor,
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
    args = (table_T5, out_B, rows, width, *columns, out_stride, across, across * down)
    with torch.cuda.device_of(out_B):
        kind = (shape, columns, out_stride, dtype, vectors)
        grid = len(table_T5) * across * down
        _turns(kind, grid, args, constants, num_warps=tile.num_warps)


def default_tile(*, rows: int, rank: int) -> Tile:
    """The tile for a merge, a strided copy, or a flat one."""
    if rank:
        return MERGE_TILE
    return FLAT_TILE if rows == 1 else COPY_TILE
