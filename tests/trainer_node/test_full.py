"""Full-parameter training on real Megatron: one rank against transformers and torch, other topologies against one rank. See `full.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.trainer_node.test_topologies import reference_loss

TOPOLOGIES = {
    "tp2": ("dense_tied", 2, (2, 1, 1)),
    "pp2_tied": ("dense_tied", 2, (1, 2, 1)),
    "dp2": ("dense_untied", 2, (1, 1, 1)),
    "tp2pp2_tied": ("dense_tied", 4, (2, 2, 1)),
    "moe_ep2": ("moe", 2, (1, 1, 2)),
    "moe_tp2pp2ep2": ("moe", 4, (2, 2, 2)),
}


@pytest.fixture(scope="session")
def single_full(models, torchrun, tmp_path_factory):
    """Model name -> folder with what one rank did; made once."""
    done: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in done:
            out = tmp_path_factory.mktemp(f"full_{name}")
            torchrun(1, "full", out, models[name], 1, 1, 1)
            done[name] = out
        return done[name]

    return get


def facts(folder: Path) -> dict:
    return json.loads((folder / "facts.json").read_text())


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> tuple[float, str]:
    assert ours.keys() == theirs.keys()
    return max(((ours[n] - theirs[n]).abs().max().item(), n) for n in ours)


@pytest.mark.parametrize("name", ["dense_tied", "dense_untied", "moe"])
def test_two_steps_equal_transformers(name: str, models, single_full) -> None:
    """Loss, every gradient and every weight of two AdamW steps against a plain loop over transformers; norms do not decay."""
    from tests.trainer_node.full import LOSS, OPTIM

    out = single_full(name)
    model = AutoModelForCausalLM.from_pretrained(models[name], torch_dtype=torch.float32)
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": OPTIM.weight_decay},
        {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIM.lr, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.eps)
    assert facts(out)["num_parameters"] == sum(p.numel() for p in named.values())
    assert largest_difference(load_file(out / "weights_0.safetensors"), {n: p.detach() for n, p in named.items()})[0] == 0.0
    for step, said in enumerate(facts(out)["steps"]):
        optimizer.zero_grad()
        loss = reference_loss(model, LOSS.clip_low, LOSS.clip_high)
        loss.backward()
        for p in named.values():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in named.items()}
            largest = max(g.abs().max().item() for g in gradients.values())
            difference, where = largest_difference(load_file(out / "gradients.safetensors"), gradients)
            assert difference <= 1e-5 * largest, where
        norm = torch.nn.utils.clip_grad_norm_(named.values(), OPTIM.max_grad_norm)
        optimizer.step()
        assert said["loss"] == pytest.approx(loss.item(), rel=2e-6)
        assert said["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        ours = load_file(out / f"weights_{step + 1}.safetensors")
        difference, where = largest_difference(ours, {n: p.detach() for n, p in named.items()})
        # Adam divides by the square root of a gradient's square: where a gradient is near eps, its rounding shows in the step of lr.
        assert difference < 0.02 * OPTIM.lr, (where, difference)
        assert all(not torch.equal(ours[n], load_file(out / f"weights_{step}.safetensors")[n]) for n in ours)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_topology_changes_nothing(topology: str, models, single_full, torchrun, tmp_path: Path) -> None:
    from tests.trainer_node.full import OPTIM

    name, ranks, sizes = TOPOLOGIES[topology]
    torchrun(ranks, "full", tmp_path, models[name], *sizes)
    one = single_full(name)
    assert facts(one)["num_parameters"] == facts(tmp_path)["num_parameters"]
    for a, b in zip(facts(one)["steps"], facts(tmp_path)["steps"], strict=True):
        for key in ("loss", "grad_norm", "tokens"):
            assert b[key] == pytest.approx(a[key], rel=5e-6), key
    gradients = load_file(one / "gradients.safetensors")
    largest = max(g.abs().max().item() for g in gradients.values())
    difference, where = largest_difference(load_file(tmp_path / "gradients.safetensors"), gradients)
    assert difference <= 1e-5 * largest, where
    for n in range(3):
        ours, theirs = (load_file(folder / f"weights_{n}.safetensors") for folder in (tmp_path, one))
        difference, where = largest_difference(ours, theirs)
        assert difference <= 0.02 * OPTIM.lr * (n > 0), (n, where, difference)
