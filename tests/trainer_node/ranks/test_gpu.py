"""torch's allocator as a trainer on GPUs sets it. Its settings can be read without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.protocol.config import TrainerConfig

SETTINGS = "print(torch._C._accelerator_getAllocatorSettings(), torch.cuda.is_initialized())"
DIRECT = f"""
import torch
from trainer_node.ranks import gpu
gpu.use_expandable_segments()
{SETTINGS}
"""
PROCESS = f"""
import sys, torch
from trainer_node import node
def run(**_):
    {SETTINGS}
    return 0
node.run = run
sys.exit(node.main(["--endpoint", "tcp://127.0.0.1:1", "--config", sys.argv[1]]))
"""
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def settings(script: str, *arguments: str, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
    ],
)
def test_segments_grow_unless_the_user_says_otherwise(
    environment: dict[str, str], found: str
) -> None:
    assert settings(DIRECT, **environment) == f"{found} False"


@pytest.mark.parametrize(("device", "found"), [("cuda", "expandable_segments:True"), ("cpu", "")])
def test_a_rank_sets_it_before_cuda(device: str, found: str, tmp_path: Path) -> None:
    config = tmp_path / "trainer.json"
    made = TrainerConfig.model_validate({"model": "m", "device": device, "dtype": "bfloat16"})
    config.write_text(made.model_dump_json())
    assert settings(PROCESS, str(config)) == f"{found} False".strip()
