"""vLLM's layerwise reload, repaired: updates can fail and be repeated, and pack each weight once.

vLLM puts a layer's parameters on the meta device and collects what `load_weights` brings. Once the
layer is complete, vLLM builds it, packs it, and copies the result into the live ("kernel") tensors.
Five things go wrong there (seen on 0.32, code read in 0.26):

* *MoE on the CPU, 0.28 to 0.32*: `UnquantizedFusedMoEMethod._setup_kernel` skips the experts'
  packing hook if a kernel exists. An update then silently copies raw weights into packed storage.
  `repair_moe_prepack` runs the skipped hook, and does nothing where vLLM calls it. It can go when
  vLLM calls the hook on updates too.
* *Tied embeddings on the CPU*: the head has its own packed copy of the embedding, receives no
  tensor, and keeps the old copy. `repack_tied` packs it again. It can go when vLLM's reload
  processes a layer whose parameter is shared with one that loaded.
* *Models that copy into a parameter themselves* (gpt-oss): vLLM sees only what passes through a
  parameter's `weight_loader`. Other copies end on the meta device, and the layer keeps its old
  weights. `load` collects them too. It can go when vLLM does.
* *Loaders that are `functools.partial`* (MiniMax-M2's norms): vLLM asks each for its `__name__`,
  and the update fails. `name_partial_loaders` gives them one. It can go when vLLM asks otherwise.
* *A failed update*: half-loaded layers stay registered and the next start skips them, which leaves
  uninitialised memory. `reset` restores every kernel tensor and forgets what was half loaded.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload import layerwise as vllm_layerwise

from inference_node.worker import dialect

_REPAIRED = "_splice_prepack_repaired"


def start(model: torch.nn.Module) -> None:
    """Put every layer into checkpoint format on the meta device, ready for `load_weights`."""
    reset(model)
    repair_moe_prepack(model)
    name_partial_loaders(model)
    initialize_layerwise_reload(model)


def load(model: torch.nn.Module, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Load HF tensors, also those that the model copies past its loaders.

    Args:
        tensors: they own their memory, because vLLM keeps them until their layers are complete.
    """
    with _CopiesPastLoaders(model):
        model.load_weights(iter(tensors))  # type: ignore[operator]


def finish(model: torch.nn.Module, model_config: Any) -> None:
    """Finish the reload: kernel tensors are back, and shared parameters repacked."""
    # vLLM warns of each layer that got nothing. Those were placed directly, or did not change, and
    # the read-back compares every tensor.
    vllm_layerwise.logger.addFilter(_is_of_use)
    try:
        finalize_layerwise_reload(model, model_config)
    finally:
        vllm_layerwise.logger.removeFilter(_is_of_use)
    repack_tied(model)


def _is_of_use(record: logging.LogRecord) -> bool:
    return "Failed to load weights" not in str(record.msg)


def reset(model: torch.nn.Module) -> int:
    """Restore the kernel tensors of every half-loaded layer and drop its tensors; safe at any time.

    Returns: the number of half-loaded layers. Completed layers keep their new values.
    """
    layers = 0
    for layer in model.modules():
        info = vllm_layerwise.get_layerwise_info(layer)
        if info.kernel_tensors is not None:
            vllm_layerwise._place_kernel_tensors(layer, info)
            layers += 1
        info.reset()
    vllm_layerwise.LOADING_LAYERS.clear()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload
    return layers


@contextlib.contextmanager
def checkpoint_format(model: torch.nn.Module) -> Iterator[None]:
    """Within the block, the parameters are meta tensors in checkpoint format with their own
    loaders.

    Raises:
        RuntimeError: an update is under way.
    """
    swapped: list[tuple[torch.nn.Module, Any]] = []
    try:
        for layer in model.modules():
            info = vllm_layerwise.get_layerwise_info(layer)
            if info.can_load():
                raise RuntimeError(
                    f"a weight update is under way in {type(layer).__name__}; reset it first"
                )
            info.kernel_tensors = vllm_layerwise.get_layer_params_buffers(layer)
            info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
            swapped.append((layer, info))
            vllm_layerwise.restore_layer_on_meta(layer, info)
            for tensor in layer._parameters.values():
                # An earlier update left its loader here; it does nothing outside an update.
                if tensor is not None and _is_collecting_loader(tensor):
                    setattr(tensor, "weight_loader", vllm_layerwise._get_original_loader(tensor))  # noqa: B010 - mypy: a Parameter has none
        yield
    finally:
        for layer, info in swapped:
            vllm_layerwise._place_kernel_tensors(layer, info)
            info.reset()


def _is_collecting_loader(tensor: torch.Tensor) -> bool:
    return (
        getattr(getattr(tensor, "weight_loader", None), "__name__", "") == "online_process_loader"
    )


def repair_moe_prepack(model: torch.nn.Module) -> None:
    """Run each MoE method's packing hook exactly once per update, whether or not vLLM runs it."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if (
            method is None
            or getattr(method, _REPAIRED, False)
            or not dialect.moe_prepack_is_skipped_on_reload(method)
        ):
            continue
        method.process_weights_after_loading = _with_hook_once(method)
        setattr(method, _REPAIRED, True)


def name_partial_loaders(model: torch.nn.Module) -> None:
    """Give each weight loader that is a `functools.partial` the name of its function."""
    for layer in model.modules():
        loaded, _ = vllm_layerwise.get_layerwise_info(layer).restore_metadata
        for param in (*layer._parameters.values(), *loaded.values()):
            loader = getattr(param, "weight_loader", None)
            if isinstance(loader, functools.partial):
                setattr(loader, "__name__", loader.func.__name__)  # noqa: B010 - mypy: it has none


def _with_hook_once(method: Any) -> Any:
    original = method.process_weights_after_loading

    def process_weights_after_loading(layer: torch.nn.Module) -> None:
        experts = method.moe_kernel.fused_experts
        hook, calls = experts.process_weights_after_loading, []

        def counted(target: torch.nn.Module) -> None:
            calls.append(target)
            hook(target)

        experts.process_weights_after_loading = counted
        try:
            original(layer)
        finally:
            del experts.process_weights_after_loading
        if not calls and method.moe_kernel.fused_experts is experts:
            hook(layer)

    return process_weights_after_loading


class _CopiesPastLoaders(TorchDispatchMode):
    """Hands copies into parameters on meta to vLLM's reload, as if a weight loader made them."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model = model
        self._loaders = 0
        """Weight loaders that are running; their copies are no news."""
        self._targets: dict[int, tuple[torch.nn.Module, str, torch.Tensor]] | None = None
        self._get_numel_loaded = vllm_layerwise.get_numel_loaded

    def __enter__(self) -> Any:
        vllm_layerwise.get_numel_loaded = self._count
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        vllm_layerwise.get_numel_loaded = self._get_numel_loaded
        super().__exit__(*error)

    def _count(self, *args: Any) -> Any:
        self._loaders += 1
        try:
            return self._get_numel_loaded(*args)
        finally:
            self._loaders -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].is_meta and not self._loaders:
            self._take(args[0], args[1])
            return args[0]
        return func(*args, **(kwargs or {}))

    def _take(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        if self._targets is None:
            self._targets = {
                p.untyped_storage()._cdata: (layer, name, p)
                for layer in self._model.modules()
                for name, p in layer._parameters.items()
                if p is not None and p.is_meta
            }
        found = self._targets.get(destination.untyped_storage()._cdata)
        if found is None:
            return
        layer, name, param = found
        setattr(param, "weight_loader", _place)  # noqa: B010 - mypy: a Parameter has none
        loader = vllm_layerwise.make_online_process_loader(layer, name)
        setattr(param, "weight_loader", loader)  # noqa: B010
        size, stride = tuple(destination.shape), tuple(destination.stride())
        loader(param, source, size, stride, destination.storage_offset())


def _place(
    param: torch.Tensor,
    loaded_weight: torch.Tensor,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
) -> None:
    """A weight loader: copies into the given view of the parameter."""
    torch.as_strided(param, size, stride, offset).copy_(loaded_weight)


def repack_tied(model: torch.nn.Module) -> None:
    """Pack layers again whose `cpu_linear` copies a parameter that another layer owns."""
    owners: dict[int, torch.nn.Module] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is None or weight.numel() == 0:
            continue
        first = owners.setdefault(id(weight), layer)
        if first is not layer and hasattr(layer, "cpu_linear"):
            method: Any = layer.quant_method
            method.process_weights_after_loading(layer)
