"""Loads a checkpoint, whatever topology wrote it. Nothing changes unless all of it can be read."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.protocol.config import LoraConfig
from trainer_node.adapters import peft_io
from trainer_node.adapters.rounding import Rounding
from trainer_node.files import generations
from trainer_node.files.generations import CheckpointError
from trainer_node.layout.pieces import TrainedParam
from trainer_node.model import rng
from trainer_node.model.model import Model
from trainer_node.model.whole_adapters import expected_tensors
from trainer_node.state import sharded_state
from trainer_node.state.checkpoint import settle
from trainer_node.state.contents import (
    ADAPTER,
    REMAKE,
    STATE,
    WEIGHTS,
    agree_on,
    base_of_adapters,
    check_format,
    identity,
    lora_identity,
    on_disk,
    real,
    shard_of,
)
from trainer_node.state.sharded_state import Place, Shard
from trainer_node.training import pack_size
from trainer_node.training.optimizer import MOMENTS
from trainer_node.training.trainer import PlannedAdapter, Trainer

log = logging.getLogger("splice.trainer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A checkpoint whose moments were never finished."""

    base: Path
    """The checkpoint at which its step began."""
    base_save: str
    steps: int
    """Optimizer steps up to the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The content that `load` found, and what it dropped."""

    version: int
    client_state: dict[str, Any]
    dropped_batches: int
    """Batches whose pending gradients were dropped."""
    rng_restored: bool
    """False: another topology wrote it, and the generators were seeded again."""
    notes: tuple[str, ...] = ()
    """Differences to the state that was saved."""
    adapter_changed: bool = False
    """Whether the trainer now has the checkpoint's adapter, with another rank, scale or place."""


def lost_moments(trainer: Trainer, folder: Path) -> Lost | None:
    """Repair what a crash left, and say whether the checkpoint's moments are missing. A collective.

    Raises:
        CheckpointError: on every rank, for no checkpoint, a partial one, or one of another model.
    """
    folder, model = real(folder), trainer.model
    _repair(trainer, folder)
    if (folder / STATE).exists() or not (folder / REMAKE).exists():
        return None
    with agree_on(model.control_group, f"checking {folder}"):
        generations.check_contents(folder, part=dist.get_rank(), parts=dist.get_world_size())
        meta = {"value_head": False, **json.loads((folder / "meta.json").read_text())}
        _check_meta(folder, meta, identity(model) | {"lora": meta.get("lora")})
        check_base(folder, meta, model)
    made = meta["remake"]
    return Lost(
        base=Path(os.path.normpath(folder / made["base"])),
        base_save=made["save"],
        steps=int(meta["counters"]["steps"]),
    )


def _repair(trainer: Trainer, folder: Path) -> None:
    with agree_on(trainer.model.control_group, f"repairing {folder}"):
        if dist.get_rank() == 0:
            check_format(folder)
            generations.recover(folder)
            if generations.is_whole(folder) and (folder / REMAKE).exists():
                generations.recover(folder / STATE)


def load(
    trainer: Trainer, folder: Path, *, with_moments: bool = True, only_save: str | None = None
) -> Loaded:
    """Restore what `save` wrote, at any topology, and drop pending gradients. A collective.

    It first repairs what a crash left. Nothing changes unless all of it can be read. A trainer
    whose adapter has another rank, scale or place then takes on the checkpoint's. This rank's state
    is in CPU memory twice for a moment.

    Args:
        with_moments: False: the trainer keeps its moments.
        only_save: refuse a checkpoint with another id.

    Raises:
        CheckpointError: on every rank, for no checkpoint, a partial one, a mixture, or one of
            another model.
        ConfigError: the trainer cannot take on the checkpoint's adapter; nothing changed.
    """
    folder, model = real(folder), trainer.model
    settle(trainer)
    _repair(trainer, folder)
    whole: dict[peft_io.Key, torch.Tensor] = {}
    # Check all files before any rank reads what another one checks.
    with agree_on(model.control_group, f"checking {folder}"):
        generations.check_contents(folder, part=dist.get_rank(), parts=dist.get_world_size())
    with agree_on(model.control_group, f"reading {folder}"):
        meta = {"value_head": False, **json.loads((folder / "meta.json").read_text())}
        _check_meta(folder, meta, identity(model) | {"lora": meta.get("lora")})
        check_base(folder, meta, model)
    dropped, present = trainer.pending.num_batches, model.config.lora
    other = _other_adapter(trainer, meta.get("lora"))
    adapters = model.adapters if other is None else other.adapter.adapters
    optimizer = trainer.optimizer if other is None else other.optimizer
    group = model.control_group
    matrices = adapters.local_matrices()
    expected = {} if model.trains_all else expected_tensors(matrices, group=group)
    with agree_on(group, f"reading {folder}"):
        if only_save is not None and meta.get("save") != only_save:
            raise CheckpointError(f"{folder} is another checkpoint than the one before it")
        note = _check_parts(folder, meta) if with_moments else ""
        if not model.trains_all:
            whole = _adapters_in(folder, expected, adapters.stacked)
        same_place = meta["parallel"] == model.config.parallel.model_dump(mode="json")
        generators = None
        if same_place:
            generators = torch.load(
                folder / f"rank_{dist.get_rank()}.pt", map_location="cpu", weights_only=True
            )
        num_steps = int(meta["optimizer_steps"]) if with_moments else None
        version = int(meta["version"])
        counters = meta["counters"]
        moments = MOMENTS * bool(num_steps)
        kinds = {
            p: ("weight",) * (model.trains_all or p.is_value) + moments
            for p, _ in optimizer.tensors()
        }
        shards = _room(kinds)
        plans = [
            (sharded_state.plan(part, folder / name), folder / name)
            for name, part in _by_folder(folder, shards).items()
        ]
    for plan, where in plans:
        sharded_state.load(plan, where, group=model.control_group)
    del plans
    with trainer.changing():
        if other is not None:
            trainer.use_adapter(other)
        trainer.drop_pending()
        if not model.trains_all:
            adapters.load(whole)
        optimizer.restore(_values(kinds, shards), num_steps=num_steps)
        if other is not None:
            trainer.micro_batch_tokens = pack_size.tokens_for(trainer)
        if generators is not None:
            rng.restore(generators, model.device)
        else:
            rng.seed(model.config.seed + counters["steps"], model.device)
        if same_place:
            pack_size.remember(trainer, meta)
        trainer.num_steps, trainer.num_skipped_steps = counters["steps"], counters["skipped_steps"]
        trainer.steps_since_sent, trainer.sent.version = 0, version
        model.adapters.rounding = rounding_of(model, meta)
        trainer.on_disk = on_disk(folder, meta) if with_moments else None
    trainer.is_unknown = False
    switched = switch_note(folder, present, model.config.lora)
    return Loaded(
        version=version,
        client_state=meta.get("client_state", {}),
        dropped_batches=dropped,
        rng_restored=same_place,
        notes=tuple(text for text in (note, switched) if text),
        adapter_changed=bool(switched),
    )


def read_adapters(model: Model, folder: Path) -> tuple[dict[peft_io.Key, torch.Tensor], Rounding]:
    """Return a checkpoint's adapters, and how its version was merged. Nothing is loaded. A
    collective.

    Raises:
        CheckpointError: on every rank, for no checkpoint, or one of other adapters or another
            model.
    """
    folder, group = real(folder), model.control_group
    expected = expected_tensors(model.adapters.local_matrices(), group=group)
    with agree_on(group, f"reading {folder}"):
        meta = {"value_head": False, **json.loads((folder / "meta.json").read_text())}
        _check_meta(folder, meta, identity(model))
        check_base(folder, meta, model)
        whole = _adapters_in(folder, expected, model.adapters.stacked)
    return whole, rounding_of(model, meta)


def _adapters_in(
    folder: Path, expected: Mapping[peft_io.Key, tuple[int, ...]], stacked: Sequence[str]
) -> dict[peft_io.Key, torch.Tensor]:
    stored = peft_io.read_tensors(folder / ADAPTER, mapped=True)
    whole = peft_io.by_module(stored, path=folder / ADAPTER)
    whole = peft_io.as_expected(whole, expected, stacked)
    peft_io.check_tensors(whole, expected, path=folder / ADAPTER)
    return whole


def rounding_of(model: Model, meta: Mapping[str, Any]) -> Rounding:
    """How the checkpoint's version was merged: sent again, it must have the same bytes. Older
    trainers rounded to nearest."""
    saved = meta.get("rounding")
    seed = model.config.seed
    return Rounding(**saved) if saved else Rounding(mode="nearest", seed=seed)


def _other_adapter(trainer: Trainer, saved: Mapping[str, Any] | None) -> PlannedAdapter | None:
    """Plan an adapter as the checkpoint's. None: the trainer's adapter is already of that kind. A
    collective.

    Raises:
        ConfigError: such an adapter does not fit the model.
    """
    if saved is None or saved == lora_identity(trainer.model):
        return None
    dropout = trainer.model.config.lora.dropout
    return trainer.plan_adapter(LoraConfig.model_validate({**saved, "dropout": dropout}))


def switch_note(folder: Path, present: LoraConfig, lora: LoraConfig) -> str:
    """Say, and log, that a load has changed the adapter's settings; empty: it has not."""
    if lora == present:
        return ""
    text = (
        f"the adapter is now that of {folder}: rank {lora.rank}, alpha {lora.alpha:g} on "
        f"{', '.join(lora.targets)}; it was rank {present.rank}, alpha {present.alpha:g} on "
        f"{', '.join(present.targets)}"
    )
    log.warning("%s", text)
    return text


def _check_parts(folder: Path, meta: Mapping[str, Any]) -> str:
    """Check that all parts are of one save and step. Returns the note in the moments' marker."""
    steps, written = meta["counters"]["steps"], dict(meta.get("parts", {}))
    note = ""
    if "remake" in meta:
        if not (folder / STATE).exists():
            raise CheckpointError(
                f"{folder} has no moments: the trainer ended while they were being written"
            )
        marker = generations.check_whole(folder / STATE)
        written[STATE] = marker.get("steps")
        if marker.get("save") != meta["save"]:
            raise CheckpointError(
                f"{folder / STATE} belongs to another checkpoint (step {written[STATE]}; the "
                f"weights are of step {steps}): a mixture is not loaded. Restore the folder from a "
                "copy, or remove it: the step is then made again"
            )
        note = str(marker.get("note", ""))
    wrong = {part: step for part, step in written.items() if step != steps}
    if wrong:
        raise CheckpointError(f"{folder} is of step {steps}, but has parts of others: {wrong}")
    return note


def _check_meta(folder: Path, meta: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for field, value in wanted.items():
        if meta.get(field) != value:
            raise CheckpointError(
                f"{folder} was written with {field} {meta.get(field)}; this trainer has {value}"
            )


def check_base(folder: Path, meta: Mapping[str, Any], model: Model) -> None:
    """Refuse adapters of other weights. Older checkpoints do not name theirs."""
    saved, present = meta.get("base"), base_of_adapters(model)
    if saved is not None and present is not None and saved != present:
        raise CheckpointError(
            f"the adapters in {folder} were trained on other base weights than those that "
            f"{model.config.model} has now (fingerprint {saved[:12]}, now {present[:12]}). Give "
            "the trainer those weights again; of a hub's model, name the revision "
            "(org/name@revision)"
        )


def _by_folder(folder: Path, shards: Mapping[Place, Shard]) -> dict[str, dict[Place, Shard]]:
    """Return the shards by the folder that has them. Older checkpoints have all in `state/`."""
    has_weights = (folder / WEIGHTS).is_dir()
    found: dict[str, dict[Place, Shard]] = {}
    for place, shard in shards.items():
        name = WEIGHTS if has_weights and place[0].startswith("weight.") else STATE
        found.setdefault(name, {})[place] = shard
    return found


def _room(kinds: Mapping[TrainedParam, Sequence[str]]) -> dict[Place, Shard]:
    """Return memory for the shards of the parameters that this rank owns."""
    shards = {}
    for p, own in kinds.items():
        for kind in own:
            for piece in p.pieces:
                memory = torch.empty(piece.box_shape(p.param))
                shards[f"{kind}.{piece.key}", piece.offsets] = shard_of(
                    p, piece, partial(lambda t: t, memory)
                )
    return shards


def _values(
    kinds: Mapping[TrainedParam, Sequence[str]], shards: dict[Place, Shard]
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield what was read for each parameter of this rank, and free its shards. Padding is 0."""
    for p, own in kinds.items():
        found = {}
        for kind in own:
            found[kind] = torch.zeros(p.param.shape)
            for piece in p.pieces:
                piece.write(
                    found[kind], shards.pop((f"{kind}.{piece.key}", piece.offsets)).tensor()
                )
        yield found
