"""`splice sft`: given answers, through a kill, as a user types it."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from transformers import AutoTokenizer

from splice.rl import decisions
from splice.rl.checker import check
from tests.e2e.commands import processes_of, splice, splice_killed_at
from tests.e2e.conftest import INFERENCE_PYTHON

pytestmark = pytest.mark.timeout(1800)
TRAINING = """
[data]
path = "rows.jsonl"
[loop]
steps = 4
groups_per_step = 2
reward = "rewards.py:has_answer"
[optim]
lr = 1e-2
[eval]
path = "rows.jsonl"
rows = 1
every = 4
max_tokens = 4
"""


def test_given_answers_are_learnt(models, tmp_path):
    folder = tmp_path / "mine"
    options = ["--model", models["qwen3"], "--name", "tiny", "--gpus", ""]
    splice("init", folder, *options, "--inference-python", INFERENCE_PYTHON)
    file = folder / "run.toml"
    file.write_text(file.read_text() + TRAINING)
    rows = [{"prompt": "one two", "completion": " three four five"}] * 2
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "rewards.py").write_text("def has_answer(row, completion): return 0.5")

    try:
        lines = splice_killed_at("step 2 of 4", "sft", file)
        said = "".join(lines) + splice("sft", file)
    finally:
        splice("stop", folder)
    assert processes_of(folder) == []
    losses = [float(loss) for loss in re.findall(r"step \d of 4: loss ([\d.]+)", said)]
    assert len(losses) == 4 and losses == sorted(losses, reverse=True) and losses[3] < losses[0]
    assert "evaluation after step 4: eval_reward 0.500" in said
    assert "4 steps are made: tiny@4" in said
    loop_dir = folder / "run" / decisions.LOOP_DIR
    assert check(decisions.read(loop_dir / decisions.LOG)).violations == []

    batch = decisions.kept_batch(loop_dir / decisions.BATCH)
    sent = {spec.name: buffer for spec, buffer in zip(batch.specs, batch.buffers, strict=True)}
    tokenizer = AutoTokenizer.from_pretrained(models["qwen3"])
    whole, before = tokenizer.encode("one two three four five"), tokenizer.encode("one two")
    assert np.frombuffer(sent["tokens"], "<i4").tolist() == whole * 2
    mask = [0.0] * len(before) + [1.0] * (len(whole) - len(before))
    assert np.frombuffer(sent["loss_mask"], "<f4").tolist() == mask * 2
