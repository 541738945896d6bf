"""Triton kernels of `experts`, for the steps between the grouped matrix products.

Rows come sorted by expert, and a program finds its own one (`product_kernels`).

Axes: N = rows, E = experts, H = hidden size, F = an expert's inner size, R = columns of an
adapter's hidden layer (padded), T = tokens, K = experts of a token.
"""

# Triton takes annotations for globals:
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from trainer_node.adapters.product_kernels import (
    BLOCK_N,
    find_tile,
    num_tiles,
    padded,
    precision,
)
from trainer_node.model.grouped import GateUp

BLOCK_F = 64
COMBINE_COLUMNS = 1024


@triton.jit
def _swiglu_kernel(
    y_ptr, h_ptr, b_ptr, p_ptr, ends_ptr, out_ptr, num_rows,
    F: tl.constexpr, R: tl.constexpr, PADDED_R: tl.constexpr, E: tl.constexpr,
    PADDED_E: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip # many constants
    expert, first, end = find_tile(ends_ptr, tl.program_id(0), num_rows, E, PADDED_E, BLOCK)
    if expert < E:
        n = first + tl.arange(0, BLOCK)
        f = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        here = (n < end)[:, None] & (f < F)[None, :]
        row = n.to(tl.int64)[:, None]
        gate = tl.load(y_ptr + row * (2 * F) + f[None, :], mask=here, other=0.0).to(tl.float32)
        up = tl.load(y_ptr + row * (2 * F) + F + f[None, :], mask=here, other=0.0).to(tl.float32)
        if R > 0:
            r = tl.arange(0, PADDED_R)
            in_h = (n < end)[:, None] & (r < R)[None, :]
            in_b = (r < R)[:, None] & (f < F)[None, :]
            b = b_ptr + expert.to(tl.int64) * (4 * F * R) + r[:, None] + f[None, :] * (2 * R)
            h_gate = tl.load(h_ptr + row * (2 * R) + r[None, :], mask=in_h, other=0.0)
            gate += tl.dot(h_gate, tl.load(b, mask=in_b, other=0.0), input_precision=PRECISION)
            h_up = tl.load(h_ptr + row * (2 * R) + R + r[None, :], mask=in_h, other=0.0)
            gain = tl.load(b + 2 * F * R + R, mask=in_b, other=0.0)
            up += tl.dot(h_up, gain, input_precision=PRECISION)
        p = tl.load(p_ptr + n, mask=n < end, other=0.0).to(tl.float32)
        out = gate * tl.sigmoid(gate) * up * p[:, None]
        tl.store(out_ptr + row * F + f[None, :], out.to(out_ptr.dtype.element_ty), mask=here)


@triton.jit
def _swiglu_backward_kernel(
    y_ptr, h_ptr, b_ptr, p_ptr, ends_ptr, grad_ptr, down_h_ptr, down_a_ptr, act_ptr, grad_y_ptr,
    grad_p_ptr, num_rows,
    F: tl.constexpr, R: tl.constexpr, DOWN_R: tl.constexpr, PADDED_R: tl.constexpr,
    PADDED_DOWN_R: tl.constexpr,
    E: tl.constexpr, PADDED_E: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip # many constants
    expert, first, end = find_tile(ends_ptr, tl.program_id(0), num_rows, E, PADDED_E, BLOCK)
    if expert < E:
        n = first + tl.arange(0, BLOCK)
        row = n.to(tl.int64)[:, None]
        p = tl.load(p_ptr + n, mask=n < end, other=0.0).to(tl.float32)
        grad_p = tl.zeros((BLOCK,), dtype=tl.float32)
        if R > 0:
            r = tl.arange(0, PADDED_R)
            in_h = (n < end)[:, None] & (r < R)[None, :]
            h_gate = tl.load(h_ptr + row * (2 * R) + r[None, :], mask=in_h, other=0.0)
            h_up = tl.load(h_ptr + row * (2 * R) + R + r[None, :], mask=in_h, other=0.0)
            b_expert = b_ptr + expert.to(tl.int64) * (4 * F * R)
        if DOWN_R > 0:
            d = tl.arange(0, PADDED_DOWN_R)
            down_h = tl.load(
                down_h_ptr + row * DOWN_R + d[None, :],
                mask=(n < end)[:, None] & (d < DOWN_R)[None, :],
                other=0.0,
            )
            down_a = down_a_ptr + expert.to(tl.int64) * (DOWN_R * F)
        for column in range(0, F, COLUMNS):
            f = column + tl.arange(0, COLUMNS)
            here = (n < end)[:, None] & (f < F)[None, :]
            gate = tl.load(y_ptr + row * (2 * F) + f[None, :], mask=here, other=0.0).to(tl.float32)
            up = tl.load(y_ptr + row * (2 * F) + F + f[None, :], mask=here, other=0.0).to(
                tl.float32
            )
            grad = tl.load(grad_ptr + row * F + f[None, :], mask=here, other=0.0).to(tl.float32)
            if R > 0:
                in_b = (r < R)[:, None] & (f < F)[None, :]
                b = b_expert + r[:, None] + f[None, :] * (2 * R)
                gate += tl.dot(h_gate, tl.load(b, mask=in_b, other=0.0), input_precision=PRECISION)
                up += tl.dot(
                    h_up,
                    tl.load(b + 2 * F * R + R, mask=in_b, other=0.0),
                    input_precision=PRECISION,
                )
            if DOWN_R > 0:
                in_a = (d < DOWN_R)[:, None] & (f < F)[None, :]
                a = tl.load(down_a + d[:, None] * F + f[None, :], mask=in_a, other=0.0)
                grad += tl.dot(down_h, a, input_precision=PRECISION)
            s = tl.sigmoid(gate)
            silu = gate * s
            product = silu * up
            grad_p += tl.sum(grad * product, 1)
            tl.store(
                act_ptr + row * F + f[None, :],
                (product * p[:, None]).to(act_ptr.dtype.element_ty),
                mask=here,
            )
            grad = grad * p[:, None]
            grad_gate = grad * up * (s * (1 + gate * (1 - s)))
            tl.store(
                grad_y_ptr + row * (2 * F) + f[None, :],
                grad_gate.to(grad_y_ptr.dtype.element_ty),
                mask=here,
            )
            tl.store(
                grad_y_ptr + row * (2 * F) + F + f[None, :],
                (grad * silu).to(grad_y_ptr.dtype.element_ty),
                mask=here,
            )
        tl.store(grad_p_ptr + n, grad_p, mask=n < end)


@triton.jit
def _combine_kernel(
    y_ptr, row_ptr, out_ptr, H: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for k in tl.static_range(K):
        row = tl.load(row_ptr + t * K + k).to(tl.int64)
        total += tl.load(y_ptr + row * H + c, mask=c < H, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * H + c, total.to(out_ptr.dtype.element_ty), mask=c < H)


def swiglu(inner: GateUp) -> torch.Tensor:
    """`experts.swiglu`."""
    y_N2F, (num_rows, width) = inner.y_N2F, inner.y_N2F.shape
    out_NF = y_N2F.new_empty(num_rows, width // 2)
    grid = (num_tiles(num_rows, len(inner.ends_E)), triton.cdiv(width // 2, BLOCK_F))
    with torch.cuda.device_of(y_N2F):
        _swiglu_kernel[grid](*_inputs(inner), out_NF, num_rows, **_shape(inner), num_warps=4)
    return out_NF


def swiglu_backward(
    inner: GateUp,
    grad_NF: torch.Tensor,
    down_NR: torch.Tensor | None,
    down_A_ERF: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`experts.swiglu_backward`."""
    y_N2F, num_rows = inner.y_N2F, len(inner.y_N2F)
    act_NF, grad_y_N2F = torch.empty_like(grad_NF), torch.empty_like(y_N2F)
    grad_p_N = torch.empty(num_rows, dtype=torch.float32, device=y_N2F.device)
    down_rank = 0 if down_NR is None else down_NR.shape[1]
    with torch.cuda.device_of(y_N2F):
        _swiglu_backward_kernel[(num_tiles(num_rows, len(inner.ends_E)),)](
            *_inputs(inner),
            grad_NF,
            _or(down_NR, y_N2F),
            _or(down_A_ERF, y_N2F),
            act_NF,
            grad_y_N2F,
            grad_p_N,
            num_rows,
            **_shape(inner),
            DOWN_R=down_rank,
            PADDED_DOWN_R=padded(down_rank),
            num_warps=4,
        )
    return act_NF, grad_y_N2F, grad_p_N


def combine(y_NH: torch.Tensor, row_TK: torch.Tensor) -> torch.Tensor:
    """`experts.combine`."""
    (tokens, top_k), hidden = row_TK.shape, y_NH.shape[1]
    out_TH = y_NH.new_empty(tokens, hidden)
    columns = min(COMBINE_COLUMNS, triton.next_power_of_2(hidden))
    with torch.cuda.device_of(y_NH):
        _combine_kernel[(tokens, triton.cdiv(hidden, columns))](
            y_NH, row_TK, out_TH, H=hidden, K=top_k, COLUMNS=columns, num_warps=4
        )
    return out_TH


def _inputs(inner: GateUp) -> tuple[torch.Tensor, ...]:
    """Both kernels' first arguments."""
    y_N2F = inner.y_N2F
    return (
        y_N2F,
        _or(inner.h_N2R, y_N2F),
        _or(inner.lora_B_E2F2R, y_N2F),
        inner.probs_N,
        inner.ends_E,
    )


def _shape(inner: GateUp) -> dict[str, Any]:
    rank = 0 if inner.h_N2R is None else inner.h_N2R.shape[1] // 2
    return {
        "F": inner.y_N2F.shape[1] // 2,
        "R": rank,
        "PADDED_R": padded(rank),
        "E": len(inner.ends_E),
        "PADDED_E": triton.next_power_of_2(len(inner.ends_E)),
        "BLOCK": BLOCK_N,
        "COLUMNS": BLOCK_F,
        "PRECISION": precision(inner.y_N2F),
    }


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """An address for an argument that the kernel does not read."""
    return other if tensor is None else tensor
