"""The merge's definition, against exact fractions and against the integers of the smoke's
reference, which share no code with it.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from tests.numerics import SIGMAS
from trainer_node.adapters.merge import merged as on_device
from trainer_node.adapters.rounding import (
    NEAREST,
    Corner,
    Rounding,
    chain,
    delta_of,
    merge_matrix,
    rounded,
    thresholds,
)
from trainer_node.tools.reference import stochastic_bf16

SEEDED = Rounding(seed=7)
NAME = "model.layers.3.mlp.experts.5.down_proj.weight"


def merged(
    weight: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    *,
    scale: float = 2.0,
    rounding: Rounding = SEEDED,
    corner: Corner | None = None,
) -> torch.Tensor:
    where = corner or Corner(NAME)
    return merge_matrix(weight, b, a, scale=scale, rounding=rounding, corner=where)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view({2: torch.int16, 4: torch.int32}[values.element_size()])


# ------------------------------------------------------------ the sum


def to_fp32(exact: Fraction) -> float:
    """The nearest fp32 number, ties to even, subnormal ones included."""
    if exact == 0:
        return 0.0
    size, exponent = abs(exact), -126
    while Fraction(2) ** (exponent + 1) <= size:
        exponent += 1
    unit = Fraction(2) ** (exponent - 23)
    whole = size // unit
    rest = size / unit - whole
    whole += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1)
    return math.copysign(float(whole * unit), exact)


def exact_chain(b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Each step a fused multiply-add: the exact sum, rounded once."""
    found = torch.zeros(b.shape[0], a.shape[1])
    for o, i in np.ndindex(*found.shape):
        total = 0.0
        for r in range(b.shape[1]):
            total = to_fp32(Fraction(b[o, r].item()) * Fraction(a[r, i].item()) + Fraction(total))
        found[o, i] = total
    return found


def test_the_chain_is_one_of_fused_multiply_adds() -> None:
    torch.manual_seed(0)
    b, a = torch.randn(12, 5), torch.randn(5, 14)
    assert torch.equal(chain(b, a), exact_chain(b, a))
    plain = torch.zeros(12, 14)  # a product rounded before it is added is another number
    for r in range(5):
        plain += b[:, r : r + 1] * a[r]
    assert not torch.equal(plain, exact_chain(b, a))


def test_a_tie_of_two_roundings_is_decided_by_the_first_ones_error() -> None:
    """1 or 1 + 2^-23, and a product that is half of that unit but for 2^-46 of itself."""
    half, step = 2.0**-12, 2.0**-23
    b = torch.tensor([[1.0, half * (1 + step)], [1 + step, half * (1 + step)]])
    a = torch.tensor([[1.0, 1.0], [half * (1 - step), half * (step - 1)]])
    want = exact_chain(b, a)
    assert torch.equal(chain(b, a), want)
    doubles = b.double() @ a.double()
    assert not torch.equal(doubles.float(), want), "no tie here would round twice"


def test_sums_below_the_normal_numbers() -> None:
    step = 2.0**-23
    tie_b = torch.tensor([[1.0, 2.0**-75 * (1 + step)]])
    tie_a = torch.tensor([[2.0**-127 + 2.0**-149], [2.0**-75 * (1 - step)]])
    assert torch.equal(chain(tie_b, tie_a), exact_chain(tie_b, tie_a))
    generator = torch.Generator().manual_seed(0)
    b = torch.randint(1, 2**24, (10, 4), generator=generator).float() * 2.0**-90
    a = torch.randint(-(2**24), 2**24, (4, 12), generator=generator).float() * 2.0**-85
    assert torch.equal(chain(b, a), exact_chain(b, a))


# ------------------------------------------------------------ stochastic rounding


@pytest.mark.parametrize("shape", [(1, 1), (3, 700), (129, 64), (40, 4097)])
def test_bf16_equals_the_integers_of_the_reference(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    weight = torch.randn(shape).bfloat16()
    b, a = torch.randn(shape[0], 8) * 1e-4, torch.randn(8, shape[1])
    got = merged(weight, b, a)
    total = (delta_of(b, a, 2.0) + weight).numpy()
    want = torch.from_numpy(stochastic_bf16(total, NAME, SEEDED.seed)).bfloat16()
    assert torch.equal(bits(got), bits(want))
    assert not torch.equal(bits(got), bits(merged(weight, b, a, rounding=NEAREST))) or shape == (
        1,
        1,
    )


def test_every_bit_of_a_threshold_counts() -> None:
    """A number with a fraction f of 65,536 goes up where the threshold is at least 65,536 - f."""
    h16, base = thresholds(Corner(NAME).word(SEEDED), 64, 256).clamp(min=1), 0x3F800000
    spread = torch.arange(64 * 256, dtype=torch.int32).view(64, 256) * 4
    for fraction in (spread, 65535 - h16, 65536 - h16):  # the last two: just not, and just
        for sign in (0, -(2**31)):
            total = (base | fraction | sign).view(torch.float32)
            got = bits(rounded(total, torch.bfloat16, h16)).int() & 0x7FFF
            assert torch.equal(got - (base >> 16), ((fraction + h16) >= 65536).int())


def test_fp16_goes_up_by_the_thresholds_upper_13_bits() -> None:
    torch.manual_seed(2)
    total = torch.randn(64, 64) * torch.exp2(torch.randint(-28, 15, (64, 64)).float())
    total[0, :4] = torch.tensor([65504.0, 65519.0, 1e9, -1e9])
    h16 = thresholds(Corner(NAME).word(SEEDED), 64, 64)
    got = rounded(total, torch.float16, h16)
    for place in np.ndindex(64, 64):
        exact = abs(Fraction(total[place].item()))
        exponent = max(-14, math.frexp(float(exact))[1] - 1)
        unit = Fraction(2) ** (exponent - 10)
        cut = int(exact / unit * 2**13)  # what is below its 13th bit is dropped
        want = min(((cut + (int(h16[place]) >> 3)) >> 13) * unit, Fraction(65504))
        assert got[place].item() == math.copysign(float(want), total[place].item()), place


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rounding", [SEEDED, NEAREST])
def test_no_delta_copies_the_bits(dtype: torch.dtype, rounding: Rounding) -> None:
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    weight = torch.randint(-(2**15), 2**15, (64, 96), dtype=torch.int64)
    weight = (weight << (8 * dtype.itemsize - 16)).to(integers).view(dtype)
    assert bool(weight.isnan().any())
    weight[0, :2] = torch.tensor([-0.0, 0.0])
    zeros, a = torch.zeros(64, 3), torch.randn(3, 96)
    a[:, 0] = 1.0  # its product with 0 is +0, and -0 + 0 would be +0
    assert torch.equal(bits(merged(weight, zeros, a, rounding=rounding)), bits(weight))
    zeros[1:, 2] = 1.0  # now only row 0 has no delta
    a[2, 5] = 0.0
    got = merged(weight, zeros, a, rounding=rounding)
    assert torch.equal(bits(got)[0], bits(weight)[0])
    assert torch.equal(bits(got)[:, 5], bits(weight)[:, 5])
    assert torch.equal(got.isnan(), weight.isnan())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_finite_stays_finite_and_infinity_infinite(dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    weight = torch.tensor([[top, -top, math.inf, -math.inf] * 64]).to(dtype)
    b, a = torch.tensor([[1.0]]), weight.float().sign() * (top * 2.0**-9)  # half a unit or more
    got = merged(weight, b, a, scale=1.0)
    assert torch.equal(got, weight)


def test_a_delta_that_is_no_number_is_not_hidden() -> None:
    got = merged(torch.ones(2, 2).bfloat16(), torch.tensor([[math.nan], [1.0]]), torch.ones(1, 2))
    assert bool(got[0].isnan().all()) and not bool(got[1].isnan().any())


# ------------------------------------------------------------ what it is for


def served(weight: torch.Tensor, b: torch.Tensor, a: torch.Tensor, rounding: Rounding) -> float:
    """The share of delta in the merged weights, in standard errors from 1 for an unbiased one."""
    delta = delta_of(b, a, 2.0).double()
    got = merged(weight, b, a, rounding=rounding).double() - weight.double()
    return float((got * delta).sum() / (delta * delta).sum())


@pytest.mark.parametrize("size", [1e-7, 1e-5, 1e-3])
def test_an_update_of_any_size_is_served_in_the_mean(size: float) -> None:
    torch.manual_seed(3)
    weight = (torch.randn(512, 1024) * 0.05).bfloat16()
    b, a = torch.randn(512, 8) * size, torch.randn(8, 1024) / 32
    delta = delta_of(b, a, 2.0).double()
    error = merged(weight, b, a).double() - weight.double() - delta
    standard = float((delta * error).square().sum().sqrt() / delta.square().sum())
    assert abs(served(weight, b, a, SEEDED) - 1) < SIGMAS * standard
    if size <= 1e-5:
        assert served(weight, b, a, NEAREST) < 0.2


def test_versions_differ_only_where_a_threshold_was_crossed() -> None:
    """Of two deltas that differ by 1 %, as many elements differ as the difference has units; with
    thresholds drawn again it would be twice the delta's own."""
    torch.manual_seed(4)
    weight = (torch.randn(512, 1024) * 0.05).bfloat16()
    b, a = torch.randn(512, 8) * 1e-4, torch.randn(8, 1024) / 32
    one, other = merged(weight, b, a), merged(weight, b * 1.01, a)
    changed = float((one != weight).double().mean())
    crossed = float((one != other).double().mean())
    anew = float((one != merged(weight, b * 1.01, a, rounding=Rounding(seed=8))).double().mean())
    assert crossed < 0.03 * changed < changed < anew


def test_thresholds_are_uniform_and_unrelated() -> None:
    """Mean, spread, and correlation of rows, of columns, and of tensors, as of random numbers."""
    count = 2048
    found = [
        (thresholds(Corner(n).word(SEEDED), 512, count).double() + 0.5) / 65536 - 0.5
        for n in ("a", "b")
    ]
    for one in found:
        assert abs(float(one.mean())) < SIGMAS * math.sqrt(1 / 12 / one.numel())
        assert abs(float(one.square().mean()) * 12 - 1) < SIGMAS * math.sqrt(0.8 / one.numel())
    (one, other), bound = found, SIGMAS / math.sqrt(count)
    related = torch.corrcoef(one).fill_diagonal_(0)
    assert float(related.abs().max()) < bound
    assert float(torch.corrcoef(one.t()[:512]).fill_diagonal_(0).abs().max()) < SIGMAS / 512**0.5
    assert abs(float((one * other).mean())) * 12 < SIGMAS / math.sqrt(one.numel())


def test_a_piece_has_the_bits_of_the_whole() -> None:
    torch.manual_seed(5)
    weight = (torch.randn(300, 500) * 0.05).bfloat16()
    b, a = torch.randn(300, 4) * 1e-4, torch.randn(4, 500)
    whole = merged(weight, b, a)
    for row, rows, column, columns in ((0, 300, 0, 500), (7, 1, 499, 1), (100, 200, 13, 400)):
        place = slice(row, row + rows), slice(column, column + columns)
        corner = Corner(NAME, row, column)
        piece = merged(weight[place], b[place[0]], a[:, place[1]], corner=corner)
        assert torch.equal(bits(piece), bits(whole[place]))
    assert not torch.equal(whole, merged(weight, b, a, corner=Corner("another.weight")))


# ------------------------------------------------------------ on a GPU


@pytest.mark.gpu1
@pytest.mark.parametrize("rank", [1, 8, 32, 64])
def test_the_kernel_is_the_definition(rank: int) -> None:
    """Some 1e9 elements: fp32 values before the rounding, and bf16 after it, bit for bit."""
    generator = torch.Generator("cuda").manual_seed(rank)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    for shape in ((4096, 14336), (14336, 4096), (3001, 5003), (65536, 2048)):
        b, a = normal(shape[0], rank) * 1e-4, normal(rank, shape[1])
        nothing = torch.full(shape, -0.0, device="cuda")
        weight = (normal(*shape) * 0.05).bfloat16()
        for base in (nothing, weight):
            for scale in (2.0, 1.7):
                for rounding in (SEEDED, NEAREST)[: 1 if base is nothing else 2]:
                    kwargs: dict[str, Any] = {"rounding": rounding, "corner": Corner(NAME, 3, 5)}
                    got = on_device(base, b, a, scale=scale, **kwargs)
                    want = merge_matrix(base, b, a, scale=scale, **kwargs)
                    different = int((bits(got) != bits(want)).sum())
                    assert not different, f"{different} of {got.numel()} differ: {shape}"


@pytest.mark.gpu1
def test_a_gpu_and_a_cpu_agree() -> None:
    torch.manual_seed(9)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        weight = (torch.randn(700, 1300) * 0.05).to(dtype)
        b, a = torch.randn(700, 16) * 1e-3, torch.randn(16, 1300)
        kwargs: dict[str, Any] = {"scale": 1.7, "rounding": SEEDED, "corner": Corner(NAME)}
        got = on_device(weight.cuda(), b.cuda(), a.cuda(), **kwargs)
        assert torch.equal(bits(got).cpu(), bits(merge_matrix(weight, b, a, **kwargs)))
        got = on_device(weight.cuda(), b.t().contiguous().cuda().t(), a.cuda(), **kwargs)
        assert torch.equal(bits(got).cpu(), bits(merge_matrix(weight, b, a, **kwargs)))
