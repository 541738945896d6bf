"""`splice train`: from one file to an adapter, through a kill, as a user types it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from orchestrator.processes.python import python_command
from splice.dashboard import Dashboard
from splice.report import read
from splice.rl import decisions, evaluations
from tests.e2e.commands import processes_of, splice, splice_killed_at
from tests.e2e.conftest import INFERENCE_PYTHON, ROOT

pytestmark = pytest.mark.timeout(1800)
SPLICE = shlex.join(python_command(sys.executable, "-m", "splice"))
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
schedule = "cosine"
warmup_steps = 1
[eval]
path = "rows.jsonl"
rows = 2
n = 2
temperature = 1.0
every = 2
pass_at = [1, 2]
pass_reward = 0.5
keep_best = true
"""
REWARD = """
def short(row, completion):
    return len(completion.text) % 7 / 7 + len(row["question"]) / 100
"""


def test_one_command_from_a_file_to_an_adapter(models, tmp_path):
    folder = tmp_path / "mine"
    options = ["--model", models["qwen3"], "--name", "tiny", "--gpus", ""]
    splice("init", folder, *options, "--inference-python", INFERENCE_PYTHON)
    file = folder / "run.toml"
    keeps_all = re.sub(r"keep_versions = \d+", "keep_versions = 0", file.read_text())
    file.write_text(keeps_all + TRAINING)
    rows = [{"question": f"{i} + 1"} for i in range(6)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    assert "there is no file" in splice("train", file, code=2)
    assert "there is no file" in splice("config", "check", file, code=2)
    (folder / "rewards.py").write_text(REWARD)
    assert splice("config", "check", file).endswith("\nok\n")
    assert not (folder / "run").exists(), "nothing has started"

    try:
        lines = splice_killed_at("step 2 of 4", "train", file)
        assert any(line.startswith("evaluation after step 0: eval_reward") for line in lines)
        assert any("eval_best_of_2" in line and "eval_pass_at_2" in line for line in lines)

        said = splice("train", file, "--keep-up")
        assert "is up; it continues" in said
        assert "step 3 of 4" in said and "step 1 of 4" not in said
        assert "evaluation after step 2" in "".join([*lines, said]) and "after step 4" in said
        by_the_run, by_itself = tmp_path / "by_the_run", tmp_path / "by_itself"
        splice("export", file, "--hf", by_the_run)
    finally:
        splice("stop", folder)
    assert processes_of(folder) == []
    adapter = folder / "run" / "versions" / "4" / "adapter"
    *_, steps_made, where, best, _ = said.splitlines()
    assert (steps_made, where) == ("4 steps are made: tiny@4", f"adapter: {adapter}")
    found = evaluations.best_kept(folder / "run")
    assert found is not None and best.startswith(f"best: tiny@{found.version}, eval_reward")
    best_dir = Path(best.rpartition(" ")[2])
    assert (best_dir / "adapter_model.safetensors").is_file()
    assert (best_dir.parent / "meta.json").is_file(), "with the trainer's state"
    assert f"best: version {found.version}" in splice("status", folder)
    assert (adapter / "adapter_model.safetensors").is_file()
    assert "4 steps are made: tiny@4" in splice("train", file), "nothing is left to do"

    assert str(by_itself) in splice("export", folder / "run", "--hf", by_itself, "--version", 4)
    for path in by_the_run.iterdir():
        assert (by_itself / path.name).read_bytes() == path.read_bytes(), path
    splice("export", folder, "--adapter", tmp_path / "best", "--version", "best")
    kept = best_dir / "adapter_model.safetensors"
    assert (tmp_path / "best" / kept.name).read_bytes() == kept.read_bytes()
    assert "choose a new folder" in splice("export", folder, "--hf", by_itself, code=2)
    assert "on disk are" in splice("export", folder, "--hf", "x", "--version", 7, code=2)
    made = splice("replay", folder, "--from", 1, "--to", 4).splitlines()
    assert [line.partition(" (")[0] for line in made] == [
        f"@{version}: equal, bit for bit" for version in (2, 3, 4)
    ]
    assert "is no whole version" in splice("replay", folder, "--from", 1, "--to", 5, code=2)


GAE = """
[data]
path = "rows.jsonl"
prompt = "{question} ="
[loop]
reward = "rewards.py:short"
advantages = "gae"
steps = 2
group_size = 1
groups_per_step = 6
mini_batch_sequences = 3
[sampling]
max_tokens = 8
[loss]
name = "ppo"
[loss.value]
lam = 0.9
"""


def test_a_value_head_from_a_file(models, tmp_path):
    """It trains, the same command continues with it, and the exported model has none."""
    folder = tmp_path / "mine"
    options = ["--model", models["qwen3"], "--name", "tiny", "--gpus", ""]
    splice("init", folder, *options, "--inference-python", INFERENCE_PYTHON)
    file = folder / "run.toml"
    file.write_text(file.read_text() + GAE)
    rows = [{"question": f"{i} + 1"} for i in range(6)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "rewards.py").write_text(REWARD)
    try:
        splice("train", file)
        splice("train", file, "--set", "loop.steps=3")
        splice("export", file, "--hf", tmp_path / "out")
    finally:
        splice("stop", folder)
    lines = map(json.loads, (folder / "run" / "loop" / "decisions.jsonl").read_text().splitlines())
    steps = [line["metrics"] for line in lines if line["event"] == "trained"]
    assert len(steps) == 3 and [m["num_batches"] for m in steps] == [2, 2, 2]
    assert steps[0]["value_mean"] == 0.0 != steps[2]["value_mean"]
    meta = json.loads((folder / "run" / "versions" / "3" / "meta.json").read_text())
    assert meta["value_head"] is True


def test_the_documented_sweep(models, tmp_path):
    """The page's own lines: a run for each rate, one after the other, and a page that compares."""
    folder = tmp_path / "mine"
    options = ["--model", models["qwen3"], "--name", "tiny", "--gpus", ""]
    splice("init", folder, *options, "--inference-python", INFERENCE_PYTHON)
    file = folder / "run.toml"
    training = TRAINING.partition("[eval]")[0].replace("steps = 4", "steps = 1")
    file.write_text(file.read_text() + training.replace('schedule = "cosine"', ""))
    rows = [{"question": f"{i} + 1"} for i in range(6)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "rewards.py").write_text(REWARD)
    page = (ROOT / "docs/train.md").read_text()
    (lines,) = re.findall(r"```\n(for lr in .*?done\n)splice dashboard", page, re.DOTALL)
    script = lines.replace("runs/mine", str(folder)).replace("splice train", SPLICE + " train")
    assert "1e-4 2e-4; do" in script
    script = script.replace("1e-4 2e-4; do", "1e-4; do")
    try:
        subprocess.run(["bash", "-ec", script], check=True, timeout=900)
        subprocess.run(["bash", "-ec", script], check=True, timeout=300)  # nothing is left to do
    finally:
        for run in folder.glob("sweep/*"):
            splice("stop", run)
    assert processes_of(folder) == []
    loops = sorted(folder.glob("sweep/*/loop"))
    rates = [read(loop / decisions.LOG).steps[1]["lr"] for loop in loops]
    assert rates == pytest.approx([1e-4, 5e-5])
    with Dashboard(loops) as board:
        text = httpx.get(board.url, timeout=60, trust_env=False).text
    assert "lr-5e-5 (tiny)" in text and "<h2>Comparison</h2>" in text
