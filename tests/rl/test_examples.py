"""The examples, a few steps each with a tiny model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

from splice.rl import decisions
from splice.rl.checker import check
from tests.e2e.commands import splice
from tests.e2e.conftest import INFERENCE_PYTHON, ROOT
from tests.hub_cache import make_cache
from tests.rl.conftest import CHAT, tiny_cluster

pytestmark = pytest.mark.timeout(900)


def example(name: str) -> dict:
    return runpy.run_path(str(ROOT / "examples" / name / "train.py"))


def run(train: dict, *argv: object) -> None:
    asyncio.run(train["main"](train["arguments_of"](list(map(str, argv)))))


@pytest.fixture
def loop_dir(monkeypatch, tmp_path) -> str:
    """A separate folder for a loop: the cluster serves several tests."""
    name = f"loop-{tmp_path.name}"
    monkeypatch.setattr(decisions, "LOOP_DIR", name)
    return name


def found_in(run_dir, loop_dir):
    found = check(decisions.read(run_dir / loop_dir / decisions.LOG))
    assert found.violations == []
    return found


# ---------------------------------------------------------------- a tool


def test_the_calculator_learns_in_two_turns(cluster, loop_dir, capfd):
    train, run_dir = example("calculator"), cluster.run.run_dir
    run(train, run_dir, "--steps", 2, "--groups", 2, "--group-size", 2, "--held-out", 2)
    found = found_in(run_dir, loop_dir)
    assert (found.steps, found.trained, found.turns_left_out) == (2, 8, 0)
    assert "step 2: reward" in capfd.readouterr().out


def test_the_calculator():
    calculate = example("calculator")["calculate"]
    assert calculate(" 12 + 30 - 2 ") == "40" and calculate("-(3*4)") == "-12"
    for wrong in ("1 +", "__import__('os')", "2 ** 9", "'a' * 9", "x", "1.5", "(" * 500):
        assert calculate(wrong) == "error"


# ---------------------------------------------------------------- SFT, then RL


def test_rl_starts_from_what_sft_published(models, tmp_path, capfd):
    with tiny_cluster(models["qwen3"], tmp_path / "run") as cluster:
        options = ["--solved", 16, "--mini-batch", 8, "--epochs", 3, "--sft-lr", "5e-3"]
        options += ["--groups", 2, "--group-size", 2, "--held-out", 2, "--steps", 2]
        run(example("sft_then_rl"), cluster.run.run_dir, *options)
        assert cluster.client.status().version == 3
    said = capfd.readouterr().out
    assert "serving tiny@1" in said and "step 2: reward" in said
    (start, *_) = decisions.read(tmp_path / "run" / "loop" / decisions.LOG)
    assert start["version"] == 1, "RL begins at SFT's version"
    found_in(tmp_path / "run", "loop")


# ---------------------------------------------------------------- a loss of one's own


def test_a_loss_of_ones_own(models, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'examples/own_loss'}")
    own = {"loss_modules": ("my_losses",)}
    with tiny_cluster(models["qwen3"], tmp_path / "run", trainer=own) as cluster:
        run(example("own_loss"), cluster.run.run_dir, "--steps", 2)
    assert "step 2: loss" in capfd.readouterr().out
    assert found_in(tmp_path / "run", "loop").steps == 2


# ---------------------------------------------------------------- GSM8K


@pytest.fixture
def hub(models, tmp_path, monkeypatch) -> None:
    """A stand-in for the download: a tiny model as the hub's cache would have it."""
    make_cache(models["qwen3"], tmp_path / "hub", repo="models--Qwen--Qwen3-8B")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_gsm8k_whole_but_for_the_download(hub, tmp_path):
    problems, file = tmp_path / "problems.jsonl", tmp_path / "mine" / "run.toml"
    options = ["--gpus", "", "--inference-python", INFERENCE_PYTHON]
    splice("init", file.parent, "--recipe", "gsm8k-8b", *options)
    problems.write_text('{"question": "Two and two?", "answer": "2 + 2 = 4\\\\n#### 4"}\n' * 4)
    smaller = ["inference.cpu_kv_cache_gb=0.1", f"run_dir={tmp_path / 'run'}"]
    smaller += ["trainer.admission=skip", f'inference.extra_args=["--chat-template", "{CHAT}"]']
    smaller += [f"data.path={problems}", f"eval.path={problems}", "eval.rows=1"]
    smaller += ["loop.steps=2", "loop.groups_per_step=2", "loop.group_size=2"]
    smaller += ["sampling.max_tokens=8"]
    options = [part for value in smaller for part in ("--set", value)]
    assert splice("config", "check", file, *options).endswith("\nok\n")
    said = splice("train", file, *options)
    assert "evaluation after step 2: eval_reward 0.000" in said and "policy@2" in said
    assert found_in(tmp_path / "run", "loop").steps == 2


def test_gsm8ks_numbers():
    number = runpy.run_path(str(ROOT / "splice/recipes/gsm8k.py"))["final_number"]
    assert number("so 1,200 eggs\n#### 1,200") == 1200.0 and number("#### -3.5") == -3.5
    assert number("the answer is 7") is None and number("#### 1 ... #### 2") == 2.0


# ---------------------------------------------------------------- the notebook


def run_cells(path: Path, **parameters: object) -> dict[str, Any]:
    """Run a notebook's code as IPython does: `!command` with {names} filled in. The parameters
    replace those of the cell with that tag."""

    def shell(command: str) -> None:
        subprocess.run(command, shell=True, check=True, timeout=600)

    space: dict[str, Any] = {"shell": shell}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            source = re.sub(r"^!(.*)$", r"shell(rf'''\1''')", "".join(cell["source"]), flags=re.M)
            exec(compile(source, str(path), "exec"), space)
        if "parameters" in cell["metadata"].get("tags", ()):
            space |= parameters
    return space


def test_the_notebook(models, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PATH", os.environ["PATH"])  # it puts its own before it
    folder = tmp_path / "run"
    notebook = ROOT / "examples" / "arithmetic" / "arithmetic.ipynb"
    monkeypatch.chdir(ROOT)
    try:
        run_cells(notebook, FOLDER=folder, MODEL=models["qwen3"], STEPS=2, HELD_OUT=2)
    finally:
        splice("stop", folder)
    said = capfd.readouterr().out
    assert "step   2 0." in said and "after step 2: {'eval_reward'" in said
    assert "adapter_model.safetensors" in said
