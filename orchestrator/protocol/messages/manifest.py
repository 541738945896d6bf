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
        """Return the manifest of only these tensors, in this order."""
        return Manifest(tensors=tuple(self.tensors[i] for i in indices))


def _check_indices(indices: Sequence[int], *, count: int | None, field: str) -> None:
    if not indices or list(indices) != sorted(set(indices)) or indices[0] < 0:
        raise ValueError(
            f"{field} must be ascending indices into the manifest's tensors, at least one; "
            f"got {list(indices[:5])}..."
        )
    if count is not None and indices[-1] >= count:
        raise ValueError(f"{field} has index {indices[-1]}, but the manifest has {count} tensors")


class Fp8Group(Message):
    """HF matrices that a server keeps in one FP8 parameter, such as q, k and v, or an expert's gate
    and up. Each is sent as e4m3 and followed by its scale."""

    kind: Literal["per_tensor", "per_channel", "per_block"]
    """per_tensor: all matrices of the group share one scale. per_channel: each row has its own.
    per_block: each block of 128 x 128 has its own."""
    tensors: tuple[int, ...] = Field(min_length=1)
    """Ascending indices into the trainer's manifest."""


class Fp8Weights(Message):
    """What an FP8 server holds of a manifest. Tensors in no group stay as the trainer has them."""

    groups: Annotated[tuple[Fp8Group, ...], Field(fail_fast=True)] = Field(min_length=1)

    @model_validator(mode="after")
    def _groups_are_apart(self) -> Fp8Weights:
        indices = [i for group in self.groups for i in group.tensors]
        if len(set(indices)) != len(indices):
            raise ValueError("a tensor may be in one group of FP8 weights only")
        return self


FP8_BLOCK = 128
"""Rows and columns of a block that has its own scale."""


def fp8_places(manifest: Manifest, fp8: Fp8Weights | None) -> list[tuple[int, ...]]:
    """For each tensor of the trainer's manifest: the indices of what is sent for it. Pure.

    One index: the tensor. Two: its e4m3 weight and, after it, the scale.
    """
    quantised = {i for group in fp8.groups for i in group.tensors} if fp8 is not None else set()
    places, at = [], 0
    for index in range(len(manifest.tensors)):
        count = 2 if index in quantised else 1
        places.append(tuple(range(at, at + count)))
        at += count
    return places


def fp8_manifest(manifest: Manifest, fp8: Fp8Weights | None) -> Manifest:
    """The manifest of what is sent: FP8 weights and their scales instead of the matrices. Pure.

    Raises:
        ValueError: a group has a tensor that is not a matrix of the manifest.
    """
    if fp8 is None:
        return manifest
    kinds = {i: group.kind for group in fp8.groups for i in group.tensors}
    sent: list[TensorSpec] = []
    for index, spec in enumerate(manifest.tensors):
        kind = kinds.pop(index, None)
        sent += [spec] if kind is None else _fp8_specs(spec, kind)
    if kinds:
        raise ValueError(f"FP8 groups have indices that the manifest lacks: {sorted(kinds)[:5]}")
    changed = manifest.changed
    if changed is not None:
        places = fp8_places(manifest, fp8)
        changed = tuple(place for index in changed for place in places[index])
    return Manifest(tensors=tuple(sent), changed=changed)


def _fp8_specs(spec: TensorSpec, kind: str) -> list[TensorSpec]:
    if len(spec.shape) != 2 or 0 in spec.shape:
        raise ValueError(f"{spec.name} has shape {spec.shape}; only matrices are sent as FP8")
    height, width = spec.shape
    shape = {
        "per_tensor": (1,),
        "per_channel": (height, 1),
        "per_block": (-(-height // FP8_BLOCK), -(-width // FP8_BLOCK)),
    }[kind]
    return [
        TensorSpec(name=spec.name, dtype="float8_e4m3fn", shape=spec.shape),
        TensorSpec(name=fp8_scale(spec.name, kind), dtype="float32", shape=shape),
    ]


def fp8_scale(name: str, kind: str) -> str:
    """The name of a weight's scale."""
    return name + ("_scale_inv" if kind == "per_block" else "_scale")


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
    """How the workers of a replica reach the trainer's ranks in their transfer group.

    The trainer's ranks that send are ranks 0 to senders - 1. The workers' ranks follow.
    """

    transport: Transport
    host: str
    port: int = 0
    """tcp: the port that this sender listens on. nccl: 0."""
    secret: bytes = Field(default=b"", max_length=32, repr=False)
    """tcp: 32 random bytes for this rendezvous, which both ends prove to have. nccl: empty."""
    nccl_unique_id: bytes | None = Field(default=None, repr=False)
    """nccl: the 128 bytes of ncclGetUniqueId. tcp: None."""
    world_size: int = Field(ge=2)
    """Senders + workers of this replica."""
    senders: int = Field(default=1, ge=1)
    """Trainer ranks in the group."""
    others: tuple[Rendezvous, ...] = ()
    """tcp: where senders 1, 2 and so on listen. nccl: empty."""
