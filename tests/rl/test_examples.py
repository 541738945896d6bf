"""The examples, a few steps each with a tiny model."""

from __future__ import annotations

import asyncio
import runpy

import pytest

from splice.client.run_file import load
from splice.rl import decisions
from splice.rl.checker import check
from tests.e2e.conftest import ROOT
from tests.rl.conftest import tiny_cluster

pytestmark = pytest.mark.timeout(900)


def example(name: str) -> dict:
    return runpy.run_path(str(ROOT / "examples" / name / "train.py"))


def run(train: dict, *argv: object) -> None:
    asyncio.run(train["main"](train["arguments_of"](list(map(str, argv)))))


@pytest.fixture
def loop_dir(monkeypatch, tmp_path) -> str:
    """A loop's folder of its own: the cluster serves several tests."""
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


def test_gsm8k_up_to_the_download(cluster, loop_dir, tmp_path, capfd):
    problems = tmp_path / "problems.jsonl"
    problems.write_text(
        '{"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\\\\n#### 4"}\n' * 4
    )
    run_dir, small = cluster.run.run_dir, ["--groups", 2, "--group-size", 2, "--steps", 2]
    files = ["--train", problems, "--test", problems, "--held-out", 1, "--max-tokens", 8]
    run(example("gsm8k"), run_dir, *small, *files, "--evaluate-every", 2)
    assert found_in(run_dir, loop_dir).steps == 2
    assert "held out: 0.000" in capfd.readouterr().out


def test_gsm8ks_numbers_and_configuration():
    train = example("gsm8k")
    number = train["final_number"]
    assert number("so 1,200 eggs\n#### 1,200") == 1200.0 and number("#### -3.5") == -3.5
    assert number("the answer is 7") is None and number("#### 1 ... #### 2") == 2.0
    loaded = load(ROOT / "examples/gsm8k/run.toml")
    assert loaded.name == "qwen3-8b" and loaded.device == "cuda"
