"""Durable saves: seconds of a whole checkpoint and of an adapter alone, against `torch.save` of the
same tensors to one file, flushed.

LoRA of rank 16 on all linear layers with its AdamW moments, fp32. `30b-a3b` needs a GPU (37,248
adapter matrices, 3.3 GB, 10 GB with the moments); on a
CPU two shapes of it: `many-experts` has as many matrices, but small ones, so that the time is
Python's, and `large-experts` few large ones (rank 256), so that it is the disk's. Every save goes
to a new folder; the disk is idle before (`sync`) and what was written is on it after.
SPLICE_BENCH_DIR chooses the disk (the temporary folder's).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Case

RANK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of a model with experts."""

    layers: int
    experts: int
    hidden: int
    inner: int
    rank: int = RANK


SIZES = {
    "tiny": Size(layers=2, experts=8, hidden=64, inner=32),
    "many-experts": Size(layers=48, experts=128, hidden=64, inner=32),
    "large-experts": Size(layers=6, experts=128, hidden=256, inner=128, rank=256),
}


def run(*, device: str, small: bool) -> list[Case]:
    """One process, one rank."""
    samples = int(os.environ.get("SPLICE_BENCH_SAMPLES", "2" if small else "5"))
    names = (
        ["tiny"]
        if small
        else ["30b-a3b"]
        if device == "cuda"
        else ["many-experts", "large-experts"]
    )
    cases = []
    for name in names:
        with tempfile.TemporaryDirectory(dir=os.environ.get("SPLICE_BENCH_DIR")) as folder:
            cases += _cases(name, Path(folder), device=device, samples=samples)
    return cases


def _cases(name: str, folder: Path, *, device: str, samples: int) -> list[Case]:
    from trainer_node.state import checkpoint

    trainer = _trainer(name, folder / "model", device)
    tensors = [
        t
        for p, found in trainer.optimizer.tensors()
        for t in (p.param.detach(), *list(found.values())[1:])
    ]
    nbytes = 4 * sum(t.numel() for t in tensors)
    matrices = sum(m.tensor.numel() > 0 for m in trainer.model.adapters.local_matrices())
    whole = _times(samples, folder, lambda out: checkpoint.save(trainer, out, version=1))
    adapter = _times(samples, folder, lambda out: checkpoint.save_adapter(trainer.model, out))
    peer = _times(samples, folder, lambda out: _plain(tensors, out))
    trainer.model.close()
    settings = {"bytes": nbytes, "matrices": matrices, "disk": str(folder.parent)}
    label = "torch.save of the same tensors, fsync"

    def rates(seconds: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(nbytes / s for s in seconds)

    return [
        Case(
            name=f"save/{name}/checkpoint",
            metric="save_s",
            unit="s",
            samples=whole,
            peer=label,
            peer_samples=peer,
            settings=settings,
        ),
        Case(
            name=f"save/{name}/checkpoint",
            metric="bytes_per_s",
            unit="B/s",
            samples=rates(whole),
            peer=label,
            peer_samples=rates(peer),
        ),
        Case(name=f"save/{name}/adapter", metric="save_s", unit="s", samples=adapter),
    ]


def _times(samples: int, folder: Path, save: Callable[[Path], object]) -> tuple[float, ...]:
    """Seconds of each, after one that is not counted."""
    found = []
    for number in range(samples + 1):
        os.sync()
        started = time.perf_counter()
        save(folder / "saved")
        if number:
            found.append(time.perf_counter() - started)
        shutil.rmtree(folder / "saved")
    return tuple(found)


def _plain(tensors: list[torch.Tensor], folder: Path) -> None:
    folder.mkdir()
    with (folder / "all.pt").open("wb") as file:
        torch.save([t.cpu() for t in tensors], file)
        file.flush()
        os.fsync(file.fileno())


def _trainer(name: str, folder: Path, device: str) -> Any:
    """With moments, as after a first step."""
    from benchmarks.clusters import make_model
    from orchestrator.protocol.config import LoraConfig, TrainerConfig
    from orchestrator.protocol.messages import OptimParams
    from trainer_node.start import start
    from trainer_node.tools import make_checkpoint

    rank = SIZES[name].rank if name in SIZES else RANK
    if name in SIZES:
        size = SIZES[name]
        shape = replace(
            make_checkpoint.TINY_SHAPES["qwen3_moe"],
            layers=size.layers,
            num_experts=size.experts,
            hidden=size.hidden,
            moe_intermediate=size.inner,
        )
        folder.mkdir()
        config = make_checkpoint.hf_config(shape, dtype="float32", end_id=0, pad_id=1)
        (folder / "config.json").write_text(json.dumps(config))
    else:
        make_model(name, folder)
    trainer = start(
        TrainerConfig(
            model=folder,
            init="random",
            device=device,
            dtype="bfloat16" if device == "cuda" else "float32",  # type: ignore[arg-type]
            lora=LoraConfig(rank=rank, alpha=2.0 * rank),
        )
    )
    for p in trainer.model.params:
        p.grad.normal_()
    trainer.optimizer.step(OptimParams(lr=1e-3), factor=None)
    trainer.drop_pending()
    return trainer
