"""What a checkpoint's folder holds, and what it says of its model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from orchestrator.errors.other_version import refusal
from trainer_node.files import generations
from trainer_node.files.behind import OnDisk
from trainer_node.files.generations import CheckpointError
from trainer_node.layout.pieces import Piece, TrainedParam
from trainer_node.model.model import Model
from trainer_node.ranks.lockstep import Failure, agree
from trainer_node.state.sharded_state import Shard

ADAPTER, WEIGHTS, STATE, REMAKE = "adapter", "weights", "state", "remake.bin"
_FORMAT = 2


def real(folder: Path) -> Path:
    """Resolve a link: its target is replaced or deleted, and the link stays."""
    return folder.resolve() if folder.is_symlink() else folder


def names() -> set[str]:
    """Return all names in a checkpoint's folder, including half-written files."""
    names = {ADAPTER, WEIGHTS, REMAKE, *generations.names_of(STATE), "meta.json"}
    names |= {f"rank_{r}.pt" for r in range(4096)}
    return names | {f".{n}.tmp" for n in names}


_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size",
    "num_experts", "moe_intermediate_size", "tie_word_embeddings",
)  # fmt: skip # a list of names


def identity(model: Model) -> dict[str, Any]:
    """Return what a checkpoint and the trainer that loads it must share."""
    return {
        "format": _FORMAT,
        "finetuning_type": model.config.finetuning_type,
        "lora": lora_identity(model),
        "value_head": model.config.value_head,
        "architecture": list(model.hf_config.architectures or ()),
        "sizes": {name: getattr(model.hf_config, name, None) for name in _SIZES},
    }


def check_format(folder: Path) -> None:
    """Refuse a checkpoint in another format. Changes nothing, and leaves other faults to `load`.

    Raises:
        CheckpointError: names both versions and formats.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text())
    except (OSError, ValueError):
        return
    found, writer = meta.get("format"), meta.get("splice", "0.1.0")
    if found != _FORMAT:
        raise CheckpointError(refusal(folder, layout=found, ours=_FORMAT, writer=writer))


def lora_identity(model: Model) -> dict[str, Any] | None:
    """The LoRA settings; a load may change dropout. None: all parameters train."""
    if model.trains_all:
        return None
    return model.config.lora.model_dump(mode="json", exclude={"dropout"})


def on_disk(folder: Path, meta: Mapping[str, Any]) -> OnDisk | None:
    """None: an older trainer wrote it, and gave it no id."""
    counters, save = meta["counters"], meta.get("save")
    if save is None:
        return None
    return OnDisk(
        folder=folder.absolute(),
        save=save,
        steps=counters["steps"],
        skipped_steps=counters["skipped_steps"],
    )


def base_of_adapters(model: Model) -> str | None:
    """Fingerprint of the weights that adapters train on. None: all weights are in the checkpoint,
    or the base is random."""
    has_base = model.config.init == "hf" and not model.trains_all
    return model.checkpoint.fingerprint if has_base else None


def shard_of(p: TrainedParam, piece: Piece, tensor: Callable[[], torch.Tensor]) -> Shard:
    """The shard of a piece; `tensor` gives its elements."""
    return Shard(
        sizes=piece.box_shape(p.param), offsets=piece.offsets, shape=piece.shape, tensor=tensor
    )


def agree_on(group: Any, what: str) -> contextlib.AbstractContextManager[None]:
    """Run a block on every rank; if it fails on one rank, `CheckpointError` is raised on all."""

    def as_error(failures: Sequence[Failure], _: Exception | None) -> CheckpointError:
        return CheckpointError(f"{what} failed: rank {failures[0].rank} {failures[0]}")

    return agree(group, as_error)
