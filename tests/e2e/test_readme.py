"""The README's example runs as printed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import psutil
import pytest

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
    out, log, family = tmp_path / "out", tmp_path / "log", set()
    with out.open("w") as output, log.open("w") as errors:
        argv, env = ["bash", "-ec", f"{start}wait"], {**os.environ, "PYTHONPATH": str(ROOT)}
        shell = psutil.Popen(argv, stdout=output, stderr=errors, cwd=ROOT, env=env)
    try:
        deadline_s = time.monotonic() + RUN_S
        while shell.poll() is None and time.monotonic() < deadline_s:
            family |= set(shell.children(recursive=True))
            time.sleep(0.2)
        _, alive = psutil.wait_procs(family, timeout=20)
        assert shell.poll() == 0, log.read_text()[-4000:]
        assert len(family) > 4
        assert not alive
    finally:
        for process in (shell, *family):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    lines = out.read_text().splitlines()
    assert lines[0] == "tiny@0 is served"
    assert lines[-1].endswith("now serving tiny@4")
    rewards = [float(line.split()[2].rstrip(",")) for line in lines[1:]]
    assert len(rewards) == 4
    assert rewards[-1] > rewards[0] + 0.05
