"""Real processes killed under a loop: a replica, and everything."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest

from splice import OptimParams, SpliceClient
from splice.rl import Loop, LoopConfig, SamplingConfig, decisions
from splice.rl.checker import check
from tests.e2e.commands import kill_all, splice
from tests.e2e.conftest import INFERENCE_PYTHON, ROOT
from tests.e2e.servers import server_of
from tests.rl.conftest import tiny_cluster
from tests.rl.strict_run import ROWS, even
from tests.rl.weights import digest

pytestmark = pytest.mark.timeout(2400)
STEPS = 6
KILLS = [(1, 0.85), (3, 0.15)]
"""After which step, and how many seconds later: in the next step's training or publication, and in
its rollouts."""
SKIP = ("--set", "trainer.admission=skip")


def test_a_killed_servers_rollouts_are_asked_again(models, tmp_path):
    async def run(cluster) -> list:
        config = LoopConfig(
            group_size=4,
            groups_per_step=4,
            steps=6,
            sampling=SamplingConfig(max_tokens=150, extra={"ignore_eos": True}),
        )
        steps = []
        options = {"prompts": ROWS, "reward": even, "config": config}
        async with Loop(
            cluster.client, tmp_path / "loop", optim=OptimParams(lr=1e-3), **options
        ) as loop:
            async for step in loop:
                steps.append(step)
                if step.number == 2:
                    server_of(cluster, "inference-1").kill()
        return steps

    with tiny_cluster(models["qwen3"], tmp_path / "run", inference={"replicas": 2}) as cluster:
        steps = asyncio.run(run(cluster))
    found = check(decisions.read(tmp_path / "loop" / decisions.LOG))
    assert found.violations == [] and found.asked_again > 0
    assert [step.number for step in steps] == [1, 2, 3, 4, 5, 6]
    assert all(len(group) == 4 for step in steps for group in step.groups)


def start_loop(run_dir, folder) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.rl.strict_run", str(run_dir), str(folder), str(STEPS)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


def kill_everything(folder, loop: subprocess.Popen) -> None:
    loop.kill()
    loop.wait(10)
    kill_all(folder)


def test_everything_is_killed_and_the_loop_goes_on(models, tmp_path):
    """The weights are those of a loop from the same state that nobody killed."""
    folder, run_dir = tmp_path / "mine", tmp_path / "mine" / "run"
    options = ["--model", models["qwen3"], "--name", "tiny", "--gpus", ""]
    splice("init", folder, *options, "--inference-python", INFERENCE_PYTHON)
    splice("up", folder, *SKIP)
    try:
        with SpliceClient.of_run(run_dir) as client:
            client.save_checkpoint("start")
        for step, delay_s in KILLS:
            loop = start_loop(run_dir, tmp_path / "killed")
            assert loop.stdout is not None
            while (line := loop.stdout.readline()) and int(line.split()[1]) < step:
                pass
            assert line, loop.wait(10)
            time.sleep(delay_s)
            kill_everything(folder, loop)
            splice("up", folder, "--resume", *SKIP)
        assert start_loop(run_dir, tmp_path / "killed").wait(300) == 0
        with SpliceClient.of_run(run_dir) as client:
            assert client.status().version == STEPS
            client.export_hf("killed")
            client.load_checkpoint("start")
            client.publish()
            assert start_loop(run_dir, tmp_path / "whole").wait(300) == 0
            client.export_hf("whole")
    finally:
        splice("stop", folder)
    assert digest(run_dir / "killed") == digest(run_dir / "whole")
    for name in ("killed", "whole"):
        found = check(decisions.read(tmp_path / name / decisions.LOG))
        assert found.violations == [] and (found.steps, found.trained) == (STEPS, STEPS * 8)
