"""Layers' inputs in host memory: by hand on torch's own checkpoints, and on real Megatron. See
`host_inputs.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.trainer_node.conftest import run_on_gpus
from trainer_node.model import layer_inputs
from trainer_node.model.layer_inputs import LayerInputs

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "sizes"), [("dense_untied", (1, 1, 1)), ("moe", (2, 1, 2)), ("dense_tied", (1, 2, 1))]
)
def test_gradients_have_the_same_bits(
    name: str, sizes: tuple[int, int, int], models, torchrun, tmp_path: Path
) -> None:
    """On one rank, on tensor ranks that share a mixture's experts, and in a pipeline."""
    ranks = sizes[0] * sizes[1]
    torchrun(ranks, "training.host_inputs", tmp_path, models[name], *sizes)


@pytest.mark.gpu1
@pytest.mark.parametrize("name", ["dense_untied", "moe"])
def test_gradients_are_the_same_on_a_gpu(name: str, models, tmp_path: Path) -> None:
    run_on_gpus(1, "training.host_inputs", tmp_path, models[name], 1, 1, 1, "cuda")


def layers_of(inputs: LayerInputs, *, is_on: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of an input and of what all layers share, after three layers."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(5, 1, 8, generator=generator, requires_grad=True)
    shared = torch.randn(5, 1, 4, generator=generator, requires_grad=True)

    def layer(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return (x * table.sum()).tanh() + x

    with inputs.on_host(is_on):
        x = hidden + 0.0
        for _ in range(3):
            x = checkpoint(layer, x, shared, use_reentrant=True)
    x.square().sum().backward()
    assert hidden.grad is not None
    assert shared.grad is not None
    return hidden.grad, shared.grad


def test_only_hidden_states_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three inputs of 5 x 8 values; what all layers share stays, once."""
    monkeypatch.setattr(layer_inputs, "CHUNK_BYTES", 48)
    inputs = LayerInputs(hidden_size=8, device=CPU)
    kept = layers_of(inputs, is_on=False)
    assert inputs.moved_bytes == 0
    moved = layers_of(inputs, is_on=True)
    assert inputs.moved_bytes == 3 * 5 * 8 * 4
    assert all(torch.equal(a, b) for a, b in zip(kept, moved, strict=True))


def test_a_pass_that_fails_leaves_nothing() -> None:
    inputs = LayerInputs(hidden_size=8, device=CPU)

    def fail() -> None:
        checkpoint(torch.tanh, torch.ones(5, 1, 8, requires_grad=True), use_reentrant=True)
        raise ArithmeticError

    with pytest.raises(ArithmeticError), inputs.on_host():
        fail()
    assert inputs._last is None
    assert torch.equal(layers_of(inputs, is_on=True)[0], layers_of(inputs, is_on=False)[0])
