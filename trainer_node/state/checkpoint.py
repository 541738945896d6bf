"""Saves and loads the trainer's state: the content of a version.

    adapter/       adapters in PEFT's format, whole tensors in fp32
    weights/       with finetuning_type "full" instead: the fp32 weights, sharded
    state/         moments, sharded
    rank_<r>.pt    RNG of each rank
    meta.json      version, topology, LoRA settings, rounding of the merge, counters, the step of
                   each part, the client's state
    remake.bin     only if the moments are written behind: the request that made this state
    COMPLETE       written last: every file's size and hash

`weights/` and `state/` have torch.distributed.checkpoint's files, known as torch_dist, with every
tensor whole under its HF name (`sharded_state`). Any topology can therefore load any other's files.
RNG states belong to a rank: another topology seeds its generators anew, and `Loaded` says so.

A checkpoint is written beside its target, flushed, marked, and then moved there (`generations`). At
every instant one whole generation exists, and `load` finds it. `load` refuses a folder without its
marker, or with a missing, additional or changed file. `save` and `load` are collectives. A failure
on one rank fails all ranks.

`save` can leave the moments to a thread (`behind`). `state/` is then a generation of its own within
the checkpoint, with the checkpoint's id and step in its marker. `load` refuses moments of another
save, and a checkpoint without them. `remake` can load that one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from orchestrator.protocol.config import LoraConfig
from trainer_node.adapters import peft_io
from trainer_node.adapters.rounding import Rounding
from trainer_node.files import generations, hashing
from trainer_node.files.behind import OnDisk
from trainer_node.files.bulk_files import BulkWriter, Extent, Writing, bulk_writer
from trainer_node.files.generations import CheckpointError, write_file
from trainer_node.layout.pieces import Piece, TrainedParam
from trainer_node.model import rng
from trainer_node.model.model import Model
from trainer_node.model.whole_adapters import expected_tensors, gather_stacks
from trainer_node.ranks import objects
from trainer_node.ranks.lockstep import Failure, agree
from trainer_node.state import sharded_state
from trainer_node.state.sharded_state import Place, Shard
from trainer_node.training import pack_size
from trainer_node.training.optimizer import MOMENTS, ShardedAdamW
from trainer_node.training.trainer import PlannedAdapter, Trainer

log = logging.getLogger("splice.trainer")
ADAPTER, WEIGHTS, STATE, REMAKE = "adapter", "weights", "state", "remake.bin"
Meanwhile = Callable[[Callable[[], float | None]], None]
"""Gets a function that tells the seconds until the write ends, or None."""
_FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """How the trainer's state was made: a request that began at a complete checkpoint."""

    base: OnDisk
    request: np.ndarray
    """`lockstep.packed`."""


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
    """False: another topology wrote it, and the generators were seeded anew."""
    notes: tuple[str, ...] = ()
    """Differences to the state that was saved."""
    adapter_changed: bool = False
    """Whether the trainer now has the checkpoint's adapter, with another rank, scale or place."""


# ---------------------------------------------------------------- whole checkpoints


def save_adapter(model: Model, folder: Path) -> None:
    """Gather the adapters and write them in PEFT's format. A collective.

    Raises:
        ConfigError: the trainer has no adapters.
        CheckpointError: on every rank, if rank 0 could not write.
    """
    model.need_adapters("an adapter in PEFT's format")
    stacks = gather_stacks(model, group=model.control_group)
    with _agree(model.control_group, f"writing the adapter to {folder}"):
        if dist.get_rank() == 0:
            peft_io.write_stacks(folder, stacks, lora=model.config.lora, model=model.config.model)


def save(
    trainer: Trainer,
    folder: Path,
    *,
    version: int,
    client_state: Mapping[str, Any] | None = None,
    step: Step | None = None,
    meanwhile: Meanwhile = lambda left_s: None,
) -> None:
    """Write everything that `load` needs, without pending gradients, which stay. A collective.

    Args:
        step: how the state was made. The moments are then written after the return, if the earlier
            save in the background did not fail. None: everything is on the disk at the return.
        meanwhile: called on every rank once the weights are being written. The state must stay as
            it is.

    Raises:
        CheckpointError: on every rank, if one could not write. An earlier whole checkpoint is kept.
    """
    folder, model = _real(folder), trainer.model
    if not settle(trainer) or (step is not None and step.base.folder == folder.absolute()):
        step = None
    stacks = [] if model.trains_all else gather_stacks(model, group=model.control_group)
    meta = {
        **_meta(trainer, version),
        "client_state": dict(client_state or {}),
        **({} if step is None else {"remake": _remake(step, folder)}),
    }
    hashes = _write(trainer, folder, meta, stacks, step, meanwhile)
    with _agree(model.control_group, f"moving {folder}"):
        if dist.get_rank() == 0:
            generations.finish(
                folder,
                facts={"version": version},
                hashes=hashes,
                apart=() if step is None else (STATE,),
            )
    trainer.on_disk = _on_disk(folder, meta)
    if step is not None:
        _write_behind(trainer, folder, meta)


def _write(
    trainer: Trainer,
    folder: Path,
    meta: Mapping[str, Any],
    stacks: Sequence[peft_io.Stack],
    step: Step | None,
    meanwhile: Meanwhile,
) -> dict[str, str]:
    """Write the files beside the target. Returns the hashes of those that all ranks wrote."""
    rank, temp, model = dist.get_rank(), generations.new_folder(folder), trainer.model
    began = False
    hashes: dict[str, str] = {}

    def weights_are_written(writings: Sequence[Writing]) -> None:
        meanwhile(_left(writings))

    try:
        with bulk_writer(model.device) as writer:
            early: dict[str, Writing] = {}
            with _agree(model.control_group, f"making {temp}"):
                if rank == 0:
                    for one in (folder, temp, generations.old_folder(folder)):
                        generations.refuse_foreign(one, names=_names())
                    generations.begin(folder)
                    began = True
                    write_file(
                        temp / "meta.json", lambda path: path.write_text(json.dumps(meta, indent=1))
                    )
                    early = _start(writer, temp, stacks, step)
            random_state = rng.state(model.device)
            kinds = {WEIGHTS: ("weight",) * model.trains_all, STATE: MOMENTS * (step is None)}
            for name in (WEIGHTS,) * model.trains_all + (STATE,) * (step is None):
                found = sharded_state.save(
                    _shards(trainer.optimizer.tensors(), kinds[name]),
                    temp / name,
                    group=model.control_group,
                    writer=writer,
                    meanwhile=weights_are_written if name == WEIGHTS else lambda writings: None,
                )
                hashes |= {f"{name}/{file}": value for file, value in found.items()}
            if not model.trains_all:
                weights_are_written(list(early.values()))
            with _agree(model.control_group, f"writing rank {rank}'s state to {temp}"):
                file = temp / f"rank_{rank}.pt"
                write_file(file, lambda path: torch.save(random_state, path))
                hashes |= hashing.hashes({file.name: file})
                hashes |= {name: writing.wait() for name, writing in early.items()}
                if stacks:
                    peft_io.write_config(
                        temp / ADAPTER, stacks, lora=model.config.lora, model=model.config.model
                    )
    except Exception:
        if began:  # free the room on a full disk
            with contextlib.suppress(OSError):
                generations.discard(temp)
        raise
    everyones = objects.all_gather(hashes, group=model.control_group)
    return {k: v for one in everyones for k, v in one.items()}


def _start(
    writer: BulkWriter, temp: Path, stacks: Sequence[peft_io.Stack], step: Step | None
) -> dict[str, Writing]:
    """Begin to write rank 0's large files, while the state's plan is made. They need no rename,
    because nobody reads them before the marker exists."""
    found = {}
    if stacks:
        (temp / ADAPTER).mkdir()
        name = f"{ADAPTER}/{peft_io.WEIGHTS}"
        found[name] = writer.start(temp / name, peft_io.layout(stacks))
    if step is not None:
        request = torch.from_numpy(step.request)
        extent = Extent(offset=0, nbytes=request.numel(), source=lambda: request)
        found[REMAKE] = writer.start(temp / REMAKE, [extent])
    return found


def _left(writings: Sequence[Writing]) -> Callable[[], float | None]:
    """Tell the seconds until the files are written, from their rate so far."""
    began, total = time.monotonic(), sum(writing.nbytes for writing in writings)

    def left_s() -> float | None:
        done = sum(writing.written() for writing in writings)
        if done == total:
            return 0.0
        return (time.monotonic() - began) * (total - done) / done if done else None

    return left_s


# ---------------------------------------------------------------- moments behind


def settle(trainer: Trainer) -> bool:
    """Wait for the save in the background. Returns whether it succeeded. A collective.

    After a failure the trainer's state is on no disk, and a note for the client says why.
    """
    behind, saved = trainer.behind, trainer.on_disk
    if not behind.is_writing:
        return True
    reasons = objects.all_gather(behind.settle(), group=trainer.model.control_group)
    why = next((f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text), "")
    if why:
        trainer.on_disk = None
        name = "the last version" if saved is None else str(saved.folder)
        trainer.notes.append(
            f"The optimizer's moments of {name} could not be written ({why}). Its weights are "
            "durable. The next version is saved as a whole before it is served."
        )
    return not why


def base_of(trainer: Trainer) -> OnDisk | None:
    """Return the checkpoint with exactly the trainer's present state, perhaps still being written.
    None: there is none."""
    found = trainer.on_disk
    if found is None or trainer.pending.num_batches:
        return None
    counters = (trainer.num_steps, trainer.num_skipped_steps)
    return found if counters == (found.steps, found.skipped_steps) else None


def _write_behind(trainer: Trainer, folder: Path, meta: Mapping[str, Any]) -> None:
    found, group = list(trainer.optimizer.tensors()), trainer.model.saving_group
    kinds = [[kind for kind in MOMENTS if kind in tensors] for _, tensors in found]

    def write(copies: Sequence[torch.Tensor]) -> None:
        left = iter(copies)
        tensors = [
            (p, {kind: next(left) for kind in own})
            for (p, _), own in zip(found, kinds, strict=True)
        ]
        device = copies[0].device if copies else torch.device("cpu")
        wait_turn = trainer.behind.wait_turn
        shards = _shards(tensors, MOMENTS)
        _write_state(shards, folder, meta, group=group, device=device, wait_turn=wait_turn)

    moments = [found[n][1][kind] for n, own in enumerate(kinds) for kind in own]
    trainer.behind.start(folder, moments, write)


def complete(trainer: Trainer, folder: Path, *, note: str) -> None:
    """Write the present moments into a checkpoint that lacks its own. A collective.

    Args:
        note: how they differ from those that were lost; empty: they do not. Every load repeats it.

    Raises:
        CheckpointError: on every rank, if one could not write.
    """
    folder, model = _real(folder), trainer.model
    meta = {**json.loads((folder / "meta.json").read_text()), "note": note}
    shards = _shards(trainer.optimizer.tensors(), MOMENTS)
    _write_state(shards, folder, meta, group=model.control_group, device=model.device)
    trainer.on_disk = _on_disk(folder, meta)


def _write_state(
    shards: Mapping[Place, Shard],
    folder: Path,
    meta: Mapping[str, Any],
    *,
    group: Any,
    device: torch.device,
    wait_turn: Callable[[], None] = lambda: None,
) -> None:
    """Write the moments into their checkpoint, as a generation of their own. A collective over a
    CPU group."""
    state, is_root = folder / STATE, dist.get_rank() == 0
    temp = generations.new_folder(state)
    facts = {**{k: meta[k] for k in ("save", "version")}, "steps": meta["parts"][STATE]}
    try:
        with _agree(group, f"making {temp}"):
            if is_root:
                generations.begin(state)
        with bulk_writer(device, wait_turn=wait_turn) as writer:
            hashes = sharded_state.save(shards, temp, group=group, writer=writer)
        everyones = objects.all_gather(hashes, group=group)
        with _agree(group, f"moving {temp} to {state}"):
            if is_root:
                generations.finish(
                    state,
                    facts={**facts, "note": meta.get("note", "")},
                    hashes={k: v for one in everyones for k, v in one.items()},
                )
    except Exception:
        if is_root:  # free the room on a full disk
            with contextlib.suppress(OSError):
                generations.discard(temp)
        raise


def lost_moments(trainer: Trainer, folder: Path) -> Lost | None:
    """Repair what a crash left, and say whether the checkpoint's moments are missing. A collective.

    Raises:
        CheckpointError: on every rank, for no checkpoint, a partial one, or one of another model.
    """
    folder, model = _real(folder), trainer.model
    _repair(trainer, folder)
    if (folder / STATE).exists() or not (folder / REMAKE).exists():
        return None
    with _agree(model.control_group, f"checking {folder}"):
        generations.check_contents(folder, part=dist.get_rank(), parts=dist.get_world_size())
        meta = json.loads((folder / "meta.json").read_text())
        _check_meta(folder, meta, _identity(model) | {"lora": meta.get("lora")})
        _check_base(folder, meta, model)
    made = meta["remake"]
    return Lost(
        base=Path(os.path.normpath(folder / made["base"])),
        base_save=made["save"],
        steps=int(meta["counters"]["steps"]),
    )


def _repair(trainer: Trainer, folder: Path) -> None:
    with _agree(trainer.model.control_group, f"repairing {folder}"):
        if dist.get_rank() == 0:
            generations.recover(folder)
            if generations.is_whole(folder) and (folder / REMAKE).exists():
                generations.recover(folder / STATE)


# ---------------------------------------------------------------- loading


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
    folder, model = _real(folder), trainer.model
    settle(trainer)
    _repair(trainer, folder)
    whole: dict[peft_io.Key, torch.Tensor] = {}
    # Check all files before any rank reads what another one checks.
    with _agree(model.control_group, f"checking {folder}"):
        generations.check_contents(folder, part=dist.get_rank(), parts=dist.get_world_size())
    with _agree(model.control_group, f"reading {folder}"):
        meta = json.loads((folder / "meta.json").read_text())
        _check_meta(folder, meta, _identity(model) | {"lora": meta.get("lora")})
        _check_base(folder, meta, model)
    dropped, present = trainer.pending.num_batches, model.config.lora
    other = _other_adapter(trainer, meta.get("lora"))
    adapters = model.adapters if other is None else other.adapter.adapters
    optimizer = trainer.optimizer if other is None else other.optimizer
    group = model.control_group
    matrices = adapters.local_matrices()
    expected = {} if model.trains_all else expected_tensors(matrices, group=group)
    with _agree(group, f"reading {folder}"):
        if only_save is not None and meta.get("save") != only_save:
            raise CheckpointError(f"{folder} is another checkpoint than the one before it")
        note = _check_parts(folder, meta) if with_moments else ""
        if not model.trains_all:
            stored = peft_io.read_tensors(folder / ADAPTER, mapped=True)
            whole = peft_io.by_module(stored, path=folder / ADAPTER)
            whole = peft_io.as_expected(whole, expected, adapters.stacked)
            peft_io.check_tensors(whole, expected, path=folder / ADAPTER)
        same_place = meta["parallel"] == model.config.parallel.model_dump(mode="json")
        generators = None
        if same_place:
            generators = torch.load(
                folder / f"rank_{dist.get_rank()}.pt", map_location="cpu", weights_only=True
            )
        num_steps = int(meta["optimizer_steps"]) if with_moments else None
        version = int(meta["version"])
        counters = meta["counters"]
        kinds = ("weight",) * model.trains_all + MOMENTS * bool(num_steps)
        shards = _room(optimizer, kinds)
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
        optimizer.restore(_values(optimizer, shards, kinds), num_steps=num_steps)
        if other is not None:
            trainer.micro_batch_tokens = pack_size.tokens_for(trainer)
        if generators is not None:
            rng.restore(generators, model.device)
        else:
            rng.seed(model.config.seed + counters["steps"], model.device)
        if same_place:
            pack_size.remember(trainer, meta.get("micro_batch_tokens"))
        trainer.num_steps, trainer.num_skipped_steps = counters["steps"], counters["skipped_steps"]
        trainer.steps_since_sent = 0
        model.adapters.rounding = _rounding(trainer, meta)
        trainer.on_disk = _on_disk(folder, meta) if with_moments else None
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


def _rounding(trainer: Trainer, meta: Mapping[str, Any]) -> Rounding:
    """How the checkpoint's version was merged: sent again, it must have the same bytes. Older
    trainers rounded to nearest."""
    saved = meta.get("rounding")
    seed = trainer.model.config.seed
    return Rounding(**saved) if saved else Rounding(mode="nearest", seed=seed)


def _other_adapter(trainer: Trainer, saved: Mapping[str, Any] | None) -> PlannedAdapter | None:
    """Plan an adapter as the checkpoint's. None: the trainer has such a one. A collective.

    Raises:
        ConfigError: such an adapter does not fit the model.
    """
    if saved is None or saved == _lora_identity(trainer.model):
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


def delete(folder: Path) -> None:
    """Delete a checkpoint of ours, on rank 0 alone; a missing one is skipped.

    Raises:
        CheckpointError: it is not ours.
    """
    for one in _generations(folder):
        generations.refuse_foreign(one, names=_names())
        generations.discard(one)


def check_ours(folder: Path) -> None:
    """Refuse a folder that `delete` would refuse.

    Raises:
        CheckpointError: it is not ours.
    """
    for one in _generations(folder):
        generations.refuse_foreign(one, names=_names())


def _generations(folder: Path) -> tuple[Path, Path, Path]:
    """A checkpoint's folders, first what a crash left beside it: a load of this name could find an
    older state.
    """
    real = _real(folder)
    return generations.new_folder(real), generations.old_folder(real), real


def _real(folder: Path) -> Path:
    """Resolve a link: its target is replaced or deleted, and the link stays."""
    return folder.resolve() if folder.is_symlink() else folder


def _names() -> set[str]:
    """Return all names in a checkpoint's folder, including half-written files."""
    names = {ADAPTER, WEIGHTS, REMAKE, *generations.names_of(STATE), "meta.json"}
    names |= {f"rank_{r}.pt" for r in range(4096)}
    return names | {f".{n}.tmp" for n in names}


_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size",
    "num_experts", "moe_intermediate_size", "tie_word_embeddings",
)  # fmt: skip # a list of names


def _identity(model: Model) -> dict[str, Any]:
    """Return what a checkpoint and the trainer that loads it must share."""
    return {
        "format": _FORMAT,
        "finetuning_type": model.config.finetuning_type,
        "lora": _lora_identity(model),
        "architecture": list(model.hf_config.architectures or ()),
        "sizes": {name: getattr(model.hf_config, name, None) for name in _SIZES},
    }


def _lora_identity(model: Model) -> dict[str, Any] | None:
    if model.trains_all:
        return None
    return model.config.lora.model_dump(mode="json", exclude={"dropout"})


def _meta(trainer: Trainer, version: int) -> dict[str, Any]:
    """A collective."""
    model, steps = trainer.model, trainer.num_steps
    return {
        **_identity(model),
        "version": version,
        "save": objects.broadcast(uuid.uuid4().hex, group=model.control_group),
        "parallel": model.config.parallel.model_dump(mode="json"),
        "micro_batch_tokens": trainer.micro_batch_tokens,
        "rounding": asdict(model.rounding),
        "base": _base(model),
        "optimizer_steps": trainer.optimizer.num_steps(model.control_group),
        "counters": {"steps": steps, "skipped_steps": trainer.num_skipped_steps},
        "parts": dict.fromkeys((WEIGHTS if model.trains_all else ADAPTER, STATE, "rank"), steps),
    }


def _remake(step: Step, folder: Path) -> dict[str, Any]:
    """A relative path, so that a run's folder may move."""
    base = os.path.relpath(step.base.folder, folder)
    return {"base": base, "save": step.base.save, "steps": step.base.steps}


def _on_disk(folder: Path, meta: Mapping[str, Any]) -> OnDisk | None:
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


def _check_meta(folder: Path, meta: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for field, value in wanted.items():
        if meta.get(field) != value:
            raise CheckpointError(
                f"{folder} was written with {field} {meta.get(field)}; this trainer has {value}"
            )


def _base(model: Model) -> str | None:
    """Fingerprint of the weights that adapters train on. None: all weights are in the checkpoint,
    or the base is random."""
    has_base = model.config.init == "hf" and not model.trains_all
    return model.checkpoint.fingerprint if has_base else None


def _check_base(folder: Path, meta: Mapping[str, Any], model: Model) -> None:
    """Refuse adapters of other weights. Older checkpoints do not name theirs."""
    saved, present = meta.get("base"), _base(model)
    if saved is not None and present is not None and saved != present:
        raise CheckpointError(
            f"the adapters in {folder} were trained on other base weights than those that "
            f"{model.config.model} has now (fingerprint {saved[:12]}, now {present[:12]}). Give "
            "the trainer those weights again; of a hub's model, name the revision "
            "(org/name@revision)"
        )


# ---------------------------------------------------------------- sharded state


def _shards(
    tensors: Iterable[tuple[TrainedParam, Mapping[str, torch.Tensor]]], kinds: Sequence[str]
) -> dict[Place, Shard]:
    """Return the shards that this rank writes, of the kinds that it has."""
    shards = {}
    for p, found in tensors:
        for kind in kinds if p.counted else ():
            if kind not in found:
                continue
            for piece in p.pieces:
                shard = _shard(p, piece, partial(piece.read, found[kind]))
                shards[f"{kind}.{piece.key}", piece.offsets] = shard
    return shards


def _by_folder(folder: Path, shards: Mapping[Place, Shard]) -> dict[str, dict[Place, Shard]]:
    """Return the shards by the folder that has them. Older checkpoints have all in `state/`."""
    has_weights = (folder / WEIGHTS).is_dir()
    found: dict[str, dict[Place, Shard]] = {}
    for place, shard in shards.items():
        name = WEIGHTS if has_weights and place[0].startswith("weight.") else STATE
        found.setdefault(name, {})[place] = shard
    return found


def _room(optimizer: ShardedAdamW, kinds: Sequence[str]) -> dict[Place, Shard]:
    """Return memory for the shards that this rank owns."""
    shards = {}
    for p, _ in optimizer.tensors():
        for kind in kinds:
            for piece in p.pieces:
                memory = torch.empty(piece.box_shape(p.param))
                shards[f"{kind}.{piece.key}", piece.offsets] = _shard(
                    p, piece, partial(lambda t: t, memory)
                )
    return shards


def _shard(p: TrainedParam, piece: Piece, tensor: Callable[[], torch.Tensor]) -> Shard:
    return Shard(
        sizes=piece.box_shape(p.param), offsets=piece.offsets, shape=piece.shape, tensor=tensor
    )


def _values(
    optimizer: ShardedAdamW, shards: dict[Place, Shard], kinds: Sequence[str]
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield what was read for each parameter of this rank, and free its shards. Padding is 0."""
    for p, _ in optimizer.tensors():
        found = {}
        for kind in kinds:
            found[kind] = torch.zeros(p.param.shape)
            for piece in p.pieces:
                piece.write(
                    found[kind], shards.pop((f"{kind}.{piece.key}", piece.offsets)).tensor()
                )
        yield found


def _agree(group: Any, what: str) -> contextlib.AbstractContextManager[None]:
    """Run a block on every rank; if it fails on one rank, `CheckpointError` is raised on all."""

    def as_error(failures: Sequence[Failure], _: Exception | None) -> CheckpointError:
        return CheckpointError(f"{what} failed: rank {failures[0].rank} {failures[0]}")

    return agree(group, as_error)
