"""Tensors that attention layers derive from other layers' parameters after loading.

MLA absorbs `kv_b_proj` into W_UK_T and W_UV, which decoding multiplies by. Some backends keep a
layer's sinks in float32. vLLM's reload derives such tensors again. `refresh` does so after
parameters were written in place, and `check` compares MLA's with their source.

Axes: N = heads, P = a head's key dimensions without position, V = its value dimensions, L = latent
dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from inference_node.worker import dialect
from orchestrator.errors import ManifestError, VerificationError

_HOOK = "process_weights_after_loading"


def deriving_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Path -> the attention layers that make tensors of other layers' parameters.

    Raises:
        ManifestError: a layer dropped the weight that it absorbed, so no update can reach it.
    """
    found = {
        path: layer
        for path, layer in model.named_modules()
        if dialect.is_deferred_attention(layer) and _derives(layer)
    }
    for path, layer in found.items():
        weight = getattr(getattr(layer, "kv_b_proj", None), "weight", None)
        if weight is not None and weight.numel() == 0:
            raise ManifestError(
                f"{path} dropped the weight of kv_b_proj after absorbing it, so vLLM cannot reload "
                "it; start vLLM with --attention-backend CPU_MLA"
            )
    return found


def _derives(layer: torch.nn.Module) -> bool:
    classes = type(getattr(layer, "impl", None)).__mro__
    is_overridden = sum(_HOOK in vars(c) for c in classes) > 1
    return is_overridden or hasattr(layer, "kv_b_proj")


def refresh(layers: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Derive the layers' tensors again.

    Args:
        dtype: of the model's activations.
    """
    for layer in layers.values():
        layer.process_weights_after_loading(dtype)


def check(layers: Mapping[str, Any]) -> None:
    """Compare absorbed projections with the weights that they are made of.

    Raises:
        VerificationError: they differ; names the layers.
    """
    found = {path: _absorbs_its_weight(layer) for path, layer in layers.items()}
    equal = {path: is_same for path, is_same in found.items() if is_same is not None}
    same = torch.stack(list(equal.values())).tolist() if equal else []
    wrong = [path for path, is_same in zip(equal, same, strict=True) if not is_same]
    if wrong:
        raise VerificationError(
            f"the absorbed projections of {', '.join(wrong[:5])} are not those of kv_b_proj; "
            "restart the replica"
        )


def _absorbs_its_weight(layer: Any) -> torch.Tensor | None:
    """Whether W_UK_T [N, P, L] and W_UV [N, L, V] are made of the live weight [N * (P + V), L].

    None: the layer has none, they share its memory, or it is kept in another form.
    """
    w_uk_NPL, w_uv_NLV = getattr(layer, "W_UK_T", None), getattr(layer, "W_UV", None)
    weight = getattr(getattr(layer, "kv_b_proj", None), "weight", None)
    if w_uk_NPL is None or w_uv_NLV is None or weight is None:
        return None
    heads, keys, latent = w_uk_NPL.shape
    shape = (heads * (keys + w_uv_NLV.shape[2]), latent)
    storages = {t.untyped_storage().data_ptr() for t in (w_uk_NPL, w_uv_NLV, weight)}
    if len(storages) == 1 or tuple(weight.shape) != shape or weight.dtype != w_uk_NPL.dtype:
        return None
    weight_NOL = weight.view(heads, -1, latent)
    keys_same = (weight_NOL[:, :keys] == w_uk_NPL).all()
    return keys_same & (weight_NOL[:, keys:] == w_uv_NLV.transpose(1, 2)).all()
