"""Saves the trainer's state: the content of a version. `loading` loads it.

    adapter/       adapters in PEFT's format, whole tensors in fp32
    weights/       with finetuning_type "full" instead: the fp32 weights, sharded
    state/         moments, sharded
    rank_<r>.pt    RNG of each rank
    meta.json      version, topology, LoRA settings, rounding of the merge, counters, the step of
                   each part, the client's state
    remake.bin     only if moments are written in the background: the request of this state
    COMPLETE       written last: every file's size and hash

`weights/` and `state/` have torch.distributed.checkpoint's files, known as torch_dist, with every
tensor whole under its HF name (`sharded_state`). Any topology can therefore load any other's files.
RNG states belong to a rank: another topology seeds its generators again, and `Loaded` says so.

A checkpoint is written next to its target, flushed, marked, and then moved (`generations`). At
every instant one whole generation exists, and `load` finds it. `load` refuses a folder without its
marker, or with a missing, additional or changed file. `save` and `load` are collectives. A failure
on one rank fails all ranks.

`save` can leave the moments to a thread (`behind`). `state/` is then its own generation within
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from orchestrator.errors.other_version import splice_version
from trainer_node.adapters import peft_io
from trainer_node.files import generations, hashing
from trainer_node.files.behind import OnDisk
from trainer_node.files.bulk_files import BulkWriter, Extent, Writing, bulk_writer
from trainer_node.files.generations import write_file
from trainer_node.layout.pieces import TrainedParam
from trainer_node.model import rng
from trainer_node.model.model import Model
from trainer_node.model.whole_adapters import gather_stacks
from trainer_node.ranks import objects
from trainer_node.state import sharded_state
from trainer_node.state.contents import (
    ADAPTER,
    REMAKE,
    STATE,
    WEIGHTS,
    agree_on,
    base_of_adapters,
    identity,
    names,
    on_disk,
    real,
    shard_of,
)
from trainer_node.state.sharded_state import Place, Shard
from trainer_node.training.optimizer import MOMENTS
from trainer_node.training.trainer import Trainer

log = logging.getLogger("splice.trainer")
Meanwhile = Callable[[Callable[[], float | None]], None]
"""Gets a function that tells the seconds until the write ends, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """How the trainer's state was made: a request that began at a complete checkpoint."""

    base: OnDisk
    request: np.ndarray
    """`lockstep.packed`."""


# ---------------------------------------------------------------- whole checkpoints


def save_adapter(model: Model, folder: Path) -> None:
    """Gather the adapters and write them in PEFT's format. A collective.

    Raises:
        ConfigError: the trainer has no adapters.
        CheckpointError: on every rank, if rank 0 could not write.
    """
    model.need_adapters("an adapter in PEFT's format")
    stacks = gather_stacks(model, group=model.control_group)
    with agree_on(model.control_group, f"writing the adapter to {folder}"):
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
    folder, model = real(folder), trainer.model
    if not settle(trainer) or (step is not None and step.base.folder == folder.absolute()):
        step = None
    stacks = [] if model.trains_all else gather_stacks(model, group=model.control_group)
    meta = {
        **_meta(trainer, version),
        "client_state": dict(client_state or {}),
        **({} if step is None else {"remake": _remake(step, folder)}),
    }
    hashes = _write(trainer, folder, meta, stacks, step, meanwhile)
    with agree_on(model.control_group, f"moving {folder}"):
        if dist.get_rank() == 0:
            generations.finish(
                folder,
                facts={"version": version},
                hashes=hashes,
                apart=() if step is None else (STATE,),
            )
    trainer.on_disk = on_disk(folder, meta)
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
    """Write the files next to the target. Returns the hashes of those that all ranks wrote."""
    rank, temp, model = dist.get_rank(), generations.new_folder(folder), trainer.model
    began = False
    hashes: dict[str, str] = {}

    def weights_are_written(writings: Sequence[Writing]) -> None:
        meanwhile(_left(writings))

    try:
        with bulk_writer(model.device) as writer:
            early: dict[str, Writing] = {}
            with agree_on(model.control_group, f"making {temp}"):
                if rank == 0:
                    for one in (folder, temp, generations.old_folder(folder)):
                        generations.refuse_foreign(one, names=names())
                    generations.begin(folder)
                    began = True
                    write_file(
                        temp / "meta.json", lambda path: path.write_text(json.dumps(meta, indent=1))
                    )
                    early = _start(writer, temp, stacks, step)
            random_state = rng.state(model.device)
            kinds = {WEIGHTS: ("weight",), STATE: MOMENTS}
            has_weights = model.trains_all or model.config.value_head
            for name in (WEIGHTS,) * has_weights + (STATE,) * (step is None):
                is_long = name == WEIGHTS and model.trains_all
                found = sharded_state.save(
                    _shards(trainer.optimizer.tensors(), kinds[name], trains_all=model.trains_all),
                    temp / name,
                    group=model.control_group,
                    writer=writer,
                    meanwhile=weights_are_written if is_long else lambda writings: None,
                )
                hashes |= {f"{name}/{file}": value for file, value in found.items()}
            if not model.trains_all:
                weights_are_written(list(early.values()))
            with agree_on(model.control_group, f"writing rank {rank}'s state to {temp}"):
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


# ---------------------------------------------------------------- moments in the background


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
    folder, model = real(folder), trainer.model
    meta = {**json.loads((folder / "meta.json").read_text()), "note": note}
    shards = _shards(trainer.optimizer.tensors(), MOMENTS)
    _write_state(shards, folder, meta, group=model.control_group, device=model.device)
    trainer.on_disk = on_disk(folder, meta)


def _write_state(
    shards: Mapping[Place, Shard],
    folder: Path,
    meta: Mapping[str, Any],
    *,
    group: Any,
    device: torch.device,
    wait_turn: Callable[[], None] = lambda: None,
) -> None:
    """Write the moments into their checkpoint, as a separate generation. A collective over a
    CPU group."""
    state, is_root = folder / STATE, dist.get_rank() == 0
    temp = generations.new_folder(state)
    facts = {**{k: meta[k] for k in ("save", "version")}, "steps": meta["parts"][STATE]}
    try:
        with agree_on(group, f"making {temp}"):
            if is_root:
                generations.begin(state)
        with bulk_writer(device, wait_turn=wait_turn) as writer:
            hashes = sharded_state.save(shards, temp, group=group, writer=writer)
        everyones = objects.all_gather(hashes, group=group)
        with agree_on(group, f"moving {temp} to {state}"):
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


def delete(folder: Path) -> None:
    """Delete a checkpoint of ours, only on rank 0; a missing one is skipped.

    Raises:
        CheckpointError: it is not ours.
    """
    for one in _generations(folder):
        generations.refuse_foreign(one, names=names())
        generations.discard(one)


def check_ours(folder: Path) -> None:
    """Refuse a folder that `delete` would refuse.

    Raises:
        CheckpointError: it is not ours.
    """
    for one in _generations(folder):
        generations.refuse_foreign(one, names=names())


def _generations(folder: Path) -> tuple[Path, Path, Path]:
    """A checkpoint's folders, first what a crash left next to it: a load of this name could find an
    older state.
    """
    folder = real(folder)
    return generations.new_folder(folder), generations.old_folder(folder), folder


def _meta(trainer: Trainer, version: int) -> dict[str, Any]:
    """A collective."""
    model, steps = trainer.model, trainer.num_steps
    return {
        **identity(model),
        "splice": splice_version(),
        "version": version,
        "save": objects.broadcast(uuid.uuid4().hex, group=model.control_group),
        "parallel": model.config.parallel.model_dump(mode="json"),
        "micro_batch_tokens": trainer.micro_batch_tokens,
        "bundle_tokens": trainer.bundle_tokens,
        "rounding": asdict(model.rounding),
        "base": base_of_adapters(model),
        "optimizer_steps": trainer.optimizer.num_steps(model.control_group),
        "counters": {"steps": steps, "skipped_steps": trainer.num_skipped_steps},
        "parts": dict.fromkeys((WEIGHTS if model.trains_all else ADAPTER, STATE, "rank"), steps),
    }


def _remake(step: Step, folder: Path) -> dict[str, Any]:
    """A relative path, so that a run's folder may move."""
    base = os.path.relpath(step.base.folder, folder)
    return {"base": base, "save": step.base.save, "steps": step.base.steps}


def _shards(
    tensors: Iterable[tuple[TrainedParam, Mapping[str, torch.Tensor]]],
    kinds: Sequence[str],
    *,
    trains_all: bool = False,
) -> dict[Place, Shard]:
    """Return the shards that this rank writes, of the kinds that it has. Adapters' weights are in
    PEFT's files."""
    shards = {}
    for p, found in tensors:
        for kind in kinds if p.counted else ():
            if kind not in found or (kind == "weight" and not (trains_all or p.is_value)):
                continue
            for piece in p.pieces:
                shard = shard_of(p, piece, partial(piece.read, found[kind]))
                shards[f"{kind}.{piece.key}", piece.offsets] = shard
    return shards
