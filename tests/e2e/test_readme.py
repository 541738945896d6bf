"""The README's example runs as printed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.e2e.commands import processes_of
from tests.e2e.conftest import ROOT
from tests.readme import blocks

pytestmark = pytest.mark.timeout(900)
MODEL = ROOT / "runs/models/tiny-qwen3-moe"
RUN_S = 600.0


def test_the_first_loop(tmp_path):
    """It publishes four versions, the reward rises, and no process is left."""
    if not MODEL.exists():
        argv = [
            sys.executable,
            "-m",
            "trainer_node.tools.make_checkpoint",
            "--arch",
            "qwen3_moe",
            "--out",
            MODEL,
        ]
        subprocess.run(argv, check=True, timeout=120, cwd=ROOT)
    (start,) = blocks("bash")
    start = start.replace("runs/first", str(tmp_path / "first"))
    done = subprocess.run(
        ["bash", "-ec", start],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert processes_of(tmp_path) == []
    lines = [line for line in done.stdout.splitlines() if line.startswith("mean reward")]
    assert [line.split()[-1] for line in lines] == [f"tiny@{version}" for version in (1, 2, 3, 4)]
    rewards = [float(line.split()[2].rstrip(",")) for line in lines]
    assert rewards[-1] > rewards[0] + 0.05
    (greedy,) = [line for line in done.stdout.splitlines() if "saved/4" in line]
    assert float(greedy.split()[1].rstrip(",")) == 1.0, "it says maybe"
    assert (tmp_path / "first" / "run" / "saved" / "4").is_dir()
    watched = done.stdout.partition(greedy)[2]
    assert "serves tiny@4; " in watched and "no job runs" in watched and "tokens/s" in watched
    assert watched.count("host: ") == 2, "memory of the trainer's launcher and of vLLM"
