"""Threads for rewards that are plain functions.

A reward cannot be ended from outside. One that never returns keeps its place, but neither the
deadline of another one nor the end of the process waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable
from typing import Any

from orchestrator.errors import ErrorCode, SpliceError

LOOK_S = 1.0


class NoThread(SpliceError, RuntimeError):
    """Every thread is held by a reward that nobody waits for any more."""

    code = ErrorCode.BAD_INPUT
    remedy = "Let the reward end by itself, with its own timeout, then start the loop again."


class RewardThreads:
    """At most `most` calls at once, each on its own daemon thread.

    Args:
        patience_s: how long `turn` waits while no place can be expected.
    """

    def __init__(self, most: int, *, patience_s: float) -> None:
        self._most, self._free = most, asyncio.Semaphore(most)
        self._patience_s = patience_s
        self._overdue = 0
        """Calls that nobody waits for any more, and that have not returned."""

    async def turn(self) -> None:
        """Wait for a place; `call` uses it.

        Raises:
            NoThread: every place is held by a call that nobody waits for any more.
        """
        hopeless_since: float | None = None
        while True:
            now_s = asyncio.get_running_loop().time()
            if self._overdue < self._most:
                hopeless_since = None
            elif hopeless_since is None:
                hopeless_since = now_s
            elif now_s - hopeless_since > self._patience_s:
                raise NoThread(
                    f"no thread is free: {self._overdue} rewards exceeded reward_timeout_s and "
                    "have not returned (reward_threads)"
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(LOOK_S, self._patience_s)):
                    await self._free.acquire()
                    return

    async def call(self, function: Callable[[], Any]) -> Any:
        """Return what the function returns, called on a thread; the caller has a place."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        is_overdue = False

        def settle(result: Any, error: BaseException | None) -> None:
            self._free.release()
            self._overdue -= is_overdue
            if future.done():
                _close(result)
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def run() -> None:
            result: Any = None
            error: BaseException | None = None
            try:
                result = function()
            except StopIteration as stop:  # a future takes none
                error = RuntimeError(f"StopIteration: {stop}")
            except BaseException as caught:  # noqa: BLE001  - whoever awaits raises it
                error = caught
            try:
                loop.call_soon_threadsafe(settle, result, error)
            except RuntimeError:  # the loop has ended
                _close(result)
            finally:
                error = None  # its traceback holds this frame

        threading.Thread(target=run, name="splice-reward", daemon=True).start()
        try:
            return await future
        except asyncio.CancelledError:
            is_overdue = True
            self._overdue += 1
            raise


def _close(result: Any) -> None:
    """Nobody awaits a coroutine that a call returned too late."""
    if inspect.iscoroutine(result):
        result.close()
