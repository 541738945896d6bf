"""Models that see train their language part; see `sees`."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from orchestrator.errors import ConfigError
from tests.trainer_node import towers
from tests.trainer_node.conftest import Ranks
from trainer_node.hf import language_part
from trainer_node.hf.checkpoint import read_config


@pytest.mark.parametrize(("family", "ranks"), [("gemma3", 1), ("qwen3_5_moe", 2)])
def test_a_model_that_sees(torchrun: Ranks, tmp_path: Path, family: str, ranks: int) -> None:
    torchrun(ranks, "hf.sees", towers.make(family, tmp_path / family), ranks)


def test_a_language_part_that_is_no_architecture_is_refused(tmp_path: Path) -> None:
    transformers.Qwen2_5_VLConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"language part of qwen2_5_vl .* not towers"):
        read_config(tmp_path)


def test_both_spellings_of_the_language_parts_names() -> None:
    for own in ("model.language_model.", "language_model.model."):
        names = [f"{own}layers.0.mlp.up_proj.weight", "vision_tower.a", "lm_head.weight"]
        assert language_part.prefix_of(names) == ("model.", own)
        assert language_part.towers(names) == ["vision_tower.a"]
    assert language_part.prefix_of(["model.layers.0.mlp.up_proj.weight"]) is None
    assert language_part.towers(["model.layers.0.mlp.up_proj.weight"]) == []
