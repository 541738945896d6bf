"""Live progress: a spinner with the current phase on a terminal, one line per phase elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from orchestrator.protocol.messages import Progress


class Display:
    """Shows phases as they begin, as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._started_s = time.monotonic()
        self._last = ""

    def phase(self, text: str) -> None:
        """Show a new phase, once."""
        if text == self._last:
            return
        self._last = text
        if self._status is not None:
            self._status.update(f"{self._elapsed()} {escape(text)}")
        else:
            self.done(escape(text))

    def done(self, text: str) -> None:
        """Print a line of markup."""
        self._console.print(f"{self._elapsed()} {text}", highlight=False)

    def on_progress(self, label: str, progress: Progress) -> None:
        """Show the phase of a job's progress message."""
        self.phase(f"{label}: {progress.phase}")

    def _elapsed(self) -> str:
        return f"[dim]{time.monotonic() - self._started_s:6.1f} s[/dim]"

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._status = self._console.status("starting")
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
