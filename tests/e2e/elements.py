"""A run that publishes changed elements."""

from __future__ import annotations

from pathlib import Path

from splice.client.run_file import RunFile
from tests.e2e.conftest import INFERENCE_PYTHON, TRAINER_PYTHON


def run_file(
    folder: Path,
    model: Path,
    *,
    mode: str,
    parallel: dict[str, int] | None = None,
    workers: int = 1,
    replicas: int = 1,
    vllm: tuple[str, ...] = (),
    **trainer: object,
) -> RunFile:
    return RunFile(
        name="tiny",
        model=model,
        run_dir=folder / "run",
        dtype="bfloat16",
        # Elements come next to the live tensors, if they fit.
        publication={"send": "elements", "shadow_bytes": 2**30 if mode == "shadow" else 1},
        trainer={"python": TRAINER_PYTHON, "parallel": parallel or {}, **trainer},
        inference={
            "python": INFERENCE_PYTHON,
            "tensor_parallel": workers,
            "replicas": replicas,
            "max_model_len": 256,
            "cpu_kv_cache_gb": 0.1,
            "extra_args": vllm,
        },
    )
