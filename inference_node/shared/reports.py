"""What each worker reports to the API process: plain data, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

NAMES_SHOWN = 5
MAX_REFUSALS = 4
"""Recording stops after this many tensors whose loader raised."""
PartKey = tuple[int, tuple[int, ...], tuple[int, ...]]
"""First index, size and index strides: which elements of the HF tensor a part has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """One worker's findings about a manifest; plain data that travels to the API process."""

    loaded: dict[str, list[tuple[int, tuple[int, ...], tuple[int, ...]]]]
    """HF name -> (first index, size, index strides) of the parts that this worker takes."""
    refused: dict[str, str]
    uncovered: dict[str, str]
    """"module.param" -> what is missing."""
    lossy: dict[str, str]
    """HF name -> the cast that would change its values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDigest:
    """Digest of one region on one worker; `key` distinguishes replicas from shards."""

    key: PartKey
    numel: int
    digest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDigests:
    """One worker's parts by HF name, and tensors that it could not read back."""

    parts: dict[str, list[PartDigest]]
    unverified: dict[str, str] = field(default_factory=dict)
    arrived: Sequence[int] | None = None
    """Digests taken on arrival, in the order of `Arrivals`. None: there are none."""


def some(items: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    shown = ", ".join(items[:NAMES_SHOWN])
    return shown if len(items) <= NAMES_SHOWN else f"{shown} and {len(items) - NAMES_SHOWN} more"
