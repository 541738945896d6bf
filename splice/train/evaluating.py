"""Evaluates versions while the loop trains the next ones, and keeps the best one's checkpoint.

    step N -> its rows are sampled while step N + 1 trains -> evaluations.jsonl, kept.json

If the loop is killed during an evaluation, the next start makes it with the version that is then
served.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from orchestrator.storage import retention
from splice.client.batches import Completion
from splice.rl import Loop, Row, decisions, evaluations
from splice.rl.evaluations import REWARD, Evaluation
from splice.train.sections import EvalSection

log = logging.getLogger("splice.train")
Score = Callable[
    [Sequence[Row], Sequence[Sequence[Completion]]], Awaitable[Sequence[Sequence[float]]]
]


def is_overdue(run_dir: Path, section: EvalSection, *, done: int, steps: int) -> bool:
    """Whether the newest evaluation that should have been made was not.

    Args:
        done: steps that were made, of `steps`.
    """
    due = done if done >= steps else done - done % section.every
    made = evaluations.read(run_dir / decisions.LOOP_DIR)
    return not made or made[-1].step < due


class Evaluating:
    """Evaluations of a loop, as an async context manager within the loop's own.

    Args:
        rows: rows that are not trained on.
        score: the rewards of answers to rows, as `Loop.score`.
        steps: number of steps in the run.
    """

    def __init__(
        self,
        loop: Loop,
        run_dir: Path,
        section: EvalSection,
        rows: Sequence[Row],
        *,
        score: Score,
        steps: int,
        say: Callable[[str], None],
    ) -> None:
        self._loop, self._run_dir, self._section, self._rows = loop, run_dir, section, rows
        self._score, self._steps, self._say = score, steps, say
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Evaluating:
        done = self._loop.done
        if is_overdue(self._run_dir, self._section, done=done, steps=self._steps):
            await self._begin(done, self._loop.version)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._task is None:
            return
        if kind is not None:
            self._task.cancel()
            with contextlib.suppress(BaseException):  # the block's own error is what counts
                await self._task
            return
        await self._task

    async def after(self, step: int, version: int) -> None:
        """Begin an evaluation if this step has one. It waits for the one before."""
        if self._task is not None and self._task.done():
            self._task.result()
        if step % self._section.every == 0 or step == self._steps:
            await self._begin(step, version)

    async def _begin(self, step: int, version: int) -> None:
        if self._task is not None:
            await self._task
        self._keep(version)
        self._task = asyncio.create_task(self._evaluate(step, version))
        if self._section.waits:
            await self._task

    async def _evaluate(self, step: int, version: int) -> None:
        section = self._section
        more: dict[str, Any] = {"n": section.n, "temperature": section.temperature}
        more |= {} if section.max_tokens is None else {"max_tokens": section.max_tokens}
        answers = await self._loop.sample(self._rows, **more)
        rewards = await self._score(self._rows, answers)
        found = metrics_of(section, rewards, answers, version=version)
        evaluations.add(
            self._run_dir / decisions.LOOP_DIR,
            Evaluation(step=step, version=version, metrics=found),
        )
        self._keep()
        self._loop.note(step, **found)
        said = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
        self._say(f"evaluation after step {step}: {said}")

    def _keep(self, *evaluated: int) -> None:
        """Keep the best version, and those that are being evaluated."""
        if self._section.keep_best:
            best = evaluations.best(self._run_dir)
            retention.keep(self._run_dir, [*evaluated, *([best.version] if best else [])])


def metrics_of(
    section: EvalSection,
    rewards: Sequence[Sequence[float]],
    answers: Sequence[Sequence[Completion]],
    *,
    version: int,
) -> dict[str, float]:
    """Return what an evaluation found.

    Args:
        rewards: of `n` answers to each row.
        version: the version that was to be evaluated.
    """
    found = {REWARD: fmean(fmean(group) for group in rewards)}
    if section.n > 1:
        found[f"eval_best_of_{section.n}"] = fmean(max(group) for group in rewards)
    for k in section.pass_at:
        found[f"eval_pass_at_{k}"] = fmean(
            pass_at(k, len(group), sum(reward >= section.pass_reward for reward in group))
            for group in rewards
        )
    late = [max(answer.versions, default=version) > version for each in answers for answer in each]
    if any(late):
        found["eval_later"] = fmean(late)
    return found


def pass_at(k: int, n: int, passed: int) -> float:
    """Return the chance that one of k answers passes, without bias, if `passed` of n did."""
    return 1 - math.comb(n - passed, k) / math.comb(n, k)
