"""Holds back what the engine has made, between its socket in vLLM's API process and the requests.

At a commit the old weights' tokens have to leave under the old name before the first of the new ones does. Waiting for that with the engine standing
still costs as long as this process takes to hand out a step's tokens, some 10 ms with 64 streams. With a gate the engine goes on at once: what it
makes waits here until the alias has moved.

    gate.hold_at(answer)    once this future is done nothing passes, not even what came right behind it
    gate.hold()             from now on nothing passes
    gate.pass_on(n)         the next n outputs pass, then nothing
    gate.open()             everything passes; on every path

vLLM's one task that hands outputs out asks the engine client's `get_output_async` for each; the gate stands in its place on that client object.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

DEATH_POLL_S = 0.2
ANSWER_TURNS = 6
"""Turns of the event loop from an answer's arrival at the client until the task that awaits it is done: two, and some for the client's own."""


class OutputGate:
    """One per engine client, for the life of the process.

    Args:
        engine_core: `AsyncLLM.engine_core`.

    Raises:
        AttributeError: this client keeps its outputs otherwise (`waiting` would not be true).
    """

    def __init__(self, engine_core: Any) -> None:
        self._queue: asyncio.Queue[Any] = engine_core.outputs_queue
        if not isinstance(self._queue, asyncio.Queue):
            raise AttributeError(f"the engine client keeps its outputs in a {type(self._queue).__name__}")
        self._ask = engine_core.get_output_async
        self._left: int | None = None
        """How many pass yet; None: all."""
        self._is_asked = self._was_asked = self._has_one = self._is_expecting = False
        self._changed = asyncio.Event()
        self._resources = getattr(engine_core, "resources", None)
        engine_core.get_output_async = self._get

    async def _get(self) -> Any:
        self._is_asked = self._was_asked = True
        try:
            output = await self._ask()
            self._has_one = True
            for _ in range(ANSWER_TURNS if self._is_expecting else 0):
                await asyncio.sleep(0)
            while self._left == 0 and not self._is_dead():
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), DEATH_POLL_S)
            if self._left:
                self._left -= 1
            return output
        finally:
            self._is_asked = self._has_one = False

    def _is_dead(self) -> bool:
        """The engine has ended: vLLM hears of it behind what is held here."""
        return bool(getattr(self._resources, "engine_dead", False))

    @property
    def is_sure(self) -> bool:
        """Nothing goes past: the task has asked here since the gate was put up. (It may have been waiting at the client itself before.)"""
        return self._was_asked

    @property
    def waiting(self) -> int:
        """Outputs that have come and have not passed."""
        return self._queue.qsize() + self._has_one

    @property
    def left(self) -> int:
        """Of those that were to pass, how many the requests' collectors do not have yet: the task has them when it asks for more."""
        return (self._left or 0) + (not self._is_asked)

    def hold_at(self, answer: asyncio.Future[Any]) -> None:
        """Nothing passes that comes behind `answer`, unless the gate was opened before it came.

        The client may set an answer's future and queue an output in one turn of the loop, and the output would be the first to be seen: from
        now on each passes some turns late.
        """
        self._is_expecting = True
        answer.add_done_callback(lambda _: self.hold() if self._is_expecting else None)

    def hold(self) -> None:
        """Nothing more passes."""
        self._left, self._is_expecting = 0, False

    def pass_on(self, count: int) -> None:
        """So many more pass, in their order, then nothing."""
        self._left = count
        self._changed.set()

    def open(self) -> None:
        """Everything passes."""
        self._left, self._is_expecting = None, False
        self._changed.set()
