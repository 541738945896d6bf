"""A way to publish that failed again and again rests for some publications."""

from __future__ import annotations

from dataclasses import dataclass

MOST_DOUBLINGS = 6


@dataclass(slots=True)
class Rests:
    """One failure may be chance. After more in succession it rests, each time for twice as many
    publications."""

    failures: int = 0
    """In succession."""
    _left: int = 0

    def failed(self) -> None:
        """Note a failure."""
        self.failures += 1
        self._left = 2 ** min(self.failures - 1, MOST_DOUBLINGS) if self.failures > 1 else 0

    def succeeded(self) -> None:
        """Note a success."""
        self.failures = 0

    def take(self) -> bool:
        """Whether this publication must do without it."""
        rests, self._left = self._left > 0, max(0, self._left - 1)
        return rests
