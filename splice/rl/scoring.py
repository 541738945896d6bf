"""Rewards of rollouts: coroutines, or plain functions on threads or in processes."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from orchestrator.errors import ConfigError
from splice.client.batches import Completion
from splice.rl.config import LoopConfig
from splice.rl.parts import as_reward, parts_of
from splice.rl.reward_processes import (
    START_S,
    NoProcess,
    RewardFailed,
    RewardLate,
    RewardProcesses,
)
from splice.rl.reward_threads import NoThread, RewardThreads
from splice.rl.sampler import Row
from splice.rl.turns import LARGEST_REWARD, Environment

Given = float | Mapping[str, float]
"""A reward, or its parts by name, of which it is the sum."""
Reward = Callable[[Row, Completion], Given | Awaitable[Given]]
Fail = Callable[[str], Exception]
"""Makes a text the failure of one sample."""


class Scoring:
    """Computes rewards, each within `reward_timeout_s`."""

    def __init__(self, reward: Reward, config: LoopConfig) -> None:
        self._timeout_s = self._limit_s = config.reward_timeout_s
        self._threads = RewardThreads(
            config.reward_processes or config.reward_threads, patience_s=self._timeout_s
        )
        self._reward: Callable[..., Any] = reward
        self.processes: RewardProcesses | None = None
        if config.reward_processes:
            self.processes = RewardProcesses(reward, timeout_s=self._timeout_s)
            self._reward, self._limit_s = self.processes, self._timeout_s + START_S

    async def score(self, row: Row, completion: Completion, fail: Fail) -> float:
        """Return the reward.

        Raises:
            Exception: what `fail` makes: the reward raised, was late or is not a finite number.
            NoThread, NoProcess: none is left for further rewards.
        """
        timeout = asyncio.timeout(None)
        late = f"the reward took more than {self._timeout_s:.0f} s (reward_timeout_s)"
        with users_code("the reward", fail, timeout, lambda: late, passes=(NoThread, NoProcess)):
            given = await self._call(row, completion, timeout)
        try:
            reward = as_reward(given)
        except Exception:  # noqa: BLE001  - a user's object may raise anything
            raise fail(f"the reward returned {given!r:.100}, which is no number") from None
        for name, value in {**parts_of(reward), "": reward}.items():
            if not abs(value) <= LARGEST_REWARD:  # nor NaN
                raise fail(f"the reward{name and f' {name}'} is {value}")
        return reward

    async def _call(self, row: Row, completion: Completion, timeout: asyncio.Timeout) -> Any:
        reward, running = self._reward, asyncio.get_running_loop()
        is_coroutine = inspect.iscoroutinefunction(reward)
        if not is_coroutine:
            await self._threads.turn()  # the wait for a thread does not count
        async with timeout:
            timeout.reschedule(running.time() + self._limit_s)
            if is_coroutine:
                return await reward(row, completion)
            given = await self._threads.call(lambda: reward(row, completion))
            return await given if inspect.isawaitable(given) else given


async def score_all(
    scoring: Scoring, rows: Sequence[Row], answers: Sequence[Sequence[Completion]]
) -> list[list[float]]:
    """Return the reward of each answer to each row.

    Raises:
        ConfigError: a reward failed.
    """

    async def score(row: Row, answer: Completion) -> float:
        return await scoring.score(row, answer, ConfigError)

    return [
        list(await asyncio.gather(*(score(row, answer) for answer in group)))
        for row, group in zip(rows, answers, strict=True)
    ]


def check_scoring(
    reward: Reward | None, environment: Environment | None, config: LoopConfig
) -> None:
    """Refuse what cannot be called with two arguments, and `reward_processes` where no process can
    compute the reward.

    Raises:
        ConfigError: names the function.
    """
    if (reward is None) == (environment is None):
        raise ConfigError("a loop takes either a reward or an environment")
    function, takes = (
        (environment, "(row, sample)") if reward is None else (reward, "(row, completion)")
    )
    if isinstance(function, list | tuple):
        raise ConfigError(
            "a loop takes one reward; for the weighted sum of several: "
            "reward=trl_reward(first, second, weights=[1.0, 0.5]), from splice.rl"
        )
    if not callable(function):
        raise ConfigError("the reward or environment is no function")
    _check_signature(function, takes, has_reward=reward is not None)
    if config.reward_processes and (reward is None or inspect.iscoroutinefunction(reward)):
        what = "an environment" if reward is None else "a coroutine"
        raise ConfigError(
            f"reward_processes is for rewards that are plain functions, and {what} runs in the "
            "loop; leave reward_processes out"
        )


def _check_signature(function: Callable[..., Any], takes: str, *, has_reward: bool) -> None:
    try:
        # Of the function that is called, not of one that it wraps.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        hint = "; functions with TRL's arguments go through trl_reward" if has_reward else ""
        raise ConfigError(f"{name}{signature} is called with {takes}: {error}{hint}") from None


@contextlib.contextmanager
def users_code(
    what: str,
    fail: Fail,
    timeout: asyncio.Timeout,
    late: Callable[[], str],
    *,
    passes: tuple[type[Exception], ...],
) -> Iterator[None]:
    """Turn any exception of a user's function into the failure of one sample.

    Args:
        late: says that the timeout has passed.
        passes: exceptions that are not the function's.
    """
    try:
        yield
    except passes:
        raise
    except Exception as error:  # a user's function may raise anything
        raise fail(
            late()
            if timeout.expired() or isinstance(error, RewardLate)
            else f"{what} {error}"
            if isinstance(error, RewardFailed)
            else f"{what} raised {type(error).__name__}: {error}"
        ) from error
    except (asyncio.CancelledError, SystemExit) as error:
        task = asyncio.current_task()
        is_cancelled = isinstance(error, asyncio.CancelledError)
        if is_cancelled and task is not None and task.cancelling() > 0:
            raise  # the end of this task, not of something that it waited for
        raise fail(f"{what} raised {type(error).__name__}") from error
