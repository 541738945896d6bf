"""A run that publishes changed elements."""

from __future__ import annotations

from pathlib import Path

from splice.client.run_file import RunFile
from tests.e2e.tiny_run import tiny_run


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
    return tiny_run(
        folder,
        model,
        dtype="bfloat16",
        # Elements come next to the live tensors, if they fit.
        publication={"send": "elements", "shadow_bytes": 2**30 if mode == "shadow" else 1},
        trainer={"parallel": parallel or {}, **trainer},
        inference={"tensor_parallel": workers, "replicas": replicas, "extra_args": vllm},
    )
