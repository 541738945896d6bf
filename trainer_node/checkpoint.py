"""The trainer's state on disk: what a version is made of.

    <dir>/adapter/adapter_model.safetensors, adapter_config.json    PEFT's format, whole tensors in fp32
    <dir>/rank_<r>.pt                                               optimizer and RNG of each rank
    <dir>/meta.json                                                 version, topology, LoRA settings
    <dir>/COMPLETE                                                  written last: every file's size

Written beside the target, fsynced, renamed, and only then marked. A folder without its marker, or with a file missing or of
another size, is refused, never read as far as it goes. `save` and `load` are collectives; a failure on one rank is every rank's.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from orchestrator.errors import SpliceError
from trainer_node.lora import Matrix
from trainer_node.merge import LoraDelta
from trainer_node.runtime import TrainerRuntime

MARKER = "COMPLETE"
ADAPTER = "adapter"
_FORMAT = 1
_PEFT_PREFIX = "base_model.model."


class CheckpointError(SpliceError, OSError):
    """A checkpoint could not be written, or is not whole; names the file."""


# ---------------------------------------------------------------- PEFT's format


def write_adapter(folder: Path, *, runtime: TrainerRuntime, deltas: Mapping[str, LoraDelta]) -> None:
    """Write a PEFT adapter into `folder`, which may exist; each file appears whole or not at all, the config last."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, delta in deltas.items():
        tensors[f"{_PEFT_PREFIX}{name}.lora_A.weight"] = delta.lora_A_RI.detach().float().cpu().contiguous().clone()
        tensors[f"{_PEFT_PREFIX}{name}.lora_B.weight"] = delta.lora_B_OR.detach().float().cpu().contiguous().clone()
    _write(folder / "adapter_model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"}))
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
    _write(folder / "adapter_config.json", lambda path: path.write_text(json.dumps(config, indent=1)))


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


def save(runtime: TrainerRuntime, folder: Path, *, version: int) -> None:
    """Write everything `load` needs. A collective.

    Raises:
        CheckpointError: on every rank, if one could not write; a whole checkpoint that stood there before is still there then.
    """
    rank, temp = dist.get_rank(), folder.with_name(f".{folder.name}.tmp")
    deltas = runtime.adapters.gather()
    with _together(runtime, f"making {temp}"):
        if rank == 0:
            _refuse_foreign(folder)
            shutil.rmtree(temp, ignore_errors=True)
            temp.mkdir(parents=True)
            write_adapter(temp / ADAPTER, runtime=runtime, deltas=deltas)
            _write(temp / "meta.json", lambda path: path.write_text(json.dumps(_meta(runtime, version), indent=1)))
    with _together(runtime, f"writing rank {rank}'s state to {temp}"):
        _write(temp / f"rank_{rank}.pt", lambda path: torch.save(_rank_state(runtime), path))
    with _together(runtime, f"moving {temp} to {folder}"):
        if rank == 0:
            _publish(temp, folder, version)


def load(runtime: TrainerRuntime, folder: Path) -> int:
    """Restore what `save` wrote; nothing changes unless all of it can be read. A collective. Returns the version.

    Raises:
        CheckpointError: on every rank: no such checkpoint, a partial one, or one of another model, topology or LoRA setting.
    """
    with _together(runtime, f"reading {folder}"):
        meta = _check_whole(folder)
        wanted = _meta(runtime, meta["version"])
        for field in ("format", "parallel", "lora", "architecture"):
            if meta.get(field) != wanted[field]:
                raise CheckpointError(f"{folder} was written with {field} {meta.get(field)}; this trainer has {wanted[field]}")
        whole = read_adapter(folder / ADAPTER, runtime=runtime)
        state = torch.load(folder / f"rank_{dist.get_rank()}.pt", map_location=runtime.device, weights_only=True)
    runtime.adapters.load(whole)
    runtime.zero_grad()
    if runtime.optimizer is not None:
        runtime.optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"].cpu())
    if runtime.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda_rng"].cpu(), runtime.device)
    return int(meta["version"])


def _meta(runtime: TrainerRuntime, version: int) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "version": version,
        "parallel": runtime.config.parallel.model_dump(mode="json"),
        "lora": runtime.config.lora.model_dump(mode="json"),
        "architecture": list(runtime.hf_config.architectures or ()),
    }


def _rank_state(runtime: TrainerRuntime) -> dict[str, Any]:
    state: dict[str, Any] = {
        "optimizer": runtime.optimizer.state_dict() if runtime.optimizer is not None else {},
        "rng": torch.get_rng_state(),
    }
    if runtime.device.type == "cuda":
        state["cuda_rng"] = torch.cuda.get_rng_state(runtime.device)
    return state


def _check_whole(folder: Path) -> dict[str, Any]:
    marker = folder / MARKER
    if not marker.is_file():
        raise CheckpointError(f"{folder} has no {MARKER}: it does not exist or was never finished")
    for name, size in json.loads(marker.read_text())["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            found = path.stat().st_size if path.is_file() else "no"
            raise CheckpointError(f"{path} should have {size} bytes; found {found}. The checkpoint is not whole")
    meta: dict[str, Any] = json.loads((folder / "meta.json").read_text())
    return meta


def _refuse_foreign(folder: Path) -> None:
    """Only a checkpoint of ours, finished or not, is ever replaced."""
    ours = not folder.exists() or (
        folder.is_dir()
        and not {p.name for p in folder.iterdir()} - {MARKER, ADAPTER, "meta.json"} - {f"rank_{r}.pt" for r in range(4096)}
    )
    if not ours:
        raise CheckpointError(f"{folder} exists and is no checkpoint of ours; choose another folder")


def _publish(temp: Path, folder: Path, version: int) -> None:
    files = {str(p.relative_to(temp)): p.stat().st_size for p in sorted(temp.rglob("*")) if p.is_file()}
    _fsync(temp / ADAPTER)
    _fsync(temp)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    temp.rename(folder)
    _fsync(folder.parent)
    _write(folder / MARKER, lambda path: path.write_text(json.dumps({"version": version, "files": files})))
    shutil.rmtree(old, ignore_errors=True)


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    """Write beside, fsync, rename, fsync the folder."""
    temp = path.with_name(f".{path.name}.tmp")
    write(temp)
    _fsync(temp)
    os.replace(temp, path)
    _fsync(path.parent)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
