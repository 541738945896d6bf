"""Tiny random HF checkpoints, made with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 300  # no multiple of 128: Megatron pads it
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}


def hf_model(folder: Path) -> Any:
    """The checkpoint in transformers, fp32, with one module for each expert."""
    from transformers import AutoModelForCausalLM

    from trainer_node.tools.reference import with_single_experts

    return with_single_experts(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def make_peft_adapter(model: Path, folder: Path, *, seed: int = 3, **settings: object) -> Path:
    """An adapter with random A and B, made and saved by the PEFT library; r 4, alpha 8, all seven
    linears.
    """
    from peft import LoraConfig, get_peft_model

    from orchestrator.protocol.config import LORA_TARGETS

    base = hf_model(model)
    wanted = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": list(LORA_TARGETS),
        "task_type": "CAUSAL_LM",
        **settings,
    }
    adapted = get_peft_model(base, LoraConfig(**wanted))
    torch.manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(0.0, 0.1)
    adapted.save_pretrained(folder)
    return folder


def make_all(folder: Path) -> dict[str, Path]:
    """Write the three checkpoints; name -> folder."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    configs = {
        "dense_tied": Qwen3Config(**_COMMON, tie_word_embeddings=True),
        "dense_untied": Qwen3Config(**_COMMON, tie_word_embeddings=False),
        "moe": Qwen3MoeConfig(
            **_COMMON,
            tie_word_embeddings=False,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            norm_topk_prob=True,
        ),
    }
    paths = {}
    for seed, (name, config) in enumerate(configs.items()):
        torch.manual_seed(seed)
        kind = Qwen3MoeForCausalLM if name == "moe" else Qwen3ForCausalLM
        model = kind(config).float()
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.data.uniform_(0.5, 1.5)
        paths[name] = folder / name
        model.save_pretrained(paths[name])
    return paths
