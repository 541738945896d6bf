"""Whose turn it is: old snapshots are served again one at a time (`TinkerConfig.old_snapshots`).

    sample of snapshot M -> waits for its turn -> M is served -> vLLM answers -> leaves
    publication          -> waits for its turn -> publishes   -> leaves

Samples of the served snapshot run together. Another one waits until they have ended, and then goes
first. So no version changes under a sample, and nobody waits for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator

from splice.tinker.books import Books

PUBLICATION = -1
"""Whoever publishes, in the place of a snapshot."""


class Snapshots:
    """The turns, on the event loop.

    Args:
        serve_again: has a snapshot served; runs on a thread.
    """

    def __init__(self, books: Books, serve_again: Callable[[int], None]) -> None:
        self._books, self._serve_again = books, serve_again
        self._loop = asyncio.get_running_loop()
        self._users = 0
        self._is_publishing = False
        """Whether the one user is a publication, during which no sample may start."""
        self._waiting: OrderedDict[int, list[asyncio.Future[None]]] = OrderedDict()
        self._change: asyncio.Task[None] | None = None
        """Whoever waited longest gets its turn."""

    @contextlib.asynccontextmanager
    async def turn(self, snapshot: int) -> AsyncIterator[int]:
        """Wait for the snapshot; in the block it stays served. Yields its version, as of `name@`.

        Raises:
            SpliceError: it cannot be served again.
        """
        await self._enter(snapshot)
        try:
            yield int(self._books.fact("served")["version"])
        finally:
            self._leave()

    @contextlib.contextmanager
    def publishing(self) -> Iterator[None]:
        """Publish in the block, on another thread: no sample runs meanwhile."""
        asyncio.run_coroutine_threadsafe(self._enter(PUBLICATION), self._loop).result()
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._leave)

    async def _enter(self, snapshot: int) -> None:
        is_free = not (self._waiting or self._change or self._is_publishing)
        if is_free and snapshot == self._books.served_snapshot():
            self._users += 1
            return
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiting.setdefault(snapshot, []).append(waiter)
        self._next()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._leave()
            raise
        finally:
            del waiter  # its error's traceback holds this frame

    def _leave(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._is_publishing = False
        self._next()

    def _next(self) -> None:
        if self._users == 0 and self._waiting and self._change is None:
            self._change = asyncio.ensure_future(
                self._give_turn(*self._waiting.popitem(last=False))
            )

    async def _give_turn(self, snapshot: int, waiters: list[asyncio.Future[None]]) -> None:
        try:
            if snapshot not in (PUBLICATION, self._books.served_snapshot()):
                await asyncio.to_thread(self._serve_again, snapshot)
        except Exception as error:  # noqa: BLE001  - each waiter raises it
            self._answer(waiters, snapshot, error)
        else:
            self._answer(waiters, snapshot, None)
        finally:
            self._change = None
        self._next()

    def _answer(
        self, waiters: list[asyncio.Future[None]], snapshot: int, error: Exception | None
    ) -> None:
        """Let the waiters in, or have them raise the error. Empties the list: the error's traceback
        holds the frame that has it."""
        while waiters:
            waiter = waiters.pop(0)
            if waiter.done():  # cancelled
                continue
            if error is None:
                self._users += 1
                self._is_publishing = snapshot == PUBLICATION
                waiter.set_result(None)
            else:
                waiter.set_exception(error)
