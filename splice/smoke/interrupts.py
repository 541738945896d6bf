"""Remembers Ctrl-C and SIGTERM, so that none is lost.

Python drops a KeyboardInterrupt raised in a destructor. `asyncio.run` turns one into a cancellation
that a task may swallow. So the handler also remembers the signal, and a run checks it after each
piece of work.
"""

from __future__ import annotations

import signal


class Interrupts:
    """Handlers of SIGINT and SIGTERM."""

    def __init__(self) -> None:
        self.received = False

    def install(self) -> None:
        """Install the handlers for the process. Call it on the main thread."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal was received."""
        if self.received:
            raise KeyboardInterrupt

    def _on_signal(self, *_: object) -> None:
        self.received = True
        raise KeyboardInterrupt
