"""Saves and loads the trainer's state: the content of a version.

    adapter/       adapters in PEFT's format, whole tensors in fp32
    state/         moments (and with finetuning_type "full" the fp32 weights), sharded
    rank_<r>.pt    RNG of each rank
    meta.json      version, topology, LoRA settings, counters, the client's state
    COMPLETE       written last: every file's size and hash

`state/` has torch.distributed.checkpoint's files, known as torch_dist, with every tensor whole
under its HF name (`sharded_state`). Any topology can therefore load any other's files. RNG states
belong to a rank: another topology seeds its generators anew, and `Loaded` says so.

A checkpoint is written beside its target, flushed, marked, and then moved there (`generations`). At
every instant one whole generation exists, and `load` finds it. `load` refuses a folder without its
marker, or with a missing, additional or changed file. `save` and `load` are collectives. A failure
on one rank fails all ranks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer_node import objects
from trainer_node.adapters import peft_io
from trainer_node.lockstep import Failure, agree
from trainer_node.model.model import Model
from trainer_node.model.parameters import Piece, TrainedParam
from trainer_node.state import generations, hashing, sharded_state
from trainer_node.state.bulk_files import Writing, bulk_writer
from trainer_node.state.generations import CheckpointError, write_file
from trainer_node.state.sharded_state import Place, Shard
from trainer_node.training import pack_size, rng
from trainer_node.training.optimizer import MOMENTS
from trainer_node.training.trainer import Trainer

ADAPTER, STATE = "adapter", "state"
_FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The content that `load` found, and what it dropped."""

    version: int
    client_state: dict[str, Any]
    dropped_batches: int
    """Batches whose pending gradients were dropped."""
    rng_restored: bool
    """False: another topology wrote it, and the generators were seeded anew."""


# ---------------------------------------------------------------- whole checkpoints


def save_adapter(model: Model, folder: Path) -> None:
    """Gather the adapters and write them in PEFT's format. A collective.

    Raises:
        ConfigError: the trainer has no adapters.
        CheckpointError: on every rank, if rank 0 could not write.
    """
    model.need_adapters("an adapter in PEFT's format")
    stacks = peft_io.gather_stacks(model, group=model.control_group)
    with _agree(model, f"writing the adapter to {folder}"):
        if dist.get_rank() == 0:
            peft_io.write_stacks(folder, stacks, lora=model.config.lora, model=model.config.model)


def save(
    trainer: Trainer, folder: Path, *, version: int, client_state: Mapping[str, Any] | None = None
) -> None:
    """Write everything that `load` needs, without pending gradients, which stay. A collective.

    Raises:
        CheckpointError: on every rank, if one could not write. An earlier whole checkpoint is kept.
    """
    folder, model = _real(folder), trainer.model
    rank, temp = dist.get_rank(), generations.new_folder(folder)
    stacks = [] if model.trains_all else peft_io.gather_stacks(model, group=model.control_group)
    meta = {**_meta(trainer, version), "client_state": dict(client_state or {})}
    began = False
    try:
        with bulk_writer(model.device) as writer:
            adapter: Writing | None = None
            hashes: dict[str, str] = {}
            with _agree(model, f"making {temp}"):
                if rank == 0:
                    for one in (folder, temp, generations.old_folder(folder)):
                        generations.refuse_foreign(one, names=_names())
                    generations.begin(folder)
                    began = True
                    write_file(
                        temp / "meta.json", lambda path: path.write_text(json.dumps(meta, indent=1))
                    )
                    if stacks:
                        # Written while the state's plan is made. It needs no rename, because nobody
                        # reads it before the marker exists.
                        (temp / ADAPTER).mkdir()
                        adapter = writer.start(
                            temp / ADAPTER / peft_io.WEIGHTS, peft_io.layout(stacks)
                        )
            state = sharded_state.save(
                _shards(trainer), temp / STATE, group=model.control_group, writer=writer
            )
            with _agree(model, f"writing rank {rank}'s state to {temp}"):
                file = temp / f"rank_{rank}.pt"
                write_file(file, lambda path: torch.save(rng.state(model.device), path))
                hashes = {
                    f"{STATE}/{name}": found for name, found in state.items()
                } | hashing.hashes({file.name: file})
                if adapter is not None:
                    hashes[f"{ADAPTER}/{peft_io.WEIGHTS}"] = adapter.wait()
                    peft_io.write_config(
                        temp / ADAPTER, stacks, lora=model.config.lora, model=model.config.model
                    )
    except Exception:
        if began:  # free the room on a full disk
            with contextlib.suppress(OSError):
                generations.discard(temp)
        raise
    everyones = objects.all_gather(hashes, group=model.control_group)
    with _agree(model, f"moving {temp} to {folder}"):
        if rank == 0:
            generations.finish(
                folder,
                facts={"version": version},
                hashes={k: v for one in everyones for k, v in one.items()},
            )


def load(trainer: Trainer, folder: Path) -> Loaded:
    """Restore what `save` wrote, at any topology, and drop pending gradients. A collective.

    It first repairs what a crash left. Nothing changes unless all of it can be read. This rank's
    state is in CPU memory twice for a moment.

    Raises:
        CheckpointError: on every rank, for no checkpoint, a partial one, or one of another model or
            LoRA setting.
    """
    folder, model = _real(folder), trainer.model
    with _agree(model, f"repairing {folder}"):
        if dist.get_rank() == 0:
            generations.recover(folder)
    whole: dict[peft_io.Key, torch.Tensor] = {}
    expected = {} if model.trains_all else peft_io.expected_tensors(model)
    # Check all files before any rank reads what another one checks.
    with _agree(model, f"checking {folder}"):
        generations.check_contents(folder, part=dist.get_rank(), parts=dist.get_world_size())
    with _agree(model, f"reading {folder}"):
        meta = json.loads((folder / "meta.json").read_text())
        _check_meta(folder, meta, _identity(model))
        if not model.trains_all:
            stored = peft_io.read_tensors(folder / ADAPTER, mapped=True)
            whole = peft_io.by_module(stored, path=folder / ADAPTER)
            whole = peft_io.as_expected(whole, expected, model.adapters.stacked)
            peft_io.check_tensors(whole, expected, path=folder / ADAPTER)
        same_place = meta["parallel"] == model.config.parallel.model_dump(mode="json")
        generators = None
        if same_place:
            generators = torch.load(
                folder / f"rank_{dist.get_rank()}.pt", map_location="cpu", weights_only=True
            )
        num_steps = int(meta["optimizer_steps"])
        version = int(meta["version"])
        counters = meta["counters"]
        shards = _room(trainer, with_moments=num_steps > 0)
        plan = sharded_state.plan(shards, folder / STATE)
    sharded_state.load(plan, folder / STATE, group=model.control_group)
    dropped = trainer.drop_pending()
    if not model.trains_all:
        model.adapters.load(whole)
    del plan
    trainer.optimizer.restore(
        _values(trainer, shards, with_moments=num_steps > 0), num_steps=num_steps
    )
    if generators is not None:
        rng.restore(generators, model.device)
    else:
        rng.seed(model.config.seed + counters["steps"], model.device)
    if same_place:
        pack_size.remember(trainer, meta.get("micro_batch_tokens"))
    trainer.num_steps, trainer.num_skipped_steps = counters["steps"], counters["skipped_steps"]
    trainer.steps_since_sent = 0
    return Loaded(
        version=version,
        client_state=meta.get("client_state", {}),
        dropped_batches=dropped,
        rng_restored=same_place,
    )


def delete(folders: Iterable[Path]) -> dict[str, str]:
    """Delete checkpoints of ours, on rank 0 alone; a missing one is skipped.

    Returns folder -> why it was not deleted. The save that came before still counts.
    """
    kept = {}
    for folder in folders:
        try:
            real = _real(folder)
            # First what a crash left beside it: a load of this name could find an older state.
            for one in (generations.new_folder(real), generations.old_folder(real), real):
                generations.refuse_foreign(one, names=_names())
                generations.discard(one)
        except OSError as error:
            kept[str(folder)] = str(error)
    return kept


def _real(folder: Path) -> Path:
    """Resolve a link: its target is replaced or deleted, and the link stays."""
    return folder.resolve() if folder.is_symlink() else folder


def _names() -> set[str]:
    """Return all names in a checkpoint's folder, including half-written files."""
    names = {ADAPTER, STATE, "meta.json", *(f"rank_{r}.pt" for r in range(4096))}
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
        "lora": None
        if model.trains_all
        else model.config.lora.model_dump(mode="json", exclude={"dropout"}),
        "architecture": list(model.hf_config.architectures or ()),
        "sizes": {name: getattr(model.hf_config, name, None) for name in _SIZES},
    }


def _meta(trainer: Trainer, version: int) -> dict[str, Any]:
    """A collective."""
    model = trainer.model
    return {
        **_identity(model),
        "version": version,
        "parallel": model.config.parallel.model_dump(mode="json"),
        "micro_batch_tokens": trainer.micro_batch_tokens,
        "optimizer_steps": trainer.optimizer.num_steps(model.control_group),
        "counters": {"steps": trainer.num_steps, "skipped_steps": trainer.num_skipped_steps},
    }


def _check_meta(folder: Path, meta: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for field, value in wanted.items():
        if meta.get(field) != value:
            raise CheckpointError(
                f"{folder} was written with {field} {meta.get(field)}; this trainer has {value}"
            )


# ---------------------------------------------------------------- sharded state


def _kinds(trainer: Trainer, *, with_moments: bool) -> tuple[str, ...]:
    """Return the tensors of each parameter in `state/`. Adapters' weights are in PEFT's file."""
    return ("weight",) * trainer.model.trains_all + MOMENTS * with_moments


def _shards(trainer: Trainer) -> dict[Place, Shard]:
    """Return the shards that this rank writes."""
    shards = {}
    for p, tensors in trainer.optimizer.tensors():
        for kind in _kinds(trainer, with_moments=len(tensors) > 1) if p.counted else ():
            for piece in p.pieces:
                shard = _shard(p, piece, partial(piece.read, tensors[kind]))
                shards[f"{kind}.{piece.key}", piece.offsets] = shard
    return shards


def _room(trainer: Trainer, *, with_moments: bool) -> dict[Place, Shard]:
    """Return memory for the shards that this rank owns."""
    shards = {}
    for p, _ in trainer.optimizer.tensors():
        for kind in _kinds(trainer, with_moments=with_moments):
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
    trainer: Trainer, shards: dict[Place, Shard], *, with_moments: bool
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield what was read for each parameter of this rank, and free its shards. Padding is 0."""
    for p, _ in trainer.optimizer.tensors():
        found = {}
        for kind in _kinds(trainer, with_moments=with_moments):
            found[kind] = torch.zeros(p.param.shape)
            for piece in p.pieces:
                piece.write(
                    found[kind], shards.pop((f"{kind}.{piece.key}", piece.offsets)).tensor()
                )
        yield found


def _agree(model: Model, what: str) -> contextlib.AbstractContextManager[None]:
    """Run a block on every rank; if it fails on one rank, `CheckpointError` is raised on all."""

    def as_error(failures: Sequence[Failure], _: Exception | None) -> CheckpointError:
        return CheckpointError(f"{what} failed: rank {failures[0].rank} {failures[0]}")

    return agree(model.control_group, as_error)
