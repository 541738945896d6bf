"""Points at which a process stops until the nemesis has done its work there.

On stdin: `arm COUNT POINT` (the COUNTth time that it is reached), `disarm`, `go`, and what the
process adds. On stdout: `reached POINT`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

HELD_S = 3.0
"""At most; then the process continues by itself."""


class Traps:
    """Listens on a thread; ends the process when its parent is gone."""

    def __init__(self, more: dict[str, Callable[[list[str]], None]] | None = None) -> None:
        self._lock, self._go = threading.Lock(), threading.Event()
        self._more = {} if more is None else more  # filled later on, too
        self._point, self._left = "", 0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            word, *rest = line.split()
            if word == "arm":
                with self._lock:
                    self._go.clear()
                    self._left, self._point = int(rest[0]), " ".join(rest[1:])
            elif word == "disarm":
                self._point = ""
            elif word == "go":
                self._go.set()
            else:
                self._more[word](rest)
        os._exit(9)

    def reach(self, point: str) -> None:
        """Wait here if this point is armed."""
        with self._lock:
            if point != self._point:
                return
            self._left -= 1
            if self._left > 0:
                return
            self._point = ""
        os.write(1, f"reached {point}\n".encode())
        self._go.wait(HELD_S)
