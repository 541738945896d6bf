"""Rewards in processes: those that use signals, never return, or end their process."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from orchestrator.errors import ConfigError
from splice.rl import SampleFailed, checker, decisions, trl_reward
from splice.rl.reward_processes import NoProcess, RewardProcesses
from tests.orchestrator.fake_nodes import soon
from tests.rl.stand_in import StandIn
from tests.rl.stood_in import ROWS, reward, run_loop

pytestmark = pytest.mark.timeout(120)


def with_alarm(row, completion) -> float:
    """As math_verify does it."""

    def late(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(30)
    except TimeoutError:
        return reward(row, completion)
    return 0.0


def test_a_reward_may_use_signals(tmp_path, before):
    with pytest.raises(SampleFailed, match="signal only works in main thread"):
        asyncio.run(run_loop(StandIn(), tmp_path / "threads", reward=with_alarm, steps=1))
    asyncio.run(
        run_loop(StandIn(), tmp_path / "mine", reward=with_alarm, steps=2, reward_processes=2)
    )
    assert workers() <= before


def workers() -> set[psutil.Process]:
    """Processes for rewards, and what they have started; also the nodes of other tests."""
    children = psutil.Process().children(recursive=True)
    return {child for child in children if "resource_tracker" not in command(child)}


def command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return "resource_tracker"


@pytest.fixture
def before() -> set[psutil.Process]:
    return workers()


def busy(row, completion) -> float:
    """Never returns for one row, holds Python's lock, and has its own child."""
    if row["name"] == 0:
        subprocess.Popen(["sleep", "1000"])
        while True:
            10**20_000  # noqa: B018 - it is computed, in C
    return reward(row, completion)


def ends(row, completion) -> float:
    if row["name"] == 0:
        os._exit(7)
    return reward(row, completion)


def mumbles(row, completion) -> object:
    return "much" if row["name"] == 0 else reward(row, completion)


@pytest.mark.parametrize(
    ("bad", "says"),
    [(busy, "took more than 1 s"), (ends, "ended with code 7"), (mumbles, "returned 'much'")],
)
def test_a_bad_reward_drops_its_sample_alone_and_leaves_nothing(tmp_path, bad, says, before):
    options = {"reward": bad, "steps": 2, "on_error": "drop", "max_staleness": 0}
    options |= {"reward_processes": 2, "reward_timeout_s": 1.0}
    asyncio.run(run_loop(StandIn(), tmp_path, **options))
    lines = list(decisions.read(tmp_path / decisions.LOG))
    found = checker.check(lines)
    assert found.violations == [] and (found.trained, found.dropped) == (9, 3)
    assert all(says in line["why"] for line in lines if line["event"] == "drop")
    assert workers() <= before


async def async_half(completion) -> float:
    return 0.5


def plain_half(completion) -> float:
    return float(os.getpid())


def test_trls_rewards_run_there_too(tmp_path):
    both = RewardProcesses(trl_reward(plain_half, async_half), timeout_s=30.0)
    try:
        (pid, *_) = {both(row, one) - 0.5 for row, one in [(ROWS[0], ANSWER)] * 3}
        assert pid != os.getpid() and psutil.pid_exists(int(pid)), "one process, used again"
    finally:
        both.close()


class ANSWER:  # a class goes by its name
    text, answer_ids = "", (1,)


class Unloadable:
    def __reduce__(self):
        return functools.partial(exec, "raise ImportError('no module rewards')"), ()

    def __call__(self, row, completion) -> float:
        return 0.0


async def later(row, completion) -> float:
    return 0.0


def test_what_cannot_be_sent_is_said_at_the_start(tmp_path, before):
    def inner(row, completion) -> float:
        return 0.0

    for bad in (inner, lambda row, completion: 0.0):
        with pytest.raises(ConfigError, match="at the top level of a module"):
            asyncio.run(run_loop(StandIn(), tmp_path / "a", reward=bad, reward_processes=1))
    with pytest.raises(NoProcess, match="cannot load the reward: ImportError: no module rewards"):
        asyncio.run(run_loop(StandIn(), tmp_path / "b", reward=Unloadable(), reward_processes=1))
    with pytest.raises(ConfigError, match="a coroutine runs in the loop"):
        asyncio.run(run_loop(StandIn(), tmp_path / "c", reward=later, reward_processes=1))
    assert workers() <= before


SCRIPT = """
import asyncio, time
from pathlib import Path
from tests.rl.stand_in import StandIn
from tests.rl.stood_in import run_loop

def reward(row, completion):
    time.sleep({seconds})
    return 0.0

{guard}
    asyncio.run(run_loop(StandIn(), Path({folder!r}), reward=reward, reward_processes=2))
"""


def script(tmp_path, **more) -> list[str]:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(folder=str(tmp_path / "loop"), **more))
    return [sys.executable, str(path)]


def test_a_script_that_starts_its_loop_when_it_is_imported_starts_no_second_one(tmp_path):
    argv = script(tmp_path, guard="if True:", seconds=0)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "this script starts a loop when it is imported" in done.stderr
    assert 'if __name__ == "__main__":' in done.stderr.strip().splitlines()[-1], done.stderr


def test_nothing_outlives_a_loop_that_is_killed(tmp_path):
    argv = script(tmp_path, guard='if __name__ == "__main__":', seconds=1000)
    with subprocess.Popen(argv) as loop:
        try:
            started = psutil.Process(loop.pid)
            # Not git, which says the commit and ends.
            assert soon(lambda: sum("spawn_main" in command(c) for c in started.children()) == 2)
            family = started.children(recursive=True)
            time.sleep(1.0)
        finally:
            loop.kill()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
