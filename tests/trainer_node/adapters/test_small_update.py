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
    torchrun(ranks, "adapters.small_update", models[model], *flags)


@pytest.mark.gpu1
@pytest.mark.parametrize(
    ("model", "flags"),
    [("dense_untied", ["head"]), ("moe", []), ("moe", ["dropout"])],
    ids=["dense", "moe", "megatrons_experts"],
)
def test_a_small_update_is_in_a_gpus_forward_pass(models, model: str, flags: list[str]) -> None:
    """TransformerEngine's linears, and the experts' kernels."""
    run_on_gpus(1, "adapters.small_update", models[model], "1", "1", "cuda", *flags)


@pytest.mark.gpu2
@pytest.mark.parametrize("flags", [[], ["no-sequence"]], ids=["sequence", "no_sequence"])
def test_a_small_update_is_in_two_gpus_forward_pass(models, flags: list[str]) -> None:
    run_on_gpus(2, "adapters.small_update", models["moe"], "2", "2", "cuda", *flags)


def test_what_is_added_to_rounded_numbers_is_added_in_the_mean() -> None:
    """Addends of some 1 % of a unit: to nearest nothing of them is left."""
    torch.manual_seed(0)
    out = (1 + torch.rand(512, 1024)).bfloat16().requires_grad_()
    addend = ((0.01 + 0.001 * torch.randn(512, 1024)) * 2.0**-7).bfloat16().requires_grad_()
    assert torch.equal(out + addend, out)
    found = products.added(out, addend)
    mean = float((found.double() - out.double()).mean())
    assert mean == pytest.approx(0.01 * 2.0**-7, rel=0.1)
    found.sum().backward()
    assert bool((out.grad == 1).all()) and bool((addend.grad == 1).all())


def test_a_tokens_sum_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(1)
    out, addend = torch.randn(64, 300).bfloat16(), torch.randn(64, 300).bfloat16() * 1e-3
    order = torch.randperm(64)
    assert torch.equal(
        products.added(out, addend)[order], products.added(out[order], addend[order])
    )
    turned = out.t().contiguous().t()
    assert torch.equal(products.added(turned, addend), products.added(out, addend))


def test_the_errors_of_many_layers_cancel() -> None:
    """The same token and channels, 64 layers with outputs that keep their sign."""
    torch.manual_seed(2)
    mean_O, errors = torch.randn(2048), []
    for _ in range(64):
        out = (mean_O + 0.1 * torch.randn(16, 2048)).bfloat16()
        addend = torch.randn(16, 2048) * 2.0**-9
        errors.append(products.added(out, addend).double() - out.double() - addend.double())
    one = sum(float(e.square().mean()) for e in errors)
    assert float(sum(errors).square().mean()) < 1.2 * one


def test_infinite_numbers_stay() -> None:
    out = torch.tensor([[float("inf"), -float("inf"), float("nan"), 3.3895e38]]).bfloat16()
    found = products.added(out, torch.tensor([[0.0, 1.0, 0.0, 1e36]]).bfloat16())
    assert found[0, 0] == float("inf") and found[0, 1] == -float("inf")
    assert bool(found[0, 2].isnan()) and bool(found[0, 3].isfinite())


def test_compiled_layers_add_without_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    out, addend = torch.randn(64, 300).bfloat16(), torch.randn(64, 300).bfloat16() * 1e-3
    want = products.added(out, addend)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    ours = out.clone().requires_grad_()
    found = products.added(ours, addend)
    assert torch.equal(found, want)
    found.sum().backward()
    assert bool((ours.grad == 1).all())
