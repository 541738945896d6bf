"""Named parts of a reward: in metrics, samples and sinks, wherever the reward is computed."""

from __future__ import annotations

import asyncio
import json
import math
import pickle
from statistics import fmean

import pytest

from splice import Completion, report
from splice.rl import browse, samples, sinks, trl_reward
from splice.rl.parts import PartedReward, as_reward, parts_of
from splice.rl.turns import Scored
from tests.rl.stand_in import StandIn
from tests.rl.stood_in import run_loop

SAID = Completion(prompt_ids=(1,), answer_ids=(7, 8), logprobs=(0.0, 0.0), text=" 5")


def parted(row, completion) -> dict[str, float]:
    return {"mean": fmean(completion.answer_ids), "even": float(row["name"] % 2 == 0)}


def steps_of(folder, reward, **more):
    return asyncio.run(run_loop(StandIn(), folder, reward=reward, **more))


@pytest.mark.parametrize("processes", [0, 1])
def test_a_reward_of_parts_is_their_sum_and_each_is_logged(tmp_path, processes):
    for step in steps_of(tmp_path, parted, steps=2, reward_processes=processes):
        rollouts = [r for group in step.groups for r in group]
        found = [parted(r.row, r.completion) for r in rollouts]
        assert [r.reward for r in rollouts] == [sum(own.values()) for own in found]
        assert step.metrics["rewards/mean"] == pytest.approx(fmean(f["mean"] for f in found))
        assert step.metrics["rewards/even"] == pytest.approx(fmean(f["even"] for f in found))
        assert step.metrics["reward_mean"] == pytest.approx(
            step.metrics["rewards/mean"] + step.metrics["rewards/even"]
        )
        kept = samples.read(tmp_path / samples.SAMPLES, step.number)
        assert [sample["rewards"] for sample in kept] == found
        assert [sample["reward"] for sample in kept] == [r.reward for r in rollouts]
    events = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())
    assert b"rollout/rewards/even" in events and b"train/rewards/even/mean" in events


def test_weights_change_the_sum_and_not_the_parts():
    def correct(completion):
        return 1.0

    def brief(completion):
        return {"words": 2.0, "letters": 3.0}

    def silent(completion):
        return None

    reward = trl_reward(correct, brief, correct, silent, weights=[1.0, 0.5, 10.0, 7.0])(
        {"prompt": ""}, SAID
    )
    assert reward == 1.0 + 0.5 * 5.0 + 10.0
    assert parts_of(reward) == {"correct": 1.0, "words": 2.0, "letters": 3.0, "correct.2": 1.0}


def test_a_reward_of_parts_is_its_number_to_everything_else():
    reward = as_reward({"a": 0.25, "b": 0.5})
    assert reward == 0.75 and hash(reward) == hash(0.75) and json.dumps(reward) == "0.75"
    again = pickle.loads(pickle.dumps(reward))
    assert again == reward and parts_of(again) == {"a": 0.25, "b": 0.5}
    assert as_reward(again) is again and parts_of(as_reward(0.5)) == {}
    assert isinstance(again, PartedReward)


def test_a_part_that_is_no_number_is_said(tmp_path):
    with pytest.raises(Exception, match="the reward even is nan"):
        steps_of(tmp_path / "nan", lambda row, said: {"even": math.nan, "odd": 1.0}, steps=1)
    with pytest.raises(Exception, match="which is no number"):
        steps_of(tmp_path / "text", lambda row, said: {"even": "much"}, steps=1)
    with pytest.raises(Exception, match=r"the reward returned \{\}, which is no number"):
        steps_of(tmp_path / "none", lambda row, said: {}, steps=1)


def test_an_environment_returns_parts_too(tmp_path):
    async def play(row, sample):
        turn = await sample(row["prompt"])
        found = {"first": 1.0, "second": float(len(turn.token_ids))}
        return Scored(reward=as_reward(found), turns=[turn]) if row["name"] else found

    (step,) = steps_of(tmp_path, None, environment=play, steps=1)
    assert step.metrics["rewards/first"] == 1.0
    assert step.metrics["reward_mean"] == pytest.approx(1 + step.metrics["rewards/second"])


def test_a_report_and_the_samples_show_them(tmp_path):
    steps_of(tmp_path, parted, steps=2)
    text = report.page(tmp_path)
    plot = text[text.index("<h3>Parts of the reward</h3>") :]
    assert ">mean</text>" in plot[: plot.index("</svg>")]
    first = samples.read(tmp_path / samples.SAMPLES, 2)[0]
    named = f"mean {first['rewards']['mean']:.4g}, even {first['rewards']['even']:.4g}"
    assert f"of {named}" in text
    del first["rewards"]
    assert "of" not in browse.details_of(first), "one of an older loop"


def test_trls_names():
    found = sinks.with_trl_names(
        {"rollout/reward_mean": 1.0, "rollout/rewards/brief": 2.0, "train/lr": 3.0}
    )
    assert found["train/reward"] == 1.0 and found["train/rewards/brief/mean"] == 2.0
    assert found["train/learning_rate"] == 3.0 and found["rollout/reward_mean"] == 1.0


def test_wandb_has_the_name_and_a_table_of_samples(tmp_path, monkeypatch):
    """With the real package, which writes its files without a server."""
    monkeypatch.setattr(sinks, "CLOSE_S", 120.0)  # its service starts slowly on a busy machine
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_NAME", "the-name-of-this-run")
    steps_of(tmp_path, parted, steps=2, sinks=("wandb",))
    (path,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    data = path.read_bytes()
    assert b"the-name-of-this-run" in data and b"train/rewards/even/mean" in data
    tables = sorted((path.parent / "files/media/table").glob("samples_*.table.json"))
    assert len(tables) == 2
    table = json.loads(tables[0].read_text())
    assert len(table["data"]) == 6 and table["columns"][:2] == ["step", "group"]
    kept = samples.read(tmp_path / samples.SAMPLES, 1)
    column = table["columns"].index("reward")
    assert sorted(row[column] for row in table["data"]) == pytest.approx(
        sorted(sample["reward"] for sample in kept)
    )
