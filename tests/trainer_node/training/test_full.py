"""Full-parameter training on real Megatron: one rank against transformers and torch, other
topologies against one rank. See `full.py`.
"""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer_node import bounds
from tests.trainer_node.data import arrays
from tests.trainer_node.references import reference_loss
from tests.trainer_node.tiny import hf_model

TOKENS = int(arrays()["loss_mask"].sum())
# In this order; each loads the checkpoint of the one before it, and last a single rank, which all
# are compared with.
TOPOLOGIES = {"dense_tied": ((2, (2, 1, 1)), (2, (1, 2, 1))), "moe": ((2, (1, 1, 2)),)}


@pytest.fixture(scope="session")
def chain(models, torchrun, tmp_path_factory):
    """Model name -> folders with what each topology did, the single rank's last; made once."""

    @functools.cache
    def get(name: str) -> list[Path]:
        folders: list[Path] = []
        for ranks, sizes in (*TOPOLOGIES[name], (1, (1, 1, 1))):
            out = tmp_path_factory.mktemp(f"full_{name}")
            torchrun(ranks, "training.full", out, models[name], *sizes, *folders[-1:])
            folders.append(out)
        return folders

    return get


def facts(folder: Path) -> dict:
    return json.loads((folder / "facts.json").read_text())


def largest_difference(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]
) -> tuple[float, str]:
    assert ours.keys() == theirs.keys()
    return max(((ours[n] - theirs[n]).abs().max().item(), n) for n in ours)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_two_steps_equal_transformers(name: str, models, chain) -> None:
    """Loss, every gradient and every weight of two AdamW steps against a plain loop over
    transformers; norms do not decay. (The MoE's head is not tied.)
    """
    from tests.trainer_node.training.full import LOSS, OPTIM

    out = chain(name)[-1]
    model = hf_model(models[name])
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": OPTIM.weight_decay},
        {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=OPTIM.lr, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.eps
    )
    assert facts(out)["num_parameters"] == sum(p.numel() for p in named.values())
    assert (
        largest_difference(
            load_file(out / "weights_0.safetensors"), {n: p.detach() for n, p in named.items()}
        )[0]
        == 0.0
    )
    for step, said in enumerate(facts(out)["steps"]):
        optimizer.zero_grad()
        loss = reference_loss(model, LOSS.clip_low, LOSS.clip_high)
        loss.backward()
        for p in named.values():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in named.items()}
            largest = max(g.abs().max().item() for g in gradients.values())
            difference, where = largest_difference(
                load_file(out / "gradients.safetensors"), gradients
            )
            error = bounds.gradients() * largest
            assert difference <= error, where
        norm = torch.nn.utils.clip_grad_norm_(named.values(), OPTIM.max_grad_norm)
        optimizer.step()
        assert said["loss"] == pytest.approx(loss.item(), abs=bounds.loss(count=TOKENS) / TOKENS)
        assert said["grad_norm"] == pytest.approx(norm.item(), rel=bounds.gradients())
        ours = load_file(out / f"weights_{step + 1}.safetensors")
        difference, where = largest_difference(ours, {n: p.detach() for n, p in named.items()})
        allowed = bounds.two_steps(OPTIM, gradient=error, norm=facts(out)["steps"][0]["grad_norm"])
        assert difference <= allowed, (where, difference, allowed)
        assert all(
            not torch.equal(ours[n], load_file(out / f"weights_{step}.safetensors")[n])
            for n in ours
        )


def check_against(one: Path, other: Path) -> None:
    """Losses, norms, gradients, weights; and what the other resumed from a foreign checkpoint,
    against continuing.
    """
    from tests.trainer_node.training.full import OPTIM

    ours, theirs = facts(other), facts(one)
    assert ours["num_parameters"] == theirs["num_parameters"]
    for a, b in [
        *zip(theirs["steps"], ours["steps"], strict=True),
        *((theirs["steps"][1], r) for r in ours["resumed"]),
    ]:
        assert b["loss"] == pytest.approx(a["loss"], abs=bounds.loss(count=TOKENS) / TOKENS)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=bounds.gradients())
        assert b["tokens"] == a["tokens"]
    gradients = load_file(one / "gradients.safetensors")
    largest = max(g.abs().max().item() for g in gradients.values())
    difference, where = largest_difference(load_file(other / "gradients.safetensors"), gradients)
    error = bounds.gradients() * largest
    assert difference <= error, where
    allowed = bounds.two_steps(OPTIM, gradient=error, norm=theirs["steps"][0]["grad_norm"])
    pairs = [(f"weights_{n}", n) for n in range(3)]
    for n in range(len(ours["resumed"])):
        pairs += [(f"loaded_{n + 1}", 1), (f"resumed_{n + 1}", 2)]
    for name, n in pairs:
        mine, wanted = (
            load_file(other / f"{name}.safetensors"),
            load_file(one / f"weights_{n}.safetensors"),
        )
        difference, where = largest_difference(mine, wanted)
        assert difference <= allowed * (n > 0), (name, where, difference, allowed)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_topology_changes_nothing(name: str, chain) -> None:
    """Training is the same at every topology, and continues from a checkpoint of any other;
    gradients within `bounds` of the largest, weights within `bounds.two_steps`. What is loaded are
    the bits that were saved.
    """
    *others, one = chain(name)
    for other in others:
        check_against(one, other)
    check_against(one, one)
    for before, after in itertools.pairwise([*others, one]):
        loaded, saved = (
            load_file(after / "loaded_1.safetensors"),
            load_file(before / "weights_1.safetensors"),
        )
        assert largest_difference(loaded, saved)[0] == 0.0
