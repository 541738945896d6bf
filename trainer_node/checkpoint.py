"""The trainer's state on disk: what a version is made of.

    <dir>/adapter/adapter_model.safetensors, adapter_config.json    adapters in PEFT's format, whole tensors in fp32
    <dir>/state/                                                    moments (and with finetuning_type "full" the fp32 weights), sharded
    <dir>/rank_<r>.pt                                               RNG of each rank
    <dir>/meta.json                                                 version, topology, LoRA settings, counters, the client's state
    <dir>/COMPLETE                                                  written last: every file's size and hash

`state/` is what is known as torch_dist: torch.distributed.checkpoint's files, every tensor whole under its HF name (`sharded_state`), so
any topology can load what any other wrote. RNG states are of a rank: at another topology generators are seeded anew, and `Loaded` says so.

Written beside the target, flushed, marked, and then put in its place (`generations`): at every instant one whole generation can be
found, and `load` finds it. A folder without its marker, or with a file that is missing, too many or not the one that was written, is refused,
never read as far as it goes. `save` and `load` are collectives; a failure on one rank is every rank's.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from trainer_node import generations, hashing, objects, pack_size, peft_io, sharded_state
from trainer_node.bulk_files import Writing, bulk_writer
from trainer_node.generations import MARKER, CheckpointError, write_file
from trainer_node.lora import Matrix
from trainer_node.optimizer import MOMENTS
from trainer_node.parameters import Piece, TrainedParam
from trainer_node.runtime import TrainerRuntime
from trainer_node.sharded_state import Box

__all__ = [
    "ADAPTER",
    "MARKER",
    "CheckpointError",
    "Loaded",
    "delete",
    "load",
    "read_adapter",
    "save",
    "save_adapter",
]
ADAPTER, STATE = "adapter", "state"
_FORMAT = 2
_PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What `load` found and what it cost."""

    version: int
    client_state: dict[str, Any]
    dropped_batches: int
    """Batches whose pending gradients were dropped."""
    rng_restored: bool
    """False: it was written at another topology, and the generators were seeded anew."""


# ---------------------------------------------------------------- PEFT's format


def read_adapter(folder: Path, *, runtime: TrainerRuntime) -> dict[tuple[str, Matrix], torch.Tensor]:
    """A PEFT adapter's whole tensors, checked to be those this rank needs.

    Raises:
        CheckpointError: a tensor is missing or of another shape; names it.
    """
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        raise CheckpointError(f"no {path}; the adapter is missing")
    stored = load_file(path)
    whole: dict[tuple[str, Matrix], torch.Tensor] = {}
    for shard in runtime.adapters.shards():
        key = f"{_PEFT_PREFIX}{shard.name}.lora_{shard.matrix}.weight"
        shape = shard.whole_shape()
        if key not in stored or list(stored[key].shape) != shape:
            found = tuple(stored[key].shape) if key in stored else "nothing"
            raise CheckpointError(f"{path}: {key} should have shape {tuple(shape)}; found {found}")
        whole[shard.name, shard.matrix] = stored[key]
    return whole


# ---------------------------------------------------------------- whole checkpoints


def save_adapter(runtime: TrainerRuntime, folder: Path) -> None:
    """Gather the adapters and write them in PEFT's format. A collective.

    Raises:
        ConfigError: the trainer has no adapters.
        CheckpointError: on every rank, if rank 0 could not write.
    """
    runtime.need_adapters("an adapter in PEFT's format")
    stacks = peft_io.gather_stacks(runtime)
    with _together(runtime, f"writing the adapter to {folder}"), bulk_writer(runtime.device) as writer:
        if dist.get_rank() == 0:
            parts = peft_io.layout(stacks)
            folder.mkdir(parents=True, exist_ok=True)
            write_file(folder / peft_io.WEIGHTS, lambda path: writer.start(path, parts).wait())
            peft_io.write_config(folder, lora=runtime.config.lora, model=runtime.config.model)


def save(runtime: TrainerRuntime, folder: Path, *, version: int, client_state: Mapping[str, Any] | None = None) -> None:
    """Write everything `load` needs. A collective. Pending gradients are not part of it, and stay.

    Raises:
        CheckpointError: on every rank, if one could not write; a whole checkpoint that stood there before is still there then.
    """
    folder = _real(folder)
    rank, temp = dist.get_rank(), generations.new_folder(folder)
    stacks = [] if runtime.trains_all else peft_io.gather_stacks(runtime)
    meta = {**_meta(runtime, version), "client_state": dict(client_state or {})}
    began = False
    try:
        with bulk_writer(runtime.device) as writer:
            adapter: Writing | None = None
            hashes: dict[str, str] = {}
            with _together(runtime, f"making {temp}"):
                if rank == 0:
                    for one in (folder, temp, generations.old_folder(folder)):
                        generations.refuse_foreign(one, names=_names())
                    generations.begin(folder)
                    began = True
                    write_file(temp / "meta.json", lambda path: path.write_text(json.dumps(meta, indent=1)))
                    if stacks:
                        # Written while the state's plan is made. Nobody looks for it here before the marker is there, so it needs no rename.
                        (temp / ADAPTER).mkdir()
                        adapter = writer.start(temp / ADAPTER / peft_io.WEIGHTS, peft_io.layout(stacks))
            state = sharded_state.save(_boxes(runtime), temp / STATE, group=runtime.control_group, writer=writer)
            with _together(runtime, f"writing rank {rank}'s state to {temp}"):
                rng = temp / f"rank_{rank}.pt"
                write_file(rng, lambda path: torch.save(rng_state(runtime), path))
                hashes = {f"{STATE}/{name}": found for name, found in state.items()} | hashing.hashes({rng.name: rng})
                if adapter is not None:
                    hashes[f"{ADAPTER}/{peft_io.WEIGHTS}"] = adapter.wait()
                    peft_io.write_config(temp / ADAPTER, lora=runtime.config.lora, model=runtime.config.model)
    except Exception:
        if began:  # on a full disk it would keep what room there was
            with contextlib.suppress(OSError):
                generations.discard(temp)
        raise
    everyones = objects.all_gather(hashes, group=runtime.control_group)
    with _together(runtime, f"moving {temp} to {folder}"):
        if rank == 0:
            generations.finish(folder, facts={"version": version}, hashes={k: v for one in everyones for k, v in one.items()})


def load(runtime: TrainerRuntime, folder: Path) -> Loaded:
    """Restore what `save` wrote, at this topology or another, after mending what a crash left; nothing changes unless all of it can be
    read: what this rank owns is in CPU memory twice for a moment. A collective.

    Pending gradients are dropped.

    Raises:
        CheckpointError: on every rank: no such checkpoint, a partial one, or one of another model or LoRA setting.
    """
    folder = _real(folder)
    with _together(runtime, f"mending {folder}"):
        if dist.get_rank() == 0:
            generations.recover(folder)
    whole: dict[tuple[str, Matrix], torch.Tensor] = {}
    with _together(runtime, f"checking {folder}"):  # all of it, before any rank reads what another one checks
        generations.check_contents(folder, part=dist.get_rank(), parts=dist.get_world_size())
    with _together(runtime, f"reading {folder}"):
        meta = json.loads((folder / "meta.json").read_text())
        _check_meta(folder, meta, _identity(runtime))
        if not runtime.trains_all:
            whole = read_adapter(folder / ADAPTER, runtime=runtime)
        same_place = meta["parallel"] == runtime.config.parallel.model_dump(mode="json")
        rng = None
        if same_place:
            rng = torch.load(folder / f"rank_{dist.get_rank()}.pt", map_location="cpu", weights_only=True)
        num_steps, version, counters = int(meta["optimizer_steps"]), int(meta["version"]), meta["counters"]
        boxes = _room(runtime, with_moments=num_steps > 0)
        plan = sharded_state.plan(boxes, folder / STATE)
    sharded_state.load(plan, folder / STATE, group=runtime.control_group)
    dropped = runtime.drop_pending()
    if not runtime.trains_all:
        runtime.adapters.load(whole)
    del plan
    runtime.optimizer.restore(_values(runtime, boxes, with_moments=num_steps > 0), num_steps=num_steps)
    if rng is not None:
        set_rng_state(runtime, rng)
    else:
        runtime.seed(counters["steps"])
    if same_place:
        pack_size.remember(runtime, meta.get("micro_batch_tokens"))
    runtime.num_steps, runtime.num_skipped_steps = counters["steps"], counters["skipped_steps"]
    runtime.steps_since_sent = 0
    return Loaded(
        version=version,
        client_state=meta.get("client_state", {}),
        dropped_batches=dropped,
        rng_restored=same_place,
    )


def delete(folders: Iterable[Path]) -> dict[str, str]:
    """Delete checkpoints of ours; one that is not there is passed over. Not a collective: rank 0 alone.

    Returns folder -> why it was not deleted; that is no reason to fail what has just been saved.
    """
    kept = {}
    for folder in folders:
        try:
            real = _real(folder)
            # What a crash left beside it first: without it, a load of this name would find an older state.
            for one in (generations.new_folder(real), generations.old_folder(real), real):
                generations.refuse_foreign(one, names=_names())
                generations.discard(one)
        except OSError as error:
            kept[str(folder)] = str(error)
    return kept


def _real(folder: Path) -> Path:
    """A checkpoint that a link stands for is replaced and deleted where it lies; the link stays."""
    return folder.resolve() if folder.is_symlink() else folder


def _names() -> set[str]:
    """Everything that may stand in a checkpoint's folder, half-written files included."""
    names = {ADAPTER, STATE, "meta.json", *(f"rank_{r}.pt" for r in range(4096))}
    return names | {f".{n}.tmp" for n in names}


_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "num_experts", "moe_intermediate_size", "tie_word_embeddings",
)  # fmt: skip


def _identity(runtime: TrainerRuntime) -> dict[str, Any]:
    """What a checkpoint and the trainer that loads it must have in common."""
    return {
        "format": _FORMAT,
        "finetuning_type": runtime.config.finetuning_type,
        "lora": None if runtime.trains_all else runtime.config.lora.model_dump(mode="json", exclude={"dropout"}),
        "architecture": list(runtime.hf_config.architectures or ()),
        "sizes": {name: getattr(runtime.hf_config, name, None) for name in _SIZES},
    }


def _meta(runtime: TrainerRuntime, version: int) -> dict[str, Any]:
    """A collective."""
    return {
        **_identity(runtime),
        "version": version,
        "parallel": runtime.config.parallel.model_dump(mode="json"),
        "micro_batch_tokens": runtime.micro_batch_tokens,
        "optimizer_steps": runtime.optimizer.num_steps(runtime.control_group),
        "counters": {"steps": runtime.num_steps, "skipped_steps": runtime.num_skipped_steps},
    }


def _check_meta(folder: Path, meta: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for field, value in wanted.items():
        if meta.get(field) != value:
            raise CheckpointError(f"{folder} was written with {field} {meta.get(field)}; this trainer has {value}")


# ---------------------------------------------------------------- sharded state


def _kinds(runtime: TrainerRuntime, *, with_moments: bool) -> tuple[str, ...]:
    """What of each parameter is in `state/`: adapters' weights are in PEFT's file."""
    return ("weight",) * runtime.trains_all + MOMENTS * with_moments


def _boxes(runtime: TrainerRuntime) -> dict[str, Box]:
    """What this rank writes."""
    boxes = {}
    for p, tensors in runtime.optimizer.tensors():
        for kind in _kinds(runtime, with_moments=len(tensors) > 1) if p.counted else ():
            for piece in p.pieces:
                box = _box(p, piece, partial(piece.read, tensors[kind]))
                boxes[f"{kind}.{piece.key}"] = box
    return boxes


def _room(runtime: TrainerRuntime, *, with_moments: bool) -> dict[str, Box]:
    """Memory for what this rank owns."""
    boxes = {}
    for p, _ in runtime.optimizer.tensors():
        for kind in _kinds(runtime, with_moments=with_moments):
            for piece in p.pieces:
                memory = torch.empty(piece.box_shape(p.param))
                boxes[f"{kind}.{piece.key}"] = _box(p, piece, partial(lambda t: t, memory))
    return boxes


def _box(p: TrainedParam, piece: Piece, tensor: Callable[[], torch.Tensor]) -> Box:
    return Box(sizes=piece.box_shape(p.param), offsets=piece.offsets, shape=piece.shape, tensor=tensor)


def _values(runtime: TrainerRuntime, boxes: dict[str, Box], *, with_moments: bool) -> Iterator[dict[str, torch.Tensor]]:
    """For each parameter that this rank owns, what was read; boxes are let go on the way. Padding is 0."""
    for p, _ in runtime.optimizer.tensors():
        found = {}
        for kind in _kinds(runtime, with_moments=with_moments):
            found[kind] = torch.zeros(p.param.shape)
            for piece in p.pieces:
                piece.write(found[kind], boxes.pop(f"{kind}.{piece.key}").tensor())
        yield found


# ---------------------------------------------------------------- random numbers


def rng_state(runtime: TrainerRuntime) -> dict[str, Any]:
    """Of this process's generators."""
    state: dict[str, Any] = {"rng": torch.get_rng_state()}
    if runtime.device.type == "cuda":
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        state["cuda_rng"] = torch.cuda.get_rng_state(runtime.device)
        state["cuda_rng_tracker"] = get_cuda_rng_tracker().get_states()
    return state


def set_rng_state(runtime: TrainerRuntime, state: Mapping[str, Any]) -> None:
    """Undo what drew from them since `rng_state`."""
    torch.set_rng_state(state["rng"])
    if runtime.device.type == "cuda":
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        torch.cuda.set_rng_state(state["cuda_rng"], runtime.device)
        get_cuda_rng_tracker().set_states(state["cuda_rng_tracker"])


@contextlib.contextmanager
def _together(runtime: TrainerRuntime, what: str) -> Iterator[None]:
    """Run a block that holds no collective; if it fails on one rank, it fails on all."""
    error: str | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001  - whatever it is, the others must hear of it here, or the ranks are out of step
        error = f"{type(caught).__name__}: {caught}"
    errors = objects.all_gather(error, group=runtime.control_group)
    first = next((f"rank {r} {e}" for r, e in enumerate(errors) if e is not None), None)
    if first is not None:
        raise CheckpointError(f"{what} failed: {first}")
