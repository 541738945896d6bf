"""Lets a built Megatron model compute with `weight_transfer.exact`: `numerics = "exact"`.

The model consists of the CPU tier's modules (`cpu_te`), on a GPU as well. The products of linears,
norms, SwiGLU, rotary embeddings, attention and routers get the bits that vLLM has with
`inference_node.worker.exact`. `trainer_node.model.experts` does the same for experts, and
`trainer_node.training.head` for the output layer and the log-softmax. Backward passes are
Megatron's own.

Axes: see `weight_transfer.exact.kernels` and `experts`.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TENorm,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import attention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.router import TopKRouter
from torch.nn import functional

from trainer_node.backends.cpu_attention import attend
from weight_transfer.exact import experts, kernels

_FLAG = "splice_is_exact"
"""Attribute of Megatron's config: rotary embeddings are a function that gets only the config."""
_TABLE = "splice_exact_table"
"""Attribute of the angles, which Megatron makes once for a pass."""


def use(model: Any, config: Any, device: torch.device, *, parts: int) -> None:
    """Replace the methods of this model's modules.

    Args:
        config: Megatron's, which the model's layers share.
        device: where the model will be.
        parts: tensor parallel ranks of the sampler.

    Raises:
        ConfigError: a product is not exact on this host.
    """
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            # The sampler's ranks cut rows of the one kind, and features of the other.
            adds = parts if isinstance(module, RowParallelLinear) else 1
            if module.weight is not None:
                out, into = module.weight.shape
                kernels.check((out, into // adds), device, parts // adds)
            module._forward_impl = functools.partial(_product, adds)
        if isinstance(module, TENorm):
            module.forward = functools.partial(_norm, module, "weight")
        if isinstance(module, TELayerNormColumnParallelLinear):
            module.normed = functools.partial(_norm, module, "layer_norm_weight")
        if isinstance(module, TEDotProductAttention):
            module.forward = functools.partial(_attend, module)
        if isinstance(module, TopKRouter):
            kernels.check(tuple(module.weight.shape), device)
            module.gating = functools.partial(_gating, module)
            module.routing = functools.partial(_routing, module)
        if type(module) is MLP:
            module.config = copy.copy(config)
            module.config.use_te_activation_func = True  # one function for both halves
            module.activation_func = kernels.trained_swiglu
    setattr(config, _FLAG, True)
    if not hasattr(attention.apply_rotary_pos_emb, "__wrapped__"):
        attention.apply_rotary_pos_emb = _rotary(attention.apply_rotary_pos_emb)


def _product(
    parts: int,
    *,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    **_: Any,
) -> torch.Tensor:
    out = kernels.product(input, weight, parts)
    return out if bias is None else out + bias


def _norm(module: Any, name: str, x: torch.Tensor) -> torch.Tensor:
    weight, eps = getattr(module, name), module.eps

    def ordinary(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    return kernels.differentiable(functools.partial(kernels.rms_norm, eps=eps), ordinary, x, weight)


def _gating(router: Any, x: torch.Tensor) -> torch.Tensor:
    return kernels.product(x, router.weight)


def _routing(
    router: Any, logits: torch.Tensor, padding_mask: None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's shares, [T, E], and its experts, [T, E]; a batch may say which those are."""
    logits_TE = logits.view(-1, logits.shape[-1])

    def choose(scores_TE: torch.Tensor, top_k: int, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        experts_TK = experts.chosen(scores_TE, top_k)
        return scores_TE.gather(1, experts_TK), experts_TK

    replay = router.router_replay
    _, experts_TK = replay.get_replay_topk(logits_TE.detach(), router.topk, None, None, choose)
    experts_TK = experts_TK.sort(dim=1).values
    shares_TK = kernels.differentiable(
        experts.shares, lambda top_TK: top_TK.float().softmax(1), logits_TE.gather(1, experts_TK)
    )
    nothing_TE = torch.zeros_like(logits_TE, dtype=torch.float32)
    return nothing_TE.scatter(1, experts_TK, shares_TK), nothing_TE.bool().scatter(
        1, experts_TK, True
    )


def _table(freqs: torch.Tensor) -> torch.Tensor:
    """The rotary table of these angles, made once for the layers that share them."""
    if (found := getattr(freqs, _TABLE, None)) is None:
        found = kernels.rotary_table(freqs[:, 0, 0, : freqs.shape[-1] // 2])
        setattr(freqs, _TABLE, found)
    table: torch.Tensor = found
    return table


def _rotary(ordinary: Any) -> Any:
    @functools.wraps(ordinary)
    def rotated(t: torch.Tensor, freqs: torch.Tensor, config: Any, **more: Any) -> torch.Tensor:
        """[N, A, D] of a pack; `freqs` are the angles of positions from 0 on, twice."""
        if not getattr(config, _FLAG, False):
            return ordinary(t, freqs, config=config, **more)
        table = _table(freqs)
        bounds, places = more["cu_seqlens"], torch.arange(len(t), device=t.device)
        places = places - bounds[torch.bucketize(places, bounds, right=True) - 1]
        return kernels.rotate(t, table, places)

    return rotated


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_seq_params: Any,
    **_: Any,
) -> torch.Tensor:
    """[N, A, D] -> [N, A * D], sequence by sequence."""
    starts, scale = packed_seq_params.cu_seqlens_q, module.softmax_scale
    most = packed_seq_params.max_seqlen_q
    exact = functools.partial(kernels.attend_pack, starts=starts, most=most, scale=scale)
    if query.is_cuda:  # it has gradients there
        return exact(query, key, value)

    def ordinary(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend(
            query,
            key,
            value,
            starts.tolist(),
            scale=scale,
            window=None,
            sink_A=None,
            context_group=module._context_group,
        )

    return kernels.differentiable(exact, ordinary, query, key, value)
