"""Dropout on adapters' inputs: the hash by itself, and real Megatron against PEFT with the same
masks and against other topologies.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn

from tests.trainer_node import bounds
from tests.trainer_node.data import LENGTHS, make_batch
from tests.trainer_node.tiny import hf_model
from trainer_node.adapters.dropout import keep_mask, key_of
from trainer_node.adapters.rounding import signed

TOPOLOGIES = {
    "tp2": ("dense_tied", 2, (2, 1, 1), "sequence"),
    "dp2": ("dense_tied", 2, (1, 1, 1), "sequence"),
    "cp2": ("dense_tied", 2, (1, 1, 1), "sequence", "cp2"),
    "tp2-no-sequence": ("dense_tied", 2, (2, 1, 1), "no-sequence"),
    "pp2-recompute": ("dense_tied", 2, (1, 2, 1), "sequence"),
    "tp2pp2-recompute": ("dense_tied", 4, (2, 2, 1), "sequence"),
    "moe-tp2-no-sequence": ("moe", 2, (2, 1, 1), "no-sequence"),
}


@pytest.fixture(scope="module")
def single(models, torchrun, tmp_path_factory):
    """Model name -> folder with what one rank did; made once."""

    @functools.cache
    def get(name: str) -> Path:
        out = tmp_path_factory.mktemp(f"dropout_{name}")
        torchrun(1, "adapters.dropout", out, models[name], 1, 1, 1, "sequence")
        return out

    return get


def load(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "result.pt", weights_only=True)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_masks_are_independent_and_drop_as_often_as_asked(p: float) -> None:
    rows, columns = torch.arange(1000), torch.arange(1000)
    keep = keep_mask(rows, columns, key=key_of("a"), p=p).float()
    assert abs(keep.mean() - (1 - p)) < 0.002
    assert (keep.mean(0) - (1 - p)).abs().max() < 0.08
    assert (keep.mean(1) - (1 - p)).abs().max() < 0.08
    centred = keep - (1 - p)
    for other in (
        keep_mask(rows, columns, key=key_of("b"), p=p).float(),
        keep.roll(1, 0),
        keep.roll(1, 1),
        keep.T,
    ):
        assert (centred * (other - (1 - p))).mean().abs() < 0.002


def test_a_part_of_the_mask_is_that_part() -> None:
    rows, columns = torch.tensor([5, 900, 7, -1]), torch.arange(64)
    whole = keep_mask(rows, columns, key=3, p=0.5)
    assert torch.equal(keep_mask(rows[1:3], columns[32:], key=3, p=0.5), whole[1:3, 32:])


class SameMasks(nn.Module):
    """PEFT's dropout module, with our masks."""

    def __init__(self, name: str, rows: dict[str, torch.Tensor], p: float) -> None:
        super().__init__()
        self.key, self.rows, self.p = signed(key_of(1234, 0, 0) ^ key_of(name), 62), rows, p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keep = keep_mask(self.rows["now"], torch.arange(x.shape[-1]), key=self.key, p=self.p)
        return x * keep.view(x.shape) / (1 - self.p)


def test_one_rank_equals_peft_with_the_same_masks(models, single) -> None:
    """Each HF linear has its own; loss and gradients within `bounds`."""
    from tests.trainer_node.adapters.dropout import P

    folder = single("dense_tied")
    assert json.loads((folder / "adapter" / "adapter_config.json").read_text())["lora_dropout"] == P
    base = hf_model(models["dense_tied"])
    policy: Any = PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True).train()
    rows: dict[str, torch.Tensor] = {}
    for name, module in policy.named_modules():
        if hasattr(module, "lora_dropout"):
            assert module.lora_dropout["default"].p == P
            module.lora_dropout["default"] = SameMasks(
                name.removeprefix("base_model.model."), rows, P
            )
    batch, total = make_batch(), torch.zeros(())
    for ids, mask, now in zip(
        *(
            t.split(LENGTHS)
            for t in (batch.tokens_T, batch.loss_mask_T, torch.arange(sum(LENGTHS)))
        ),
        strict=True,
    ):
        rows["now"] = now
        table = policy(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        total = total - (table.gather(-1, ids[1:, None])[:, 0] * mask[1:]).sum()
    ours = load(folder)
    assert abs(ours["loss"] - total.item()) <= bounds.loss(count=batch.num_loss_tokens)
    (total / batch.num_loss_tokens).backward()
    theirs = {n: p.grad for n, p in policy.named_parameters() if p.requires_grad}
    largest = max(g.abs().max().item() for g in theirs.values())
    assert len(theirs) == len(ours["gradients"])
    for name, gradient in theirs.items():
        module, _, rest = name.removeprefix("base_model.model.").partition(".lora_")
        assert (
            ours["gradients"][f"{module}.{rest[0]}"] - gradient
        ).abs().max() <= bounds.gradients() * largest, name


@pytest.mark.parametrize("name", ["dense_tied", "moe"])
def test_steps_resume_cuts_and_recomputation(name: str, models, torchrun, tmp_path: Path) -> None:
    torchrun(1, "adapters.dropout", tmp_path, models[name], 1, 1, 1, "checks")


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_topology_draws_the_same_masks(
    topology: str, models, single, torchrun, tmp_path: Path
) -> None:
    model, ranks, sizes, *rest = TOPOLOGIES[topology]
    torchrun(ranks, "adapters.dropout", tmp_path, models[model], *sizes, *rest)
    ours, theirs = load(tmp_path), load(single(model))
    assert abs(ours["loss"] - theirs["loss"]) <= bounds.loss(count=make_batch().num_loss_tokens)
    largest = max(t.abs().max().item() for t in theirs["gradients"].values())
    for name, gradient in theirs["gradients"].items():
        assert (ours["gradients"][name] - gradient).abs().max() <= bounds.gradients() * largest, (
            name
        )
