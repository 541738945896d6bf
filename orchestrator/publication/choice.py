"""Whether an update travels as whole tensors or as changed elements. Pure, but for the rates kept.

Whole tensors take their bytes over the link's rate. Changed elements take the coding at both ends,
and then fewer bytes. Over a fast link the coding already takes longer, so nothing changes there.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Setting = Literal["auto", "tensors", "elements"]
LEAST_S = 1.0
"""An update that takes less time as whole tensors stays as it is."""
GAIN = 0.8
"""Changed elements must take at most this share of the time, or of the bytes."""
FIRST_CODING = 5e10
"""Bytes a second assumed before the first coding: optimistic, so that it is measured once."""
FIRST_SHARE = 0.25
"""Encoded bytes for each byte of whole tensors, assumed before the first coding."""
KEPT = 5


@dataclass(slots=True)
class Rates:
    """What the last publications took. One slow transfer decides nothing."""

    _link: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _coding: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _share: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))

    def kept(self) -> dict[str, list[float]]:
        """All of it, for a journal."""
        rates = {"link": self._link, "coding": self._coding, "share": self._share}
        return {name: list(values) for name, values in rates.items()}

    def restore(self, kept: Mapping[str, Sequence[float]]) -> None:
        """Continue with what another orchestrator measured."""
        self._link.extend(kept.get("link", ()))
        self._coding.extend(kept.get("coding", ()))
        self._share.extend(kept.get("share", ()))

    def sent(self, nbytes: int, seconds: float) -> None:
        """Note a transfer of whole tensors, until the replicas have what they brought."""
        self._link.append(nbytes / max(seconds, 1e-6))

    def coded(self, nbytes: int, encoded_bytes: int, seconds: float) -> None:
        """Note changed elements of tensors of `nbytes`: encoding and transfer, to the same end."""
        travel_s = encoded_bytes / self.link if self.link else 0.0
        self._coding.append(nbytes / max(seconds - travel_s, 1e-6))
        self._share.append(encoded_bytes / max(nbytes, 1))

    @property
    def best(self) -> float | None:
        """The best rate of a few, in bytes a second."""
        return max(self._link, default=None)

    @property
    def link(self) -> float | None:
        """Bytes a second from the trainer to the replicas: the best of a few, of which the first
        warms up. None: not measured yet."""
        return self.best if len(self._link) > 1 else None

    @property
    def coding(self) -> float:
        """Bytes of whole tensors a second, at both ends."""
        return statistics.median(self._coding) if self._coding else FIRST_CODING

    @property
    def share(self) -> float:
        """Encoded bytes for each byte of whole tensors."""
        return statistics.median(self._share) if self._share else FIRST_SHARE


@dataclass(frozen=True, slots=True)
class Choice:
    """What to send, and why."""

    elements: bool
    why: str


def choose(setting: Setting, nbytes: int, rates: Rates) -> Choice:
    """Choose for an update that takes `nbytes` as whole tensors, and may be either."""
    if setting != "auto":
        return Choice(setting == "elements", f"publication.send is {setting!r}")
    if rates.link is None:
        return Choice(False, "the link's rate is not measured yet")
    whole_s = nbytes / rates.link
    if whole_s < LEAST_S:
        return Choice(False, f"whole tensors take {whole_s:.2g} s")
    elements_s = nbytes / rates.coding + rates.share * whole_s
    why = f"whole tensors would take {whole_s:.3g} s, changed elements {elements_s:.3g} s"
    return Choice(elements_s < GAIN * whole_s, why)


def remembers(setting: Setting, nbytes: int, rates: Rates) -> bool:
    """Whether the trainer keeps what it sends, for a later update of changed elements."""
    if setting == "auto":  # after the first transfer at the earliest: the next one measures too
        return rates.best is not None and nbytes / rates.best >= LEAST_S
    return setting == "elements"
