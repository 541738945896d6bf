"""Adapters and their files are those of Megatron-Bridge's own LoRA: `bridges_lora` on real
Megatron."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.trainer_node import bounds
from tests.trainer_node.conftest import Ranks
from trainer_node.adapters.peft_io import CONFIG, WEIGHTS


def test_numbers_and_files_are_those_of_bridges_lora(
    models, torchrun: Ranks, tmp_path: Path
) -> None:
    torchrun(1, "adapters.bridges_lora", tmp_path, models["dense_untied"])
    found = torch.load(tmp_path / "numbers.pt")
    plain_T, theirs_T, ours_T = (found[k]["log_probs_T"] for k in ("plain", "theirs", "ours"))
    assert (ours_T - theirs_T).abs().max() <= bounds.scores()
    assert (plain_T - theirs_T).abs().max() > 1e3 * bounds.scores()
    count = int((theirs_T != 0).sum())
    allowed = bounds.loss(count=count)
    assert abs(found["ours"]["loss"] - found["theirs"]["loss"]) <= allowed
    assert abs(found["plain"]["loss"] - found["theirs"]["loss"]) > 10 * allowed

    ours, theirs = (load_file(tmp_path / who / WEIGHTS) for who in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and len(ours) == 28  # A and B of 7 linears in 2 layers
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    ours, theirs = (json.loads((tmp_path / who / CONFIG).read_text()) for who in ("ours", "theirs"))
    assert {k: theirs[k] for k in ours} == ours
    assert not any(theirs[k] for k in theirs.keys() - ours.keys() - {"init_lora_weights"})
