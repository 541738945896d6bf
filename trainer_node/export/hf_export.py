"""Writes the merged model as an HF checkpoint, which transformers and vLLM load.

    <dir>/config.json, tokenizer files                       copied from the model's folder
    <dir>/model-00001-of-0000N.safetensors ...               in the manifest's order
    <dir>/model.safetensors.index.json                       which tensor is where
    <dir>/splice_merge.json                                  how adapters were merged

Streamed: at most one file's tensors are in memory. The folder appears whole or not at all.

With `fp8_like` the weights that are block-scaled FP8 in that checkpoint are written so, in the
bytes of a publication to a server that loaded it. Config and tokenizer are copied from there.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import Manifest
from trainer_node.adapters.rounding import Rounding
from trainer_node.export.merged import Exporter
from trainer_node.files import generations
from trainer_node.files.generations import CheckpointError, write_file
from trainer_node.hf import fp8_blocks
from trainer_node.hf.checkpoint import save_tensors, tensor_dtypes
from trainer_node.model.model import Model
from trainer_node.ranks import objects
from trainer_node.ranks.lockstep import Failure, agree

_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_DTYPES = ("dtype", "torch_dtype")
"""Keys of a config, in transformers 5 and 4."""
_TOWER = re.compile("vision|audio|image|video")
INDEX = "model.safetensors.index.json"
MERGE = "splice_merge.json"
"""Mode and seed of the rounding with which adapters were merged."""


def plan_files(manifest: Manifest, *, shard_bytes: int) -> dict[str, tuple[str, ...]]:
    """Map file names to their tensors, in the manifest's order.

    A tensor larger than `shard_bytes` gets its own file.
    """
    files: list[list[str]] = [[]]
    used = 0
    for spec in manifest.tensors:
        if files[-1] and used + spec.nbytes > shard_bytes:
            files.append([])
            used = 0
        files[-1].append(spec.name)
        used += spec.nbytes
    if len(files) == 1:
        return {"model.safetensors": tuple(files[0])}
    return {
        f"model-{i:05d}-of-{len(files):05d}.safetensors": tuple(names)
        for i, names in enumerate(files, 1)
    }


def export_hf(
    model: Model,
    exporter: Exporter,
    folder: Path,
    *,
    shard_bytes: int,
    fp8_like: Path | None = None,
) -> list[str]:
    """Write the checkpoint; returns its files. A collective.

    Args:
        fp8_like: a checkpoint in block-scaled FP8, on rank 0's host.

    Raises:
        ConfigError: on every rank: `fp8_like` is no such checkpoint of this model.
        ExportError: on every rank, if the folder exists, a foreign file is in the way, or rank
            0 could not write.
        ManifestError, MergePlanError: see `Exporter`.
    """
    manifest, like = exporter.manifest(), fp8_like or model.config.model
    scaled = _scaled_in(model, fp8_like)
    if scaled:
        manifest = fp8_blocks.manifest_like(manifest, scaled)
    plan = plan_files(manifest, shard_bytes=shard_bytes)
    stream = exporter.merged_tensors()
    sent = fp8_blocks.quantising(stream, scaled)
    with agree(model.control_group, partial(_failed, folder)):
        try:
            if dist.get_rank() == 0:
                _write(
                    like,
                    folder,
                    manifest,
                    plan,
                    sent,
                    dtype=model.config.dtype,
                    merged=None if model.trains_all else model.rounding,
                    is_fp8=bool(scaled),
                )
        finally:
            for _ in stream:  # every rank finishes the export, so that they stay in step
                pass
    return [*plan, INDEX] if len(plan) > 1 else [*plan]


def _scaled_in(model: Model, folder: Path | None) -> frozenset[str]:
    """The block-scaled weights of a checkpoint that rank 0 reads. A collective."""
    names: list[str] = []
    refused: str | None = None
    if folder is not None and dist.get_rank() == 0:
        try:
            names = sorted(fp8_blocks.scaled_weights(folder, tensor_dtypes(folder)))
        except ConfigError as error:
            refused = f"fp8_like: {error}"
    refused, names = objects.broadcast((refused, names), group=model.control_group)
    if refused is not None:
        raise ConfigError(refused)
    return frozenset(names)


class ExportError(CheckpointError):
    """A folder could not be written. The trainer's state is what it was."""

    remedy = "Fix the disk, or choose another folder; then export again. The trainer is unchanged."


def _failed(folder: Path, failures: Sequence[Failure], _: Exception | None) -> ExportError:
    return ExportError(f"exporting to {folder} failed: {failures[0]}")


def _write(
    model: Path,
    folder: Path,
    manifest: Manifest,
    plan: dict[str, tuple[str, ...]],
    stream: Iterator[tuple[str, torch.Tensor]],
    *,
    dtype: str,
    merged: Rounding | None,
    is_fp8: bool,
) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not empty; choose another folder")
    temp = generations.make_empty(generations.new_folder(folder))
    try:
        for name, tensors in plan.items():
            _write_shard(temp / name, tensors, stream)
        if len(plan) > 1:
            index = {
                "metadata": {"total_size": manifest.nbytes},
                "weight_map": {t: f for f, ts in plan.items() for t in ts},
            }
            write_file(temp / INDEX, lambda path: path.write_text(json.dumps(index, indent=1)))
        for source in sorted({p for pattern in _COPIED for p in model.glob(pattern)}):
            if source.name == "config.json" and not is_fp8:
                write_file(temp / source.name, partial(_write_plain_config, source, dtype))
            elif source.name not in (INDEX, MERGE):
                write_file(temp / source.name, partial(shutil.copyfile, source))
        if merged is not None:
            text = json.dumps(asdict(merged), indent=1)
            write_file(temp / MERGE, lambda path: path.write_text(text))
        temp.replace(folder)  # an empty folder may be there
        (folder / generations.BEGUN).unlink()
        generations.DISK.flush(folder.parent)
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def _write_plain_config(source: Path, dtype: str, path: Path) -> None:
    """Copy a config for weights that are not quantised and have this dtype. transformers would
    round them to the dtype that the config names."""
    text = source.read_text()
    config = json.loads(text)
    changed = config.pop("quantization_config", None) is not None
    changed |= _name_dtype(config, dtype)
    path.write_text(json.dumps(config, indent=2) if changed else text)


def _name_dtype(config: dict[str, Any], dtype: str) -> bool:
    """Write the dtype where a config names one, but not of towers, which keep theirs. Returns
    whether it changed."""
    changed = False
    for key, value in config.items():
        if key in _DTYPES and value != dtype:
            config[key], changed = dtype, True
        elif isinstance(value, dict) and not _TOWER.search(key):
            changed |= _name_dtype(value, dtype)
    return changed


def _write_shard(
    path: Path, names: Sequence[str], stream: Iterator[tuple[str, torch.Tensor]]
) -> None:
    # A merged tensor may be a view of a larger one. safetensors needs separate tensors.
    tensors = {}
    for wanted in names:
        name, tensor = next(stream)
        assert name == wanted, f"the export gave {name} where the plan has {wanted}"
        tensors[name] = tensor.detach().cpu().contiguous().clone()
    write_file(path, lambda temp: save_tensors(temp, tensors))
