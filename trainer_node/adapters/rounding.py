"""The merge of an adapter into a frozen weight, defined to the bit. Pure functions of numbers.

    W' = round(W + delta)        delta = scale * (B A)        scale = alpha / rank

Every path that makes a version must give the same bytes: the kernels of `merge_kernels`, the torch
path of `wire_export`, `hf_export`, several ranks' pieces, a resync. So the order of each sum and
each rounding is part of the definition:

1. `B A` is a chain of fp32 fused multiply-adds, r = 0, 1, ..., R - 1, from 0 (`chain`).
2. One multiplication by `scale`, one addition of W, each rounded to fp32.
3. One rounding to W's dtype, stochastic or to nearest (`rounded`).

A frozen bf16 weight lies on bf16's grid. Rounding to nearest therefore drops every delta below half
a unit in the last place. Stochastic rounding (Forsythe 1950; Gupta et al. 2015, arXiv:1502.02551)
keeps each delta in the mean, and the errors of a dot product's terms cancel:

    bits(W') = (bits(W + delta) + h16) & 0xFFFF0000          for bf16, on sign and magnitude

`h16` is a hash of the run's seed, the tensor's HF name, and the element's row and column, so of its
row-major index (`thresholds`). It does not depend on rank, topology, chunk or version: two versions
differ only where `W + delta` crossed an element's threshold. A delta of exactly zero copies W's
bits. What is finite stays finite, and NaN stays NaN.

Axes: H = rows and W = columns of an HF tensor, seen as a matrix (`boxes.matrix`); R = rank.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch

from orchestrator.protocol.config import RoundingMode

MIX_1, MIX_2 = 0x7FEB352D, 0x846CA68B
"""Factors of a 32-bit finaliser (Wellons 2018, "Prospecting for Hash Functions", lowbias32)."""
BF16_TOP = 3.3895313892515355e38
"""The largest finite bf16: from here up nothing is added."""
BF16_NAN = 0x7FFF
"""What is left of a GPU's NaN, 0x7FFFFFFF."""
FP16_BIAS = 112 << 23
"""What fp32's exponent exceeds fp16's by."""
FP16_NORMAL = 113 << 23
"""Bits of fp16's smallest normal number, 2^-14."""
FP16_TOP, FP16_INF, FP16_NAN = 0x7BFF, 0x7C00, 0x7E00

BLOCK_ELEMENTS = {"cpu": 1 << 15, "cuda": 1 << 24}
"""Elements that are merged at a time. On a CPU they stay in its cache, and torch uses one thread
for so few: with several, each of a merge's hundreds of operations would wait for a busy machine."""
_HALF, _LOW = 1 << 28, (1 << 29) - 1
"""The bits of a double below fp32's last one: all of them, and those of a tie."""
_LEAST = 2.0**-130
"""Products from here up, or 0, make no sum below fp32's normal numbers that is not exact."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """How the merged weights of a run are rounded."""

    mode: RoundingMode = "stochastic"
    seed: int = 1234
    """Chooses the thresholds. A run keeps it in its checkpoints."""

    def key(self, name: str) -> int:
        """64 bits that choose the thresholds of the HF tensor `name`."""
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        return int.from_bytes(digest[:8], "little")


NEAREST = Rounding(mode="nearest")


@dataclass(frozen=True, slots=True)
class Corner:
    """Where a piece begins in its HF tensor: what thresholds are counted from."""

    name: str
    """HF tensor's name."""
    row: int = 0
    column: int = 0

    def word(self, rounding: Rounding) -> int:
        """64 bits from which a kernel counts: low half for rows, high half for columns."""
        key = rounding.key(self.name)
        rows, columns = key & 0xFFFFFFFF, key >> 32
        rows = (rows + self.row) & 0xFFFFFFFF
        columns = (columns + self.column) & 0xFFFFFFFF
        return signed(rows | columns << 32, 64)


# ---------------------------------------------------------------- thresholds


def signed(value: int, bits: int = 32) -> int:
    """The same bits, as torch's signed integers take them."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def shifted(x: torch.Tensor, shift: int, bits: int = 32) -> torch.Tensor:
    """Right by `shift`, zeros from the left: torch's own shift repeats the sign, and x ^ (x >> n)
    would always be positive."""
    return (x >> shift).bitwise_and_((1 << (bits - shift)) - 1)


def _odd_hash(first: int, count: int, device: torch.device | str) -> torch.Tensor:
    """Odd 32-bit numbers [N] of the counters from `first` on, modulo 2^32."""
    counter = torch.arange(first, first + count, dtype=torch.int64, device=device)
    x_N = counter.to(torch.int32)
    x_N = (x_N ^ shifted(x_N, 16)) * signed(MIX_1)
    x_N = (x_N ^ shifted(x_N, 15)) * signed(MIX_2)
    return (x_N ^ shifted(x_N, 16)) | 1


def thresholds(
    word: int, rows: int, columns: int, *, first_row: int = 0, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """int32 [H, W] from 0 to 65,535; `word` as `Corner.word` makes it.

    The high half of a 32-bit product of the row's and the column's hash: one multiplication and one
    shift for each element.
    """
    word &= (1 << 64) - 1
    x_H = _odd_hash((word & 0xFFFFFFFF) + first_row, rows, device)
    y_W = _odd_hash(word >> 32, columns, device)
    return shifted(x_H[:, None] * y_W, 16)


def content_thresholds(sum_HW: torch.Tensor) -> torch.Tensor:
    """int32 [H, W] from 0 to 65,535, of fp32 sums that belong to no tensor: a hash of an
    element's bits and its column."""
    x_HW = sum_HW.view(torch.int32) ^ _odd_hash(0, sum_HW.shape[1], sum_HW.device)
    x_HW ^= shifted(x_HW, 16)
    return shifted(x_HW.mul_(signed(MIX_1)), 16)


# ---------------------------------------------------------------- rounding


def rounded(sum_HW: torch.Tensor, dtype: torch.dtype, h16_HW: torch.Tensor | None) -> torch.Tensor:
    """fp32 sums in a dtype.

    Args:
        h16_HW: `thresholds`; None: to nearest, ties to even.
    """
    if dtype is torch.float32 or h16_HW is None:
        return sum_HW.to(dtype)
    if dtype is torch.bfloat16:
        return _bf16(sum_HW, h16_HW)
    if dtype is torch.float16:
        return _fp16(sum_HW, h16_HW >> 3)
    raise TypeError(f"no stochastic rounding to {dtype}")


def _bf16(sum_HW: torch.Tensor, h16_HW: torch.Tensor) -> torch.Tensor:
    bits = sum_HW.view(torch.int32) + h16_HW * (sum_HW.abs() < BF16_TOP)
    found = (bits >> 16).masked_fill_(sum_HW.isnan(), BF16_NAN)
    return found.to(torch.int16).view(torch.bfloat16)


def _fp16(sum_HW: torch.Tensor, h13_HW: torch.Tensor) -> torch.Tensor:
    """fp16 keeps 13 bits fewer than fp32; its subnormal numbers are multiples of 2^-24."""
    bits = sum_HW.view(torch.int32)
    size = bits & 0x7FFFFFFF
    small = (sum_HW.abs() * 2.0**37).clamp(max=2.0**23).to(torch.int32)
    cut = torch.where(size < FP16_NORMAL, small, size - FP16_BIAS)
    found = ((cut + h13_HW) >> 13).clamp_(max=FP16_TOP)
    found = torch.where(size == 0x7F800000, FP16_INF, found)
    found = torch.where(size > 0x7F800000, FP16_NAN, found)
    found |= (bits >> 16) & 0x8000
    return found.to(torch.int16).view(torch.float16)


# ---------------------------------------------------------------- the sum


def chain(lora_B_HR: torch.Tensor, lora_A_RW: torch.Tensor) -> torch.Tensor:
    """B A in fp32: fused multiply-adds in the order of r, as a GPU computes them.

    torch has none, so each step is a double's: the product is exact there, and its sum is rounded
    to 53 bits and then to 24. Two roundings differ from one only where the first produces a tie for
    the second. There the error of the first decides.
    """
    b_HR, a_RW = lora_B_HR.double(), lora_A_RW.double()
    is_plain = _least(b_HR) * _least(a_RW) >= _LEAST
    sum_HW = b_HR[:, :1] * a_RW[:1]
    single_HW = sum_HW.float()
    before_HW, scratch_HW = torch.empty_like(sum_HW), torch.empty_like(sum_HW, dtype=torch.int64)
    for r in range(1, b_HR.shape[1]):
        before_HW.copy_(single_HW)
        torch.addcmul(before_HW, b_HR[:, r : r + 1], a_RW[r : r + 1], out=sum_HW)
        single_HW.copy_(sum_HW)
        torch.bitwise_xor(sum_HW.view(torch.int64), _HALF, out=scratch_HW).bitwise_and_(_LOW)
        if not is_plain:
            scratch_HW[(sum_HW.abs() < 2.0**-126) & (sum_HW != 0)] = 0
        if int(scratch_HW.count_nonzero()) == scratch_HW.numel():
            continue
        row, column = (scratch_HW == 0).nonzero(as_tuple=True)
        product = b_HR[row, r] * a_RW[r, column]
        single_HW[row, column] = _once_rounded(product, before_HW[row, column])
    return single_HW


def _least(values: torch.Tensor) -> float:
    """Smallest magnitude above 0."""
    sizes = values.abs()
    return float(torch.where(sizes > 0, sizes, math.inf).min()) if sizes.numel() else math.inf


def _once_rounded(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y of doubles, rounded once to fp32: the error of the sum (Knuth's TwoSum) moves it off a
    tie."""
    total = x + y
    part = total - x
    error = (x - (total - part)) + (y - part)
    towards = torch.where(error > 0, math.inf, -math.inf)
    return torch.where(error == 0, total, torch.nextafter(total, towards)).float()


# ---------------------------------------------------------------- the merge


@torch.no_grad()
def delta_of(lora_B_HR: torch.Tensor, lora_A_RW: torch.Tensor, scale: float) -> torch.Tensor:
    """scale * (B A) in fp32, [H, W]."""
    return chain(lora_B_HR, lora_A_RW).mul_(_fp32(scale))


def _fp32(scale: float) -> float:
    """A kernel's scale is an fp32 number."""
    return float(torch.tensor(scale, dtype=torch.float32))


@torch.no_grad()
def merge_matrix(
    weight_HW: torch.Tensor,
    lora_B_HR: torch.Tensor,
    lora_A_RW: torch.Tensor,
    *,
    scale: float,
    rounding: Rounding,
    corner: Corner,
) -> torch.Tensor:
    """W' of a matrix, or of a piece of one; see the module. A new tensor."""
    height, width = weight_HW.shape
    out_HW = torch.empty((height, width), dtype=weight_HW.dtype, device=weight_HW.device)
    if not bool(lora_B_HR.any()) and bool(lora_A_RW.isfinite().all()):
        return out_HW.copy_(weight_HW)
    word = None
    if rounding.mode == "stochastic" and weight_HW.dtype is not torch.float32:
        word = corner.word(rounding)
    step = max(1, BLOCK_ELEMENTS[weight_HW.device.type] // max(1, width))
    for row in range(0, height, step):
        weight = weight_HW[row : row + step]
        delta = delta_of(lora_B_HR[row : row + step], lora_A_RW, scale)
        h16 = None
        if word is not None:
            h16 = thresholds(word, len(weight), width, first_row=row, device=weight.device)
        found = rounded(delta + weight, weight.dtype, h16)
        out_HW[row : row + step] = torch.where(delta == 0, weight, found)
    return out_HW
