"""Requests of a loop: each is asked again until its answer is whole and young enough."""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from splice.client.batches import Completion
from splice.rl import decisions
from splice.rl.balance import Meter
from splice.rl.config import LoopConfig, SamplingConfig
from splice.rl.record import Record
from splice.rl.sampler import Answer, RolloutLost, Row, Sampler
from splice.rl.turns import Turn

log = logging.getLogger("splice.rl")
T = TypeVar("T")
SAY_EVERY_S = 60.0
"""Least time between two log lines about lost requests that are not trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One sample's place in the loop, which it keeps however often it is asked again.

    Attributes:
        group: number of its group, over the whole loop.
        sample: its place in the group.
        prompt: index of the group's prompt.
        replaced: number of prompts that had the group's place before.
    """

    step: int
    group: int
    sample: int
    prompt: int
    replaced: int = 0

    @property
    def named(self) -> dict[str, Any]:
        """What every decision on it has."""
        return {"group": self.group, "sample": self.sample}

    @property
    def asked_for(self) -> dict[str, Any]:
        """What decisions on its admission add."""
        return {"step": self.step, "prompt": self.prompt}


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the parts of an entered loop share."""

    config: LoopConfig
    past: decisions.Past
    log: decisions.DecisionLog
    record: Record
    meter: Meter
    sampler: Sampler


class Asking:
    """Asks the replicas, and logs what is to be trained on."""

    def __init__(self, context: Context) -> None:
        self._sampler, self._sampling = context.sampler, context.config.sampling
        self._made, self._log, self._meter = context.past.made, context.log, context.meter
        self._has_said, self._silent_until_s = False, 0.0

    async def turn(
        self, asked: Row, place: Place, *, turn: int, lost: list[int], **more: Any
    ) -> Turn:
        """Ask until an answer comes whole and young enough.

        Args:
            lost: gets the number of a turn for each of its attempts that was lost.
        """
        more = {"seed": request_seed(self._sampling, place, turn), **more}
        for attempt in itertools.count():
            admitted = self._made.newest
            of: dict[str, Any] = {**place.named, "turn": turn, "attempt": attempt}
            self._log.write("admit", **place.asked_for, version=admitted, **of)
            try:
                answer = await self._once(asked, admitted, meter=self._meter, **more)
            except RolloutLost as error:
                self._log.write("lost", **of, why=str(error)[:1000])
                lost.append(turn)
            else:
                self._log.write("finish", **of, spans=answer.spans, replica=answer.replica)
                said, spans = answer.completion, answer.spans
                return Turn(number=turn, attempt=attempt, completion=said, spans=spans)
        raise AssertionError("unreachable")

    def given(self, said: Completion, place: Place, *, turn: int) -> Turn:
        """Log a turn whose answer nobody sampled."""
        of: dict[str, Any] = {**place.named, "turn": turn, "attempt": 0}
        self._log.write("admit", **place.asked_for, version=self._made.newest, **of)
        self._log.write("finish", **of, spans=[], replica="")
        return Turn(number=turn, attempt=0, completion=said, spans=())

    async def untrained(self, asked: Row, **more: Any) -> Answer:
        """Return an answer that is not trained on."""
        return await self._until_whole(lambda: self._once(asked, self._made.newest, **more))

    async def encode(self, prompt: str | Row, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text, or of a row, as the server encodes them."""
        row, add = {"prompt": prompt} if isinstance(prompt, str) else prompt, add_special_tokens
        return await self._until_whole(lambda: self._sampler.encode(row, add_special_tokens=add))

    async def _once(self, asked: Row, admitted: int, **more: Any) -> Answer:
        """A replica that was cut off may serve an old version for minutes. An answer that begins
        with the version of its admission, or a later one, keeps the bound."""
        answer = await self._sampler.sample(asked, self._sampling, **more)
        oldest = min((version for version, _ in answer.spans), default=admitted)
        if oldest < admitted:
            self._sampler.distrust(answer.replica)
            raise RolloutLost(
                f"{answer.replica} answered with version {oldest}, older than version {admitted}, "
                "with which the answer was admitted"
            )
        return answer

    async def _until_whole(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask again after a loss. An outage loses all that is in flight, again and again, so the
        log has one line until an answer comes, and at most one a minute."""
        while True:
            try:
                found = await ask()
            except RolloutLost as error:
                now_s = time.monotonic()
                if not self._has_said and now_s >= self._silent_until_s:
                    log.warning("requests are lost and asked again: %s", error)
                    self._has_said, self._silent_until_s = True, now_s + SAY_EVERY_S
            else:
                self._has_said = False
                return found


def request_seed(sampling: SamplingConfig, place: Place, turn: int = 0) -> int | None:
    """Return the seed of one request, or None."""
    if sampling.seed is None:
        return None
    named = f"{sampling.seed}/{place.group}/{place.sample}" + (f"/{turn}" if turn else "")
    named += f"+{place.replaced}" if place.replaced else ""
    return random.Random(named).getrandbits(31)
