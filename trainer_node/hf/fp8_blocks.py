"""Checkpoints in block-scaled FP8, as DeepSeek's and Qwen's FP8 releases.

    X.weight              e4m3 [O, I]
    X.weight_scale_inv    fp32, one for each block of 128 x 128
    config.json           "quantization_config": see `SETTINGS`

A weight is its e4m3 times its block's scale. The trainer reads it as bf16 and trains that.
Quantised again, a weight that was not trained keeps its codes. Its scales move by bf16's rounding.

Axes: O = out features, I = in features.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import (
    FP8_BLOCK,
    Fp8Group,
    Fp8Weights,
    Manifest,
    fp8_manifest,
    fp8_scale,
)
from weight_transfer import fp8

SETTINGS: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
}
SUFFIX = fp8_scale("", "per_block")


def is_block_scaled(folder: Path) -> bool:
    """Whether a checkpoint's weights are block-scaled FP8.

    Raises:
        ConfigError: they are quantised in another way, which the trainer does not read.
    """
    found = json.loads((folder / "config.json").read_text()).get("quantization_config")
    if found is None:
        return False
    wanted = ("quant_method", "weight_block_size")
    if any(found.get(key) != SETTINGS[key] for key in wanted):
        raise ConfigError(
            f"{folder}/config.json: quantization_config is {json.dumps(found)[:200]}; the trainer "
            f"reads bf16, and FP8 with weight_block_size {SETTINGS['weight_block_size']}. Give it "
            "the bf16 model of this architecture"
        )
    return True


def weights_of(names: Collection[str]) -> frozenset[str]:
    """The tensors of a checkpoint that have scales."""
    there = frozenset(names)
    scaled = (n.removesuffix(SUFFIX) for n in there if n.endswith(SUFFIX))
    return frozenset(n for n in scaled if n in there)


def scaled_weights(folder: Path, dtypes: Mapping[str, str]) -> frozenset[str]:
    """The weights of a checkpoint in block-scaled FP8.

    Args:
        dtypes: `checkpoint.tensor_dtypes` of the folder.

    Raises:
        ConfigError: it is not such a checkpoint, or an FP8 weight has no scales.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json, or does not exist")
    found = weights_of(dtypes) if is_block_scaled(folder) else frozenset()
    if not found:
        raise ConfigError(f"{folder} is no checkpoint in block-scaled FP8")
    for name, dtype in dtypes.items():
        if (dtype == "F8_E4M3") != (name in found):
            what = "has scales, but is no e4m3" if name in found else "has no scales"
            raise ConfigError(f"{folder}: {name} {what}")
    return found


def loss_of(folder: Path, kinds: Collection[str]) -> str:
    """What a publication in FP8 loses of this base; empty: nothing.

    Args:
        kinds: of the scales that are sent, as `Fp8Group.kind`.
    """
    if "per_block" not in kinds or not is_block_scaled(folder):
        return ""
    return (
        "The base weights are block-scaled FP8, and so are the served ones. An update below half a "
        "step of FP8's grid, some 3 to 6 % of a weight, is rounded away, whatever "
        "publication.rounding says; served_share is of the merge in bf16 before that. Serve a bf16 "
        "copy of the checkpoint, or expect the served model to lag behind (docs/merging.md)"
    )


def read(name: str, tensor: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """A checkpoint's tensor for a bf16 model.

    Args:
        scales: of its blocks. None: it has none.

    Raises:
        ConfigError: FP8 that cannot be read: without scales it would be a model of other weights.
    """
    is_fp8 = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    if scales is None and not is_fp8:
        return tensor
    blocks = tuple(-(-size // FP8_BLOCK) for size in tensor.shape)
    is_matrix = tensor.dtype is torch.float8_e4m3fn and tensor.dim() == 2
    if is_matrix and scales is not None and tuple(scales.shape) == blocks:
        return dequantised(tensor, scales)
    found = "no scales" if scales is None else f"scales of shape {tuple(scales.shape)}"
    raise ConfigError(
        f"the checkpoint's {name} is {str(tensor.dtype)[6:]} {tuple(tensor.shape)} with {found}; "
        f"the trainer reads float8_e4m3fn matrices with a scale for each {FP8_BLOCK} x {FP8_BLOCK} "
        f"block ({name}{SUFFIX}). Give it the bf16 model of this architecture"
    )


def dequantised(weight_OI: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The bf16 weight of e4m3 and its blocks' scales."""
    height, width = weight_OI.shape
    each = scales.float().repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return (weight_OI.float() * each[:height, :width]).bfloat16()


def quantised(name: str, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
    """e4m3 and scales of a bf16 weight, by name: the bytes of a publication."""
    values_1OI, scales = fp8.per_block(weight_OI[None])
    return {name: values_1OI[0], name + SUFFIX: scales[0]}


def manifest_like(manifest: Manifest, weights: Collection[str]) -> Manifest:
    """The manifest of a checkpoint in which these matrices are block-scaled. Pure.

    Raises:
        ConfigError: the model lacks one of them, or has it in a dtype other than bf16.
    """
    specs = {spec.name: (i, spec.dtype) for i, spec in enumerate(manifest.tensors)}
    wrong = sorted(n for n in weights if n not in specs or specs[n][1] != "bfloat16")
    if wrong or not weights:
        what = f"{wrong[0]} is FP8 there, and no bf16 tensor here" if wrong else "it has no FP8"
        raise ConfigError(f"cannot write FP8 like this checkpoint: {what}")
    groups = (Fp8Group(kind="per_block", tensors=(specs[n][0],)) for n in sorted(weights))
    return fp8_manifest(manifest, Fp8Weights(groups=tuple(groups)))


def quantising(
    stream: Iterator[tuple[str, torch.Tensor]], weights: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a bf16 export, these weights as e4m3 and scales."""
    for name, tensor in stream:
        if name in weights:
            yield from quantised(name, tensor).items()
        else:
            yield name, tensor
