"""Lets vLLM compute with `weight_transfer.exact`: `inference.exact`. On a CPU in fp32, on a GPU in
bf16.

    install()    in each process of vLLM, before it builds a model

vLLM's own kernels (oneDNN or cuBLAS products, paged attention) give a token other bits with another
batch. These methods are replaced, of vLLM 0.32 on a CPU, of 0.26 and 0.33 on a GPU: the products of
linears and of the output layer, RMSNorm, SwiGLU, rotary embeddings, experts and their choice, and
attention with its KV cache, whose keys and values are kept as they are. A layer of another kind is
refused when vLLM builds it. vLLM's sampler stays as it is.

Axes: see `weight_transfer.exact.kernels` and `experts`; B = requests, S = slots of a block of the
cache.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn

from orchestrator.errors import ConfigError
from weight_transfer.exact import experts, kernels


def install() -> None:
    """Replace the methods, once."""
    from vllm.model_executor.layers import activation, layernorm, linear
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.rotary_embedding import base
    from vllm.platforms import current_platform

    for cls, method in (
        (layernorm.RMSNorm, _norm),
        (activation.SiluAndMul, _swiglu),
        (base.RotaryEmbedding, _rotate),
    ):
        cls.forward_cpu = cls.forward_cuda = cls.forward_native = method
    RoutedExperts.forward_modular, RoutedExperts.forward_monolithic = _experts, _in_one_kernel
    linear.tensor_model_parallel_all_reduce = _ordered_sum
    (_install_on_cpu if current_platform.is_cpu() else _install_on_gpu)()


def _install_on_cpu() -> None:
    from vllm.model_executor.layers import utils as layer_utils
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
    from vllm.v1.attention.backends import cpu_attn

    layer_utils.dispatch_cpu_unquantized_gemm = _product
    # Experts' weights stay as they are loaded.
    cpu_moe.CPUUnquantizedExperts.process_weights_after_loading = lambda *_: None
    CPURouter._compute_routing = _route
    impl = cpu_attn.CPUAttentionBackendImpl
    if impl.forward is not _attend:
        impl.__init__ = _checked(impl.__init__)
        impl.forward, impl.do_kv_cache_update = _attend, _keep


def _install_on_gpu() -> None:
    from vllm.model_executor.layers import linear, vocab_parallel_embedding
    from vllm.model_executor.layers.fused_moe.router import fused_topk_router, gate_linear
    from vllm.v1.attention.backends import flash_attn

    linear.UnquantizedLinearMethod.apply = _multiply
    vocab_parallel_embedding.UnquantizedEmbeddingMethod.apply = _multiply
    gate_linear.GateLinear.forward = linear.ReplicatedLinear.forward
    fused_topk_router.FusedTopKRouter._compute_routing = _route
    impl = flash_attn.FlashAttentionImpl
    if impl.forward is not _attend_on_gpu:
        impl.__init__ = _checked(impl.__init__)
        impl.forward = _attend_on_gpu


def _refuse(what: str) -> ConfigError:
    return ConfigError(f'numerics = "exact" does not go with {what}; docs/exactness.md says why')


def _product(layer: Any, remove_weight: bool) -> None:
    weight = layer.weight
    if weight.is_meta:
        layer.cpu_linear = nn.functional.linear
        return
    _check(weight, torch.float32)
    layer.cpu_linear = kernels.linear


def _check(weight: torch.Tensor, dtype: torch.dtype, dims: int = 2) -> None:
    if weight.dim() != dims or weight.dtype is not dtype:
        raise _refuse(f"a weight of shape {tuple(weight.shape)} in {weight.dtype}")
    if why := kernels.obstacle(tuple(weight.shape), weight.device):
        raise _refuse(f"this host: {why}")


def _multiply(
    _: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    _check(layer.weight, torch.bfloat16)
    return kernels.linear(x, layer.weight, bias)


def _ordered_sum(part_NO: torch.Tensor) -> torch.Tensor:
    """Of all tensor parallel ranks."""
    from vllm.distributed import (
        get_tensor_model_parallel_world_size,
        tensor_model_parallel_all_gather,
    )

    count = get_tensor_model_parallel_world_size()
    gathered = tensor_model_parallel_all_gather(part_NO.contiguous(), dim=0)
    return kernels.added(gathered.view(count, *part_NO.shape).unbind())


def _norm(norm: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    if norm.variance_size_override is not None or not norm.has_weight:
        raise _refuse("a norm over a part of its features, or without a weight")
    weight, eps = norm.weight.data, norm.variance_epsilon
    if residual is None:
        return kernels.rms_norm(x, weight, eps)
    return kernels.add_rms_norm(x, residual, weight, eps)


def _swiglu(_: Any, x: torch.Tensor) -> torch.Tensor:
    return kernels.swiglu(x)


def _route(
    router: Any, hidden_states: torch.Tensor, router_logits: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    if router.scoring_func != "softmax" or not router.renormalize:
        raise _refuse("routing by other than the softmax of the chosen experts' logits")
    experts_TK = experts.chosen(router_logits, router.top_k)
    return experts.shares(router_logits.gather(1, experts_TK)), experts_TK


def _experts(
    layer: Any,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    method, cut = layer.quant_method, layer.moe_config
    if cut.tp_size != 1 or cut.ep_size != 1:
        raise _refuse("experts that are cut over ranks")
    backend = getattr(getattr(method, "unquantized_backend", None), "name", type(method).__name__)
    if backend not in ("CPU", "TRITON") or layer.activation.value != "silu":
        raise _refuse(f"experts of vLLM's backend {backend} with {layer.activation}")
    dtype = torch.float32 if x.device.type == "cpu" else torch.bfloat16
    for weight in (layer.w13_weight, layer.w2_weight):
        _check(weight, dtype, dims=3)
    return experts.mlp(x, topk_weights, topk_ids, layer.w13_weight, layer.w2_weight)


def _in_one_kernel(*_: Any, **__: Any) -> torch.Tensor:
    raise _refuse("experts that are chosen and computed in one kernel")


def _table(rotary: Any, device: torch.device) -> torch.Tensor:
    """[positions, D] in fp32: cosines, then sines. vLLM's own has the weights' dtype. The trainer
    computes the frequencies on a CPU as well."""
    from vllm.model_executor.layers.rotary_embedding import base

    if type(rotary) is not base.RotaryEmbedding:
        raise _refuse(f"scaled rotary embeddings ({type(rotary).__name__})")
    with torch.device("cpu"):
        places = torch.arange(rotary.max_position_embeddings, dtype=torch.float32)
        angles = places[:, None] * rotary._compute_inv_freq(rotary.base)
    return kernels.rotary_table(angles.to(device))


def _rotate(
    rotary: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if rotary.rotary_dim != rotary.head_size or not rotary.is_neox_style:
        raise _refuse("rotary embeddings of a part of a head, or interleaved ones")
    if "exact_table" not in rotary.__dict__:
        rotary.__dict__["exact_table"] = _table(rotary, query.device)
    places_N = positions.flatten()

    def turned(x: torch.Tensor) -> torch.Tensor:
        x_NAD = x.view(len(places_N), -1, rotary.head_size)
        return kernels.rotate(x_NAD, rotary.exact_table, places_N).view(x.shape)

    return turned(query), None if key is None else turned(key)


_CACHES = ("auto", "float32", "bfloat16")


def _checked(init: Any) -> Any:
    def checked(impl: Any, *args: Any, **kwargs: Any) -> None:
        init(impl, *args, **kwargs)
        special = {
            # The CPU's backend has a number, the GPU's a pair; -1: none.
            "a sliding window": impl.sliding_window not in (-1, None, (-1, -1)),
            "a cap of the attention's logits": bool(impl.logits_soft_cap),
            "ALiBi": impl.alibi_slopes is not None,
            "a KV cache cut over ranks": getattr(impl, "dcp_world_size", 1) > 1,
            "attention sinks": impl.sinks is not None,
            f"attention of the kind {impl.attn_type}": impl.attn_type != "decoder",
            f"a KV cache in {impl.kv_cache_dtype}": impl.kv_cache_dtype not in _CACHES,
        }
        if found := [what for what, has in special.items() if has]:
            raise _refuse(found[0])

    return checked


def _keep(
    _: Any,
    layer: nn.Module,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write [N, G, D] keys and values to their slots; kv_cache is [blocks, G, S, 2 D]."""
    slots = slot_mapping[slot_mapping >= 0]
    block, offset = slots // kv_cache.shape[2], slots % kv_cache.shape[2]
    kv_cache[block, :, offset] = torch.cat([key, value], dim=-1)[: len(slot_mapping)][
        slot_mapping >= 0
    ]


def _attend(
    impl: Any,
    layer: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    attn_metadata: Any,
    output: torch.Tensor,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    """Attend request by request."""
    if attn_metadata is None:  # warming up
        return output
    bounds, lengths = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
    for request, (start, end) in enumerate(pairwise(bounds)):
        length = lengths[request]
        if end == start:
            continue
        blocks = attn_metadata.block_table[request, : -(-length // kv_cache.shape[2])]
        both_KGD = kv_cache[blocks.long()].transpose(1, 2).flatten(0, 1)[:length]
        keys, values = both_KGD.chunk(2, dim=-1)
        found = kernels.attend(query[start:end], keys, values, impl.scale)
        output[start:end] = found.view_as(output[start:end])
    return output


def _attend_on_gpu(
    impl: Any,
    layer: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    attn_metadata: Any,
    output: torch.Tensor,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    """Attend to the cache, which has the new keys and values already."""
    if attn_metadata is None:  # measuring memory
        return output.fill_(0)
    from weight_transfer.exact import gpu

    gpu.attend_paged(
        query,
        kv_cache,
        starts=attn_metadata.query_start_loc,
        lengths=attn_metadata.seq_lens,
        table=attn_metadata.block_table,
        most=attn_metadata.max_query_len,
        scale=impl.scale,
        out=output.view_as(query),
    )
    return output
