"""Lets the layers of a model compute a pack in which sequences share prefixes.

    packed.paths -> rotary table of each token's own position
                 -> attention: a sequence's own tokens ask all tokens of its path

All else in a layer is done token by token. A sequence's own queries are the last ones of its path,
so attention is causal from the bottom right. Keys and values are copied along the paths; their
gradients add up in fp32, in a fixed order.

Axes: L = tokens of the pack, K = tokens of all paths, G = key-value heads, D = their size.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

from orchestrator.protocol.config import TrainerConfig

_BOTTOM_RIGHT = types.SimpleNamespace(name="padding_causal_bottom_right")
"""TransformerEngine's name; Megatron (0.19.2) has no member for it, and passes names on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Travels in a pack's `PackedSeqParams` to its attention layers."""

    runs: tuple[tuple[int, int], ...]
    """(place, count) of the keys, one after the other."""
    packed: PackedSeqParams
    """Bounds of the queries, and of the keys along the paths."""
    positions_L: torch.Tensor | None = None
    """Of the pack's tokens, for layers that have a rotary table each."""


def obstacle(module: Any, provider: Any, config: TrainerConfig) -> str | None:
    """Why a model's sequences cannot share prefixes; None: they can."""
    # Late, because on a CPU they can be imported only after the shims.
    from megatron.bridge.models.gemma.gemma3_provider import Gemma3SelfAttention
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    # Layers that take a rotary table as long as the pack, and attend by their core only.
    forwards = (Attention.forward, MultiLatentAttention.forward, Gemma3SelfAttention.forward)
    if not config.shared_prefixes:
        return "shared_prefixes is off"
    if config.numerics == "exact":
        return "numerics = 'exact' computes each sequence as the sampler does"
    if config.finetuning_type == "lora" and config.lora.dropout:
        return "lora.dropout is not 0"
    if config.parallel.context > 1:
        return "parallel.context is not 1"
    if config.compile:
        return "layers are compiled"
    if provider.position_embedding_type not in ("rope", "yarn"):
        return f"positions are of the kind {provider.position_embedding_type}"
    for layer in module.decoder.layers:
        kind = type(layer.self_attention)
        core = getattr(layer.self_attention, "core_attention", None)
        if kind.forward not in forwards or not isinstance(core, TEDotProductAttention):
            return f"{kind.__name__} attends in its own way"
    return None


def follow(module: Any) -> None:
    """Hook on the rotary tables and the attention of every layer, once."""
    _hook_table(module)
    for layer in module.decoder.layers:
        attention = layer.self_attention
        attention.core_attention.register_forward_pre_hook(_along_paths, with_kwargs=True)
        if _hook_table(attention):  # multi-latent attention has a table in each layer
            attention.register_forward_pre_hook(_use_own, with_kwargs=True)


def use(owner: Any, positions_L: torch.Tensor | None) -> None:
    """Give the tokens of the next pass these positions. None: they restart where a sequence
    begins.

    Args:
        owner: the model or layer that has the table.
    """
    owner.positions_L = positions_L


def _hook_table(owner: Any) -> bool:
    table = getattr(owner, "rotary_pos_emb", None)
    if table is not None:
        table.register_forward_hook(partial(_at_positions, owner))
    return table is not None


def _use_own(attention: Any, _args: Any, kwargs: Any) -> None:
    """Also where a backward pass runs the layer again, after the forward pass of another pack."""
    own = getattr(kwargs["packed_seq_params"], "paths", None)
    use(attention, None if own is None else own.positions_L)


def _at_positions(owner: Any, _rotary: Any, _args: Any, table: Any) -> Any:
    """Megatron takes a table as long as the pack to be the tokens' own."""
    positions_L = getattr(owner, "positions_L", None)
    if positions_L is None:
        return table
    if isinstance(table, tuple):  # YaRN's has its scale next to it
        return (_at_positions(owner, _rotary, _args, table[0]), *table[1:])
    # Gemma 3 has two tables in one, for its two kinds of layers.
    return table.index_select(table.dim() - 4, positions_L)


def _along_paths(_core: Any, args: Any, kwargs: Any) -> Any:
    paths = getattr(kwargs["packed_seq_params"], "paths", None)
    if paths is None:
        return None
    query, key, value, *rest = args
    key, value = (_Copied.apply(t, paths.runs) for t in (key, value))
    changed = {"packed_seq_params": paths.packed, "attn_mask_type": _BOTTOM_RIGHT}
    return (query, key, value, *rest), {**kwargs, **changed}


class _Copied(torch.autograd.Function):
    """[L, G, D] -> [K, G, D]."""

    @staticmethod
    def forward(
        ctx: Any, tokens_LGD: torch.Tensor, runs: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """Copy run after run."""
        ctx.runs, ctx.length = runs, len(tokens_LGD)
        return torch.cat([tokens_LGD[place : place + count] for place, count in runs])

    @staticmethod
    def backward(ctx: Any, grad_KGD: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """The sum over a token's copies."""
        dtype = torch.promote_types(grad_KGD.dtype, torch.float32)
        total_LGD = grad_KGD.new_zeros(ctx.length, *grad_KGD.shape[1:], dtype=dtype)
        ends = [0]
        for _, count in ctx.runs:
            ends.append(ends[-1] + count)
        for (place, count), (start, end) in zip(ctx.runs, pairwise(ends), strict=True):
            total_LGD[place : place + count] += grad_KGD[start:end]
        return total_LGD.to(grad_KGD.dtype), None


def copy_load(provider: Any) -> float:
    """Memory of a token's keys and values, as a share of what a layer keeps for a token: the inputs
    of both halves before and after their norms, queries, keys, values, attention's output, and the
    gated inner layer."""
    heads, width = provider.num_attention_heads, provider.kv_channels
    copied = 2 * (provider.num_query_groups or heads) * width
    given = 2 * heads * width
    if provider.multi_latent_attention:
        width = provider.qk_head_dim + provider.qk_pos_emb_head_dim
        copied = given = heads * (width + provider.v_head_dim)
    inner = provider.ffn_hidden_size
    if provider.num_moe_experts:
        inner = provider.moe_router_topk * provider.moe_ffn_hidden_size
    return float(copied / (4 * provider.hidden_size + given + copied + 3 * inner))
