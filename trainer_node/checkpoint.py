"""The trainer's state on disk: what a version is made of.

    <dir>/adapter/adapter_model.safetensors, adapter_config.json    PEFT's format, whole tensors in fp32
    <dir>/rank_<r>.pt                                               optimizer and RNG of each rank
    <dir>/meta.json                                                 version, topology, LoRA settings, counters, the client's state
    <dir>/COMPLETE                                                  written last: every file's size

Written beside the target, flushed, marked, and then put in its place (`generations`): at every instant one whole generation can be
found, and `load` finds it. A folder without its marker, or with a file missing or of another size, is refused, never read as far as
it goes. `save` and `load` are collectives; a failure on one rank is every rank's.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from trainer_node import generations
from trainer_node.generations import MARKER, CheckpointError, write_file
from trainer_node.lora import Matrix
from trainer_node.merge import LoraDelta
from trainer_node.runtime import TrainerRuntime

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
    "write_adapter",
]
ADAPTER = "adapter"
_FORMAT = 1
_PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What `load` found and what it cost."""

    version: int
    client_state: dict[str, Any]
    dropped_batches: int
    """Batches whose pending gradients were dropped."""


# ---------------------------------------------------------------- PEFT's format


def write_adapter(folder: Path, *, runtime: TrainerRuntime, deltas: Mapping[str, LoraDelta]) -> None:
    """Write a PEFT adapter into `folder`, which may exist; each file appears whole or not at all, the config last."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, delta in deltas.items():
        tensors[f"{_PEFT_PREFIX}{name}.lora_A.weight"] = delta.lora_A_RI.detach().float().cpu().contiguous().clone()
        tensors[f"{_PEFT_PREFIX}{name}.lora_B.weight"] = delta.lora_B_OR.detach().float().cpu().contiguous().clone()
    write_file(folder / "adapter_model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    lora = runtime.config.lora
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(runtime.config.model.absolute()),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    write_file(folder / "adapter_config.json", lambda path: path.write_text(json.dumps(config, indent=1)))


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
    size = runtime.config.parallel.tensor
    for shard in runtime.adapters.shards():
        key = f"{_PEFT_PREFIX}{shard.name}.lora_{shard.matrix}.weight"
        shape = list(shard.tensor.shape)
        if shard.dim is not None:
            shape[shard.dim] *= size
        if key not in stored or list(stored[key].shape) != shape:
            found = tuple(stored[key].shape) if key in stored else "nothing"
            raise CheckpointError(f"{path}: {key} should have shape {tuple(shape)}; found {found}")
        whole[shard.name, shard.matrix] = stored[key]
    return whole


# ---------------------------------------------------------------- whole checkpoints


def save_adapter(runtime: TrainerRuntime, folder: Path) -> None:
    """Gather the adapters and write them in PEFT's format. A collective.

    Raises:
        CheckpointError: on every rank, if rank 0 could not write.
    """
    deltas = runtime.adapters.gather()
    with _together(runtime, f"writing the adapter to {folder}"):
        if dist.get_rank() == 0:
            write_adapter(folder, runtime=runtime, deltas=deltas)


def save(runtime: TrainerRuntime, folder: Path, *, version: int, client_state: Mapping[str, Any] | None = None) -> None:
    """Write everything `load` needs. A collective. Pending gradients are not part of it, and stay.

    Raises:
        CheckpointError: on every rank, if one could not write; a whole checkpoint that stood there before is still there then.
    """
    rank, temp = dist.get_rank(), generations.new_folder(folder)
    deltas = runtime.adapters.gather()
    meta = {**_meta(runtime, version), "client_state": dict(client_state or {})}
    with _together(runtime, f"making {temp}"):
        if rank == 0:
            for one in (folder, temp, generations.old_folder(folder)):
                generations.refuse_foreign(one, names=_names())
            generations.begin(folder)
            write_adapter(temp / ADAPTER, runtime=runtime, deltas=deltas)
            write_file(temp / "meta.json", lambda path: path.write_text(json.dumps(meta, indent=1)))
    with _together(runtime, f"writing rank {rank}'s state to {temp}"):
        write_file(temp / f"rank_{rank}.pt", lambda path: torch.save(_rank_state(runtime), path))
    with _together(runtime, f"moving {temp} to {folder}"):
        if rank == 0:
            generations.finish(folder, facts={"version": version})


def load(runtime: TrainerRuntime, folder: Path) -> Loaded:
    """Restore what `save` wrote, after mending what a crash left; nothing changes unless all of it can be read. A collective.

    Pending gradients are dropped.

    Raises:
        CheckpointError: on every rank: no such checkpoint, a partial one, or one of another model, topology or LoRA setting.
    """
    with _together(runtime, f"mending {folder}"):
        if dist.get_rank() == 0:
            generations.recover(folder)
    with _together(runtime, f"reading {folder}"):
        generations.check_whole(folder)
        meta = json.loads((folder / "meta.json").read_text())
        wanted = _meta(runtime, meta["version"])
        for field in ("format", "parallel", "lora", "architecture"):
            if meta.get(field) != wanted[field]:
                raise CheckpointError(f"{folder} was written with {field} {meta.get(field)}; this trainer has {wanted[field]}")
        whole = read_adapter(folder / ADAPTER, runtime=runtime)
        state = torch.load(folder / f"rank_{dist.get_rank()}.pt", map_location=runtime.device, weights_only=True)
    runtime.adapters.load(whole)
    dropped = runtime.drop_pending()
    if runtime.optimizer is not None:
        runtime.optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"].cpu())
    if runtime.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda_rng"].cpu(), runtime.device)
    counters = meta.get("counters", {})
    runtime.num_steps, runtime.num_skipped_steps = counters.get("steps", 0), counters.get("skipped_steps", 0)
    return Loaded(version=int(meta["version"]), client_state=meta.get("client_state", {}), dropped_batches=dropped)


def delete(folders: Iterable[Path]) -> dict[str, str]:
    """Delete checkpoints of ours; one that is not there is passed over. Not a collective: rank 0 alone.

    Returns folder -> why it was not deleted; that is no reason to fail what has just been saved.
    """
    kept = {}
    for folder in folders:
        try:
            generations.refuse_foreign(folder, names=_names())
            generations.discard(folder)
        except OSError as error:
            kept[str(folder)] = str(error)
    return kept


def _names() -> set[str]:
    """Everything that may stand in a checkpoint's folder, half-written files included."""
    names = {ADAPTER, "meta.json", *(f"rank_{r}.pt" for r in range(4096))}
    return names | {f".{n}.tmp" for n in names}


def _meta(runtime: TrainerRuntime, version: int) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "version": version,
        "parallel": runtime.config.parallel.model_dump(mode="json"),
        "lora": runtime.config.lora.model_dump(mode="json"),
        "architecture": list(runtime.hf_config.architectures or ()),
        "counters": {"steps": runtime.num_steps, "skipped_steps": runtime.num_skipped_steps},
    }


def _rank_state(runtime: TrainerRuntime) -> dict[str, Any]:
    state: dict[str, Any] = {
        "optimizer": runtime.optimizer.state_dict() if runtime.optimizer is not None else {},
        "rng": torch.get_rng_state(),
    }
    if runtime.device.type == "cuda":
        state["cuda_rng"] = torch.cuda.get_rng_state(runtime.device)
    return state


@contextlib.contextmanager
def _together(runtime: TrainerRuntime, what: str) -> Any:
    """Run a block that holds no collective; if it fails on one rank, it fails on all."""
    error: str | None = None
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, json.JSONDecodeError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error, group=runtime.control_group)
    first = next((f"rank {r} {e}" for r, e in enumerate(errors) if e is not None), None)
    if first is not None:
        raise CheckpointError(f"{what} failed: {first}")
