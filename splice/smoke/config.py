"""Configuration of `splice smoke`, checked before any process starts."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import ParallelConfig
from splice.client.run_file import RunFile, build, read, set_value
from splice.cluster.machine import inference_python, with_local_models
from splice.cluster.preflight import check_model, share_a_gpu
from splice.cluster.up import check as check_run

RUNS = Path("runs/smoke")
"""Each run gets a new folder in it."""
SMALL = {"max_model_len": 512, "max_num_seqs": 64, "enforce_eager": True}
"""For vLLM, without a file that says otherwise."""
TAU = 1e-4
"""Largest allowed difference, in nats, between a log-prob served in fp32 and the reference's.

It is six standard deviations of fp32 rounding in a decoder with three layers, hidden size 64 and
logits of 10 (`tests/numerics.py`). The tiny models measure 2e-6 to 8e-6. Larger models are served
and judged in bf16.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeConfig:
    """One smoke run."""

    run: RunFile
    steps: int = 2
    lr: float = 5e-3
    report: Path | None = None
    proof: bool = True
    num_prompts: int = 8
    group_size: int = 8
    max_tokens: int = 3
    trainer_module: str = "trainer_node"


def smoke_run(
    file: Path | None,
    overrides: Sequence[str],
    *,
    model: Path | None = None,
    tiny: Callable[[], Path],
    proof: bool = True,
) -> RunFile:
    """Return what to run: the file's settings or the smallest ones, in a new folder.

    Args:
        model: instead of the file's.
        tiny: makes a model where none is named.

    Raises:
        ConfigError: as `splice.client.run_file.load`.
    """
    values: dict[str, Any] = {"name": "tiny"} if file is None else read(file)
    values.pop("run_dir", None)
    if model is not None:
        values["model"] = str(model)
        for role in ("trainer", "inference"):
            if isinstance(values.get(role), dict):
                values[role].pop("model", None)
    for override in overrides:
        set_value(values, override)
    values.setdefault(
        "run_dir", str(RUNS.absolute() / time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}"))
    )
    trainer, inference = values.setdefault("trainer", {}), values.setdefault("inference", {})
    if "model" not in values:
        values["model"] = str(tiny().absolute())
    if isinstance(orchestrator := values.setdefault("orchestrator", {}), dict):
        orchestrator["keep_versions"] = 0  # the proof reads each version's adapter
    if isinstance(trainer, dict) and isinstance(inference, dict):
        trainer.setdefault("python", sys.executable)
        inference.setdefault("python", os.path.abspath(inference_python()))
        trainer.setdefault("admission", "skip" if proof else "check")  # the proof compares more
        inference.setdefault("load_format", "dummy")  # @0 brings every weight
        for key, value in () if file is not None else SMALL.items():
            inference.setdefault(key, value)
        if values.get("device") == "cuda":
            _choose_gpus(trainer, inference)
    return with_local_models(build(values, source=file or Path("smoke")))


def _choose_gpus(trainer: dict[str, Any], inference: dict[str, Any]) -> None:
    """Fill `gpus`: the first ones for the trainer, the next ones for vLLM. Both may share one."""
    try:
        ranks = ParallelConfig.model_validate(trainer.get("parallel", {})).world_size
        trainer.setdefault("gpus", list(range(ranks)))
        workers = inference.get("tensor_parallel", 1) * inference.get("replicas", 1)
        first = len(trainer["gpus"])
        inference.setdefault("gpus", list(range(first, first + workers)))
        is_shared = share_a_gpu(trainer["gpus"], [inference["gpus"]])
    except (ValidationError, TypeError):
        return  # `build` says what is wrong
    if is_shared:
        trainer["transport"] = inference["transport"] = "tcp"
        inference.setdefault("gpu_memory_utilization", 0.4)


def check(config: SmokeConfig) -> dict[str, Any]:
    """Check the input; returns the model's config. Starts nothing.

    Raises:
        ConfigError: names the mistake and its remedy.
    """
    run = config.run
    if config.proof and run.trainer.init == "random":
        raise ConfigError(
            'the reference needs a checkpoint\'s weights; with trainer.init = "random" pass '
            "--no-proof"
        )
    check_run(run)
    if run.device == "cpu" and run.trainer.dtype != "float32":
        raise ConfigError(
            'on a CPU smoke compares float32 with float32: set dtype = "float32". `splice up` '
            "takes bfloat16 there"
        )
    gpus, ranks = run.trainer.gpus, run.trainer.parallel.world_size
    if run.device == "cuda" and len(gpus) != ranks:
        raise ConfigError(f"{ranks} trainer ranks need as many GPUs, got trainer.gpus = {gpus}")
    return check_model(run.trainer.model, needs_weights=run.trainer.init == "hf")
