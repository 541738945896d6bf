"""Holds back the engine's outputs, between its socket in vLLM's API process and the requests.

At a commit, the old weights' tokens must leave under the old name before the first token of the new
weights. While the engine waits for that, this process hands out a step's tokens: some 10 ms with 64
streams. With a gate the engine resumes immediately, and its new outputs wait here until the alias
has moved.

    gate.hold_at(answer)    once this future is done, nothing passes, not even the next output
    gate.hold()             from now on nothing passes
    gate.pass_on(n)         the next n outputs pass, then nothing
    gate.open()             everything passes; called on every path

One task of vLLM hands outputs out. It asks the engine client's `get_output_async` for each; the
gate replaces that method on the client object.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

DEATH_POLL_S = 0.2
ANSWER_TURNS = 6
"""Event loop turns from an answer's arrival until the task that awaits it is done.

The task itself needs two; the client's own tasks take the others.
"""


class OutputGate:
    """One per engine client, for the life of the process.

    Args:
        engine_core: `AsyncLLM.engine_core`.

    Raises:
        AttributeError: this client keeps its outputs elsewhere, so `waiting` would be wrong.
    """

    def __init__(self, engine_core: Any) -> None:
        self._queue: asyncio.Queue[Any] = engine_core.outputs_queue
        if not isinstance(self._queue, asyncio.Queue):
            raise AttributeError(
                f"the engine client keeps its outputs in a {type(self._queue).__name__}"
            )
        self._ask = engine_core.get_output_async
        self._left: int | None = None
        """Number of outputs that still pass. None: all."""
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
        """Whether the engine has ended; vLLM learns that from an output after those held here."""
        return bool(getattr(self._resources, "engine_dead", False))

    @property
    def is_sure(self) -> bool:
        """Whether every output passes here: the task has asked since the gate was put up.

        Before that, the task may wait at the client itself.
        """
        return self._was_asked

    @property
    def waiting(self) -> int:
        """Number of outputs that arrived and have not passed."""
        return self._queue.qsize() + self._has_one

    @property
    def left(self) -> int:
        """Number of outputs that passed but have not reached the requests' collectors.

        The collectors have an output once the task asks for the next.
        """
        return (self._left or 0) + (not self._is_asked)

    def hold_at(self, answer: asyncio.Future[Any]) -> None:
        """Hold every output after `answer`, unless the gate is opened before.

        The client may set an answer's future and queue an output in one turn of the loop. The
        output would then be seen first, so from now on every output is delayed by a few loop turns.
        """
        self._is_expecting = True
        answer.add_done_callback(lambda _: self.hold() if self._is_expecting else None)

    def hold(self) -> None:
        """Let nothing pass."""
        self._left, self._is_expecting = 0, False

    def pass_on(self, count: int) -> None:
        """Let this many outputs pass, in order, then nothing."""
        self._left = count
        self._changed.set()

    def open(self) -> None:
        """Let everything pass."""
        self._left, self._is_expecting = None, False
        self._changed.set()
