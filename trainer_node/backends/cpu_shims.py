"""Patches Megatron-Core 0.19.2 and Megatron-Bridge 0.6.2 to run on a CPU over gloo.

For device="cpu" only. `cpu_te` stands in for TransformerEngine. The other shims, the reason of
each, and when it can go:

`_cuda_calls_answer_the_cpu`: Megatron asks `torch.cuda` for the current device, streams and
    synchronisation. Until Megatron asks `torch.accelerator`.
`_schedule_allocates_on_the_cpu`: the pipeline schedules call `torch.zeros(device="cuda")`. Until
    the schedules take a device.
`_tensor_cuda_is_the_identity`: tied embeddings under PP call `weight.data.cuda()`. Likewise.
`_no_cuda_rng`: sequence parallelism and recomputation fork CUDA RNG states, which nothing uses
    without dropout. Until Megatron asks the device.

`apply` must run before anything imports Megatron.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from typing import Any

import torch

from trainer_node.backends import cpu_te, megatron_import

_CPU = torch.device("cpu")
_applied = False


def apply() -> None:
    """Patch this process for Megatron on a CPU; safe to call twice.

    Raises:
        ConfigError: Megatron is imported already.
    """
    global _applied
    if _applied:
        return
    with megatron_import.quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they miss TransformerEngine and Apex, which need CUDA
        cpu_te.install()
        importlib.import_module("megatron.bridge")
    _cuda_calls_answer_the_cpu()
    _schedule_allocates_on_the_cpu()
    _tensor_cuda_is_the_identity()
    _no_cuda_rng()
    _applied = True


def _cuda_calls_answer_the_cpu() -> None:
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    torch.cuda.current_stream = lambda device=None: None  # type: ignore[assignment,return-value]


def _schedule_allocates_on_the_cpu() -> None:
    from megatron.core.pipeline_parallel import schedules

    schedules.torch = cpu_te.TorchOnCpu("torch")


def _tensor_cuda_is_the_identity() -> None:
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment,method-assign]


def _no_cuda_rng() -> None:
    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda self, *args, **kwargs: contextlib.nullcontext()
    random._get_cuda_rng_state = lambda *args, **kwargs: None
    random._set_cuda_rng_state = lambda *args, **kwargs: None


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
    # The alltoall dispatcher makes a CUDA stream in its constructor.
    provider.moe_token_dispatcher_type = "allgather"
