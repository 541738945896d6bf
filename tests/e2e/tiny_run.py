"""The run file of a tiny model on the CPU, in both environments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from splice.client.run_file import RunFile
from tests.e2e.conftest import INFERENCE_PYTHON, TRAINER_PYTHON

_NONE: Mapping[str, Any] = MappingProxyType({})


def tiny_run(
    folder: Path,
    model: Path,
    *,
    trainer: Mapping[str, Any] = _NONE,
    inference: Mapping[str, Any] = _NONE,
    **more: Any,
) -> RunFile:
    """`more`: other tables and keys."""
    return RunFile(
        name="tiny",
        model=model,
        run_dir=folder / "run",
        trainer={"python": TRAINER_PYTHON, **trainer},
        inference={
            "python": INFERENCE_PYTHON,
            "max_model_len": 256,
            "cpu_kv_cache_gb": 0.1,
            **inference,
        },
        **more,
    )
