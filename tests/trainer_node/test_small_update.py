"""A small update moves the trainer's own forward pass: `small_update` on real Megatron."""

from __future__ import annotations

import pytest
import torch

from tests.trainer_node.conftest import Ranks, run_on_gpus
from trainer_node.adapters import products


@pytest.mark.parametrize(
    ("ranks", "model", "flags"),
    [
        (1, "dense_untied", ["1", "1", "head"]),
        (1, "moe", ["1", "1"]),
        (1, "moe", ["1", "1", "dropout"]),
        (2, "dense_untied", ["2", "1"]),
        (2, "moe", ["2", "2", "no-sequence"]),
    ],
    ids=["dense", "moe", "megatrons_experts", "tp2", "tp2_ep2"],
)
def test_a_small_update_is_in_the_forward_pass(
    models, torchrun: Ranks, ranks: int, model: str, flags: list[str]
) -> None:
    torchrun(ranks, "small_update", models[model], *flags)


@pytest.mark.gpu1
@pytest.mark.parametrize(
    ("model", "flags"),
    [("dense_untied", ["head"]), ("moe", []), ("moe", ["dropout"])],
    ids=["dense", "moe", "megatrons_experts"],
)
def test_a_small_update_is_in_a_gpus_forward_pass(models, model: str, flags: list[str]) -> None:
    """TransformerEngine's linears, and the experts' kernels."""
    run_on_gpus(1, "small_update", models[model], "1", "1", "cuda", *flags)


@pytest.mark.gpu2
@pytest.mark.parametrize("flags", [[], ["no-sequence"]], ids=["sequence", "no_sequence"])
def test_a_small_update_is_in_two_gpus_forward_pass(models, flags: list[str]) -> None:
    run_on_gpus(2, "small_update", models["moe"], "2", "2", "cuda", *flags)


def test_what_is_added_to_rounded_numbers_is_added_in_the_mean() -> None:
    """An addend of 1 % of a unit: to nearest nothing of it is left."""
    torch.manual_seed(0)
    out = torch.ones(512, 1024, dtype=torch.bfloat16).requires_grad_()
    addend = torch.full_like(out, 0.01 * 2.0**-7).detach().requires_grad_()
    assert torch.equal(out + addend, out)
    found = products.added(out, addend)
    mean = float((found.double() - 1).mean())
    assert mean == pytest.approx(0.01 * 2.0**-7, rel=0.1)
    found.sum().backward()
    assert bool((out.grad == 1).all()) and bool((addend.grad == 1).all())
