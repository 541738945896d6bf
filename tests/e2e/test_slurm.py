"""`splice train --on slurm` on a real Slurm of two and of eight nodes: submitted, cancelled in the
middle, and continued by the same command. Of the eight, the trainer's and the first replica's have
real roles; the other six run stand-ins of replicas."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e import slurm
from tests.e2e.commands import processes_of, splice
from tests.e2e.stand_in_replica import wrapper

pytestmark = [
    pytest.mark.timeout(2400),
    pytest.mark.skipif(slurm.MISSING is not None, reason=f"{slurm.MISSING} is not installed"),
]
JOB_S = 900.0
TRAINING = """
[data]
path = "rows.jsonl"
prompt = "{question} ="
[loop]
reward = "rewards.py:short"
steps = 4
group_size = 4
groups_per_step = 2
[sampling]
max_tokens = 8
[optim]
lr = 1e-3
"""
REWARD = "def short(row, completion): return len(completion.text) % 7 / 7"


def ask(environment: Mapping[str, str], *command: str) -> str:
    done = subprocess.run(
        command, env=dict(environment), capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def wait(environment: Mapping[str, str], log: Path, said: str) -> None:
    """Until the log says so or no job is left."""
    until_s = time.monotonic() + JOB_S
    while time.monotonic() < until_s:
        if log.exists() and said in log.read_text():
            return
        if not ask(environment, "squeue", "--noheader"):
            break
        time.sleep(1.0)
    assert said in log.read_text(), log.read_text()


@pytest.mark.parametrize("nodes", [2, 8])
def test_a_job_continues_after_it_was_cancelled(nodes, models, tmp_path, monkeypatch) -> None:
    folder = tmp_path / "mine"
    options = ["--name", "tiny", "--gpus", "", "--inference-python", wrapper(tmp_path / "python")]
    splice("init", folder, "--model", models["qwen3"], *options)
    file, replicas = folder / "run.toml", nodes - 1
    text = file.read_text().replace("replicas = 1", f"replicas = {replicas}")
    file.write_text(text + TRAINING)
    rows = [{"question": f"{i} + 1"} for i in range(6)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "rewards.py").write_text(REWARD)
    log = folder / "run" / "logs" / "loop.log"
    with slurm.cluster(tmp_path / "slurm", nodes=nodes) as environment:
        monkeypatch.setenv("SLURM_CONF", environment["SLURM_CONF"])
        assert "Submitted batch job 1" in splice("train", file, "--on", "slurm")
        wait(environment, log, "step 2 of 4")
        steps = ask(environment, "squeue", "--steps", "--noheader", "--format=%j %N").splitlines()
        places = dict(line.split() for line in steps)
        assert places["trainer"] == places["loop"] == "n1"
        assert [places[f"inference-{k}"] for k in range(replicas)] == [
            f"n{k + 2}" for k in range(replicas)
        ]
        ask(environment, "scancel", "1")
        wait(environment, log, "CANCELLED")
        while ask(environment, "squeue", "--noheader"):
            time.sleep(0.5)
        assert "Submitted batch job 2" in splice("train", file, "--on", "slurm")
        wait(environment, log, "4 steps are made: tiny@4")
        while ask(environment, "squeue", "--noheader"):
            time.sleep(0.5)
        assert "JobState=COMPLETED" in ask(environment, "scontrol", "show", "job", "2")
    lines = log.read_text()
    assert lines.count("step 1 of 4") == 1 and lines.count("step 4 of 4") == 1
    for k in range(1, replicas):
        said = (folder / "run" / "logs" / f"inference-{k}.log").read_text()
        assert said.count("serves 4") == 1, "each received and digested every version"
    assert processes_of(folder) == []
