"""`splice check --bits`: runs vLLM, then Megatron, on the same tokens, and compares each operation.

Neither is part of this process. `weight_transfer.exact.bits` has the operations.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.processes.python import python_command, python_environment
from orchestrator.protocol.hub import is_hub_id
from splice.client import run_file
from splice.cluster.machine import local_model, with_local_models

TIMEOUT_S = 3600.0
"""Longest run of either side. Exact kernels take minutes for a hundred million parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """What to compare, and the two interpreters."""

    model: Path
    device: str
    dtype: str
    is_exact: bool
    trainer_python: Path
    inference_python: Path

    @staticmethod
    def of(
        model: str, *, is_exact: bool, device: str | None, dtype: str | None, **pythons: Path
    ) -> Sides:
        """Of a checkpoint or a Hub id, or of a run.toml or a run's folder, which have all of it.

        Raises:
            ConfigError: neither is there, or a Hub id cannot be downloaded.
        """
        path = Path(model)
        folder_files = (path / run_file.FILE_NAME, path / run_file.RUN_JSON)
        file = next((f for f in folder_files if f.is_file()), path)
        if file.suffix in (".toml", ".json"):
            run = with_local_models(run_file.load(file))
            return Sides(
                model=run.trainer.model,
                device=device or run.trainer.device,
                dtype=dtype or run.trainer.dtype,
                is_exact=is_exact or run.trainer.numerics == "exact",
                trainer_python=run.trainer.python,
                inference_python=run.inference.python,
            )
        if is_hub_id(path):
            path = local_model(path, python=pythons["trainer_python"])
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"{model} has neither a config.json nor a run.toml; name a checkpoint's folder, or "
                "a run's"
            )
        device = device or "cpu"
        dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
        return Sides(model=path, device=device, dtype=dtype, is_exact=is_exact, **pythons)


def compare(sides: Sides, report: Path | None) -> int:
    """Print the table. Returns 0 if every log-prob is equal, 1 if not, 2 if a side fails.

    Raises:
        ConfigError: an interpreter is missing, or a side takes too long.
    """
    shared = ["--model", str(sides.model), "--device", sides.device, "--dtype", sides.dtype]
    shared += ["--exact"] * sides.is_exact
    with tempfile.TemporaryDirectory(prefix="splice-bits-") as folder:
        file = str(Path(folder) / "sampler.safetensors")
        code = _run(sides.inference_python, "inference_node.bits", *shared, "--out", file)
        if code:
            return 2
        more = [] if report is None else ["--out", str(report)]
        module = "trainer_node.tools.bits"
        return _run(sides.trainer_python, module, *shared, "--sampler", file, *more)


def _run(python: Path, module: str, *args: Any) -> int:
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if "cpu" in args else {}
    env = python_environment({**os.environ, **hidden})
    try:
        argv = python_command(python, "-m", module, *args)
        return subprocess.run(argv, env=env, check=False, timeout=TIMEOUT_S).returncode
    except OSError as error:
        raise ConfigError(f"cannot run {python}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        text = f"{module} took longer than {TIMEOUT_S:.0f} s; check a smaller model of the kind"
        raise ConfigError(text) from error
