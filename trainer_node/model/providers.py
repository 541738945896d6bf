"""Megatron's config for one rank, from Bridge's provider: rules for every family, none by name.

Bridge reads the HF config; `prepare` sets what the trainer decides (topology, precision, fusions)
and what Bridge takes for granted but HF's config says otherwise. `settle` does the same for the
built model. The CPU tier differs only in `cpu_shims.without_cuda`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.bridge.models.minimax_m2.minimax_m2_provider import _FullDimRMSNorm
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import TrainerConfig
from trainer_node.backends import cpu_shims, cudnn, gated_delta
from trainer_node.model.model import DTYPES

_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What Megatron-Core 0.19.2 has fixed of llama3's rope scaling."""


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
    if provider.multi_latent_attention and parallel.tensor > 1 and not parallel.sequence:
        # Megatron-Core 0.19.2 adds up the ranks' gradients of the keys' rotary part only with it.
        raise ConfigError(
            "parallel.sequence = False with parallel.tensor > 1: multi-latent attention gets wrong "
            "gradients so; leave parallel.sequence on"
        )
    provider.params_dtype = provider.pipeline_dtype = provider.autocast_dtype = dtype
    provider.bf16, provider.fp16 = dtype is torch.bfloat16, False
    provider.should_pad_vocab, provider.make_vocab_size_divisible_by = True, 128
    # Not linear in the micro-batch cut (Bridge sets 1e-3 for Qwen3-MoE).
    provider.moe_aux_loss_coeff = 0.0
    _router(provider, hf_config)
    # A fused router cannot replay a micro-batch's choice of experts (`passes`).
    provider.moe_enable_routing_replay = bool(provider.num_moe_experts)
    provider.moe_router_fusion = False
    # It hides shared experts behind a dispatch that `experts` does not make on one rank.
    provider.moe_shared_expert_overlap = False
    # The trainer does not train heads that predict further tokens, and exports none.
    provider.mtp_num_layers = None
    # Some families ask for one kernel. Megatron tells TransformerEngine through the environment,
    # where the next model of the process finds it; TransformerEngine chooses as well by itself.
    provider.attention_backend = AttnBackend.auto
    # The gated delta net refuses packs in this mode.
    provider.deterministic_mode = False
    _rotary(provider, bridge, hf_config)
    _windows(provider, hf_config)
    _plain_query_projections()
    # On GPUs unfused rotary embeddings of packed sequences read the sequences' bounds back to the
    # host, in every layer. Megatron calls the fusion for multi-latent attention experimental, and
    # that for packs leaves out YaRN's scale of the embeddings.
    # (Without dropout and bias the fused bias-dropout is one addition, which Megatron would compile
    # for every shape.)
    is_yarn = provider.position_embedding_type == "yarn"
    provider.apply_rope_fusion = not (provider.multi_latent_attention or is_yarn)
    fused = provider.activation_func in (functional.silu, quick_gelu)
    provider.bias_activation_fusion = fused and provider.gated_linear_unit
    # The base is frozen: nothing accumulates into main_grad, and sums are divided by us.
    provider.gradient_accumulation_fusion = False
    provider.calculate_per_token_loss = True
    provider.finalize_model_grads_func = None
    provider.attention_dropout = provider.hidden_dropout = 0.0
    provider.perform_initialization = False
    if config.recompute == "selective":  # `recompute` switches all other ways, pack by pack
        provider.recompute_granularity = config.recompute
    if config.device == "cpu" or config.numerics == "exact":
        cpu_shims.without_cuda(provider)
    elif _has_delta_nets(provider):
        gated_delta.use_kernels()
    provider.finalize()
    if config.device != "cpu" and config.parallel.context > 1:
        cudnn.refuse_wide_heads(provider)


def fallbacks(provider: Any, config: TrainerConfig) -> dict[str, str]:
    """Parts of the model whose fast kernels are unavailable on this GPU -> what replaces them, and
    why."""
    if config.device == "cpu":
        return {}
    found = {
        "gated delta rule": gated_delta.kernels_obstacle() if _has_delta_nets(provider) else None,
        "attention": cudnn.sinks_obstacle() if provider.softmax_type == "learnable" else None,
    }
    return {part: what for part, what in found.items() if what is not None}


def _router(provider: Any, hf_config: Any) -> None:
    """Normalise the chosen experts' probabilities or leave them: HF has both, and Bridge's families
    assume one. Megatron normalises sigmoid scores always.

    It ranks groups of experts by the sum of their best scores, as many as a token takes of each
    chosen group. DeepSeek-V2 ranks them by the best one, and V3 and its successors by two.
    """
    groups, chosen = provider.moe_router_num_groups, provider.moe_router_group_topk
    if groups and chosen and chosen < groups:
        wanted = 1 if provider.moe_router_score_function == "softmax" else 2
        if provider.moe_router_topk // chosen != wanted:
            raise ConfigError(
                f"{provider.moe_router_topk} experts of {chosen} groups: Megatron ranks groups by "
                f"the best {provider.moe_router_topk // chosen} scores, and the model by {wanted}"
            )
    normalises = getattr(hf_config, "norm_topk_prob", None)
    if normalises is None:
        return
    if provider.moe_router_score_function == "softmax":
        provider.moe_router_pre_softmax = not normalises
    elif not normalises:
        raise ConfigError(
            "norm_topk_prob is off, and Megatron normalises "
            f"{provider.moe_router_score_function} scores"
        )


def _rotary(provider: Any, bridge: Any, hf_config: Any) -> None:
    """Take from HF's config what Bridge's families have fixed or read from transformers 4's place,
    and refuse what would be computed otherwise."""
    rope = getattr(hf_config, "rope_parameters", None) or {}
    by_layer = [r for r in rope.values() if isinstance(r, dict)]
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "yarn", "llama3"):
        raise ConfigError(f"rope scaling {kind!r} is not supported; default, yarn and llama3 are")
    if kinds := {r.get("rope_type", "default") for r in by_layer} - {"default", "linear"}:
        raise ConfigError(f"rope scaling by layer {kinds} is not supported; default, linear are")
    if not provider.multi_latent_attention and "partial_rotary_factor" in rope:
        provider.rotary_percent = rope["partial_rotary_factor"]
    if kind == "yarn" and not provider.multi_latent_attention:
        if rope.get("attention_factor") is not None:
            raise ConfigError("yarn's attention_factor is not supported; leave it out")
        length = hf_config.max_position_embeddings
        values = {  # transformers', where the config has none
            "beta_fast": rope.get("beta_fast") or 32.0,
            "beta_slow": rope.get("beta_slow") or 1.0,
            "original_max_position_embeddings": rope.get("original_max_position_embeddings")
            or length,
        }
        for hf_key, field in bridge.YARN_ROPE_SCALING_MAPPING:
            setattr(provider, field, values.get(hf_key, rope.get(hf_key)))
        provider.yarn_correction_range_round_to_int = rope.get("truncate", True)
    if kind == "llama3":
        if not provider.rope_scaling:
            raise ConfigError(
                f"Megatron-Bridge does not read llama3's rope scaling in a {hf_config.model_type}"
            )
        if (got := {k: rope.get(k) for k in _LLAMA3}) != _LLAMA3:
            raise ConfigError(
                f"Megatron computes llama3's rope scaling with {_LLAMA3} only; config.json has "
                f"{got}"
            )


def _windows(provider: Any, hf_config: Any) -> None:
    """Give each layer the window that HF's config lists for it. Bridge's families have fixed
    patterns, or none."""
    kinds = getattr(hf_config, "layer_types", None) or []
    is_window = [kind == "sliding_attention" for kind in kinds]
    if not any(is_window):
        return
    if provider.window_size is None:
        raise ConfigError(
            "layer_types has sliding_attention, and Bridge's provider for this architecture knows "
            "no window"
        )
    if not hasattr(provider, "interleaved_attn_pattern"):
        provider.window_attn_skip_freq = [int(w) for w in is_window]
        return
    local = is_window.index(False) if False in is_window else len(kinds)
    if is_window != [n % (local + 1) != local for n in range(len(kinds))]:
        raise ConfigError(f"layer_types has no period, which Bridge's provider needs: {kinds}")
    provider.interleaved_attn_pattern = (local, 1)


def _plain_query_projections() -> None:
    """Build a query projection without low rank as HF has it.

    Megatron-Core 0.19.2 puts a norm before it wherever `qk_layernorm` asks for the norms between
    low-rank projections. No checkpoint has that norm. Until Core leaves it out.
    """
    resolve = QKNormConfigResolver.resolve
    if hasattr(resolve, "__wrapped__"):
        return

    @functools.wraps(resolve)
    def without_norm(self: Any) -> Any:
        classes = resolve(self)
        if not self.has_q_lora:
            classes["linear_q_proj"] = self.linear_impl
        return classes

    QKNormConfigResolver.resolve = without_norm


def _has_delta_nets(provider: Any) -> bool:
    return bool(provider.experimental_attention_variant == "gated_delta_net")


def settle(model: Any, provider: Any) -> None:
    """Correct what Bridge 0.6.2 builds differently from HF.

    Every norm gets the config's epsilon: those after Gemma3's projections have TransformerEngine's
    1e-5. A norm over all heads of a tensor-parallel model gets its whole gradient. Sinks, which
    TransformerEngine keeps in fp32 (and converts in each pass), get the model's dtype.

    Raises:
        ConfigError: the logits are more than one matrix product, which is all that the trainer
            computes.
    """
    head = getattr(model, "output_layer", None)
    if head is not None and (type(head) is not ColumnParallelLinear or head.bias is not None):
        bias = " with a bias" if head.bias is not None else ""
        raise ConfigError(
            f"the model's logits come from a {type(head).__name__}{bias}. The trainer computes "
            "logits without softcap, bias or scale, so it cannot train this model"
        )
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps = provider.layernorm_epsilon
        if (sinks := getattr(module, "softmax_offset", None)) is not None:
            sinks.data = sinks.data.to(provider.params_dtype)
        if isinstance(module, _FullDimRMSNorm) and provider.tensor_model_parallel_size > 1:
            module.forward = functools.partial(_norm_over_ranks, module)


def _norm_over_ranks(norm: Any, x_sbAD: torch.Tensor) -> torch.Tensor:
    """RMSNorm over the heads (A, of size D) of all tensor ranks.

    Bridge 0.6.2 adds the ranks' squares up with a collective that autograd does not see, so each
    rank's gradient lacks the other ranks' parts. Until Bridge uses one that it sees.
    """
    group = norm._tp_group_getter()
    copies = group.size() // norm.shard_world_size
    wide = x_sbAD.flatten(2).float()
    squares = all_reduce(wide.square().sum(-1, keepdim=True), group=group) / copies
    normed = wide * torch.rsqrt(squares / norm.global_dim + norm.eps)
    return (norm.weight * normed.to(x_sbAD.dtype)).view(x_sbAD.shape)
