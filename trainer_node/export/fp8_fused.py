"""Merges and quantises a chunk's FP8 weights in one go, on a GPU.

    plan(merger, batches, ...)    which chunks of a merging export can be filled so
    FusedFp8.measure()            find the largest magnitudes of all chunks, ahead of the fills
    FusedFp8.fill(chunk, out_B)   e4m3, scales and what is sent as it is, on the current stream

A scale of a group or a row needs all of it before the first value is rounded. What was found stays
valid until the weights change. So the pass that finds it runs after a step, before its save, and
not within a pause. Whoever changes weights calls `forget` first. Changes that torch counts
(`Tensor._version`) are noticed all the same.

It takes chunks whose tensors all come whole from this rank's parameters. Others (pieces of other
ranks, transposed sources, odd offsets) go through a bf16 scratch: see `fp8_export`.

Axes: B = bytes, T = tensors of a launch, S = slots of magnitudes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch

from orchestrator.protocol.messages import FP8_BLOCK
from trainer_node.adapters.rounding import Rounding
from trainer_node.export.fp8_export import Batch, Copy
from trainer_node.export.merger import AddressTable, Entries, Merger
from trainer_node.export.sources import Member
from weight_transfer.layout import VECTOR_BYTES

MAX_ALIGN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a matrix and its scales are in the chunk, and its first slot."""

    kind: str
    shape: tuple[int, ...]
    weight: int
    scales: int
    slot: int


@dataclass(slots=True, kw_only=True)
class _Launch:
    shape: Any
    """`fp8_fused_kernels.Shape`."""
    members: list[Member] = field(default_factory=list)
    places: list[_Place] = field(default_factory=list)
    vectors: bool = False

    @property
    def align(self) -> int:
        """Power of two, at most 16, that divides every row's place in the chunk."""
        bits = self.shape.columns | MAX_ALIGN
        for place in self.places:
            bits |= place.weight
        return bits & -bits

    def entries(self, rounding: Rounding) -> Entries:
        """See `merger.Launch`. Sets whether weights and matrices can be read in 16-byte pieces."""
        entries: Entries = []
        bits = 2 * (self.shape.columns | self.shape.row_stride | self.shape.group_stride)
        for m, p in zip(self.members, self.places, strict=True):
            w, a, b = m.addresses()
            bits |= w | a | b
            word = m.corner.word(rounding) if m.delta else 0
            entries.append((w, a, b, p.weight, p.scales, p.slot, word))
        self.vectors = bits % VECTOR_BYTES == 0
        return entries


@dataclass(slots=True, kw_only=True)
class _Chunk:
    launches: list[_Launch]
    slots: int
    table: AddressTable
    largest_S: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    """Bits of the largest magnitude of each group or row."""
    measured: tuple[Rounding, list[tuple[int, int]]] | None = None
    """Rounding and `table.versions` when `largest_S` was found. None: it is not found."""


def plan(
    merger: Merger,
    steps: Sequence[Sequence[Batch | Copy]],
    nbytes: Sequence[int],
    *,
    scale: float,
    rounding: Callable[[], Rounding],
    device: torch.device,
) -> FusedFp8 | None:
    """Plan the chunks that can be merged and quantised in one go; None if there are none.

    Args:
        merger: fills the scratch of every chunk without other ranks.
        steps: of each chunk, as `fp8_export` plans them.
        nbytes: of each chunk that is sent.
        scale: alpha / rank.
        rounding: returns the present rounding.
    """
    kernels = _kernels()
    if kernels is None:
        return None
    chunks, plain = dict[int, _Chunk](), dict[int, list[Member]]()
    for number, of_chunk in enumerate(steps):
        found = _plan_chunk(merger.members(number), of_chunk, kernels, rounding, device)
        if found is not None:
            chunks[number], plain[number] = found
    if not chunks:
        return None
    return FusedFp8(
        chunks, plain, nbytes, scale=scale, rounding=rounding, device=device, kernels=kernels
    )


def _kernels() -> ModuleType | None:
    try:
        from trainer_node.export import fp8_fused_kernels
    except ImportError:
        return None
    return fp8_fused_kernels


def _plan_chunk(
    members: Sequence[Member],
    steps: Sequence[Batch | Copy],
    kernels: ModuleType,
    rounding: Callable[[], Rounding],
    device: torch.device,
) -> tuple[_Chunk, list[Member]] | None:
    """The launches of a chunk, and the members that are sent as they are."""
    batches = [step for step in steps if isinstance(step, Batch)]
    places: dict[int, _Place] = {}
    slots = 0
    for batch in batches:
        slots = _place(batch, slots, places)
    copies = [step for step in steps if isinstance(step, Copy)]
    launches: dict[Any, _Launch] = {}
    plain, count = list[Member](), 0
    for member in members:
        place = places.get(member.offset)
        if place is None:
            moved = _moved(member, copies)
            if moved is None:
                return None
            plain.append(moved)
            continue
        shape = _shape_of(member, place, kernels)
        if shape is None or place.scales % 4:
            return None
        launch = launches.setdefault(shape, _Launch(shape=shape))
        launch.members.append(member)
        launch.places.append(place)
        count += 1
    if not batches or count != len(places):
        return None
    each = list(launches.values())
    table = AddressTable(each, rounding, device)
    return _Chunk(launches=each, slots=slots, table=table), plain


def _place(batch: Batch, slots: int, places: dict[int, _Place]) -> int:
    """Add the batch's matrices by their offset in the scratch; returns the next free slot."""
    source, weight, scales = batch.source, batch.target, batch.scales
    for _ in range(batch.count):
        for height, width in batch.shapes:
            places[source] = _Place(
                kind=batch.kind, shape=(height, width), weight=weight, scales=scales, slot=slots
            )
            source, weight = source + 2 * height * width, weight + height * width
            if batch.kind == "per_tensor":
                scales += 4
            elif batch.kind == "per_channel":
                scales, slots = scales + 4 * height, slots + height
            else:
                scales += 4 * -(-height // FP8_BLOCK) * -(-width // FP8_BLOCK)
        slots += batch.kind == "per_tensor"
    return slots


def _moved(member: Member, copies: Sequence[Copy]) -> Member | None:
    """A member that is sent as it is, at its place in the chunk."""
    for copy in copies:
        if copy.source <= member.offset < copy.source + copy.nbytes:
            return replace(member, offset=member.offset - copy.source + copy.target)
    return None


def _shape_of(member: Member, place: _Place, kernels: ModuleType) -> Any:
    """What its launch shares; None if the kernels cannot take it."""
    source, delta = member.source, member.delta
    rows = source.groups * source.rows
    fits = (rows, source.columns) == place.shape and member.row_stride == source.columns
    if not fits or not source.in_rows or source.param.dtype != torch.bfloat16:
        return None
    if delta is not None and not delta.in_rows:
        return None
    return kernels.Shape(
        kind=place.kind,
        rank=0 if delta is None else delta.rank,
        rows=rows,
        columns=source.columns,
        rows_per_group=source.rows,
        group_stride=source.group_stride if source.groups > 1 else 0,
        row_stride=source.row_stride,
    )


class FusedFp8:
    """See the module and `plan`."""

    def __init__(
        self,
        chunks: Mapping[int, _Chunk],
        plain: Mapping[int, list[Member]],
        nbytes: Sequence[int],
        *,
        scale: float,
        rounding: Callable[[], Rounding],
        device: torch.device,
        kernels: ModuleType,
    ) -> None:
        self._chunks, self._scale, self._device = chunks, scale, device
        self._rounding = rounding
        self._kernels: Any = kernels
        members = ((count, plain.get(k, [])) for k, count in enumerate(nbytes))
        self._plain = Merger(members, scale=scale, rounding=rounding, device=device)
        self._has_plain = {k for k, found in plain.items() if found}
        for chunk in chunks.values():
            chunk.largest_S = torch.zeros(chunk.slots, dtype=torch.int32, device=device)
            chunk.table.tables()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # fills may run on another stream

    def takes(self, chunk: int) -> bool:
        """Whether `fill` can fill a chunk."""
        return chunk in self._chunks

    @torch.no_grad()
    def measure(self) -> None:
        """Find the largest magnitudes where they are not known. On CUDA the work is queued on the
        current stream."""
        nowhere_B = torch.empty(MAX_ALIGN, dtype=torch.uint8, device=self._device)
        for chunk in self._chunks.values():
            self._measure(chunk, nowhere_B)

    def forget(self) -> None:
        """Find them again, because the weights may have changed."""
        for chunk in self._chunks.values():
            chunk.measured = None

    @torch.no_grad()
    def fill(self, chunk: int, out_B: torch.Tensor) -> None:
        """Write a chunk whose buffer begins at a multiple of 16. On CUDA the work is queued on the
        current stream."""
        found = self._chunks[chunk]
        if chunk in self._has_plain:
            self._plain.fill(chunk, out_B)
        self._measure(found, out_B)
        self._launch("block", found, out_B)
        self._launch("round", found, out_B)

    def _measure(self, chunk: _Chunk, out_B: torch.Tensor) -> None:
        state = (self._rounding(), chunk.table.versions())
        if state == chunk.measured:
            return
        chunk.measured = None
        chunk.largest_S.zero_()
        self._launch("largest", chunk, out_B)
        chunk.measured = state

    def _launch(self, step: str, chunk: _Chunk, out_B: torch.Tensor) -> None:
        for launch, table_T7 in zip(chunk.launches, chunk.table.tables(), strict=True):
            if (launch.shape.kind == "per_block") == (step == "block"):
                self._kernels.launch(
                    step,
                    launch.shape,
                    table_T7=table_T7,
                    out_B=out_B,
                    largest_S=chunk.largest_S,
                    scale=self._scale,
                    stochastic=self._rounding().mode == "stochastic",
                    vectors=launch.vectors,
                    align=launch.align,
                )
