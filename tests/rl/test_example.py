"""examples/arithmetic, two steps with a tiny model."""

from __future__ import annotations

import asyncio
import json
import runpy
from types import SimpleNamespace

import pytest

from splice.rl import decisions
from splice.rl.checker import check
from tests.e2e.conftest import ROOT

pytestmark = pytest.mark.timeout(900)
FOLDER = ROOT / "examples/arithmetic"


def test_two_steps_and_two_more(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(decisions, "LOOP_DIR", f"loop-{tmp_path.name}")
    train = runpy.run_path(str(FOLDER / "train.py"))
    run_dir, curve = cluster.run.run_dir, tmp_path / "curve.json"
    options = ["--groups", "2", "--group-size", "2", "--held-out", "4", "--out", str(curve)]
    for steps in ("2", "4"):
        argv = [str(run_dir), *options, "--evaluate-every", "2", "--steps", steps]
        asyncio.run(train["main"](train["arguments_of"](argv)))
    found = json.loads(curve.read_text())
    assert [line["step"] for line in found["steps"]] == [1, 2, 3, 4], "it went on"
    assert [line["step"] for line in found["evaluations"]] == [0, 2, 4]
    assert check(decisions.read(run_dir / decisions.LOOP_DIR / decisions.LOG)).violations == []


def test_the_cookbooks_task(cluster, models, tmp_path, monkeypatch):
    monkeypatch.setattr(decisions, "LOOP_DIR", f"loop-{tmp_path.name}")
    script = runpy.run_path(str(FOLDER / "math_rl.py"))
    out = tmp_path / "math_rl.json"
    argv = [str(cluster.run.run_dir), "--steps", "1", "--out", str(out)]
    argv += ["--tokenizer", str(models["qwen3"])]
    asyncio.run(script["main"](script["arguments_of"](argv)))
    assert len(json.loads(out.read_text())["right"]) == 1
    row = {"answer": 93}
    for text, ended, reward in (("93", True, 1.0), ("is 9,3", False, 0.9), ("94", True, 0.0)):
        answer = SimpleNamespace(text=text, finish_reason="stop" if ended else "length")
        assert script["reward"](row, answer) == pytest.approx(reward)


def test_training_and_held_out_problems_differ():
    pytest.importorskip("reasoning_gym")
    training, held_out = runpy.run_path(str(FOLDER / "train.py"))["problems"]()
    assert len(held_out) == 200 and len(training) > 1000
    questions = {row["prompt"].split(": ")[-1] for row in training}
    assert not questions & {row["prompt"].split(": ")[-1] for row in held_out}
