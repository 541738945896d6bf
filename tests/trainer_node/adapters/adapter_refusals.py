"""Targets that no adapter can be for: a rank's check, on real models.

python -m tests.trainer_node.adapters.adapter_refusals FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import LoraConfig, TrainerConfig
from tests.trainer_node.families import make
from tests.trainer_node.model import family
from trainer_node.ranks import topology

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"targets": ("q_pro",)}, r"'q_pro' matches nothing.*q_proj"),
    ("llama", {"targets": ("input_layernorm",)}, r"input_layernorm\.weight is no linear"),
    ("qwen3_5_moe", {"targets": ("k_proj", "conv1d")}, r"conv1d\.weight is no linear"),
    ("qwen3_5_moe", {"targets": ("mlp.gate",)}, r"mlp\.gate\.weight is a router"),
    (
        "qwen3_5_moe",
        {"targets": ("shared_expert_gate",), "dropout": 0.1},
        r"within SharedExpertMLP.*set lora\.dropout to 0",
    ),
    ("llama_tied", {"targets": ("all-linear", "lm_head")}, r"lm_head is its embedding"),
    ("llama", {"targets": ("lm_head",), "dropout": 0.1}, r"lm_head.*set lora\.dropout to 0"),
    ("gpt_oss", {"targets": ("down_proj",)}, r"stacked tensor.*name 'experts\.down_proj'"),
    (
        "gpt_oss",
        {"targets": ("experts.down_proj",), "dropout": 0.1},
        r"stacked tensor, for which PEFT has no dropout",
    ),
]


def main() -> None:
    """See the module's docstring."""
    root = Path(sys.argv[1])
    for name, lora, says in REFUSED:
        if not (root / name).exists():
            make(name, root / name)
        with pytest.raises(ConfigError, match=says):
            family.build(TrainerConfig(model=root / name, lora=LoraConfig(**lora)))
        topology.leave()


if __name__ == "__main__":
    main()
