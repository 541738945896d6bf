"""Tiny HF checkpoints and a way to run a check on real Megatron under torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.trainer_node import tiny

REPO = Path(__file__).resolve().parents[2]


def child_env() -> dict[str, str]:
    """Environment of the processes that tests start."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name -> checkpoint folder: dense_tied, dense_untied, moe."""
    torch.set_num_threads(1)
    return tiny.make_all(tmp_path_factory.mktemp("models"))


@pytest.fixture
def torchrun():
    """Run `python -m tests.trainer_node.<module> args` on n ranks; fails with the ranks' output."""

    def run(num_ranks: int, module: str, *args: object, timeout_s: float = 120.0) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        command += ["-m", f"tests.trainer_node.{module}", *map(str, args)]
        process = subprocess.Popen(
            command,
            cwd=REPO,
            env=child_env(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            pytest.fail(f"no end within {timeout_s} s:\n{output[-6000:]}")
        assert process.returncode == 0, output[-6000:]

    return run
