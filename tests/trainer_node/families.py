"""Tiny HF checkpoints of each family, made by transformers' own classes with random weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCAB = 300  # no multiple of 128: Megatron pads it
LENGTHS = (21, 34, 13)
"""Of the sequences that are compared: longer than the windows, shorter than the chunks of 64."""
EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family's config, and what must show in the log-probs."""

    name: str
    """Of transformers' classes: NameConfig or NameTextConfig, NameForCausalLM."""
    settings: dict[str, Any]
    visible: dict[str, Any] = field(default_factory=dict)
    """Other values of settings; with any of them the log-probs must differ by far."""
    text: bool = False
    """The config is the text part's of a model that sees."""


_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rms_norm_eps": EPS,
    "tie_word_embeddings": False,
}
_HEADS = _BASE | {"head_dim": 32}
_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MLA = _BASE | {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_DEEPSEEK_V2 = _MLA | {
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "n_group": None,
    "topk_group": None,
}
_DEEPSEEK_V3 = _MLA | {
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.0,
    "norm_topk_prob": True,
}
_THETA = {"rope_theta": 10000.0}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_OTHER_ROPE = {"rope_parameters": _DEFAULT_ROPE | {"rope_theta": 9000.0}}
_PARTIAL = {"rope_parameters": _DEFAULT_ROPE | {"partial_rotary_factor": 0.25}}
_OTHER_PARTIAL = {"rope_parameters": _DEFAULT_ROPE | {"partial_rotary_factor": 0.5}}
_DELTA = _PARTIAL | {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "original_max_position_embeddings": 16,
}

FAMILIES = {
    "llama": Family(name="Llama", settings=_HEADS, visible=_OTHER_ROPE),
    "llama_tied": Family(
        name="Llama", settings=_HEADS | {"tie_word_embeddings": True}, visible=_OTHER_ROPE
    ),
    "llama3_rope": Family(
        name="Llama",
        settings=_HEADS | {"rope_parameters": _THETA | _LLAMA3},
        visible={"rope_parameters": _THETA | _LLAMA3 | {"factor": 4.0}},
    ),
    "llama_yarn": Family(
        name="Llama",
        settings=_HEADS | {"rope_parameters": _THETA | _YARN},
        visible={"rope_parameters": _THETA | _YARN | {"beta_slow": 1.0}},
    ),
    "qwen2": Family(
        name="Qwen2", settings=_BASE | {"tie_word_embeddings": True}, visible=_OTHER_ROPE
    ),
    "qwen3": Family(
        name="Qwen3", settings=_HEADS | {"tie_word_embeddings": True}, visible=_OTHER_ROPE
    ),
    "qwen3_moe": Family(
        name="Qwen3Moe",
        settings=_HEADS | _MOE | {"norm_topk_prob": True},
        visible={"norm_topk_prob": False},
    ),
    "qwen3_next": Family(
        name="Qwen3Next",
        settings=_HEADS
        | _MOE
        | _DELTA
        | {"shared_expert_intermediate_size": 32, "norm_topk_prob": True},
        visible=_OTHER_PARTIAL | {"norm_topk_prob": False},
    ),
    "qwen3_5": Family(
        name="Qwen3_5",
        settings=_HEADS | _DELTA | {"tie_word_embeddings": True},
        visible=_OTHER_PARTIAL,
        text=True,
    ),
    "qwen3_5_moe": Family(
        name="Qwen3_5Moe",
        settings=_HEADS | _MOE | _DELTA | {"shared_expert_intermediate_size": 32},
        visible=_OTHER_PARTIAL,
        text=True,
    ),
    "mistral": Family(
        name="Mistral", settings=_HEADS | {"sliding_window": 8}, visible={"sliding_window": 9}
    ),
    "gemma": Family(
        name="Gemma", settings=_HEADS | {"tie_word_embeddings": True}, visible=_OTHER_ROPE
    ),
    "gemma3": Family(
        name="Gemma3",
        settings=_HEADS
        | {
            "query_pre_attn_scalar": 48,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
        visible={"sliding_window": 9, "query_pre_attn_scalar": 40},
        text=True,
    ),
    "nemotron": Family(
        name="Nemotron",
        settings=_HEADS | _PARTIAL | {"hidden_act": "relu2", "norm_eps": EPS},
        visible=_OTHER_PARTIAL | {"norm_eps": 1e-4},
    ),
    "olmoe": Family(
        name="Olmoe",
        settings=_BASE
        | {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 4,
            "intermediate_size": 32,
            "norm_topk_prob": False,
        },
        visible={"norm_topk_prob": True},
    ),
    "glm4_moe": Family(
        name="Glm4Moe",
        settings=_HEADS
        | _PARTIAL
        | {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
        visible=_OTHER_PARTIAL | {"routed_scaling_factor": 1.4},
    ),
    "glm4_moe_lite": Family(
        name="Glm4MoeLite",
        settings=_MLA
        | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8, "norm_topk_prob": True},
        visible={"routed_scaling_factor": 1.7},
    ),
    "deepseek_v2": Family(
        name="DeepseekV2", settings=_DEEPSEEK_V2, visible={"routed_scaling_factor": 1.1}
    ),
    "deepseek_v2_lite": Family(
        name="DeepseekV2", settings=_DEEPSEEK_V2 | {"q_lora_rank": None}, visible=_OTHER_ROPE
    ),
    "deepseek_v3": Family(
        name="DeepseekV3",
        settings=_DEEPSEEK_V3,
        visible=_OTHER_ROPE | {"routed_scaling_factor": 1.9, "n_group": 1},
    ),
    "deepseek_v3_yarn": Family(
        name="DeepseekV3",
        settings=_DEEPSEEK_V3
        | {"rope_parameters": _THETA | _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        visible={"rope_parameters": _THETA | _YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}},
    ),
    "gpt_oss": Family(
        name="GptOss",
        settings=_HEADS
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "intermediate_size": 64,
            "rope_parameters": _THETA | _YARN | {"truncate": False},
        },
        visible={
            "sliding_window": 9,
            "rope_parameters": _THETA | _YARN | {"truncate": False, "factor": 7.0},
        },
    ),
    "minimax_m2": Family(
        name="MiniMaxM2",
        settings=_HEADS
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32},
        visible=_OTHER_ROPE | {"num_experts_per_tok": 1},
    ),
}


def make(name: str, folder: Path, dtype: str = "float32", **settings: Any) -> Path:
    """Write the family's checkpoint, with other values of settings.

    Every tensor is random (`check_model.randomize`).
    """
    import torch
    import transformers

    from trainer_node.tools.check_model import randomize

    family = FAMILIES[name]
    config_class = getattr(transformers, family.name + ("TextConfig" if family.text else "Config"))
    config = config_class(**family.settings | settings)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family.name}ForCausalLM")(config).float()
    config.architectures = [f"{family.name}ForCausalLM"]
    randomize(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def pack_experts(folder: Path) -> None:
    """Stack the experts' tensors, as transformers has them in memory and some families in files."""
    import torch
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors, packed = load_file(path), {}
    names = {n.partition(".experts.0.")[0] for n in tensors if ".experts.0." in n}
    for before in names:
        own = [n for n in tensors if n.startswith(f"{before}.experts.")]
        experts = range(len(own) // 3)
        gate, up, down = (
            torch.stack([tensors.pop(f"{before}.experts.{e}.{k}_proj.weight") for e in experts])
            for k in ("gate", "up", "down")
        )
        packed[f"{before}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        packed[f"{before}.experts.down_proj"] = down
    save_file(tensors | packed, path, metadata={"format": "pt"})
