"""Environments against stand-ins: the bound for every turn, losses, failures and the checker."""

from __future__ import annotations

import asyncio
import random

import pytest

from splice.rl import Loop, LoopConfig, SampleFailed, SamplingConfig, Scored, decisions, samples
from splice.rl.checker import check
from tests.rl.stand_in import Crash, Server, StandIn

ROWS = [{"prompt": [k, 1, 2], "name": k} for k in range(5)]
TOOL = (301, 302)


async def two_turns(row, sample) -> float:
    """The second turn's prompt extends the first one's tokens."""
    first = await sample(row["prompt"])
    second = await sample([*first.token_ids, *TOOL], max_tokens=3)
    return float(sum(second.completion.answer_ids))


def config(**more) -> LoopConfig:
    sampling = SamplingConfig(max_tokens=4, seed=3)
    return LoopConfig(**{"group_size": 3, "groups_per_step": 2, "sampling": sampling, **more})


async def run_loop(run, folder, environment, *, servers=1, on_step=None, **more):
    run.servers.clear()
    replicas = [await Server(run).start() for _ in range(servers)]
    try:
        options = {"prompts": ROWS, "environment": environment, "config": config(**more)}
        async with Loop(run, folder, **options) as loop:
            steps = []
            async for step in loop:
                steps.append(step)
                if on_step is not None:
                    await on_step(step, replicas)
            return steps
    finally:
        for replica in replicas:
            replica.kill()


def lines_in(folder) -> list[dict]:
    return list(decisions.read(folder / decisions.LOG))


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_bound_holds_for_every_turn(tmp_path, staleness):
    """Turns, tools and jobs of random lengths; a conversation spans versions."""
    run, draw = StandIn(seed=1, train_s=0.05, token_s=0.02), random.Random(1)

    async def slow(row, sample) -> float:
        first = await sample(row["prompt"])
        await asyncio.sleep(draw.choice((0.0, 0.0, 0.08)))
        second = await sample([*first.token_ids, *TOOL], max_tokens=3)
        return float(sum(second.completion.answer_ids))

    settings = {"steps": 10, "max_staleness": staleness, "max_in_flight": 9}
    steps = asyncio.run(run_loop(run, tmp_path, slow, servers=2, **settings))
    found = check(lines_in(tmp_path))
    assert found.violations == [] and found.steps == 10
    assert (found.trained, found.tokens, found.pending) == (60, 60 * 7, 0)
    assert found.max_staleness <= staleness
    rollouts = [r for step in steps for group in step.groups for r in group]
    for rollout in rollouts:
        (sequence,) = rollout.sequences
        assert sequence.answer_ids[4:6] == TOOL
        assert sequence.sampled == (*[True] * 4, False, False, *[True] * 3)
    if staleness:
        assert found.max_staleness > 0
        assert any(r.turns[0].spans[0][0] < r.turns[1].spans[-1][0] for r in rollouts)
    assert [s.metrics["answer_tokens"] for s in steps] == [7.0] * 10


def test_a_lost_replicas_turns_are_asked_elsewhere(tmp_path):
    run = StandIn(token_s=0.05)

    async def lose(step, replicas) -> None:
        if step.number == 2:
            replicas[0].kill()

    settings = {"steps": 5, "max_staleness": 1, "rollout_timeout_s": 30}
    steps = asyncio.run(run_loop(run, tmp_path, two_turns, servers=2, on_step=lose, **settings))
    found = check(lines_in(tmp_path))
    assert found.violations == [] and found.asked_again > 0
    assert all([r.sample for r in group] == [0, 1, 2] for s in steps for group in s.groups)
    again = [r for s in steps for group in s.groups for r in group if r.attempt]
    assert again and all(len(r.turns) == 2 for r in again)


def test_an_old_replica_cannot_bring_an_old_turn(tmp_path):
    run = StandIn()

    async def stick(step, replicas) -> None:
        if step.number == 1:
            replicas[0].shows = 0

    settings = {"steps": 4, "max_staleness": 1, "rollout_timeout_s": 30}
    asyncio.run(run_loop(run, tmp_path, two_turns, servers=2, on_step=stick, **settings))
    found = check(lines_in(tmp_path))
    assert found.violations == [] and found.asked_again > 0 and found.max_staleness <= 1


def test_an_environment_may_seed_its_requests(tmp_path):
    async def seeded(row, sample):
        await sample(row["prompt"], seed=7)
        return 1.0

    run = StandIn()
    assert len(asyncio.run(run_loop(run, tmp_path, seeded, steps=1))) == 1
    asked = [body["seed"] for server in run.servers for body in server.asked]
    assert asked and set(asked) == {7}


@pytest.mark.parametrize("kind", ["raises", "late", "nothing", "refused", "not ours"])
def test_a_bad_environment_names_prompt_and_sample(tmp_path, kind):
    async def bad(row, sample):
        if row["name"] != 1:
            return await two_turns(row, sample)
        if kind == "nothing":
            return 1.0
        turn = await sample(row["prompt"])
        if kind == "raises":
            raise KeyError("no such tool")
        if kind == "late":
            await asyncio.sleep(60)
        if kind == "refused":
            for server in sample_servers:
                server.answers = 400
            await sample(row["prompt"])
        other = type(turn)(number=0, attempt=0, completion=turn.completion, spans=turn.spans)
        return Scored(reward=1.0, turns=[other])

    run = StandIn()
    sample_servers = run.servers
    with pytest.raises(SampleFailed, match=r"prompt 1 \(group 1\), sample \d: \[1, 1") as caught:
        asyncio.run(run_loop(run, tmp_path, bad, steps=1, rollout_timeout_s=1.0, max_in_flight=1))
    said = {
        "raises": "KeyError: 'no such tool'",
        "late": "more than 1 s",
        "nothing": "without a turn",
        "refused": "refuses the request",
        "not ours": "did not sample",
    }[kind]
    assert said in str(caught.value)


def test_the_wait_for_a_place_is_not_part_of_a_rollouts_time(tmp_path):
    """Six rollouts of 0.2 s, one at a time, with a limit of 0.8 s for each."""

    async def slow(row, sample) -> float:
        await asyncio.sleep(0.2)
        return await two_turns(row, sample)

    settings = {"steps": 1, "max_in_flight": 1, "rollout_timeout_s": 0.8}
    (step,) = asyncio.run(run_loop(StandIn(), tmp_path, slow, **settings))
    assert [len(group) for group in step.groups] == [3, 3]


@pytest.mark.parametrize("ends", ["returns", "late"])
def test_requests_end_with_their_rollout(tmp_path, ends):
    """Also those that another task made, as verifiers' server does."""
    kept, asking = [], []

    async def careless(row, sample):
        first = await sample(row["prompt"])
        asking.append(sample)
        kept.append(asyncio.create_task(sample([*first.token_ids, *TOOL], max_tokens=500)))
        await asyncio.sleep(60 if ends == "late" and row["name"] == 0 else 0.05)
        return float(first.completion.answer_ids[0])

    async def when_over(step, replicas) -> None:
        await asyncio.wait(kept, timeout=1)
        assert all(task.cancelled() for task in kept)
        with pytest.raises(RuntimeError, match="the rollout has ended"):
            await asking[0]([1])

    run = StandIn(token_s=0.05)
    settings = {"steps": 1, "rollout_timeout_s": 1.5, "on_error": "drop"}
    asyncio.run(run_loop(run, tmp_path, careless, on_step=when_over, **settings))
    found = check(lines_in(tmp_path))
    assert found.violations == [] and found.dropped == (3 if ends == "late" else 0)
    assert len([line for line in lines_in(tmp_path) if line["event"] == "finish"]) == 6


def test_every_part_of_a_rollout_has_its_sample(tmp_path):
    """Parts without a name, or with the same one."""

    async def two_parts(row, sample):
        first, second = await sample(row["prompt"]), await sample([9, 9])
        return [Scored(reward=1.0, turns=[first]), Scored(reward=2.0, turns=[second])]

    asyncio.run(run_loop(StandIn(), tmp_path, two_parts, steps=1))
    rewards = [sample["reward"] for sample in samples.read(tmp_path / samples.SAMPLES, 1)]
    assert rewards == [1.0, 2.0] * 6


def test_bad_rollouts_may_be_dropped(tmp_path):
    async def bad(row, sample):
        turn = await sample(row["prompt"])
        if turn.completion.answer_ids[0] % 3 == 0:
            raise ValueError("no")
        return 1.0

    steps = asyncio.run(run_loop(StandIn(), tmp_path, bad, steps=3, on_error="drop"))
    found = check(lines_in(tmp_path))
    assert found.violations == [] and found.dropped > 0 and found.dropped + found.trained == 18
    assert sum(len(group) for s in steps for group in s.groups) == found.trained


def test_roles_have_advantages_of_their_own_and_turns_may_be_left_out(tmp_path):
    seen = []

    async def debate(row, sample):
        solver, judge = await asyncio.gather(sample(row["prompt"]), sample([9, 9]))
        await sample([8, 8], temperature=0.0)
        return [
            Scored(reward=float(solver.completion.answer_ids[0]), turns=[solver], name="solver"),
            Scored(reward=100.0, turns=[judge], name="judge"),
        ]

    def batch_of(groups):
        seen.append([[reward for _, reward in group] for group in groups])
        from splice import grpo_batch

        return grpo_batch(groups)

    async def run(folder):
        stand_in = StandIn()
        server = await Server(stand_in).start()
        options = {"prompts": ROWS, "environment": debate, "make_batch": batch_of}
        async with Loop(stand_in, folder, config=config(steps=1), **options) as loop:
            steps = [step async for step in loop]
        server.kill()
        return steps

    (step,) = asyncio.run(run(tmp_path))
    assert [len(group) for group in seen[0]] == [3, 3, 3, 3]
    assert [group for group in seen[0] if group == [100.0] * 3] == [[100.0] * 3] * 2
    assert [r.name for r in step.groups[0]] == ["solver", "judge"] * 3
    found = check(lines_in(tmp_path))
    assert found.violations == [] and (found.trained, found.turns_left_out) == (6, 6)
    assert found.tokens == 6 * 2 * 4


def test_a_crash_repeats_and_skips_nothing(tmp_path):
    straight, broken = StandIn(), StandIn()
    asyncio.run(run_loop(straight, tmp_path / "a", two_turns, steps=5, max_staleness=0))

    async def crash_later(step, replicas) -> None:
        if step.number == 2:
            broken.crash_at = "after submit"

    settings = {"steps": 5, "max_staleness": 0}
    with pytest.raises(Crash):
        asyncio.run(run_loop(broken, tmp_path / "b", two_turns, on_step=crash_later, **settings))
    broken.crash_at = ""
    asyncio.run(run_loop(broken, tmp_path / "b", two_turns, **settings))
    assert broken.weights == straight.weights
    found = check(lines_in(tmp_path / "b"))
    assert found.violations == [] and (found.steps, found.trained) == (5, 30)


def test_an_evaluation_in_the_environment(tmp_path):
    async def run():
        stand_in = StandIn()
        server = await Server(stand_in).start()
        async with Loop(
            stand_in, tmp_path, prompts=ROWS, environment=two_turns, config=config()
        ) as loop:
            played = await loop.play(ROWS[:2], n=2)
        server.kill()
        return played

    played = asyncio.run(run())
    assert [len(row) for row in played] == [2, 2]
    ((part,),) = played[0][:1]
    assert len(part.turns) == 2 and part.turns[0].completion.temperature == 0.0
    assert {line["event"] for line in lines_in(tmp_path)} == {"start"}


def test_a_loop_takes_a_reward_or_an_environment():
    for options in ({}, {"reward": lambda row, c: 0.0, "environment": two_turns}):
        with pytest.raises(ValueError, match="either a reward or an environment"):
            Loop(StandIn(), "nowhere", prompts=ROWS, **options)


# ---------------------------------------------------------------- the checker finds what is wrong


def of_kind(lines, event):
    return [line for line in lines if line["event"] == event]


def old_first_turn(lines):
    """The last rollout's first turn is said to be by version 0."""
    group, sample, _ = of_kind(lines, "train")[-1]["rollouts"][0]
    for line in lines:
        if (line.get("group"), line.get("sample"), line.get("turn")) == (group, sample, 0):
            line |= {"version": 0} if line["event"] == "admit" else {"spans": [[0, 4]]}


def unfinished_turn(lines):
    lines.remove(next(line for line in of_kind(lines, "finish") if line["turn"] == 1))


def turn_twice(lines):
    of_kind(lines, "turns")[0]["trained"] = [0, 1, 1]


def unknown_turn(lines):
    of_kind(lines, "turns")[0]["trained"] = [0, 2]


def no_turn(lines):
    of_kind(lines, "turns")[0]["trained"] = []


def other_step(lines):
    next(line for line in of_kind(lines, "admit") if line["turn"] == 1)["step"] += 1


@pytest.mark.parametrize(
    "break_it", [old_first_turn, unfinished_turn, turn_twice, unknown_turn, no_turn, other_step]
)
def test_the_checker_finds(tmp_path, break_it):
    run = StandIn(train_s=0.02, token_s=0.01)
    asyncio.run(run_loop(run, tmp_path, two_turns, steps=4, max_staleness=1))
    lines = lines_in(tmp_path)
    assert check(lines).violations == []
    break_it(lines)
    assert check(lines).violations
