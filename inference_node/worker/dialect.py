"""Differences in the workers between vLLM 0.26 and 0.28 to 0.32.

One function here for each name that moved, each attribute of one version only, and each call that
gained an argument. The functions import vLLM inside, because the node asks for the version without
loading vLLM.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from inference_node.shared import names, vllm_version

if TYPE_CHECKING:
    import torch

# ---------------------------------------------------------------- the layerwise reload


def skip_load_tensors() -> frozenset[str]:
    """Tensor names that no weight loader fills.

    0.26 has one set; later versions split it, and add `bias` to the wider one.
    """
    from vllm.model_executor.model_loader.reload import meta

    return frozenset(getattr(meta, "SKIP_LOAD_TENSORS", None) or meta.SKIP_TENSORS)


def loadable_numel(tensor: torch.Tensor) -> int:
    """Number of elements of a checkpoint-format parameter that a checkpoint fills.

    Later versions declare padding on the parameter.
    """
    return int(getattr(tensor, "weight_loader_numel", tensor.numel()))


def is_deferred_attention(layer: torch.nn.Module) -> bool:
    """Whether the reload treats the layer as attention, whose scales are optional."""
    from vllm.model_executor.layers import attention

    check: Callable[[torch.nn.Module], bool] | None = getattr(
        attention, "is_deferred_attention_layer", None
    )
    if check is not None:
        return check(layer)
    return isinstance(layer, (attention.Attention, attention.MLAAttention))


@contextlib.contextmanager
def partial_load() -> Iterator[None]:
    """Within the block, `load_weights` may be called many times with a part of the weights.

    Later versions must be told about it for MTP models.
    """
    try:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    except ImportError:
        yield
        return
    with disable_mtp_completeness_check():
        yield


# ---------------------------------------------------------------- adapters


def lora_manager(model: torch.nn.Module) -> Any:
    """What keeps the model's adapters; None without --enable-lora."""
    return getattr(model, "lora_manager", None)


def hold_adapter(manager: Any) -> None:
    """Have vLLM take our adapter for loaded and active, and leave its matrices as they are."""
    from vllm.lora.lora_model import LoRAModel

    if manager.lora_index_to_id[0] == names.ADAPTER_ID:
        return
    manager._registered_adapters[names.ADAPTER_ID] = LoRAModel(names.ADAPTER_ID, 1, {})
    manager._active_adapters[names.ADAPTER_ID] = None
    manager.lora_index_to_id[0] = names.ADAPTER_ID


def lora_name(model: torch.nn.Module, name: str) -> tuple[str, bool]:
    """The path in the model of the linear that a PEFT tensor belongs to, and whether it is A."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    for without_stacking in ("get_rename_mapper", "get_unstacked_mapper"):  # the latter: 0.26
        if hasattr(mapper, without_stacking):
            mapper = getattr(mapper, without_stacking)()
            break
    return parse_fine_tuned_lora_name(name, mapper)


def record_as_loaded(layer: torch.nn.Module) -> None:
    """Tell the reload that a layer's parameters are in checkpoint format."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    record_metadata_for_reloading(layer)


# ---------------------------------------------------------------- the fused MoE layer


def convert_moe_weights(
    *, method: Any, layer: torch.nn.Module, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Convert a layer's parameters as its unquantised MoE method does after loading.

    Layer and method stay as they are.

    Args:
        tensors: w13_weight [E, U, H], w2_weight [E, H, I], and w13_bias [E, U], w2_bias [E, H] if
            the layer has them. E = experts, U = 2 * intermediate, H = hidden, I = intermediate.

    Raises:
        NotImplementedError: the backend hides its layout (monolithic packing, other platforms).
    """
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    backend = method.unquantized_backend
    if backend.name in ("TPU", "OOT", "XPU", "MOONEP"):
        raise NotImplementedError(f"MoE backend {backend.name} hides its layout")
    is_old = vllm_version.dialect() == "0.26"
    if is_old and backend.name == "CPU":
        raise NotImplementedError("vLLM 0.26's CPU MoE packs into a separate module")
    extra: dict[str, Any] = {}
    if "layer" in inspect.signature(unquantized.convert_to_unquantized_kernel_format).parameters:
        extra["layer"] = moe_stand_in(layer, tensors)
    w13, w2 = unquantized.convert_to_unquantized_kernel_format(
        backend,
        moe_config=copy.copy(method.moe),
        w13_weight=tensors["w13_weight"],
        w2_weight=tensors["w2_weight"],
        **extra,
    )
    converted = {**tensors, "w13_weight": w13, "w2_weight": w2}
    if is_old:
        return converted
    stand_in = moe_stand_in(layer, converted)
    copy.copy(method.moe_kernel.fused_experts).process_weights_after_loading(stand_in)
    return {n: p.data for n, p in stand_in._parameters.items() if p is not None}


def moe_stand_in(
    layer: torch.nn.Module, tensors: dict[str, torch.Tensor], *, hides: Collection[str] = ()
) -> torch.nn.Module:
    """A module that answers like `layer` but owns the given parameters.

    Args:
        hides: parameters of the layer that the module lacks.
    """
    import torch

    class _StandIn(torch.nn.Module):
        def __getattr__(self, key: str) -> Any:
            try:
                return super().__getattr__(key)
            except AttributeError:
                if key in hides or (key.endswith("_bias") and key in layer._parameters):
                    raise
                return getattr(layer, key)

    stand_in = _StandIn()
    # register_parameter refuses a name that hasattr() finds on the original layer.
    for key, tensor in tensors.items():
        stand_in._parameters[key] = torch.nn.Parameter(tensor, requires_grad=False)
    return stand_in


def is_quantised(layer: torch.nn.Module) -> bool:
    """Whether a layer keeps its own parameters in a different form from the one they are loaded
    in."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    method = getattr(layer, "quant_method", None)
    is_method = isinstance(method, QuantizeMethodBase) and any(
        p is not None for p in layer._parameters.values()
    )
    is_plain = isinstance(method, BaseKVCacheMethod) or type(method).__name__.startswith("Unquant")
    return is_method and not is_plain


def fp8_block_remedy(kind: str) -> str:
    """The remedy where DeepGEMM rounds the scales of FP8 blocks; else empty."""
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    if kind != "per_block" or not is_deep_gemm_e8m0_used():
        return ""
    return (
        ", because DeepGEMM has their scales rounded to powers of two; start the node with "
        "VLLM_USE_DEEP_GEMM_E8M0=0 in its environment"
    )


def moe_prepack_is_skipped_on_reload(method: Any) -> bool:
    """Whether 0.28 to 0.32 skip the packing hook of this method's kernel on updates."""
    kernel = getattr(method, "moe_kernel", None)
    return vllm_version.dialect() != "0.26" and getattr(kernel, "fused_experts", None) is not None
