"""`splice replay --sample`: a real run's answers, sampled again by a real vLLM, bit for bit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from splice.rl import decisions, samples
from splice.train import resampling
from splice.train.export import run_of
from splice.train.resampling import batch_of
from tests.e2e.commands import ran, splice
from tests.e2e.conftest import INFERENCE_PYTHON

pytestmark = pytest.mark.timeout(1800)
TRAINING = """
[data]
path = "rows.jsonl"
prompt = "{question} ="
[loop]
reward = "rewards.py:mean"
steps = 2
max_staleness = 0
group_size = 3
groups_per_step = 2
[sampling]
max_tokens = 40
seed = 7
extra = { top_k = 60 }
[optim]
lr = 5e-3
"""
REWARD = """
def mean(row, completion):
    return sum(completion.answer_ids) / len(completion.answer_ids)
"""


def test_answers_are_sampled_again(models, tmp_path):
    """Two steps in turns, then two with answers of older versions and another temperature."""
    folder = tmp_path / "mine"
    options = ["--model", models["qwen3"], "--name", "tiny", "--gpus", ""]
    splice("init", folder, *options, "--inference-python", INFERENCE_PYTHON)
    file, loop = folder / "run.toml", folder / "run" / decisions.LOOP_DIR
    text = re.sub(r"keep_versions = \d+", "keep_versions = 0", file.read_text())
    text = text.replace("[trainer]", '[trainer]\nnumerics = "exact"')
    file.write_text(text + TRAINING)
    rows = [{"question": f"{i} + 1" * (1 + 5 * i)} for i in range(6)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "rewards.py").write_text(REWARD)
    later = ("loop.steps=4", "loop.max_staleness=1", "sampling.temperature=0.7")
    try:
        splice("train", file)
        splice("train", file, *(word for setting in later for word in ("--set", setting)))
    finally:
        splice("stop", folder)

    lines = again(folder, 0, 4)
    assert [line.partition(" (")[0] for line in lines[:2]] == [
        f"@{version}: equal, bit for bit; 6 of 6 answers sampled again, all equal"
        for version in (1, 2)
    ]
    for line in lines[2:]:
        said = re.search(r"; (\d) of 6 answers sampled again, all equal(.*) \(", line)
        assert said, line
        left = re.fullmatch(r"; (\d) not repeated: an update came within it", said[2])
        assert int(said[1]) + int(left[1] if left else 0) == 6
    made = {v for t in batch_of(folder / "run" / "versions" / "4") for v in t.versions}
    assert 2 in made or -3 in made, "no answer is older than its step"

    path = samples.path_of(loop / samples.SAMPLES, 2)
    first, *others = path.read_text().splitlines()
    line = json.loads(first)
    path.write_text("\n".join([json.dumps(line | {"seed": line["seed"] + 1}), *others, ""]))
    (said,) = again(folder, 1, 2, code=1)
    place = f"group {line['group']}, sample {line['sample']} of @1"
    assert re.search(rf"6 of 6 .*, 1 differ, first {place}, token \d+: \d+ is \d+ now", said)

    other_bit(folder / "run" / "versions" / "1")  # the trainer would refuse the file
    found = resampling.repeat(run_of(folder), 0, 1, on_version=lambda version, count: None)
    assert re.search(r"6 of 6 .*, 1 differ, first .* of @0, token 3: log-prob", str(found[1]))


def again(folder: Path, first: int, last: int, *, code: int = 0) -> list[str]:
    words = "replay", folder, "--from", first, "--to", last, "--sample"
    done = ran(*words)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout.splitlines()


def other_bit(version: Path) -> None:
    """Change the last bit of a log-prob in the batch: the fourth of its first answer."""
    trained = next(iter(batch_of(version)))
    at = next(i for i, p in enumerate(trained.logprobs) if p) + 3
    old = trained.logprobs[at - 3 : at + 1]
    path = version / "remake.bin"
    data = path.read_bytes()
    assert data.count(old.tobytes()) == 1
    new = (int.from_bytes(old[3:].tobytes(), "little") ^ 1).to_bytes(4, "little")
    path.write_bytes(data.replace(old.tobytes(), old[:3].tobytes() + new))
