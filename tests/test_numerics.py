"""The bounds of `numerics` against numbers added in many orders."""

from __future__ import annotations

import pytest
import torch

from tests.numerics import chain_error_bound, gamma, sum_error_bound, unit_roundoff


@pytest.mark.parametrize(
    ("dtype", "u"), [(torch.float32, 2**-24), (torch.bfloat16, 2**-8), (torch.float64, 2**-53)]
)
def test_unit_roundoff(dtype: torch.dtype, u: float) -> None:
    one = torch.ones((), dtype=dtype)
    assert unit_roundoff(dtype) == u and gamma(dtype, 1) == u / (1 - u)
    assert one + u == one and one + 2 * u > one


@pytest.mark.parametrize("count", [2, 26, 1000])
def test_a_sum_in_any_order_is_within_its_bound_and_a_lost_term_is_not(count: int) -> None:
    terms = torch.rand(count, generator=torch.Generator().manual_seed(count)) * 6 + 1
    sums = set()
    for seed in range(50):
        total = torch.zeros(())
        for n in torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist():
            total = total + terms[n]
        sums.add(total.item())
    bound = sum_error_bound(torch.float32, count=count, magnitude=terms.max().item())
    assert max(sums) - min(sums) <= bound < terms.min().item() * (1 if count < 1000 else 2)


def test_a_chain_of_products_is_within_its_bound() -> None:
    """Twelve layers of 64, in fp32 against fp64: the bound holds, and is no more than a hundred
    times what there is.
    """
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(64, 64, generator=generator, dtype=torch.float64) / 8 for _ in range(12)]
    one = torch.randn(500, 64, generator=generator, dtype=torch.float64)
    other = one.float()
    one = other.double()
    for w in (w.float() for w in weights):
        other = other @ w
        one = one @ w.double()
    found = (one - other).abs().max().item()
    bound = chain_error_bound(
        torch.float32, roundings=12 * 64, magnitude=one.square().mean().sqrt().item()
    )
    assert found <= bound <= 100 * found


def test_a_constant_for_each_term_is_not_a_bound() -> None:
    """26 terms that add up to 152.457: their order moves the sum by more than 1e-6 a term."""
    terms = torch.rand(26, generator=torch.Generator().manual_seed(26)) * 6 + 1
    terms *= 152.457 / terms.sum()
    orders = [
        torch.randperm(26, generator=torch.Generator().manual_seed(seed)) for seed in range(50)
    ]
    sums = [sum(terms[order].tolist(), torch.zeros(())).item() for order in orders]
    assert (
        26e-6
        < max(sums) - min(sums)
        <= sum_error_bound(torch.float32, count=26, magnitude=terms.max().item())
    )
