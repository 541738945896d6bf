"""Reports of a worker to the API process: plain data, without torch.

The reports travel as JSON. Lists of int64 travel in base64.
"""

from __future__ import annotations

import array
import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

NAMES_SHOWN = 5
MAX_REFUSALS = 4
"""Recording stops after this many tensors whose loader raised."""
PartKey = tuple[int, tuple[int, ...], tuple[int, ...]]
"""First index, size and index strides: which elements of the HF tensor a part has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """One worker's findings about a manifest."""

    loaded: dict[str, list[PartKey]]
    """HF name -> the parts that this worker takes."""
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

    def answer(self) -> dict[str, Any]:
        """The digests as JSON takes them."""
        rows = [
            [name, [[*p.key, p.numel, p.digest] for p in parts]]
            for name, parts in self.parts.items()
        ]
        arrived = None if self.arrived is None else packed(self.arrived)
        return {"parts": rows, "unverified": self.unverified, "arrived": arrived}

    @staticmethod
    def of(answer: dict[str, Any]) -> WorkerDigests:
        """The digests in what `answer` returned, after its travel."""
        return WorkerDigests(
            parts={
                name: [
                    PartDigest(key=hashable((first, size, strides)), numel=numel, digest=digest)
                    for first, size, strides, numel, digest in rows
                ]
                for name, rows in answer["parts"]
            },
            unverified=answer["unverified"],
            arrived=None if answer["arrived"] is None else unpacked(answer["arrived"]),
        )


def hashable(part: Sequence[Any]) -> PartKey:
    """The key of a part whose tuples have travelled as lists."""
    first, size, strides = part
    return int(first), tuple(size), tuple(strides)


def packed(values: Sequence[int]) -> str:
    """The int64 values in base64."""
    return base64.b64encode(array.array("q", values).tobytes()).decode()


def unpacked(text: str) -> array.array[int]:
    """The values that `packed` took."""
    return array.array("q", base64.b64decode(text))


def some(items: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    shown = ", ".join(items[:NAMES_SHOWN])
    return shown if len(items) <= NAMES_SHOWN else f"{shown} and {len(items) - NAMES_SHOWN} more"
