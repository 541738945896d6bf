"""Benchmarks that start side by side and measure one at a time.

Starting a cluster takes minutes and measuring seconds. With SPLICE_BENCH_LOCK=FILE, benchmarks on
one host share a lock: all may start and stop together, and one measures while nothing else starts,
stops or measures. SPLICE_BENCH_KV_GB then leaves room for the other servers on the GPU. Without the
variable nothing is locked.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")
POLL_S = 0.05


def is_shared() -> bool:
    """Whether other benchmarks may run next to this one."""
    return "SPLICE_BENCH_LOCK" in os.environ


@contextmanager
def started(server: AbstractContextManager[T]) -> Iterator[T]:
    """Enter and leave the server next to others that start or stop; hold no lock in between.

    Raises:
        TimeoutError: as `alone`.
    """
    with _locked(fcntl.LOCK_SH):
        entered = server.__enter__()
    error: tuple[Any, Any, Any] = (None, None, None)
    try:
        yield entered
    except BaseException:
        error = sys.exc_info()
        raise
    finally:
        with ExitStack() as stack:
            with suppress(TimeoutError):  # it is stopped all the same
                stack.enter_context(_locked(fcntl.LOCK_SH))
            server.__exit__(*error)


@contextmanager
def alone() -> Iterator[None]:
    """Wait until nothing else starts, stops or measures, and keep it so for the block.

    Raises:
        TimeoutError: others did so for longer than SPLICE_BENCH_LOCK_S (3600) seconds.
    """
    with _locked(fcntl.LOCK_EX):
        yield


@contextmanager
def _locked(kind: int) -> Iterator[None]:
    path = os.environ.get("SPLICE_BENCH_LOCK")
    if path is None:
        yield
        return
    limit_s = float(os.environ.get("SPLICE_BENCH_LOCK_S", "3600"))
    deadline_s = time.monotonic() + limit_s
    with open(path, "a") as file:
        while True:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(
                        f"other benchmarks held {path} for {limit_s:.0f} s"
                    ) from None
                time.sleep(POLL_S)
        yield
