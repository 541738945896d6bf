"""Groups without a signal are replaced, and answers that were cut off are masked; on stand-ins."""

from __future__ import annotations

import asyncio
import json
import statistics
from dataclasses import replace

import numpy as np
import pytest

from orchestrator.errors import ConfigError, ErrorCode, JobFailed
from splice.client.batches import Completion
from splice.rl import LoopConfig, decisions
from splice.rl.checker import check
from splice.rl.jobs import without_mixed
from tests.rl.stand_in import Crash, StandIn
from tests.rl.stood_in import reward, run_loop

DULL = 1
"""The prompt whose answers all have the same reward."""


def dull(row, completion) -> float:
    return 0.5 if row["name"] == DULL else reward(row, completion)


def lines_of(folder, event: str) -> list[dict]:
    return [line for line in decisions.read(folder / decisions.LOG) if line["event"] == event]


def found_in(folder):
    return check(decisions.read(folder / decisions.LOG))


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_group_without_signal_is_replaced_in_its_place(tmp_path, staleness):
    """Groups of later steps are in flight meanwhile, and keep their numbers and prompts."""
    run = StandIn(seed=staleness, train_s=0.03, token_s=0.01)
    settings = {"steps": 6, "max_staleness": staleness, "dynamic_sampling": 1}
    steps = asyncio.run(run_loop(run, tmp_path, servers=2, reward=dull, **settings))
    names = [group[0].row["name"] for step in steps for group in step.groups]
    assert names == [(3 if n % 5 == DULL else n % 5) for n in range(12)], "two further of five"
    sent = lines_of(tmp_path, "train")
    assert [n for line in sent for n in line["groups"]] == list(range(12))
    assert [n for line in sent for n in line["prompts"]] == names
    places = [(group, 1) for group in (1, 6, 11)]
    assert sorted((line["group"], line["prompt"]) for line in lines_of(tmp_path, "replaced")) == (
        places
    )
    shares = [step.metrics["groups_replaced"] for step in steps]
    assert shares == pytest.approx([1 / 3, 0, 0, 1 / 3, 0, 1 / 3])
    assert {step.metrics["groups_without_signal"] for step in steps} == {0.0}
    found = found_in(tmp_path)
    assert (found.violations, found.trained, found.replaced, found.pending) == ([], 36, 3, 0)
    assert found.max_staleness <= staleness


def test_the_last_prompt_stays_whatever_its_rewards(tmp_path):
    settings = {"steps": 2, "dynamic_sampling": 3}
    steps = asyncio.run(run_loop(StandIn(), tmp_path, reward=lambda r, c: 1.0, **settings))
    assert [step.metrics["groups_without_signal"] for step in steps] == [1.0, 1.0]
    assert [step.metrics["groups_replaced"] for step in steps] == [0.75, 0.75]
    asked = [line["prompt"] for line in lines_of(tmp_path, "replaced") if line["group"] == 0]
    assert asked == [0, 1, 2] and steps[0].groups[0][0].row["name"] == 3
    assert found_in(tmp_path).violations == []


def test_the_same_prompt_again_has_other_seeds(tmp_path):
    """With fewer prompts than replacements."""
    bodies = []

    async def keep(step, replicas, loop):
        bodies.extend(replicas[0].asked)

    calls = iter(range(10**6))

    def first_are_equal(row, completion) -> float:
        return 0.0 if next(calls) < 30 else reward(row, completion)

    settings = {"steps": 1, "dynamic_sampling": 9, "max_staleness": 0}
    run = run_loop(StandIn(), tmp_path, reward=first_are_equal, on_step=keep, **settings)
    asyncio.run(run)
    seeds = [body["seed"] for body in bodies]
    assert len(seeds) > 30 and len(set(seeds)) == len(seeds)


def test_a_group_that_was_dropped_whole_is_replaced(tmp_path):
    def bad(row, completion) -> float:
        if row["name"] == DULL:
            raise ValueError("no")
        return reward(row, completion)

    settings = {"steps": 1, "dynamic_sampling": 1, "on_error": "drop"}
    steps = asyncio.run(run_loop(StandIn(), tmp_path, reward=bad, **settings))
    assert [len(group) for group in steps[0].groups] == [3, 3]
    found = found_in(tmp_path)
    assert (found.violations, found.dropped, found.replaced) == ([], 3, 1)


@pytest.mark.parametrize("moment", ["asking", "before submit", "after submit", "after outcome"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_kill_repeats_and_skips_nothing(tmp_path, moment, staleness):
    """`asking`: while a replacement's answers are on their way. With staleness 0 the weights at
    the end are the uninterrupted run's, so every step has the very tokens."""
    straight, broken = StandIn(), StandIn()
    settings = {"steps": 6, "dynamic_sampling": 1}
    asyncio.run(run_loop(straight, tmp_path / "a", reward=dull, max_staleness=0, **settings))
    armed = []

    async def crash_later(step, replicas, loop) -> None:
        if step.number == 3 and moment == "asking":
            armed.append(1)
        elif step.number == 3:
            broken.crash_at = moment

    async def killing(row, completion) -> float:
        replaced = lines_of(tmp_path / "b", "replaced")
        if armed and row["name"] == 3 and replaced and replaced[-1]["group"] >= 6:
            raise Crash
        return dull(row, completion)

    settings |= {"max_staleness": staleness}
    options = {"reward": killing, "on_step": crash_later}
    with pytest.raises(Crash):
        asyncio.run(run_loop(broken, tmp_path / "b", **options, **settings))
    broken.crash_at = ""
    asyncio.run(run_loop(broken, tmp_path / "b", reward=dull, **settings))
    assert len(broken.trained) == len(set(broken.trained)) == broken.version == 6
    found = found_in(tmp_path / "b")
    assert (found.violations, found.steps, found.trained) == ([], 6, 36)
    last = {line["step"]: line for line in lines_of(tmp_path / "b", "train")}
    for line in lines_of(tmp_path / "a", "train"):
        own = last[line["step"]]
        assert (own["groups"], own["prompts"]) == (line["groups"], line["prompts"])
        assert own["metrics"]["groups_replaced"] == line["metrics"]["groups_replaced"]
    if staleness == 0:
        assert broken.weights == straight.weights


def test_a_batch_that_was_set_aside_names_the_prompts_that_trained(tmp_path):
    run = StandIn()
    run.fail_next = [
        JobFailed(
            code=ErrorCode.TRAINER_KILLED,
            node="trainer",
            phase="training",
            message="no",
            remedy="x",
        )
    ]
    asyncio.run(run_loop(run, tmp_path, steps=2, reward=dull, dynamic_sampling=1))
    assert [line["aside"] for line in lines_of(tmp_path, "failed")] == [[0, 3]]


# ---------------------------------------------------------------- the checker finds what is wrong


def _replaced(lines):
    return next(line for line in lines if line["event"] == "replaced")


def too_early(lines):
    lines.remove(
        next(
            line
            for line in lines
            if line["event"] == "finish" and line["group"] == _replaced(lines)["group"]
        )
    )


def too_often(lines):
    for line in lines:
        if line["event"] == "start":
            line["config"]["dynamic_sampling"] = 0


def never_said(lines):
    lines.remove(_replaced(lines))


def other_prompt(lines):
    after = lines.index(_replaced(lines))
    group = lines[after]["group"]
    for line in lines[after:]:
        if line["event"] == "admit" and line["group"] == group:
            line["prompt"] = 4


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (too_early, "had no answer"),
        (too_often, "more often than dynamic_sampling allows"),
        (never_said, "was admitted twice"),
        (other_prompt, "has prompt 4, which is not the next one"),
    ],
)
def test_a_wrong_log_is_found(tmp_path, break_it, said):
    asyncio.run(run_loop(StandIn(), tmp_path, steps=2, reward=dull, dynamic_sampling=1))
    lines = list(decisions.read(tmp_path / decisions.LOG))
    assert check(json.loads(json.dumps(lines))).violations == []
    break_it(lines)
    assert any(said in violation for violation in check(lines).violations)


# ---------------------------------------------------------------- overlong answers


def test_an_answer_that_was_cut_off_counts_in_the_mean_and_carries_no_loss(tmp_path):
    run = StandIn()
    run.is_cut = lambda body: body["seed"] % 2 == 0
    settings = {"steps": 1, "overlong": "mask", "max_staleness": 0, "group_size": 8}
    (step,) = asyncio.run(run_loop(run, tmp_path, **settings))
    rollouts = [r for group in step.groups for r in group]
    assert {r.is_cut for r in rollouts} == {True, False}
    batch = decisions.kept_batch(tmp_path / decisions.BATCH)
    sent = dict(zip((spec.name for spec in batch.specs), batch.buffers, strict=True))
    ids = np.frombuffer(sent["tokens"], dtype=np.int32).reshape(-1, 7)
    assert [tuple(row[3:]) for row in ids] == [
        r.completion.answer_ids for r in rollouts if not r.is_cut
    ]
    advantages = np.frombuffer(sent["advantages"], dtype=np.float32).reshape(-1, 7)[:, -1]
    means = [statistics.fmean(r.reward for r in group) for group in step.groups]
    stds = [statistics.pstdev([r.reward for r in group]) + 1e-6 for group in step.groups]
    expected = [(r.reward - means[r.group]) / stds[r.group] for r in rollouts if not r.is_cut]
    assert advantages == pytest.approx(expected, rel=1e-5)
    share = statistics.fmean(r.is_cut for r in rollouts)
    assert step.metrics["masked"] == step.metrics["truncated"] == share
    assert found_in(tmp_path).violations == []


def test_answers_train_unless_they_are_masked(tmp_path):
    (step,) = asyncio.run(run_loop(StandIn(), tmp_path, steps=1))
    assert (step.metrics["truncated"], step.metrics["masked"]) == (1.0, 0.0)
    assert decisions.kept_batch(tmp_path / decisions.BATCH).specs[1].shape == (6,)


def test_a_step_of_which_nothing_is_left_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"every answer of the step was cut off.*max_tokens"):
        asyncio.run(run_loop(StandIn(), tmp_path, steps=1, overlong="mask"))


def test_a_group_of_answers_that_were_cut_off_is_replaced(tmp_path):
    run = StandIn()
    run.is_cut = lambda body: body["prompt"][0] == DULL
    settings = {"steps": 1, "overlong": "mask", "dynamic_sampling": 1}
    (step,) = asyncio.run(run_loop(run, tmp_path, **settings))
    assert [group[0].row["name"] for group in step.groups] == [0, 3]


def test_a_group_of_one_answer_has_nothing_to_compare():
    with pytest.raises(ConfigError, match="group_size is 1: leave it out"):
        LoopConfig(group_size=1, dynamic_sampling=1)


# ---------------------------------------------------------------- tokens of several versions


def answer_by(*made_by: int, sampled: tuple[bool, ...] = ()) -> Completion:
    count = len(made_by)
    return Completion(
        prompt_ids=(1, 2),
        answer_ids=tuple(range(10, 10 + count)),
        logprobs=(-1.0,) * count,
        made_by=made_by,
        sampled=sampled,
    )


def test_tokens_after_an_update_carry_no_loss_when_masked():
    mixed, whole = answer_by(3, 3, -5, -5), answer_by(4, 4)
    turns = [
        answer_by(3, 0, 3, sampled=(True, False, True)),
        answer_by(3, 0, -5, sampled=(True, False, True)),
    ]
    masked = without_mixed([[(mixed, 1.0), (whole, 0.0)], [(turns, 0.5)]])
    assert masked[0][1] == (whole, 0.0)
    answer, reward = masked[0][0]
    assert reward == 1.0 and isinstance(answer, Completion)
    assert answer.sampled == (True, True, False, False)
    assert replace(answer, sampled=()) == mixed  # its tokens stay, as context and for the log
    assert [s.sampled for s in masked[1][0][0]] == [(True, False, True), (True, False, False)]


def test_a_step_of_nothing_else_trains_on_mixed_tokens():
    parts = [[(answer_by(-5, -5), 1.0)]]
    assert without_mixed(parts) is parts
