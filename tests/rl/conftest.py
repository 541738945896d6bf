"""A tiny model on a real orchestrator, trainer and vLLM on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.protocol.messages import InitialSync
from splice.client.run_file import RunFile
from splice.cluster import Cluster
from tests.e2e.conftest import (
    INFERENCE_PYTHON,
    ROOT,
    TRAINER_PYTHON,
    _has_both_environments,
    models,
)

__all__ = ["_has_both_environments", "models"]
NAME = "tiny"
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The tiny checkpoint has no chat template."""
TOOL_PARSER = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


@contextmanager
def tiny_cluster(
    model: Path,
    run_dir: Path,
    *,
    trainer: dict[str, Any] | None = None,
    module: str = "trainer_node",
    **tables: Any,
) -> Iterator[Cluster]:
    """A cluster that serves tiny@0.

    Args:
        trainer: instead of a small adapter.
        tables: more tables of the run.
    """
    inference = {
        "python": INFERENCE_PYTHON,
        "max_model_len": 512,
        "cpu_kv_cache_gb": 0.1,
        "extra_args": ("--chat-template", CHAT, *TOOL_PARSER),
        **tables.pop("inference", {}),
    }
    run = RunFile(
        name=NAME,
        model=model,
        run_dir=run_dir,
        trainer={
            "python": TRAINER_PYTHON,
            "admission": "skip",
            "lora": {"rank": 4, "alpha": 8},
            **(trainer or {}),
        },
        inference=inference,
        **tables,
    )
    with Cluster(run, trainer_module=module) as cluster:
        cluster.client.run(InitialSync(), timeout_s=120)
        yield cluster


@pytest.fixture(scope="session")
def cluster(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One for all; its disk is slow enough for `test_announced.py`."""
    run_dir = tmp_path_factory.mktemp("rl") / "run"
    with tiny_cluster(models["qwen3"], run_dir, module="tests.rl.slow_disk") as running:
        yield running


def user_python(folder: Path, needs: tuple[str, ...], *, variable: str) -> Path:
    """A user's environment with the project's needs and these; the variable names one that
    exists."""
    given = os.environ.get(variable)
    if given:
        return Path(given)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    # By name, not with the project: pip writes nothing into the source tree.
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    install = [folder / "bin/pip", "install", "--quiet", *needs, *own]
    subprocess.run(install, check=True, timeout=900)
    return folder / "bin/python"


def in_example(python: Path, example: str, *argv: object) -> str:
    """What an example's train.py says."""
    done = subprocess.run(
        list(map(str, [python, "train.py", *argv])),
        cwd=ROOT / "examples" / example,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
