"""What a publication sends and in which order: manifest, layout, and the way to the transfer
group."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from orchestrator.protocol.messages.base import Message, TensorSpec, Transport


class Manifest(Message):
    """What one publication sends: HF-named tensors in wire order. Computed once per model
    structure."""

    tensors: Annotated[tuple[TensorSpec, ...], Field(fail_fast=True)] = Field(min_length=1)
    changed: Annotated[tuple[int, ...], Field(fail_fast=True)] | None = None
    """Ascending indices of the tensors that training can change, which have adapters. None: all."""

    @model_validator(mode="after")
    def _changed_are_there(self) -> Manifest:
        if self.changed is not None:
            _check_indices(self.changed, count=len(self.tensors), field="changed")
        return self

    @model_validator(mode="after")
    def _names_are_unique(self) -> Manifest:
        names = [t.name for t in self.tensors]
        if len(set(names)) != len(names):
            twice = [name for name, count in Counter(names).most_common(3) if count > 1]
            raise ValueError(f"tensor names must be unique in a manifest; repeated: {twice}")
        return self

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes on the wire. Cached: 19,000 tensors take 5 ms, while generation is paused."""
        return sum(t.nbytes for t in self.tensors)

    def part(self, indices: Sequence[int]) -> Manifest:
        """Return the manifest of these tensors alone, in this order."""
        return Manifest(tensors=tuple(self.tensors[i] for i in indices))


def _check_indices(indices: Sequence[int], *, count: int | None, field: str) -> None:
    if not indices or list(indices) != sorted(set(indices)) or indices[0] < 0:
        raise ValueError(
            f"{field} must be ascending indices into the manifest's tensors, at least one; "
            f"got {list(indices[:5])}..."
        )
    if count is not None and indices[-1] >= count:
        raise ValueError(f"{field} has index {indices[-1]}, but the manifest has {count} tensors")


class WireChunk(Message):
    """Tensors that travel in one piece, laid end to end."""

    kind: Literal["live", "staged", "reload"]
    """live: received in place, into one live kernel tensor of the only worker.
    staged: received into a buffer, from which each worker copies its parts.
    reload: given to the model's own loaders."""
    tensors: tuple[int, ...] = Field(min_length=1)
    """Indices into the manifest."""


class WireLayout(Message):
    """The order in which a replica wants a manifest's bytes. Every tensor is in exactly one
    chunk."""

    chunks: tuple[WireChunk, ...] = Field(min_length=1)
    why_not_live: dict[str, str] = Field(default={})
    """Reason for the reload path -> an example tensor."""


class ManifestPart(Message):
    """What an update of changed tensors sends: those tensors, and all that share a layer with
    them."""

    tensors: tuple[int, ...]
    """Ascending indices into the manifest."""
    layout: WireLayout
    """Its indices count within the part."""

    @model_validator(mode="after")
    def _ascending(self) -> ManifestPart:
        _check_indices(self.tensors, count=None, field="tensors")
        return self


class Rendezvous(Message):
    """How the inference workers reach the trainer's transfer group.

    The trainer is rank 0; the workers' ranks start at 1.
    """

    transport: Transport
    host: str
    port: int = 0
    """tcp: the port that the trainer listens on. nccl: 0."""
    secret: bytes = Field(default=b"", max_length=32, repr=False)
    """tcp: 32 random bytes for this rendezvous, which both ends prove to have. nccl: empty."""
    nccl_unique_id: bytes | None = Field(default=None, repr=False)
    """nccl: the 128 bytes of ncclGetUniqueId. tcp: None."""
    world_size: int = Field(ge=2)
    """1 + workers of this replica."""
