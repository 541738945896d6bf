"""Whether an update travels as whole tensors or as changed elements. Pure, but for the rates kept.

Whole tensors take their bytes over the link's rate. Changed elements take the encoding, and then
fewer bytes. Over a fast link the encoding alone takes longer, so nothing changes there.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

Setting = Literal["auto", "tensors", "elements"]
LEAST_S = 1.0
"""An update that takes less time as whole tensors stays as it is."""
GAIN = 0.8
"""Changed elements must take at most this share of the time, or of the bytes."""
FIRST_ENCODING = 5e10
"""Bytes a second assumed before the first encoding: optimistic, so that it is measured once."""
FIRST_SHARE = 0.25
"""Encoded bytes for each byte of whole tensors, assumed before the first encoding."""
KEPT = 5
LEAST_BYTES = 2**24
"""A smaller transfer says little about the link."""


@dataclass(slots=True)
class Rates:
    """What the last publications took. A median of a few: one slow transfer decides nothing."""

    _link: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _encoding: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _share: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))

    def sent(self, nbytes: int, seconds: float) -> None:
        """Note a transfer."""
        if nbytes >= LEAST_BYTES or not self._link:
            self._link.append(nbytes / max(seconds, 1e-6))

    def encoded(self, nbytes: int, encoded_bytes: int, seconds: float) -> None:
        """Note an encoding of whole tensors of `nbytes`."""
        self._encoding.append(nbytes / max(seconds, 1e-6))
        self._share.append(encoded_bytes / max(nbytes, 1))

    @property
    def link(self) -> float | None:
        """Bytes a second from the trainer to a replica; None: not measured yet."""
        return statistics.median(self._link) if self._link else None

    @property
    def encoding(self) -> float:
        """Bytes of whole tensors a second."""
        return statistics.median(self._encoding) if self._encoding else FIRST_ENCODING

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
    elements_s = nbytes / rates.encoding + rates.share * whole_s
    why = f"whole tensors would take {whole_s:.3g} s, changed elements {elements_s:.3g} s"
    return Choice(elements_s < GAIN * whole_s, why)


def remembers(setting: Setting, nbytes: int, rates: Rates) -> bool:
    """Whether the trainer keeps what it sends, for a later update of changed elements."""
    if setting == "auto" and rates.link is not None:
        return nbytes / rates.link >= LEAST_S
    return setting != "tensors"
