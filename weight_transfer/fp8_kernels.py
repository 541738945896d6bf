"""Triton kernel of `weight_transfer.fp8.per_block`, and what other kernels quantise with.
Imported only where Triton is installed.

    scale = max(largest, 1e-4) / 448        inverse = 1 / scale        e4m3 = round(w * inverse)

vLLM 0.26 to 0.32 compile these lines with TorchInductor. On CUDA it multiplies by the reciprocal of
448, and its `1 / scale` is Triton's: PTX `div.full.f32`, off by up to 2 units in the last place. A
weight next to a tie then rounds differently than with torch. `FAST` follows that, on the same
instruction. Without `RECIPROCAL` and `FAST` both divisions are rounded, as on a CPU.

Axes: T = tensors of one shape, O = out features, I = in features.
"""

# Triton takes annotations for globals:
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from orchestrator.protocol.messages import FP8_BLOCK

NUM_WARPS = 8


@triton.jit
def magnitude_bits(values):
    """The absolute values' bit patterns as int32. They sort like the values; NaN sorts last."""
    return tl.abs(values).to(tl.int32, bitcast=True)


@triton.jit
def block_scale(largest, RECIPROCAL: tl.constexpr):
    """The scale of a block."""
    largest = tl.maximum(largest, 1e-4)
    return largest * (1.0 / 448.0) if RECIPROCAL else tl.div_rn(largest, 448.0)


@triton.jit
def inverse_of(scale, FAST: tl.constexpr):
    """The factor of a block's values."""
    return 1.0 / scale if FAST else tl.div_rn(1.0, scale)


@triton.jit
def codes(values):
    """The bits of e4m3, rounded to nearest even."""
    return values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _block_kernel(
    w_ptr,
    out_ptr,
    scales_ptr,
    num_rows,
    num_columns,
    down,
    across,
    RECIPROCAL: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    block = program % (down * across)
    first = (program // (down * across)).to(tl.int64) * num_rows * num_columns
    o = (block // across) * BLOCK + tl.arange(0, BLOCK)
    i = (block % across) * BLOCK + tl.arange(0, BLOCK)
    at = first + o.to(tl.int64)[:, None] * num_columns + i[None, :]
    inside = (o < num_rows)[:, None] & (i < num_columns)[None, :]
    w = tl.load(w_ptr + at, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.max(magnitude_bits(w), axis=1), axis=0).to(tl.float32, bitcast=True)
    scale = block_scale(largest, RECIPROCAL)
    tl.store(scales_ptr + program, scale)
    tl.store(out_ptr + at, codes(w * inverse_of(scale, FAST)), mask=inside)


def per_block(
    weights_TOI: torch.Tensor, *, reciprocal: bool, fast: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [T, O, I], fp32 scales [T, blocks of O, blocks of I]), queued on the current stream."""
    weights_TOI = weights_TOI.contiguous()
    count, height, width = weights_TOI.shape
    down, across = triton.cdiv(height, FP8_BLOCK), triton.cdiv(width, FP8_BLOCK)
    out_TOI = torch.empty_like(weights_TOI, dtype=torch.uint8)
    scales = torch.empty(count, down, across, dtype=torch.float32, device=weights_TOI.device)
    with torch.cuda.device_of(weights_TOI):
        _block_kernel[(count * down * across,)](
            weights_TOI,
            out_TOI,
            scales,
            height,
            width,
            down,
            across,
            RECIPROCAL=reciprocal,
            FAST=fast,
            BLOCK=FP8_BLOCK,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    return out_TOI.view(torch.float8_e4m3fn), scales


@triton.jit
def _scales_kernel(
    largest_ptr,
    scales_ptr,
    inverse_ptr,
    count,
    RECIPROCAL: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scale = block_scale(tl.load(largest_ptr + at, mask=at < count, other=0.0), RECIPROCAL)
    tl.store(scales_ptr + at, scale, mask=at < count)
    tl.store(inverse_ptr + at, inverse_of(scale, FAST), mask=at < count)


def scales_of_blocks(
    largest: torch.Tensor, *, reciprocal: bool, fast: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales, factors) of blocks with these largest magnitudes, all fp32; queued as above."""
    largest = largest.contiguous()
    scales, inverse = torch.empty_like(largest), torch.empty_like(largest)
    with torch.cuda.device_of(largest):
        _scales_kernel[(triton.cdiv(largest.numel(), 1024),)](
            largest,
            scales,
            inverse,
            largest.numel(),
            RECIPROCAL=reciprocal,
            FAST=fast,
            BLOCK=1024,
            enable_fp_fusion=False,
        )
    return scales, inverse
