"""What fits into a GPU's memory: a measured memory model, without tensors.

    peak(tokens) = fixed + per_token * tokens, of four kinds of pass: forward and backward with
    every activation kept, the same with every layer run again, this with the layers' inputs in host
    memory, and forward only

A layer whose activations are recomputed keeps its input only. So the peak falls in a line with the
number of such layers, and `share` finds the fewest with which a pack fits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

LEAST_TOKENS, MOST_TOKENS, STEP = 256, 65_536, 256
FILLING_TOKENS = 4096
"""Tokens of a pack that keep a GPU busy. A smaller one costs more time than recomputation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Peak bytes of a forward and backward pass, over what is held between them."""

    fixed_bytes: float
    bytes_per_token: float

    def peak_bytes(self, tokens: int) -> float:
        """Return the peak bytes of a pack with this many tokens."""
        return self.fixed_bytes + self.bytes_per_token * tokens

    def __str__(self) -> str:
        return f"{self.fixed_bytes / 1e9:.2f} GB + {self.bytes_per_token / 1e3:,.1f} KB a token"


def fit(samples: Sequence[tuple[int, int]]) -> MemoryModel:
    """Fit a line through (tokens, peak bytes) by least squares.

    If the fixed part is negative, or the peaks do not grow with the tokens, the fixed part is 0 and
    the slope covers every sample. A tiny model's peaks are mostly workspaces.

    Raises:
        ValueError: fewer than two different sizes.
    """
    if len({tokens for tokens, _ in samples}) < 2:
        raise ValueError(f"a memory model needs probes of two sizes at least, got {list(samples)}")
    mean_tokens = sum(t for t, _ in samples) / len(samples)
    mean_bytes = sum(b for _, b in samples) / len(samples)
    slope = sum((t - mean_tokens) * (b - mean_bytes) for t, b in samples) / sum(
        (t - mean_tokens) ** 2 for t, _ in samples
    )
    fixed = mean_bytes - slope * mean_tokens
    if slope <= 0 or fixed < 0:
        return MemoryModel(fixed_bytes=0.0, bytes_per_token=max(b / t for t, b in samples))
    return MemoryModel(fixed_bytes=fixed, bytes_per_token=slope)


def choose(model: MemoryModel, *, room_bytes: float) -> int:
    """The most tokens that fit, a multiple of `STEP`, at most `MOST_TOKENS`; 0 where not even
    `LEAST_TOKENS` do."""
    tokens = min(longest(model, room_bytes=room_bytes), MOST_TOKENS) // STEP * STEP
    return tokens if tokens >= LEAST_TOKENS else 0


def longest(model: MemoryModel, *, room_bytes: float) -> int:
    """Tokens of the longest sequence that fits, in its own pack."""
    return max(0, math.floor((room_bytes - model.fixed_bytes) / model.bytes_per_token))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """One rank's memory. `kept` and `recomputed` are the two ends; one of them may be ruled out, or
    both: then `offloaded` is the only way."""

    kept: MemoryModel | None
    """Of a pack whose activations all stay until the backward pass."""
    recomputed: MemoryModel | None
    """Of a pack whose layers all run again in the backward pass."""
    scored: MemoryModel
    """Of a pack without a backward pass."""
    room_bytes: float
    margin_bytes: float
    """What packs leave free, and a long sequence may take."""
    offloaded: MemoryModel | None = None
    """Of a pack whose layers all run again, with their inputs in host memory. None: ruled out, or
    no sequence needs it."""
    host_tokens: int = 0
    """Most tokens of a pack whose layers' inputs fit into host memory; the same on all ranks."""

    @staticmethod
    def of(fields: Mapping[str, Any]) -> RankMemory:
        """From `dataclasses.asdict`."""
        lines = {n: MemoryModel(**v) for n, v in fields.items() if isinstance(v, Mapping)}
        return RankMemory(**{**fields, **lines})

    def share(self, tokens: int) -> float:
        """The smallest share of the layers to recompute so that a pack of `tokens` fits; 1 where
        none is enough."""
        if self.kept is None or self.recomputed is None:
            return float(self.kept is None)
        most, least = self.kept.peak_bytes(tokens), self.recomputed.peak_bytes(tokens)
        if most <= self.room_bytes or least >= most:
            return 0.0
        return min(1.0, (most - self.room_bytes) / (most - least))

    def offloads(self, tokens: int) -> bool:
        """Whether a pack of `tokens` needs its layers' inputs in host memory. They fit there."""
        if self.offloaded is None or tokens > self.host_tokens:
            return False
        return self.recomputed is None or self.recomputed.peak_bytes(tokens) > self.room_bytes

    @property
    def pack_tokens(self) -> int:
        """Tokens of a pack: what fits without recomputation, which is the fastest, unless that
        leaves the GPU idle. 0: nothing fits."""
        kept, recomputed, offloaded = (
            0 if model is None else choose(model, room_bytes=self.room_bytes)
            for model in (self.kept, self.recomputed, self.offloaded)
        )
        if self.kept is None:
            return max(recomputed, min(offloaded, self.host_tokens // STEP * STEP))
        return max(kept, min(FILLING_TOKENS, recomputed))

    @property
    def bundle_tokens(self) -> int:
        """Load of a bundle of long sequences that fits, in its own pack."""
        return self._longest(self.room_bytes)

    @property
    def longest_trained(self) -> int:
        """Tokens of the longest sequence that fits, in its own pack."""
        return self._longest(self.room_bytes + self.margin_bytes)

    @property
    def longest_without_offload(self) -> int:
        """The same, with the layers' inputs on the GPU."""
        return replace(self, offloaded=None).longest_trained

    def _longest(self, room_bytes: float) -> int:
        kept, recomputed, offloaded = (
            0 if model is None else longest(model, room_bytes=room_bytes)
            for model in (self.kept, self.recomputed, self.offloaded)
        )
        return max(kept, recomputed, min(offloaded, self.host_tokens))

    @property
    def longest_scored(self) -> int:
        """Tokens of the longest sequence that fits without a backward pass."""
        return longest(self.scored, room_bytes=self.room_bytes + self.margin_bytes)
