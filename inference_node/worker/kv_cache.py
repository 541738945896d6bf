"""A KV cache in FP8: taken while each of its scales is the constant 1.0, else refused by name.

vLLM multiplies queries, keys and values by scales of the attention layer. Without scales in the
checkpoint and without `--calculate-kv-scales` they are always 1.0. New weights then cannot make
them wrong. Calibrated scales belong to the weights of that time, so a cache with such scales is
refused.

    refusals(model, config)    at the start
    scaled_layers(model, config)    once; walking over a model's modules takes milliseconds
    check(layers)              after each update, within the pause: all scales are still 1.0

The pause mode drops or keeps the entries of the old version, as with any cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from orchestrator.errors import VerificationError

FP8 = frozenset({"fp8", "fp8_e4m3", "fp8_e5m2"})
"""Formats whose only scales are the layer's."""
PLAIN = frozenset({"auto", "float32", "half", "float16", "bfloat16"})
SCALES = ("_q_scale", "_k_scale", "_v_scale", "_prob_scale")
_COPIES = ("float", "cpu")
"""Suffixes of a scale's copies: a Python number, and a tensor on the CPU."""
CONSTANT = 1.0


def refusals(model: torch.nn.Module, cache_config: Any) -> list[str]:
    """Why this cache may become wrong with new weights; empty for a plain one."""
    found = _dtypes(model, cache_config) - PLAIN
    unknown = sorted(found - FP8)
    if unknown:
        return [
            f"the KV cache is kept as {', '.join(unknown)}; splice describes "
            f"{', '.join(sorted(FP8))} only. Start vLLM with another --kv-cache-dtype"
        ]
    if not found:
        return []
    is_calculated = getattr(cache_config, "calculate_kv_scales", False) or any(
        getattr(layer, "calculate_kv_scales", False) for layer in _layers(model).values()
    )
    if is_calculated:
        return [
            "the KV cache's scales are calculated of the first request's keys and values, which "
            "new weights make wrong. Start vLLM without --calculate-kv-scales"
        ]
    wrong = _wrong(_layers(model))
    if not wrong:
        return []
    return [
        f"the checkpoint has scales for the KV cache, which new weights make wrong: {wrong}. Start "
        "vLLM without --kv-cache-dtype, or serve a checkpoint without such scales"
    ]


def scaled_layers(model: torch.nn.Module, cache_config: Any) -> dict[str, torch.nn.Module]:
    """The layers whose cache is FP8 or may be; none of a plain cache."""
    return _layers(model) if _dtypes(model, cache_config) & FP8 else {}


def check(layers: Mapping[str, torch.nn.Module]) -> None:
    """Prove that the scales of `scaled_layers` are the constant.

    Raises:
        VerificationError: names a layer, its scale and the value.
    """
    if layers and (wrong := _wrong(layers)):
        raise VerificationError(
            f"the KV cache's scales have changed: {wrong}, not {CONSTANT}. Restart vLLM"
        )


def _layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return {path: layer for path, layer in model.named_modules() if hasattr(layer, "_k_scale")}


def _dtypes(model: torch.nn.Module, cache_config: Any) -> set[str]:
    """Formats of the caches; a checkpoint may choose another one for a layer."""
    layers = (getattr(layer, "kv_cache_dtype", "auto") for layer in _layers(model).values())
    return {str(cache_config.cache_dtype), *map(str, layers)}


def _wrong(layers: Mapping[str, torch.nn.Module]) -> str:
    """A scale that is not the constant, and its value; empty if all are."""
    names: list[str] = []
    live: list[torch.Tensor] = []
    for path, layer in layers.items():
        for scale in SCALES:
            for name in (scale, *(f"{scale}_{kind}" for kind in _COPIES)):
                value = getattr(layer, name, None)
                if isinstance(value, torch.Tensor) and value.is_cuda:
                    names += [f"{path}.{name}"] * value.numel()
                    live.append(value.detach().float().flatten())
                    continue
                numbers = value.flatten().tolist() if isinstance(value, torch.Tensor) else [value]
                if any(number not in (None, CONSTANT) for number in numbers):
                    return f"{path}.{name} is {numbers[0]}"
    values = torch.cat(live).tolist() if live else []  # one copy from the device
    wrong = ((n, v) for n, v in zip(names, values, strict=True) if v != CONSTANT)
    return next((f"{name} is {value}" for name, value in wrong), "")
