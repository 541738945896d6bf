"""What Triton kernels round with: the torch functions of `rounding`, to the bit. Imported only
where Triton is installed.
"""

# Triton takes annotations for globals:
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from trainer_node.adapters.rounding import (
    BF16_TOP,
    FP16_BIAS,
    FP16_INF,
    FP16_NAN,
    FP16_NORMAL,
    FP16_TOP,
    MIX_1,
    MIX_2,
)

_MIX_1: Any = tl.constexpr(MIX_1)
_MIX_2: Any = tl.constexpr(MIX_2)
_BF16_TOP: Any = tl.constexpr(BF16_TOP)
_FP16_BIAS: Any = tl.constexpr(FP16_BIAS)
_FP16_NORMAL: Any = tl.constexpr(FP16_NORMAL)
_FP16_TOP: Any = tl.constexpr(FP16_TOP)
_FP16_INF: Any = tl.constexpr(FP16_INF)
_FP16_NAN: Any = tl.constexpr(FP16_NAN)


@triton.jit
def _odd_hash(x):
    """`rounding._odd_hash` of uint32 counters."""
    x = (x ^ (x >> 16)) * _MIX_1
    x = (x ^ (x >> 15)) * _MIX_2
    return (x ^ (x >> 16)) | 1


@triton.jit
def tile_thresholds(word, o, first_i, i):
    """`rounding.thresholds` of a tile, int32."""
    row = _odd_hash(o.to(tl.uint32) + word.to(tl.uint32))
    column = _odd_hash(i.to(tl.uint32) + (first_i + (word >> 32)).to(tl.uint32))
    return ((row[:, None] * column[None, :]) >> 16).to(tl.int32)


@triton.jit
def content_thresholds(total, column):
    """`rounding.content_thresholds` of a tile, int32."""
    x = total.to(tl.uint32, bitcast=True) ^ _odd_hash(column.to(tl.uint32))[None, :]
    return (((x ^ (x >> 16)) * _MIX_1) >> 16).to(tl.int32)


@triton.jit
def to_bf16(total, h16):
    """`rounding._bf16`."""
    bits = total.to(tl.int32, bitcast=True)
    bits = tl.where(tl.abs(total) < _BF16_TOP, bits + h16, bits)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def to_fp16(total, h13):
    """`rounding._fp16`."""
    bits = total.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    small = tl.minimum(tl.abs(total) * 137438953472.0, 8388608.0).to(tl.int32)  # 2^37, 2^23
    cut = tl.where(size < _FP16_NORMAL, small, size - _FP16_BIAS)
    found = tl.minimum((cut + h13) >> 13, _FP16_TOP)
    found = tl.where(size == 0x7F800000, _FP16_INF, found)
    found = tl.where(size > 0x7F800000, _FP16_NAN, found) | ((bits >> 16) & 0x8000)
    return found.to(tl.int16).to(tl.float16, bitcast=True)
