"""Fills chunks with e4m3 weights and scales, made of what another export merges in bf16.

    Fp8Export(export, specs, order, ...)    has the methods of `WireExport`

For each chunk the other export fills a scratch with its bf16 tensors. They are quantised
there as vLLM would quantise them (`weight_transfer.fp8`). The matrices that share a scale follow
each other in one chunk, so no scale waits for another chunk. Groups of equal shapes take one pass.
On a GPU, `fp8_fused` fills most chunks without a scratch; the bytes are the same.

Axes: B = bytes, G = groups of a batch, N = elements of a group, M = matrices of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from orchestrator.errors import ManifestError
from orchestrator.protocol.messages import (
    FP8_BLOCK,
    Fp8Group,
    Fp8Weights,
    Manifest,
    TensorSpec,
    fp8_places,
)
from weight_transfer import fp8
from weight_transfer.layout import chunk_offsets

if TYPE_CHECKING:  # tests of the inference node import this module where Megatron is not installed
    from trainer_node.export.bridge_export import BridgeExport
    from trainer_node.export.wire_export import WireExport


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What the other export must fill, and how a chunk is made of it."""

    part: tuple[int, ...]
    """Ascending indices into the trainer's manifest."""
    order: tuple[tuple[int, ...], ...]
    """For each chunk its bf16 tensors, as indices into the part."""
    batches: tuple[tuple[Batch | Copy, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A tensor that is sent as it is. Offsets in bytes, in the scratch and the chunk."""

    source: int
    target: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Groups of equal shapes that follow each other, weights as well as scales."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    """Of the matrices of one group."""
    count: int
    source: int
    target: int
    scales: int

    @property
    def numel(self) -> int:
        """Elements of one group."""
        return sum(height * width for height, width in self.shapes)


def plan(
    manifest: Manifest,
    sent: Manifest,
    weights: Fp8Weights,
    order: Sequence[Sequence[int]],
    part: Sequence[int] | None,
) -> Base:
    """Plan the chunks of `sent`, or of a part of it. Pure.

    Args:
        manifest: the trainer's; `sent` is its `fp8_manifest`.
        order: the chunks; they count in the part, if there is one.

    Raises:
        ManifestError: a group is not bf16, is split, or its parts do not follow each other.
    """
    places = fp8_places(manifest, weights)
    base_of = {place: index for index, found in enumerate(places) for place in found}
    groups = {i: group for group in weights.groups for i in group.tensors}
    chosen = list(range(len(sent.tensors))) if part is None else list(part)
    own = tuple(sorted({base_of[i] for i in chosen}))
    number = {index: n for n, index in enumerate(own)}
    chunks, batches = [], []
    for chunk in order:
        indices = [chosen[i] for i in chunk]
        offsets = dict(zip(indices, chunk_offsets(sent.tensors[i] for i in indices), strict=True))
        heads = [i for i in indices if places[base_of[i]][0] == i]
        # Weights first: their scratch is then aligned.
        heads.sort(key=lambda i: base_of[i] not in groups)
        bases = [base_of[i] for i in heads]
        chunks.append(tuple(number[b] for b in bases))
        batches.append(_batches(bases, manifest.tensors, groups, places, offsets))
    return Base(part=own, order=tuple(chunks), batches=tuple(batches))


def _batches(
    bases: Sequence[int],
    specs: Sequence[TensorSpec],
    groups: dict[int, Fp8Group],
    places: Sequence[tuple[int, ...]],
    offsets: dict[int, int],
) -> tuple[Batch | Copy, ...]:
    sources = dict(zip(bases, chunk_offsets(specs[b] for b in bases), strict=True))
    made: list[Batch | Copy] = []
    at = 0
    while at < len(bases):
        group = groups.get(bases[at])
        if group is None:
            spec, index = specs[bases[at]], bases[at]
            target = offsets[places[index][0]]
            made.append(Copy(source=sources[index], target=target, nbytes=spec.nbytes))
            at += 1
            continue
        members = bases[at : at + (len(group.tensors) if group.kind == "per_tensor" else 1)]
        batch = _batch(group, members, specs, places, sources, offsets)
        last = made[-1] if made else None
        if isinstance(last, Batch) and _follows(last, batch):
            made[-1] = replace(last, count=last.count + 1)
        else:
            made.append(batch)
        at += len(members)
    return tuple(made)


def _batch(
    group: Fp8Group,
    members: Sequence[int],
    specs: Sequence[TensorSpec],
    places: Sequence[tuple[int, ...]],
    sources: dict[int, int],
    offsets: dict[int, int],
) -> Batch:
    names = [specs[i].name for i in members]
    if any(specs[i].dtype != "bfloat16" for i in group.tensors):
        raise ManifestError(f"only bf16 is sent as FP8; {names[0]} is {specs[members[0]].dtype}")
    if group.kind == "per_tensor" and sorted(members) != list(group.tensors):
        raise ManifestError(f"{names[0]} does not share a chunk with all that share its scale")
    weights = [offsets[places[i][0]] for i in members]
    scales = [offsets[places[i][1]] for i in members if places[i][1] in offsets]
    run = [weights[0]]
    for index in members[:-1]:
        run.append(run[-1] + specs[index].numel)
    if weights != run or scales != [scales[0] + 4 * n for n in range(len(members))]:
        raise ManifestError(f"{names[0]} and what shares its scale do not follow each other")
    return Batch(
        kind=group.kind,
        shapes=tuple(specs[i].shape for i in members),
        count=1,
        source=sources[members[0]],
        target=weights[0],
        scales=scales[0],
    )


def _scale_bytes(batch: Batch) -> int:
    """Bytes of one group's scales."""
    if batch.kind == "per_tensor":
        return 4 * len(batch.shapes)
    (height, width) = batch.shapes[0]
    blocks = -(-height // FP8_BLOCK) * -(-width // FP8_BLOCK)
    return 4 * (height if batch.kind == "per_channel" else blocks)


def _follows(batch: Batch, other: Batch) -> bool:
    return (other.kind, other.shapes) == (batch.kind, batch.shapes) and (
        other.source - batch.source,
        other.target - batch.target,
        other.scales - batch.scales,
    ) == (
        2 * batch.count * batch.numel,
        batch.count * batch.numel,
        batch.count * _scale_bytes(batch),
    )


ALIGNED_BYTES = 16
"""A buffer that `Fused` fills begins at a multiple of this."""


class Fused(Protocol):
    """Fills chunks without a scratch: `fp8_fused.FusedFp8`."""

    def takes(self, chunk: int) -> bool:
        """Whether it can fill a chunk."""
        ...

    def measure(self) -> None:
        """Find what the fills need of whole tensors, queued on the current stream."""
        ...

    def forget(self) -> None:
        """Measure again before the next fill."""
        ...

    def fill(self, chunk: int, out_B: torch.Tensor) -> None:
        """Write a chunk, queued on the current stream."""
        ...


class Fp8Export:
    """See the module.

    Args:
        export: fills the chunks of `base.order` in bf16.
        fused: fills the chunks that it takes.
        sent: what is sent, or the part of it.
        order: its chunks.
    """

    def __init__(
        self,
        export: WireExport | BridgeExport,
        base: Base,
        *,
        specs: Sequence[TensorSpec],
        sent: Manifest,
        order: Sequence[Sequence[int]],
        device: torch.device,
        fused: Fused | None = None,
    ) -> None:
        self._export, self._base, self._device, self._fused = export, base, device, fused
        self._nbytes = [sum(sent.tensors[i].nbytes for i in chunk) for chunk in order]
        self._scratch_bytes = [sum(specs[i].nbytes for i in chunk) for chunk in base.order]
        self._scratch_B: torch.Tensor | None = None
        self.longest_s = export.longest_s

    @property
    def num_chunks(self) -> int:
        """Chunks of the order."""
        return len(self._nbytes)

    def chunk_nbytes(self, chunk: int) -> int:
        """Bytes of a chunk."""
        return self._nbytes[chunk]

    def _is_plain(self, chunk: int) -> bool:
        return not any(isinstance(step, Batch) for step in self._base.batches[chunk])

    def prepare(self) -> None:
        """Queue what a send of the present weights needs and no pause has to wait for."""
        if self._fused is not None:
            self._fused.measure()

    def forget_prepared(self) -> None:
        """Called before the weights may change."""
        if self._fused is not None:
            self._fused.forget()

    def start(self, *, limit: float) -> None:
        """See `WireExport.start`."""
        self._export.start(limit=limit)

    def resident(self, chunk: int) -> torch.Tensor | None:
        """See `WireExport.resident`: only what is sent as it is."""
        return self._export.resident(chunk) if self._is_plain(chunk) else None

    def fill(self, chunk: int, out_B: torch.Tensor) -> None:
        """See `WireExport.fill`. On CUDA the work is queued on the current stream."""
        if self._is_plain(chunk):
            self._export.fill(chunk, out_B)
            return
        is_aligned = out_B.data_ptr() % ALIGNED_BYTES == 0
        if self._fused is not None and self._fused.takes(chunk) and is_aligned:
            self._fused.fill(chunk, out_B)
            return
        if self._scratch_B is None:
            size = max(self._scratch_bytes)
            self._scratch_B = torch.empty(size, dtype=torch.uint8, device=self._device)
        scratch_B = self._scratch_B[: self._scratch_bytes[chunk]]
        self._export.fill(chunk, scratch_B)
        for step in self._base.batches[chunk]:
            if isinstance(step, Copy):
                source_B = scratch_B[step.source : step.source + step.nbytes]
                out_B[step.target : step.target + step.nbytes].copy_(source_B)
            else:
                _quantise(step, scratch_B, out_B)

    def drain(self) -> None:
        """See `WireExport.drain`."""
        self._export.drain()

    def contribute(self) -> None:
        """See `WireExport.contribute`."""
        self._export.contribute()

    def release(self) -> None:
        """Free the scratch, and what the other export holds."""
        self._scratch_B = None
        self._export.release()

    def seconds(self, fill_s: float) -> dict[str, float]:
        """See `WireExport.seconds`; the quantiser's are in `merge`."""
        return self._export.seconds(fill_s)


def _quantise(batch: Batch, scratch_B: torch.Tensor, out_B: torch.Tensor) -> None:
    """Quantise a batch from the scratch into the chunk."""
    total = batch.count * batch.numel
    merged_N = scratch_B[batch.source : batch.source + 2 * total].view(torch.bfloat16)
    if batch.kind == "per_tensor":
        weights, scales_G = fp8.per_tensor(merged_N.view(batch.count, batch.numel))
        scales = scales_G[:, None].expand(batch.count, len(batch.shapes))
    elif batch.kind == "per_channel":
        weights, scales = fp8.per_channel(merged_N.view(-1, batch.shapes[0][1]))
    else:
        weights, scales = fp8.per_block(merged_N.view(batch.count, *batch.shapes[0]))
    out_B[batch.target : batch.target + total].copy_(weights.view(torch.uint8).flatten())
    scales_B = scales.contiguous().view(torch.uint8).flatten()
    out_B[batch.scales : batch.scales + len(scales_B)].copy_(scales_B)
