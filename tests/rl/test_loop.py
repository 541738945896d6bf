"""The loop on a real cluster: what it trains on, what it says, and what its log proves."""

from __future__ import annotations

import asyncio
import itertools
import random
import time

import pytest

from orchestrator.errors import ConfigError
from splice import LossSpec, OptimParams
from splice.rl import Loop, LoopConfig, SampleFailed, SamplingConfig, decisions
from splice.rl.checker import check

pytestmark = pytest.mark.timeout(600)
ROWS = [{"prompt": [5 + k, 17, 33, 101, 7], "name": k} for k in range(6)]
SHORT = SamplingConfig(max_tokens=12, extra={"ignore_eos": True})
LOSS = LossSpec(name="truncated_importance_sampling")


def config(**more: object) -> LoopConfig:
    return LoopConfig(**{"group_size": 3, "groups_per_step": 2, "sampling": SHORT, **more})  # type: ignore[arg-type]


def even(row, completion) -> float:
    """The share of even tokens."""
    return sum(t % 2 == 0 for t in completion.answer_ids) / len(completion.answer_ids)


def loop_of(cluster, folder, **more) -> Loop:
    options = {"prompts": ROWS, "reward": even, "config": config(steps=3), "loss": LOSS}
    optim = OptimParams(lr=1e-3)
    return Loop(cluster.client, folder, **{**options, "optim": optim, **more})


async def all_steps(loop: Loop) -> list:
    async with loop:
        return [step async for step in loop]


def found_in(folder):
    return check(decisions.read(folder / decisions.LOG))


def test_it_overlaps_and_keeps_the_bound_under_random_delays(cluster, tmp_path):
    """Rewards of random length, so that groups finish in any order."""
    delays = random.Random(7)

    async def slow(row, completion) -> float:
        await asyncio.sleep(delays.choice((0.0, 0.05, 0.4)))
        return even(row, completion)

    began = cluster.client.status().version
    settings = config(steps=8, max_staleness=1)
    steps = asyncio.run(all_steps(loop_of(cluster, tmp_path, reward=slow, config=settings)))
    assert [step.number for step in steps] == list(range(1, 9))
    assert [step.version for step in steps] == list(range(began + 1, began + 9))
    assert all(len(group) == 3 for step in steps for group in step.groups)
    names = [group[0].row["name"] for step in steps for group in step.groups]
    assert names == [n % 6 for n in range(16)], "the prompts come in order, whatever they take"
    assert {step.metrics["staleness_max"] for step in steps} == {0.0, 1.0}

    found = found_in(tmp_path)
    assert found.violations == []
    assert (found.steps, found.trained, found.tokens) == (8, 48, 48 * 12)
    assert (found.max_staleness, found.asked_again, found.pending) == (1, 0, 0)


def test_rows_may_be_messages(cluster, tmp_path):
    rows = [{"messages": [{"role": "user", "content": "Answer with yes or no:"}], "name": 0}]
    steps = asyncio.run(all_steps(loop_of(cluster, tmp_path, prompts=rows)))
    rollouts = [r for step in steps for group in step.groups for r in group]
    assert {len(r.completion.answer_ids) for r in rollouts} == {12}
    assert len({r.completion.prompt_ids for r in rollouts}) == 1
    assert all(step.metrics["logprob_gap_mean"] < 0.05 for step in steps), "the very tokens"
    assert any(r.completion.text for r in rollouts)
    assert found_in(tmp_path).violations == []


def test_a_slow_body_admits_no_more_than_can_be_used(cluster, tmp_path):
    async def run() -> list[int]:
        pending = []
        async with loop_of(cluster, tmp_path, config=config(max_staleness=2)) as loop:
            async for step in loop:
                await asyncio.sleep(1.0)
                pending.append(found_in(tmp_path).pending)
                if step.number == 3:
                    break
        return pending

    pending = asyncio.run(run())
    assert pending == [12, 12, 12], "two steps ahead, and no more"
    assert found_in(tmp_path).violations == []


@pytest.mark.parametrize("kind", ["raises", "late", "nan"])
def test_a_bad_reward_names_prompt_and_sample(cluster, tmp_path, kind):
    def bad(row, completion):
        if row["name"] != 1:
            return even(row, completion)
        if kind == "late":
            time.sleep(4.0)
        if kind == "raises":
            raise KeyError("no answer in the row")
        return float("nan")

    settings = config(steps=1, reward_timeout_s=2.0 if kind == "late" else 60.0)
    with pytest.raises(SampleFailed, match=r"prompt 1 \(group 1\), sample \d: \[6, 17") as caught:
        asyncio.run(all_steps(loop_of(cluster, tmp_path, reward=bad, config=settings)))
    assert caught.value.row["name"] == 1
    said = {"raises": "KeyError", "late": "more than 2 s", "nan": "nan"}[kind]
    assert said in str(caught.value)
    assert found_in(tmp_path).steps == 0


def test_a_bad_sample_may_be_dropped(cluster, tmp_path):
    calls = itertools.count()

    def bad(row, completion):
        if row["name"] == 1 and next(calls) % 3 == 0:
            raise ValueError("no")
        return even(row, completion)

    settings = config(steps=2, group_size=8, on_error="drop")
    steps = asyncio.run(all_steps(loop_of(cluster, tmp_path, reward=bad, config=settings)))
    found = found_in(tmp_path)
    assert found.violations == [] and found.dropped > 0
    assert found.trained + found.dropped == 32
    assert sum(len(group) for step in steps for group in step.groups) == found.trained


def test_a_rollout_has_a_deadline(cluster, tmp_path):
    settings = config(steps=1, rollout_timeout_s=0.01)
    with pytest.raises(SampleFailed, match=r"no answer within .* \(rollout_timeout_s\)"):
        asyncio.run(all_steps(loop_of(cluster, tmp_path, config=settings)))


def test_a_cancelled_loop_ends_soon_and_goes_on_later(cluster, tmp_path):
    async def cancelled() -> float:
        task = asyncio.create_task(all_steps(loop_of(cluster, tmp_path, config=config())))
        while not (tmp_path / decisions.STATUS).exists():
            await asyncio.sleep(0.05)
        task.cancel()
        began_s = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic() - began_s

    assert asyncio.run(cancelled()) < 5.0
    done = decisions.past(tmp_path / decisions.LOG).done
    steps = asyncio.run(all_steps(loop_of(cluster, tmp_path, config=config(steps=done + 3))))
    assert [step.number for step in steps] == [done + 1, done + 2, done + 3]
    found = found_in(tmp_path)
    assert found.violations == [] and found.steps == done + 3 and found.pending == 0


def test_an_evaluation_beside_the_loop(cluster, tmp_path):
    async def run():
        async with loop_of(cluster, tmp_path) as loop:
            first = await loop.sample(ROWS[:2], n=2)
            again = await loop.sample(ROWS[:2], n=2)
        return first, again

    first, again = asyncio.run(run())
    assert [len(group) for group in first] == [2, 2]
    assert first[0][0].answer_ids == first[0][1].answer_ids == again[0][0].answer_ids, "greedy"
    assert len(first[1][0].logprobs) == 12


def test_a_loss_that_the_trainer_does_not_know_is_refused_at_the_start(cluster, tmp_path):
    loop = loop_of(cluster, tmp_path, loss=LossSpec(name="dapoo"))
    with pytest.raises(ConfigError, match="no loss 'dapoo'; did you mean 'dapo'"):
        asyncio.run(all_steps(loop))
    assert not (tmp_path / decisions.LOG).exists(), "nothing was sampled"


def test_a_log_of_another_run_is_refused(cluster, tmp_path):
    (tmp_path / decisions.LOG).write_text(
        '{"event": "start", "loop": "x", "version": 999, "config": {}}\n'
    )
    with pytest.raises(ValueError, match="has made version 999"):
        asyncio.run(all_steps(loop_of(cluster, tmp_path)))
