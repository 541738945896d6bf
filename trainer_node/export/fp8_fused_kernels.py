"""Triton kernels of `fp8_fused`: W + scale * B @ A, rounded to bf16 and quantised to e4m3 in
registers. Imported only where Triton is installed.

    _block_kernel     a program has a block of 128 x 128: merges, finds the scale, rounds
    _largest_kernel   merges, and keeps the largest magnitude of each group or row
    _round_kernel     merges again, and rounds by these

A scale of a group or a row needs all of it before the first value is rounded. Two merges then read
the weight twice (4 bytes an element) and write e4m3 once. A merge into a bf16 scratch and two
passes over it move 11. The bits are those of `merge_kernels` and `weight_transfer.fp8`.

Axes: T = tensors of a launch, O = out features, I = in features, R = rank.
"""

# Triton takes annotations for globals:
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from orchestrator.protocol.messages import FP8_BLOCK
from trainer_node.adapters.merge_kernels import MERGE_TILE, Tile, merged_tile
from weight_transfer.fp8_kernels import block_scale, codes, inverse_of, magnitude_bits
from weight_transfer.launches import Launches

ENTRY = 7
"""int64 words of a table row: addresses of W, A and B, byte offsets of the e4m3 and of the scales
in the output, the first slot of `largest`, and the word that thresholds are counted from."""
WORD: Any = tl.constexpr(6)
BLOCK_TILE = Tile(rows=FP8_BLOCK, columns=FP8_BLOCK, num_warps=8)


@triton.jit
def _tile(
    table_ptr, num_columns, tiles_across, tiles,
    VECTOR: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr
):  # fmt: skip # one line each
    """(table row, tile's number, rows, first column, columns, columns left) of this program."""
    program = tl.program_id(0)
    tile = program % tiles
    entry = table_ptr + (program // tiles).to(tl.int64) * 7
    o = (tile // tiles_across) * BLOCK_O + tl.arange(0, BLOCK_O)
    first_i = (tile % tiles_across).to(tl.int64) * BLOCK_I
    left_i = tl.minimum(num_columns - first_i, BLOCK_I).to(tl.int32)
    if VECTOR > 1:
        left_i = tl.multiple_of(left_i, VECTOR)
    return entry, tile, o, first_i, tl.arange(0, BLOCK_I), left_i


@triton.jit
def _store_codes(
    out_ptr, entry, values, o, first_i, i, inside, num_columns, EVEN: tl.constexpr,
    ALIGN: tl.constexpr
):  # fmt: skip # one line each
    offset = tl.multiple_of(tl.load(entry + 3), ALIGN)
    at = out_ptr + offset + first_i + (o.to(tl.int64) * num_columns)[:, None] + i[None, :]
    if EVEN:
        tl.store(at, codes(values), eviction_policy="evict_first")
    else:
        tl.store(at, codes(values), mask=inside, eviction_policy="evict_first")


@triton.jit
def _block_kernel(
    table_ptr, out_ptr, largest_ptr, num_rows, num_columns, rows_per_group, group_stride,
    row_stride, tiles_across, tiles, scale,
    RANK: tl.constexpr, GROUPED: tl.constexpr, EVEN: tl.constexpr, VECTOR: tl.constexpr,
    STOCHASTIC: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, RECIPROCAL: tl.constexpr,
    FAST: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr
):  # fmt: skip # one line each
    entry, tile, o, first_i, i, left_i = _tile(
        table_ptr, num_columns, tiles_across, tiles, VECTOR, BLOCK_O, BLOCK_I
    )
    inside = (o < num_rows)[:, None] & (i < left_i)[None, :]
    w = merged_tile(
        entry, o, first_i, i, left_i, inside, num_rows, rows_per_group, group_stride, row_stride,
        num_columns, 0, 1, num_columns, 1, RANK, 1, scale, tl.bfloat16, RANK, GROUPED, False, False,
        EVEN, VECTOR, STOCHASTIC, WORD, BLOCK_O, BLOCK_I
    ).to(tl.float32)  # fmt: skip
    if not EVEN:
        w = tl.where(inside, w, 0.0)
    largest = tl.max(tl.max(magnitude_bits(w), axis=1), axis=0).to(tl.float32, bitcast=True)
    of_block = block_scale(largest, RECIPROCAL)
    tl.store((out_ptr + tl.load(entry + 4)).to(tl.pointer_type(tl.float32)) + tile, of_block)
    values = w * inverse_of(of_block, FAST)
    _store_codes(out_ptr, entry, values, o, first_i, i, inside, num_columns, EVEN, ALIGN)


@triton.jit
def _largest_kernel(
    table_ptr, out_ptr, largest_ptr, num_rows, num_columns, rows_per_group, group_stride,
    row_stride, tiles_across, tiles, scale,
    RANK: tl.constexpr, GROUPED: tl.constexpr, EVEN: tl.constexpr, VECTOR: tl.constexpr,
    STOCHASTIC: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, RECIPROCAL: tl.constexpr,
    FAST: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr
):  # fmt: skip # one line each
    entry, _, o, first_i, i, left_i = _tile(
        table_ptr, num_columns, tiles_across, tiles, VECTOR, BLOCK_O, BLOCK_I
    )
    inside = (o < num_rows)[:, None] & (i < left_i)[None, :]
    w = merged_tile(
        entry, o, first_i, i, left_i, inside, num_rows, rows_per_group, group_stride, row_stride,
        num_columns, 0, 1, num_columns, 1, RANK, 1, scale, tl.bfloat16, RANK, GROUPED, False, False,
        EVEN, VECTOR, STOCHASTIC, WORD, BLOCK_O, BLOCK_I
    ).to(tl.float32)  # fmt: skip
    if not EVEN:
        w = tl.where(inside, w, 0.0)
    bits_O = tl.max(magnitude_bits(w), axis=1)
    slot = largest_ptr + tl.load(entry + 5)
    if ROWS:
        tl.atomic_max(slot + o, bits_O, mask=o < num_rows, sem="relaxed")
    else:
        tl.atomic_max(slot, tl.max(bits_O, axis=0), sem="relaxed")


@triton.jit
def _round_kernel(
    table_ptr, out_ptr, largest_ptr, num_rows, num_columns, rows_per_group, group_stride,
    row_stride, tiles_across, tiles, scale,
    RANK: tl.constexpr, GROUPED: tl.constexpr, EVEN: tl.constexpr, VECTOR: tl.constexpr,
    STOCHASTIC: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, RECIPROCAL: tl.constexpr,
    FAST: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr
):  # fmt: skip # one line each
    entry, tile, o, first_i, i, left_i = _tile(
        table_ptr, num_columns, tiles_across, tiles, VECTOR, BLOCK_O, BLOCK_I
    )
    # The scales first: a division is a call for which ptxas would spill a whole tile.
    slot = largest_ptr + tl.load(entry + 5)
    scales_ptr = (out_ptr + tl.load(entry + 4)).to(tl.pointer_type(tl.float32))
    if ROWS:
        bits_O = tl.load(slot + o, mask=o < num_rows, other=0)
        scale_O = tl.div_rn(bits_O.to(tl.float32, bitcast=True), 448.0)
        scale_O = tl.maximum(scale_O, 1.0 / (448.0 * 512.0))  # vLLM's smallest
        if first_i == 0:
            tl.store(scales_ptr + o, scale_O, mask=o < num_rows)
    else:
        of_group = tl.div_rn(tl.load(slot).to(tl.float32, bitcast=True), 448.0)
        if tile == 0:
            tl.store(scales_ptr, of_group)
        inverse = tl.where(of_group == 0.0, 0.0, tl.div_rn(1.0, of_group))
    inside = (o < num_rows)[:, None] & (i < left_i)[None, :]
    w = merged_tile(
        entry, o, first_i, i, left_i, inside, num_rows, rows_per_group, group_stride, row_stride,
        num_columns, 0, 1, num_columns, 1, RANK, 1, scale, tl.bfloat16, RANK, GROUPED, False, False,
        EVEN, VECTOR, STOCHASTIC, WORD, BLOCK_O, BLOCK_I
    ).to(tl.float32)  # fmt: skip
    values = tl.div_rn(w, scale_O[:, None]) if ROWS else w * inverse
    _store_codes(out_ptr, entry, values, o, first_i, i, inside, num_columns, EVEN, ALIGN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What all tensors of a launch share; strides in elements."""

    kind: str
    rank: int
    rows: int
    columns: int
    rows_per_group: int
    group_stride: int
    row_stride: int


def launch(
    step: str,
    shape: Shape,
    *,
    table_T7: torch.Tensor,
    out_B: torch.Tensor,
    largest_S: torch.Tensor,
    scale: float,
    stochastic: bool,
    vectors: bool,
    align: int,
    tile: Tile | None = None,
) -> None:
    """Queue a step ("block", "largest" or "round") for T tensors on the current stream.

    Args:
        largest_S: int32: bits of magnitudes; "largest" raises it, "round" reads it.
        stochastic: rounds to bf16 by thresholds, else to nearest.
        vectors: addresses and strides of the weights and matrices allow 16-byte pieces.
        align: power of two that divides the offset of each e4m3 tensor.
    """
    tile = BLOCK_TILE if step == "block" else tile or MERGE_TILE
    across, down = triton.cdiv(shape.columns, tile.columns), triton.cdiv(shape.rows, tile.rows)
    on_gpu = out_B.is_cuda
    args = (
        table_T7, out_B, largest_S, shape.rows, shape.columns, shape.rows_per_group,
        shape.group_stride, shape.row_stride, across, across * down, scale,
    )  # fmt: skip # one line each
    constants = {
        "RANK": shape.rank,
        "GROUPED": shape.rows_per_group < shape.rows,
        "EVEN": shape.rows % tile.rows == 0 and shape.columns % tile.columns == 0,
        "VECTOR": 8 if vectors else 1,
        "STOCHASTIC": stochastic,
        "ALIGN": align,
        "ROWS": shape.kind == "per_channel",
        "RECIPROCAL": on_gpu,
        "FAST": on_gpu,
        "BLOCK_O": tile.rows,
        "BLOCK_I": tile.columns,
    }
    kind, grid = (shape, stochastic, vectors, align, tile), len(table_T7) * across * down
    options = {"num_warps": tile.num_warps, "enable_fp_fusion": False}
    with torch.cuda.device_of(out_B):
        _launches[step](kind, grid, args, constants, **options)


_launches = {
    "block": Launches(_block_kernel),
    "largest": Launches(_largest_kernel),
    "round": Launches(_round_kernel),
}
