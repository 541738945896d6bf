"""Ctrl-C and SIGTERM that cannot get lost.

A KeyboardInterrupt is raised wherever the main thread happens to be: in a destructor Python prints and forgets it, and `asyncio.run`, where it has its own
handler, cancels a task that may swallow the cancellation. So a signal is remembered as well, and a run asks after each piece of work.
"""

from __future__ import annotations

import signal


class Interrupts:
    """Handlers of SIGINT and SIGTERM, from `install` on."""

    def __init__(self) -> None:
        self.received = False

    def install(self) -> None:
        """For the whole process; on the main thread."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def check(self) -> None:
        """Raises KeyboardInterrupt if a signal came, whatever became of the one raised then."""
        if self.received:
            raise KeyboardInterrupt

    def _on_signal(self, *_: object) -> None:
        self.received = True
        raise KeyboardInterrupt
