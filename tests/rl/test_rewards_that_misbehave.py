"""Whatever a reward or an environment does ends or drops only its own sample."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time

import numpy as np
import pytest

from orchestrator.errors import ConfigError
from splice.rl import SampleFailed, checker, decisions
from splice.rl.reward_threads import RewardThreads
from splice.rl.samples import SAMPLES, path_of
from tests.rl.stand_in import StandIn
from tests.rl.stood_in import reward, run_loop

pytestmark = pytest.mark.timeout(60)


def exits(row, completion):
    raise SystemExit(1)


def stops(row, completion):
    return next(iter(()))


async def cancelled(row, completion):
    inner = asyncio.ensure_future(asyncio.sleep(10))
    asyncio.get_running_loop().call_soon(inner.cancel)
    return await inner


def huge(row, completion):
    return 1.7e308


@pytest.mark.parametrize("bad", [exits, stops, cancelled, huge])
def test_it_names_its_sample_or_drops_it(tmp_path, bad):
    with pytest.raises(SampleFailed, match="prompt 0"):
        asyncio.run(run_loop(StandIn(), tmp_path / "stop", reward=bad, steps=1))

    def some(row, completion):
        return bad(row, completion) if row["name"] == 1 else reward(row, completion)

    async def some_later(row, completion):
        return await bad(row, completion) if row["name"] == 1 else reward(row, completion)

    mixed = some_later if asyncio.iscoroutinefunction(bad) else some
    options = {"reward": mixed, "steps": 2, "on_error": "drop"}
    asyncio.run(run_loop(StandIn(), tmp_path / "drop", **options))
    found = checker.check(decisions.read(tmp_path / "drop" / decisions.LOG))
    assert found.violations == [] and (found.trained, found.dropped) == (9, 3)


def test_late_rewards_do_not_cost_others_their_time(tmp_path):
    """They keep their threads; the others wait for one, and their own time begins then."""

    def slow(row, completion):
        time.sleep(1.5 if row["name"] == 0 else 0.0)
        return reward(row, completion)

    options = {"reward": slow, "steps": 1, "on_error": "drop", "max_staleness": 0}
    options |= {"reward_threads": 3, "reward_timeout_s": 1.0}
    asyncio.run(run_loop(StandIn(), tmp_path, **options))
    found = checker.check(decisions.read(tmp_path / decisions.LOG))
    assert found.violations == [] and (found.trained, found.dropped) == (3, 3)


def test_a_place_that_never_comes_back_is_said():
    async def go() -> None:
        threads = RewardThreads(1, patience_s=0.2)
        await threads.turn()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await threads.call(lambda: time.sleep(3))
        with pytest.raises(RuntimeError, match="no thread is free: 1 rewards"):
            await threads.turn()

    asyncio.run(go())


def test_a_numpy_reward_is_a_number_in_the_samples(tmp_path):
    asyncio.run(run_loop(StandIn(), tmp_path, reward=lambda *_: np.float32(0.5), steps=1))
    line = path_of(tmp_path / SAMPLES, 1).read_text().split("\n")[0]
    assert json.loads(line)["reward"] == 0.5


def test_a_forked_worker_does_not_hold_the_loops_lock(tmp_path):
    path = tmp_path / decisions.LOG
    log = decisions.DecisionLog(path)
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
    worker.start()
    try:
        with pytest.raises(ConfigError, match="another loop runs"):
            decisions.DecisionLog(path)
        assert decisions.is_running(path)
        log.close()
        assert not decisions.is_running(path)
        decisions.DecisionLog(path).close()
    finally:
        worker.kill()


def test_prompts_that_are_not_the_next_ones_are_found(tmp_path):
    asyncio.run(run_loop(StandIn(), tmp_path, steps=3, shuffle_seed=1))
    lines = list(decisions.read(tmp_path / decisions.LOG))
    assert checker.check(lines).violations == []
    for line in lines:
        if line["event"] == "admit":
            line["prompt"] = 0
    assert any("not the next one" in text for text in checker.check(lines).violations)
