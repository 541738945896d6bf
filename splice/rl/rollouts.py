"""The rollouts of a loop's steps: which are admitted, and what becomes of each."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from orchestrator.errors import ConfigError, ErrorCode, SpliceError
from splice.client.batches import Completion
from splice.rl.asking import Asking, Context, Place, request_seed
from splice.rl.config import LoopConfig
from splice.rl.decisions import Order
from splice.rl.parts import as_reward
from splice.rl.sampler import RequestRefused, Row
from splice.rl.scoring import Scoring, users_code
from splice.rl.turns import Environment, Sample, Scored, Turn, scored, sequences_of

log = logging.getLogger("splice.rl")
T = TypeVar("T")


class SampleFailed(SpliceError, RuntimeError):
    """A reward or an environment raised, vLLM refused a request, or an answer did not come in
    time; names prompt and sample.

    Attributes:
        row: the prompt's row.
        group: number of its group.
        sample: number of the sample in the group.
    """

    code = ErrorCode.BAD_INPUT
    remedy = (
        "Correct the reward or the environment, or let the loop drop such samples "
        '(on_error = "drop").'
    )

    def __init__(self, message: str, *, row: Row, group: int, sample: int) -> None:
        super().__init__(message)
        self.row, self.group, self.sample = row, group, sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One answer with its reward, or what one role said in an environment.

    Attributes:
        group: number of its group, over the whole loop.
        sample: its place in the group.
        attempt: how often it was asked again.
        completion: the answer; with an environment, the last of `sequences`.
        spans: (version, number of tokens) of all sampled tokens, in order.
        sequences: those that train. One without an environment.
        turns: those of the environment, in order.
        name: of the role, as the environment names it.
        seed: of the request. None: without one, or of an environment.
    """

    row: Row
    group: int
    sample: int
    attempt: int
    completion: Completion
    spans: tuple[tuple[int, int], ...]
    reward: float
    sequences: tuple[Completion, ...]
    turns: tuple[Turn, ...] = ()
    name: str = ""
    seed: int | None = None

    @property
    def is_cut(self) -> bool:
        """Whether the limit of tokens cut the answer off."""
        return self.completion.finish_reason == "length"


Group = tuple[Rollout, ...]


class Rollouts:
    """Admits the steps' rollouts in order, and keeps them until their step trains."""

    def __init__(
        self,
        context: Context,
        prompts: Sequence[Row],
        *,
        scoring: Scoring | None,
        environment: Environment | None,
    ) -> None:
        self._config, self._log, self._meter = context.config, context.log, context.meter
        self._record, self._asking, self._prompts = context.record, Asking(context), prompts
        self._scoring, self._environment = scoring, environment
        config = self._config
        self.order = Order(
            len(prompts), seed=config.shuffle_seed, replacements=config.dynamic_sampling
        )
        self._tasks: dict[int, dict[int, asyncio.Task[Group]]] = {}
        """Step -> group -> its rollouts."""
        self._asked: dict[int, list[int]] = {}
        """Group -> the prompts that have had its place; all but the last were replaced."""
        self._last_drop: dict[int, str] = {}
        """Step -> why its newest dropped sample was."""
        self._in_flight = asyncio.Semaphore(self._config.max_in_flight)
        self._has_failed = asyncio.Event()
        self.go_on(group=context.past.groups, step=context.past.done)

    # ------------------------------------------------------------ admission

    def go_on(self, *, group: int, step: int) -> None:
        """Admit this group next, for the step after this one."""
        self._next_group, self._admitted = group, step

    def admit_for(self, number: int) -> None:
        """Ask for all rollouts that may use tokens of the version that step `number` trains on."""
        config = self._config
        last = number + config.max_staleness
        if config.steps is not None:
            last = min(last, config.steps)
        while self._admitted < last:
            self._admitted += 1
            groups = range(self._next_group, self._next_group + config.groups_per_step)
            self._next_group = groups.stop
            self._tasks[self._admitted] = {g: self._begin(self._admitted, g) for g in groups}

    def _begin(self, step: int, group: int) -> asyncio.Task[Group]:
        task = asyncio.create_task(self._group(step, group))
        task.add_done_callback(self._note_failure)
        return task

    async def _group(self, step: int, group: int) -> Group:
        """The group's rollouts, with another prompt while their rewards are all equal. It keeps its
        number, which no later step can have."""
        config, asked = self._config, self._asked.setdefault(group, [])
        while True:
            prompt, replaced = self.order.prompt(group, len(asked)), len(asked)
            asked.append(prompt)
            places = [
                Place(step=step, group=group, sample=sample, prompt=prompt, replaced=replaced)
                for sample in range(config.group_size)
            ]
            made = await _all_of(map(self._rollout, places))
            found = tuple(rollout for parts in made for rollout in parts)
            if replaced == config.dynamic_sampling or _has_signal(found, config):
                return found
            self._log.write("replaced", step=step, group=group, prompt=prompt)

    def _note_failure(self, task: asyncio.Task[Group]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._has_failed.set()

    def __contains__(self, number: int) -> bool:
        return number in self._tasks

    def __len__(self) -> int:
        return len(self._tasks)

    def _all_tasks(self) -> list[asyncio.Task[Group]]:
        return [task for step in self._tasks.values() for task in step.values()]

    async def cancel(self) -> None:
        """End all of them."""
        tasks = self._all_tasks()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._tasks.clear()

    async def of_step(self, number: int) -> tuple[Group, ...]:
        """Wait for the step's rollouts. A failure in any step's rollouts ends the wait.

        Raises:
            SampleFailed: a reward or an environment raised, a deadline passed or vLLM refused a
                request, and on_error is "stop".
            ConfigError: no rollout of the batch is left.
        """
        own = asyncio.ensure_future(asyncio.wait(list(self._tasks[number].values())))
        failure = asyncio.ensure_future(self._has_failed.wait())
        try:
            await asyncio.wait({own, failure}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            own.cancel()
            failure.cancel()
        for task in self._all_tasks():
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        groups = tuple(task.result() for task in self._tasks[number].values())
        if not any(groups):
            why = self._last_drop.get(number, "decisions.jsonl says why")
            raise ConfigError(f"every rollout of step {number} was dropped: {why}")
        return groups

    def take(self, number: int) -> dict[int, list[int]]:
        """Forget the step's rollouts. Returns the prompts of each group: first those that were
        replaced, then the one that trains."""
        self._last_drop.pop(number, None)
        return {group: self._asked.pop(group) for group in self._tasks.pop(number)}

    # ------------------------------------------------------------ one rollout

    async def _rollout(self, place: Place) -> Group:
        """Sample and score, again after a loss. Nothing: the sample was dropped."""
        try:
            made = await self._make(place)
        except SampleFailed as error:
            if self._config.on_error == "stop":
                raise
            log.warning("dropped: %s", error)
            why = self._last_drop[place.step] = str(error)[:1000]
            self._log.write("drop", **place.asked_for, **place.named, why=why)
            return ()
        for part, rollout in enumerate(made):
            self._record.sample(place.step, rollout, part)
        return made

    async def _make(self, place: Place) -> Group:
        row = self._row(place)
        if self._environment is not None:
            return await self._play(self._environment, row, place)
        turn = await self._answer(row, place)
        assert self._scoring is not None
        with self._meter.during("scoring"):
            fail = partial(_failure, row, place)
            reward = await self._scoring.score(row, turn.completion, fail)
        rollout = Rollout(
            row=row,
            **place.named,
            attempt=turn.attempt,
            completion=turn.completion,
            spans=turn.spans,
            reward=reward,
            sequences=(turn.completion,),
            seed=request_seed(self._config.sampling, place),
        )
        return (rollout,)

    def _row(self, place: Place) -> Row:
        try:
            row = self._prompts[place.prompt]
        except Exception as error:  # a user's data set may raise anything
            text = f"the prompt cannot be read ({type(error).__name__}: {error})"
            raise _failure({}, place, text) from error
        if not isinstance(row, Mapping):
            text = f"a prompt is a row, not {type(row).__name__}"
            raise _failure({"prompt": row}, place, text)
        return row

    async def _answer(self, row: Row, place: Place) -> Turn:
        lost: list[int] = []
        async with self._in_flight:
            try:
                async with asyncio.timeout(self._config.rollout_timeout_s):
                    return await self._asking.turn(row, place, turn=0, lost=lost)
            except RequestRefused as error:
                raise _failure(row, place, str(error)) from error
            except TimeoutError:
                text = f"no answer within {self._config.rollout_timeout_s:.0f} s"
                raise _failure(
                    row, place, f"{text} (rollout_timeout_s), {len(lost)} attempts lost"
                ) from None

    async def _play(self, environment: Environment, row: Row, place: Place) -> Group:
        lost: list[int] = []
        asking = Sample(
            partial(self._asking.turn, place=place, lost=lost),
            self.encode,
            partial(self._asking.given, place=place),
        )
        fail, timeout = partial(_failure, row, place), asyncio.timeout(None)

        def late() -> str:
            limit = f"{self._config.rollout_timeout_s:.0f} s (rollout_timeout_s)"
            return f"the rollout took more than {limit}, {len(lost)} attempts lost"

        try:
            with users_code("the environment", fail, timeout, late, passes=(ConfigError,)):
                async with self._in_flight, timeout:  # the wait for a place does not count
                    now_s = asyncio.get_running_loop().time()
                    timeout.reschedule(now_s + self._config.rollout_timeout_s)
                    with self._meter.during("scoring"):
                        parts = scored(await environment(row, asking), asking.turns)
        except RequestRefused as error:
            raise fail(str(error)) from error
        finally:
            asking.end()
        trained = [turn for part in parts for turn in part.turns]
        numbers = sorted(turn.number for turn in trained)
        self._log.write("turns", **place.named, trained=numbers)
        attempt = sum(turn.attempt for turn in trained)
        return tuple(_rollout_of(part, row, place, attempt=attempt) for part in parts)

    # ------------------------------------------------------------ for an evaluation

    async def sample(self, rows: Sequence[Row], n: int, **more: Any) -> list[list[Completion]]:
        """Answers that are not trained on."""

        async def one(row: Row) -> Completion:
            limit_s = self._config.rollout_timeout_s
            try:
                async with self._in_flight, asyncio.timeout(limit_s):
                    return (await self._asking.untrained(row, **more)).completion
            except TimeoutError:
                raise TimeoutError(
                    f"no answer within {limit_s:.0f} s (rollout_timeout_s)"
                ) from None

        return await _each_of(one, rows, n)

    async def play(
        self, rows: Sequence[Row], n: int, **more: Any
    ) -> list[list[tuple[Scored, ...]]]:
        """Rollouts in the environment that are not trained on."""
        environment = self._environment
        if environment is None:
            raise ConfigError("play() runs the loop's environment; this loop has a reward")

        async def ask(asked: Row, *, turn: int, **own: Any) -> Turn:
            answer = await self._asking.untrained(asked, **{**more, **own})
            return Turn(number=turn, attempt=0, completion=answer.completion, spans=answer.spans)

        def give(said: Completion, *, turn: int) -> Turn:
            return Turn(number=turn, attempt=0, completion=said, spans=())

        async def one(row: Row) -> tuple[Scored, ...]:
            asking = Sample(ask, self.encode, give)
            try:
                async with self._in_flight, asyncio.timeout(self._config.rollout_timeout_s):
                    result = await environment(row, asking)
            finally:
                asking.end()
            return scored(result, asking.turns, trains=False)

        return await _each_of(one, rows, n)

    async def encode(self, prompt: str | Row, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text, or of a row, as the server encodes them."""
        async with asyncio.timeout(self._config.rollout_timeout_s):
            return await self._asking.encode(prompt, add_special_tokens=add_special_tokens)


def _has_signal(group: Group, config: LoopConfig) -> bool:
    """Whether rewards differ within the group, for some role, and an answer is left to train on."""
    if config.overlong == "mask" and all(rollout.is_cut for rollout in group):
        return False
    rewards = {(rollout.name, rollout.reward) for rollout in group}
    return len(rewards) > len({rollout.name for rollout in group})


async def _each_of(
    one: Callable[[Row], Coroutine[Any, Any, T]], rows: Sequence[Row], n: int
) -> list[list[T]]:
    """`n` results for each row, all at once. The first failure ends all."""
    found = await _all_of(one(row) for row in rows for _ in range(n))
    return [found[at : at + n] for at in range(0, len(found), n)]


async def _all_of(asked: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all at once. The first failure ends all."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one) for one in asked]
    except BaseExceptionGroup as group:
        first = group.exceptions[0]  # one reason is enough for a caller
        raise first from first.__cause__
    return [task.result() for task in running]


def _failure(row: Row, place: Place, text: str) -> SampleFailed:
    asked = row.get("prompt", row.get("messages"))
    try:
        prompt = json.dumps(asked, default=str)[:300]
    except (TypeError, ValueError, RecursionError):
        prompt = f"{asked!r:.300}"
    where = f"prompt {place.prompt} (group {place.group}), sample {place.sample}"
    return SampleFailed(f"{text}; {where}: {prompt}", row=row, **place.named)


def _rollout_of(part: Scored, row: Row, place: Place, *, attempt: int) -> Rollout:
    """What an environment scored, as a rollout."""
    turns = tuple(sorted(part.turns, key=lambda turn: turn.number))
    sequences = sequences_of(turns)
    return Rollout(
        row=row,
        **place.named,
        attempt=attempt,
        completion=sequences[-1],
        spans=tuple(span for turn in turns for span in turn.spans),
        reward=as_reward(part.reward),
        sequences=sequences,
        turns=turns,
        name=part.name,
    )
