"""Triton kernels that add adapters' products to outputs: of one matrix, or of one for each expert.

Rows come sorted by expert. `ends_E[e]` is the row after expert e's last one, and only the device
knows it. A program therefore finds its own expert. Every expert's rows are cut into tiles of
BLOCK_N, and program p takes the p-th tile. The grid has as many programs as there can be tiles
(`num_tiles`). Programs beyond the last tile end at once.

Axes: N = rows, E = experts, O = out features, R = columns of an adapter's hidden layer (padded).
"""

# Triton takes annotations for globals:
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trainer_node.adapters.rounding_kernels import content_thresholds, to_bf16

BLOCK_N = 64
"""Rows of a tile."""
COLUMNS = 128
LONGEST_DOT = 64
"""Columns of an adapter's hidden layer that are multiplied at a time."""


def num_tiles(num_rows: int, num_experts: int, block: int = BLOCK_N) -> int:
    """Return the largest number of tiles that these rows can make, for any choice of experts."""
    return num_rows // block + num_experts


@triton.jit
def find_tile(
    ends_ptr, program, num_rows, E: tl.constexpr, PADDED_E: tl.constexpr, BLOCK: tl.constexpr
):
    """(expert, first row, end of the expert's rows); expert >= E: nothing to do."""
    e = tl.arange(0, PADDED_E)
    end = tl.load(ends_ptr + e, mask=e < E, other=num_rows)
    start = tl.load(ends_ptr + e - 1, mask=(e > 0) & (e < E), other=0)
    start = tl.where(e < E, start, end)
    tiles = (end - start + BLOCK - 1) // BLOCK
    before = tl.cumsum(tiles, 0)
    expert = tl.sum((before <= program).to(tl.int32), 0)
    first_tile = tl.sum(tl.where(e < expert, tiles, 0), 0)
    first_row = tl.sum(tl.where(e == expert, start, 0), 0) + (program - first_tile) * BLOCK
    end_row = tl.sum(tl.where(e == expert, end, 0), 0)
    return expert, first_row, end_row


@triton.jit
def _add_product_kernel(
    y_ptr, h_ptr, w_ptr, ends_ptr, num_rows, stride_e, stride_o, stride_r,
    OUT: tl.constexpr, R: tl.constexpr, STEP_R: tl.constexpr, E: tl.constexpr,
    PADDED_E: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, STOCHASTIC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip # many constants
    if E == 1:
        expert, first, end = 0, tl.program_id(0) * BLOCK, num_rows
    else:
        expert, first, end = find_tile(ends_ptr, tl.program_id(0), num_rows, E, PADDED_E, BLOCK)
    if expert < E:
        n = first + tl.arange(0, BLOCK)
        o = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        row = n.to(tl.int64)[:, None]
        here = (n < end)[:, None] & (o < OUT)[None, :]
        w_ptrs = w_ptr + tl.cast(expert, tl.int64) * stride_e + o[None, :] * stride_o
        product = tl.zeros((BLOCK, COLUMNS), dtype=tl.float32)
        for first_r in tl.static_range(0, R, STEP_R):
            r = first_r + tl.arange(0, STEP_R)
            in_h = (n < end)[:, None] & (r < R)[None, :]
            h = tl.load(h_ptr + row * R + r[None, :], mask=in_h, other=0.0)
            in_w = (r < R)[:, None] & (o < OUT)[None, :]
            w = tl.load(w_ptrs + r[:, None] * stride_r, mask=in_w, other=0.0)
            product = tl.dot(h, w, product, input_precision=PRECISION)
        y_ptrs = y_ptr + row * OUT + o[None, :]
        y = tl.load(y_ptrs, mask=here, other=0.0).to(tl.float32) + product
        if STOCHASTIC:
            rounded = to_bf16(y, content_thresholds(y, o))
        else:
            rounded = y.to(y_ptr.dtype.element_ty)
        tl.store(y_ptrs, rounded, mask=here)


def add_product_(
    y_NO: torch.Tensor,
    h_NR: torch.Tensor,
    w_EOR: torch.Tensor,
    ends_E: torch.Tensor | None = None,
    *,
    stochastic: bool,
) -> None:
    """y += h w[e]', in place, added in fp32.

    Args:
        ends_E: the row after each expert's last one; not needed for one.
        stochastic: rounds bf16 as `products.added`, else to nearest.
    """
    experts, out, rank = w_EOR.shape
    stride_e, stride_o, stride_r = w_EOR.stride()
    tiles = num_tiles(len(y_NO), experts) if experts > 1 else triton.cdiv(len(y_NO), BLOCK_N)
    with torch.cuda.device_of(y_NO):
        _add_product_kernel[(tiles, triton.cdiv(out, COLUMNS))](
            y_NO,
            h_NR,
            w_EOR,
            y_NO if ends_E is None else ends_E,
            len(y_NO),
            stride_e,
            stride_o,
            stride_r,
            OUT=out,
            R=rank,
            STEP_R=min(padded(rank), LONGEST_DOT),
            E=experts,
            PADDED_E=triton.next_power_of_2(experts),
            BLOCK=BLOCK_N,
            COLUMNS=COLUMNS,
            STOCHASTIC=stochastic and y_NO.dtype is torch.bfloat16,
            PRECISION=precision(y_NO),
            num_warps=4,
        )


def padded(rank: int) -> int:
    """A dot's columns for a rank: Triton's smallest dot has 16."""
    return max(16, int(triton.next_power_of_2(rank)))


def precision(y: torch.Tensor) -> str:
    """The precision of Triton's dot."""
    return "ieee" if y.dtype is torch.float32 else "tf32"
