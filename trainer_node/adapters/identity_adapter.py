"""Writes a PEFT adapter that changes nothing (B is zero), from a model's config.json alone.

    python -m trainer_node.adapters.identity_adapter --model FOLDER --out FOLDER [--rank 8 --alpha
    16 --targets q_proj,v_proj --seed 1234]

A trainer with the same LoRA settings and seed starts from this adapter. vLLM and PEFT load it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import ALL_LINEAR, LORA_TARGETS, LoraConfig
from trainer_node.adapters.peft_io import Key, write
from trainer_node.model.hf import read_config


def linear_shapes(config: Any, targets: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """(HF module name, out features, in features) of every linear among `targets`, experts
    included.

    Args:
        config: the transformers config of a Qwen3 or Qwen3-MoE model.
    """
    targets = LORA_TARGETS if ALL_LINEAR in targets else targets
    hidden = config.hidden_size
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    experts = getattr(config, "num_experts", None) or 0
    inner = config.moe_intermediate_size if experts else config.intermediate_size
    attention = {
        "q_proj": (heads * head_dim, hidden),
        "k_proj": (kv_heads * head_dim, hidden),
        "v_proj": (kv_heads * head_dim, hidden),
        "o_proj": (hidden, heads * head_dim),
    }
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    for layer in range(config.num_hidden_layers):
        for target in (t for t in attention if t in targets):
            yield f"model.layers.{layer}.self_attn.{target}", *attention[target]
        for block in [f"experts.{e}." for e in range(experts)] or [""]:
            for target in (t for t in mlp if t in targets):
                yield f"model.layers.{layer}.mlp.{block}{target}", *mlp[target]


def write_identity_adapter(model: Path, out: Path, *, lora: LoraConfig, seed: int) -> int:
    """Write the adapter into `out`, a new folder; returns its number of tensors.

    Raises:
        ConfigError: no config.json, a model that the trainer does not know, or `out` exists.
    """
    config = read_config(model)
    if config.model_type not in ("qwen3", "qwen3_moe"):
        raise ConfigError(
            f"{model} is a {config.model_type!r} model; qwen3 and qwen3_moe are known"
        )
    if out.exists():
        raise ConfigError(f"{out} exists; choose a new folder")
    from trainer_node.adapters.linears import initial_lora_a

    tensors: dict[Key, torch.Tensor] = {}
    for name, rows, columns in linear_shapes(config, lora.targets):
        tensors[name, "A"] = initial_lora_a(name, rank=lora.rank, in_features=columns, seed=seed)
        tensors[name, "B"] = torch.zeros(rows, lora.rank)
    write(out, tensors, lora=lora, model=model)
    return len(tensors)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer_node.adapters.identity_adapter",
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
