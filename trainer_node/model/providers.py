"""Megatron's config for one rank, from Bridge's provider: rules for every family, none by name.

Bridge reads the HF config; `prepare` sets what the trainer decides (topology, precision, fusions)
and what Bridge takes for granted but HF's config says otherwise. `settle` does the same for the
built model. The CPU tier differs in `cpu` alone.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import TrainerConfig
from trainer_node.model.model import DTYPES


def prepare(provider: Any, bridge: Any, config: TrainerConfig, hf_config: Any) -> None:
    """Set and finalise a provider that Bridge made of `hf_config`.

    Args:
        bridge: Bridge's mapping for the architecture; it names the config's fields.
    """
    parallel, dtype = config.parallel, DTYPES[config.dtype]
    provider.tensor_model_parallel_size = parallel.tensor
    provider.pipeline_model_parallel_size = parallel.pipeline
    provider.expert_model_parallel_size = parallel.expert
    provider.expert_tensor_parallel_size = parallel.expert_tensor
    provider.context_parallel_size = parallel.context
    provider.sequence_parallel = parallel.sequence and parallel.tensor > 1
    provider.params_dtype = provider.pipeline_dtype = provider.autocast_dtype = dtype
    provider.bf16, provider.fp16 = dtype is torch.bfloat16, False
    provider.should_pad_vocab, provider.make_vocab_size_divisible_by = True, 128
    # Not linear in the micro-batch cut (Bridge sets 1e-3 for Qwen3-MoE).
    provider.moe_aux_loss_coeff = 0.0
    # Bridge assumes normalised top-k probabilities for some families; HF has both.
    if hasattr(hf_config, "norm_topk_prob"):
        provider.moe_router_pre_softmax = not hf_config.norm_topk_prob
    # A fused router cannot replay a micro-batch's choice of experts (`passes`).
    provider.moe_enable_routing_replay = bool(provider.num_moe_experts)
    provider.moe_router_fusion = False
    # The trainer does not train heads that predict further tokens, and exports none.
    provider.mtp_num_layers = None
    # Some families ask for one kernel, through NVTE_* in the environment, where the next model of
    # the process finds them; TransformerEngine chooses as well by itself.
    provider.attention_backend = AttnBackend.auto
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)
    # The gated delta net refuses packs in this mode.
    provider.deterministic_mode = False
    _rotary(provider, bridge, hf_config)
    # On GPUs unfused rotary embeddings of packed sequences read the sequences' bounds back to the
    # host, in every layer. (Without dropout and bias the fused bias-dropout is one addition, which
    # Megatron would compile for every shape.)
    provider.apply_rope_fusion = provider.bias_activation_fusion = True
    # The base is frozen: nothing accumulates into main_grad, and sums are divided by us.
    provider.gradient_accumulation_fusion = False
    provider.calculate_per_token_loss = True
    provider.finalize_model_grads_func = None
    provider.attention_dropout = provider.hidden_dropout = 0.0
    provider.perform_initialization = False
    if config.recompute != "none":
        provider.recompute_granularity = config.recompute
    if config.recompute == "full":
        provider.recompute_method, provider.recompute_num_layers = "uniform", 1
    if config.device == "cpu":
        cpu(provider)
    provider.finalize()


def _rotary(provider: Any, bridge: Any, hf_config: Any) -> None:
    """Take YaRN's numbers from HF's config, which some of Bridge's families have fixed, and refuse
    those of llama3's rule that Megatron-Core has fixed."""
    rope = getattr(hf_config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind == "yarn" and provider.position_embedding_type == "yarn":
        for hf_key, field in bridge.YARN_ROPE_SCALING_MAPPING:
            setattr(provider, field, rope.get(hf_key, getattr(provider, field)))
        provider.yarn_correction_range_round_to_int = rope.get("truncate", True)
    if kind == "llama3":
        fixed = {
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        if wrong := {k: rope.get(k) for k, v in fixed.items() if rope.get(k) != v}:
            raise ConfigError(f"Megatron computes llama3's rope scaling with {fixed}; got {wrong}")


def cpu(provider: Any) -> None:
    """Turn off all that needs CUDA."""
    provider.use_cpu_initialization = True
    provider.persist_layer_norm = False
    for fusion in (
        "apply_rope_fusion",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "masked_softmax_fusion",
        "gradient_accumulation_fusion",
        "cross_entropy_loss_fusion",
        "moe_permute_fusion",
        "moe_router_fusion",
        "use_fused_weighted_squared_relu",
    ):
        if hasattr(provider, fusion):
            setattr(provider, fusion, False)
    # The alltoall dispatcher makes a CUDA stream in its constructor, and the overlap needs it.
    provider.moe_token_dispatcher_type = "allgather"
    provider.moe_shared_expert_overlap = False


def settle(model: Any, provider: Any) -> None:
    """Give every norm the config's epsilon.

    Bridge 0.6.2 leaves TransformerEngine's 1e-5 to the norms behind Gemma3's projections.
    """
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps = provider.layernorm_epsilon
