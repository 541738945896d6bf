"""Ends a join or a send on every rank, as soon as one rank fails or is told to abort.

    rank 0: abort -> signal.raise_ -> torch's store -> a thread of each other rank -> on_abort

A rank in a join or a send waits for workers, not for other ranks, and would not learn of it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

log = logging.getLogger("splice.trainer")
PREFIX = "splice-abort"
POLL_S = 0.05
"""Pause between two looks at the store."""
END_S = 2.0
"""Longest wait for a look at the store at the end of a watch. One that takes longer reports to
nobody."""


class AbortSignal:
    """What one rank raises, all ranks hear. Does nothing if there is only one rank."""

    def __init__(self) -> None:
        self._count = 0
        """Number of watches so far, the same on every rank."""
        self._lock = threading.Lock()
        self._store: Any = None
        """A separate connection: torch's can wait for long, and serves one thread at a time."""

    @contextlib.contextmanager
    def watching(self, on_abort: Callable[[str], None]) -> Iterator[None]:
        """Call `on_abort` with the first reason that any rank raises during the block.

        Every rank must enter the block, or none. If the block fails on one rank, that failure is
        the reason for the others.

        Args:
            on_abort: ends what the block waits for. A thread calls it, at most once.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            yield
            return
        with self._lock:
            self._count += 1
            if self._store is None:
                whole: Any = distributed_c10d._get_default_store()  # type: ignore[attr-defined]
                self._store = dist.PrefixStore(PREFIX, whole.clone())  # type: ignore[attr-defined]
            arguments = (self._store, str(self._count), ended := threading.Event(), on_abort)
        thread = threading.Thread(
            target=_watch, args=arguments, name="splice-abort-signal", daemon=True
        )
        thread.start()
        try:
            yield
        except BaseException as error:
            self.raise_(f"rank {dist.get_rank()} failed: {error}")
            raise
        finally:
            ended.set()
            thread.join(END_S)

    def raise_(self, reason: str) -> None:
        """End the block that this rank entered last, on all ranks. The first reason counts.

        Callable from any thread. A reason without such a block, or after its end, is heard by
        nobody.
        """
        with self._lock:
            store, key = self._store, str(self._count)
        if store is None:
            return
        try:
            store.compare_set(key, "", reason or "no reason given")
        except RuntimeError as error:  # rank 0 is gone, and with it the store
            log.warning("could not tell the other ranks to abort: %s", error)


def _watch(store: Any, key: str, ended: threading.Event, on_abort: Callable[[str], None]) -> None:
    while not ended.wait(POLL_S):
        try:
            reason = store.get(key).decode(errors="replace") if store.check([key]) else ""
        except RuntimeError as error:
            reason = f"the store of rank 0 does not answer ({error})"
        if reason and not ended.is_set():
            on_abort(reason)
            return
