"""Writes a PEFT adapter that changes nothing (B is zero), only from a model's config.json.

    python -m trainer_node.tools.identity_adapter --model FOLDER --out FOLDER [--rank 8 --alpha
    16 --targets q_proj,v_proj --seed 1234]

A trainer with the same LoRA settings and seed starts from this adapter. vLLM and PEFT load it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import PrefixChange

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import ALL_LINEAR, LORA_TARGETS, LoraConfig
from trainer_node.adapters.linears import Targets, initial_lora_a
from trainer_node.adapters.peft_io import Key, write
from trainer_node.hf.checkpoint import read_config
from trainer_node.tools.reference import with_single_experts


def linear_shapes(config: Any, targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    """HF module name -> (out features, in features) of every linear among `targets`, experts
    included: those of transformers' class, built without memory.

    Args:
        config: the transformers config of a causal language model.

    Raises:
        ConfigError: transformers has no such model, or its checkpoints have other names.
    """
    renamed = [
        pattern
        for conversion in get_checkpoint_conversion_mapping(config.model_type) or ()
        for pattern in conversion.source_patterns
        if not isinstance(conversion, PrefixChange)
        and not pattern.endswith(tuple(f".{t}.weight" for t in LORA_TARGETS))
    ]
    if renamed or config.get_text_config() is not config:
        raise ConfigError(
            f"config.json does not tell the names in checkpoints of {config.model_type!r}; "
            "let the trainer write its adapter (train_lora)"
        )
    try:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ConfigError(
            f"transformers has no causal language model {config.model_type!r}"
        ) from error
    modules = dict(with_single_experts(built).named_modules())
    found = {
        name: (module.out_features, module.in_features)
        for name, module in modules.items()
        if isinstance(module, nn.Linear)
        and ".layers." in name
        # A router is in the same module as its experts.
        and module.out_features
        != len(getattr(modules[name.rpartition(".")[0]], "experts", None) or ())
    }
    wanted = Targets(targets, [f"{name}.weight" for name in found])
    return {name: shape for name, shape in found.items() if wanted.wants(f"{name}.weight")}


def write_identity_adapter(model: Path, out: Path, *, lora: LoraConfig, seed: int) -> int:
    """Write the adapter into `out`, a new folder; returns its number of tensors.

    Raises:
        ConfigError: no config.json, `out` exists, or as `linear_shapes`.
    """
    config = read_config(model)
    if out.exists():
        raise ConfigError(f"{out} exists; choose a new folder")
    tensors: dict[Key, torch.Tensor] = {}
    for name, (rows, columns) in linear_shapes(config, lora.targets).items():
        tensors[name, "A"] = initial_lora_a(name, rank=lora.rank, in_features=columns, seed=seed)
        tensors[name, "B"] = torch.zeros(rows, lora.rank)
    write(out, tensors, lora=lora, model=model)
    return len(tensors)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer_node.tools.identity_adapter",
        description=__doc__.partition("\n")[0],
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="folder with config.json; no weights are read"
    )
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=16.0)
    parser.add_argument("--targets", default=ALL_LINEAR, help="comma-separated HF module names")
    parser.add_argument("--seed", type=int, default=1234)
    given = parser.parse_args(argv)
    try:
        lora = LoraConfig(
            rank=given.rank,
            alpha=given.alpha,
            targets=tuple(t for t in given.targets.split(",") if t),
        )
        count = write_identity_adapter(given.model, given.out, lora=lora, seed=given.seed)
    except (ConfigError, ValidationError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{count} tensors in {given.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
