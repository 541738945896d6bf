"""Calls that block and cannot be interrupted, on a thread that can be abandoned."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")


def call_aside(call: Callable[[], T], *, check: Callable[[], None], poll_s: float, name: str) -> T:
    """Run `call` on a daemon thread; return or raise what it does. If `check` raises, abandon it.

    Args:
        check: called every `poll_s` seconds during the call.
        name: the thread's name.
    """
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(call())
        except Exception as error:  # noqa: BLE001  - the waiting thread raises it
            made.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    while not wait([made], poll_s).done:
        check()
    return made.result()
