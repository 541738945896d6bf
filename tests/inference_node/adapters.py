"""Random adapters under PEFT's names, and the weights that they stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

PREFIX = "base_model.model."
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Tensors = dict[str, torch.Tensor]


def adapter(
    base: Mapping[str, torch.Tensor], linears: Sequence[str], *, rank: int, seed: int
) -> Tensors:
    """Random A and B, under PEFT's names; the scale is in B."""
    generator, found = torch.Generator().manual_seed(seed), Tensors()
    for name, weight in base.items():
        linear = name.removesuffix(".weight")
        if linear.rpartition(".")[2] in linears and "layers" in name:
            out, inner = weight.shape
            a = torch.randn(rank, inner, generator=generator) / inner**0.5
            b = 0.3 * torch.randn(out, rank, generator=generator)
            found[f"{PREFIX}{linear}.lora_A.weight"] = a.to(weight.dtype)
            found[f"{PREFIX}{linear}.lora_B.weight"] = b.to(weight.dtype)
    return found


def merged(base: Mapping[str, torch.Tensor], matrices: Mapping[str, torch.Tensor]) -> Tensors:
    found = dict(base)
    for name, a in matrices.items():
        if name.endswith(".lora_A.weight"):
            linear = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            b = matrices[name.replace("lora_A", "lora_B")]
            found[f"{linear}.weight"] = base[f"{linear}.weight"].float() + b.float() @ a.float()
    return found
