"""Blocking calls that cannot be interrupted, made on a thread that can be left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")


def call_aside(call: Callable[[], T], *, check: Callable[[], None], poll_s: float, name: str) -> T:
    """What `call` returns or raises, made on a daemon thread; what `check` raises leaves it there, to end by itself.

    Args:
        check: called every `poll_s` seconds meanwhile.
        name: the thread's.
    """
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(call())
        except Exception as error:  # noqa: BLE001  - whatever it is, the thread that waits raises it
            made.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    while not wait([made], poll_s).done:
        check()
    return made.result()
