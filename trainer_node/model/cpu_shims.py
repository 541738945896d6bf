"""Patches Megatron-Core 0.19.2 and Megatron-Bridge 0.6.2 to run on a CPU over gloo.

For device="cpu" only. Each shim, its reason, and when it can go:

`_import_bridge_without_te`: Bridge imports TransformerEngine unconditionally in
    `peft/lora_layers.py`. Until Bridge guards the import.
`_cuda_calls_answer_the_cpu`: Megatron asks `torch.cuda` for the current device, streams and
    synchronisation. Until Megatron asks `torch.accelerator`.
`_schedule_allocates_on_the_cpu`: the pipeline schedules call `torch.zeros(device="cuda")`. Until
    the schedules take a device.
`_tensor_cuda_is_the_identity`: tied embeddings under PP call `weight.data.cuda()`. Likewise.
`_no_cuda_rng`: sequence parallelism and recomputation fork CUDA RNG states, which nothing uses
    without dropout. Until Megatron asks the device.
`_final_norm`: the block's last norm refuses sequence parallelism without TransformerEngine. Until
    Megatron's wrapper of torch's norm accepts it.
`TELayerNormColumnParallelLinear`, grouped linears, `CausalSdpa`, `RMSNorm`: stand-ins for
    TransformerEngine's layers with its parameter names, so Bridge's mappings and our adapters need
    no second set of names. The local attention forks a CUDA RNG. Until TransformerEngine runs on a
    CPU.

`apply` must run before anything imports `megatron.bridge`. Megatron-Core's modules are imported
first, while TransformerEngine is hidden, so that every `HAVE_TE` in them is False
(`megatron.training` imports most of those that Bridge does). Only then do the names that Bridge
imports appear, and they go again right after.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import sys
import types
import warnings
from typing import Any

import torch
from torch import nn

from trainer_node.model import megatron_import

_CPU = torch.device("cpu")
_CORE_MODULES = ("megatron.training", "megatron.core.models.vision.clip_vit_model")
_applied = False


def apply() -> None:
    """Patch this process for Megatron on a CPU; safe to call twice."""
    global _applied
    if _applied:
        return
    _hide_te()
    with megatron_import.quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they miss TransformerEngine and Apex, which need CUDA
        for name in _CORE_MODULES:
            importlib.import_module(name)
        _import_bridge_without_te()
    _cuda_calls_answer_the_cpu()
    _schedule_allocates_on_the_cpu()
    _tensor_cuda_is_the_identity()
    _final_norm()
    _no_cuda_rng()
    _applied = True


def _hide_te() -> None:
    """It may be installed, where the same environment trains on GPUs."""
    for name in [n for n in sys.modules if n.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]


class _AnyName(types.ModuleType):
    """A module in which every name is an empty class or a sub-module of the same kind; enough to be
    imported and annotated with."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = (
            _AnyName(f"{self.__name__}.{name}") if name.islower() else type(name, (nn.Module,), {})
        )
        setattr(self, name, value)
        return value


def _import_bridge_without_te() -> None:
    names = ("transformer_engine", "transformer_engine.pytorch")
    for name in names:
        module = _AnyName(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        sys.modules[name] = module
    sys.modules[names[0]].pytorch = sys.modules[names[1]]  # type: ignore[attr-defined]
    try:
        importlib.import_module("megatron.bridge")
    finally:
        _hide_te()


def _cuda_calls_answer_the_cpu() -> None:
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    torch.cuda.current_stream = lambda device=None: None  # type: ignore[assignment,return-value]


class _TorchOnCpu(types.ModuleType):
    """`torch` as the schedules see it: `zeros` forgets device="cuda", everything else is torch's
    own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
        """`torch.zeros` on the CPU."""
        kwargs.pop("device", None)
        return torch.zeros(*args, **kwargs)


def _schedule_allocates_on_the_cpu() -> None:
    from megatron.core.pipeline_parallel import schedules

    schedules.torch = _TorchOnCpu("torch")


def _tensor_cuda_is_the_identity() -> None:
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment,method-assign]


def _final_norm() -> None:
    from megatron.core.transformer import transformer_block

    transformer_block.LayerNormImpl = _layers().RMSNorm


def _no_cuda_rng() -> None:
    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda self, *args, **kwargs: contextlib.nullcontext()
    random._get_cuda_rng_state = lambda *args, **kwargs: None
    random._set_cuda_rng_state = lambda *args, **kwargs: None


def prepare_provider(provider: Any) -> None:
    """Turn off all that needs CUDA in a Bridge provider, and give it the layer spec below."""
    without_cuda(provider)
    provider.transformer_layer_spec = cpu_layer_spec


def without_cuda(provider: Any) -> None:
    """Turn off all that needs CUDA in a Bridge provider."""
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


def cpu_layer_spec(config: Any) -> Any:
    """Megatron's transformer layer from CPU modules, with the module and parameter names of the
    TransformerEngine spec."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.tensor_parallel.layers import RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    layers = _layers()
    qk_norm = layers.RMSNorm if config.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=layers.TELayerNormColumnParallelLinear,
            core_attention=layers.CausalSdpa,
            linear_proj=RowParallelLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=layers.RMSNorm if config.num_moe_experts else IdentityOp,
            mlp=_mlp_spec(config, layers),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _mlp_spec(config: Any, layers: Any) -> Any:
    from megatron.core.tensor_parallel.layers import RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules

    if not config.num_moe_experts:
        dense = MLPSubmodules(
            linear_fc1=layers.TELayerNormColumnParallelLinear, linear_fc2=RowParallelLinear
        )
        return functools.partial(MLP.as_mlp_submodule, submodules=dense)
    grouped = GroupedMLPSubmodules(
        linear_fc1=layers.TEColumnParallelGroupedLinear,
        linear_fc2=layers.TERowParallelGroupedLinear,
    )
    experts = functools.partial(TEGroupedMLP, submodules=grouped)
    return functools.partial(MoELayer, submodules=MoESubmodules(experts=experts))


def _layers() -> Any:
    """The CPU layers; imported late, because their bases import Megatron."""
    from trainer_node.model import cpu_layers

    return cpu_layers
