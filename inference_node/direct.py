"""Receiving straight into live kernel tensors, without vLLM's reload, where the placement plan proves that this is right.

A tensor may go direct if all of it lands on this worker, in one contiguous run of a live parameter that is kept just as it is loaded (the
same shape, strides and dtype, a packing that is the identity, no packed copy beside it). Neighbours in memory then travel as one
chunk and arrive in place: all experts of a layer in one receive. Small ones travel together and are copied to their places. Whatever is
not understood takes the reload path, in manifest order, and `WireLayout.why_not_live` says why.

    plan_layout(plan, manifest, live)    pure but for asking `live` about a parameter; -> WireLayout
    DirectReceiver(...)                  the layout's chunks as views of live memory, and the receive

Axes: B = bytes, N = tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from inference_node import verify
from inference_node.placement import PlacementPlan, Region
from orchestrator.protocol.messages import Manifest, WireChunk, WireLayout
from weight_transfer.digest import PreparedDigest, row_major_strides
from weight_transfer.groups import TransferGroup

MAX_CHUNK_BYTES = 512 * 2**20
"""Pieces on the wire: 512 MiB reach 99 % of the wire's rate, and the sender's ring holds a few of them within 2 GiB."""
SMALL_BYTES = 2**20
"""Runs below this are staged: a receive of their own would cost more than the copy."""
Live = Mapping[tuple[str, str], torch.Tensor | str]
"""(module, parameter) -> its live tensor, or why it cannot be written in place."""
Load = Callable[[list[tuple[str, torch.Tensor]]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A whole HF tensor in one contiguous run of a live parameter; offset in elements."""

    index: int
    key: tuple[str, str]
    offset: int
    numel: int
    nbytes: int


def live_parameters(model: torch.nn.Module, plan: PlacementPlan) -> dict[tuple[str, str], torch.Tensor | str]:
    """Every parameter of the plan: its live tensor if it may be written in place, else the reason."""
    layers = dict(model.named_modules())
    found: dict[tuple[str, str], torch.Tensor | str] = {}
    for key, fmt in plan.formats.items():
        if fmt.alias_of is not None:
            continue
        holders = [fmt, *(f for f in plan.formats.values() if f.alias_of == key)]
        reasons = [why for h in holders if (why := verify.why_not_in_place(layers[h.module], h)) is not None]
        found[key] = reasons[0] if reasons else layers[fmt.module]._parameters[fmt.param].data  # type: ignore[union-attr]
    return found


def plan_layout(plan: PlacementPlan, manifest: Manifest, live: Live) -> WireLayout:
    """Decide for every tensor of the manifest how it travels, and in which order."""
    by_name = plan.regions_by_name()
    places: list[_Place] = []
    reload_indices: list[int] = []
    why: dict[str, str] = {}
    for index, spec in enumerate(manifest.tensors):
        place = _whole_run(index, by_name.get(spec.name, []), plan, live, nbytes=spec.nbytes, numel=spec.numel)
        if isinstance(place, _Place):
            places.append(place)
        else:
            reload_indices.append(index)
            why.setdefault(place, spec.name)
    places = _keep_whole_params(places, reload_indices, plan, by_name, manifest, why)
    big, small = _runs(places)
    # Staged ones first: until the first chunk has come whole, a failure leaves the live tensors as they were.
    chunks = [WireChunk(kind="staged", tensors=t) for t in _packed(sorted(p.index for p in small), manifest)]
    chunks += [WireChunk(kind="live", tensors=tuple(p.index for p in run)) for run in big]
    chunks += [WireChunk(kind="reload", tensors=t) for t in _packed(sorted(reload_indices), manifest)]
    return WireLayout(chunks=tuple(chunks), why_not_live=why)


def _whole_run(
    index: int, regions: Sequence[Region], plan: PlacementPlan, live: Live, *, nbytes: int, numel: int
) -> _Place | str:
    if len(regions) != 1:
        return f"it lands in {len(regions)} places"
    region = regions[0]
    key = (region.module, region.param)
    fmt = plan.formats[key]
    tensor = live[fmt.alias_of or key]
    if isinstance(tensor, str):
        return tensor
    dense = row_major_strides(region.size)
    if region.numel != numel or region.first_index != 0 or not _same(region.index_strides, dense, region.size):
        return "only a part of it lands here"
    if not _same(region.strides, dense, region.size):
        return "it does not lie in one run"
    if plan.sent_dtypes[region.name] != fmt.dtype:
        return f"it is sent as {plan.sent_dtypes[region.name]} and kept as {fmt.dtype}"
    return _Place(index=index, key=fmt.alias_of or key, offset=region.offset, numel=numel, nbytes=nbytes)


def _keep_whole_params(
    places: list[_Place],
    reload_indices: list[int],
    plan: PlacementPlan,
    by_name: Mapping[str, Sequence[Region]],
    manifest: Manifest,
    why: dict[str, str],
) -> list[_Place]:
    """A parameter is written by one path only: if the reload takes a part of it, it takes all of it (a layer is built anew as a whole)."""
    reloaded = {r.module for i in reload_indices for r in by_name.get(manifest.tensors[i].name, ())}
    kept = []
    for place in places:
        if place.key[0] in reloaded:
            reload_indices.append(place.index)
            why.setdefault("its layer is reloaded", manifest.tensors[place.index].name)
        else:
            kept.append(place)
    return kept


def _runs(places: list[_Place]) -> tuple[list[list[_Place]], list[_Place]]:
    """Neighbours in memory, in pieces of at most MAX_CHUNK_BYTES; and those in runs too small to travel alone."""
    runs: list[list[_Place]] = []
    for place in sorted(places, key=lambda p: (p.key, p.offset)):
        last = runs[-1][-1] if runs else None
        joins = last is not None and last.key == place.key and last.offset + last.numel == place.offset
        if joins and sum(p.nbytes for p in runs[-1]) + place.nbytes <= MAX_CHUNK_BYTES:
            runs[-1].append(place)
        else:
            runs.append([place])
    big = [run for run in runs if sum(p.nbytes for p in run) >= SMALL_BYTES]
    small = [p for run in runs if sum(q.nbytes for q in run) < SMALL_BYTES for p in run]
    return big, small


def _packed(indices: Sequence[int], manifest: Manifest) -> list[tuple[int, ...]]:
    """Indices in pieces of at most MAX_CHUNK_BYTES (a single larger tensor is a piece of its own)."""
    pieces: list[list[int]] = []
    size = 0
    for index in indices:
        nbytes = manifest.tensors[index].nbytes
        if pieces and size + nbytes <= MAX_CHUNK_BYTES:
            pieces[-1].append(index)
            size += nbytes
        else:
            pieces.append([index])
            size = nbytes
    return [tuple(p) for p in pieces]


def _same(strides: Sequence[int], dense: Sequence[int], size: Sequence[int]) -> bool:
    return all(s == d or extent == 1 for s, d, extent in zip(strides, dense, size, strict=True))


@dataclass(slots=True)
class _Chunk:
    """A chunk as this worker receives it."""

    kind: str
    nbytes: int
    tensors: tuple[int, ...]
    target_B: torch.Tensor | None
    """live: the bytes in place; else None."""
    places_N: list[torch.Tensor]
    """staged: live views to copy to, in order."""
    digest: PreparedDigest | None
    """Of the live views, on CUDA."""


class DirectReceiver:
    """One worker's receives of one layout. Views are made once and stay valid: kernel tensors never move."""

    def __init__(
        self, *, layout: WireLayout, manifest: Manifest, plan: PlacementPlan, live: Live, device: torch.device
    ) -> None:
        self._manifest, self._device = manifest, device
        self.needs_reload = any(c.kind == "reload" for c in layout.chunks)
        self._regions = plan.regions_by_name()
        self._plan, self._live = plan, live
        self._chunks = [self._chunk(c) for c in layout.chunks]
        self._direct_indices = tuple(i for c in layout.chunks if c.kind != "reload" for i in c.tensors)
        self.direct_names = frozenset(manifest.tensors[i].name for i in self._direct_indices)
        self._digest_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._digests_N = torch.zeros(len(manifest.tensors), dtype=torch.int64, device=device)

    def _view(self, index: int) -> torch.Tensor:
        region = self._regions[self._manifest.tensors[index].name][0]
        key = (region.module, region.param)
        live = self._live[self._plan.formats[key].alias_of or key]
        assert isinstance(live, torch.Tensor)
        return torch.as_strided(live, region.size, region.strides, live.storage_offset() + region.offset)

    def _chunk(self, chunk: WireChunk) -> _Chunk:
        nbytes = sum(self._manifest.tensors[i].nbytes for i in chunk.tensors)
        if chunk.kind == "reload":
            return _Chunk(chunk.kind, nbytes, chunk.tensors, None, [], None)
        views = [self._view(i) for i in chunk.tensors]
        target_B = None
        if chunk.kind == "live":
            first = views[0]
            flat = torch.as_strided(first, (nbytes // first.element_size(),), (1,), first.storage_offset())
            target_B = flat.view(torch.uint8)
        digest = PreparedDigest(views, rows=chunk.tensors) if self._device.type == "cuda" else None
        return _Chunk(chunk.kind, nbytes, chunk.tensors, target_B, views, digest)

    def receive(
        self, *, group: TransferGroup, deadline_s: float, load: Load, on_written: Callable[[int], None]
    ) -> dict[str, float]:
        """Receive every chunk to its place; returns seconds {"wire", "load"}.

        Args:
            load: gets what takes the reload path; the tensors own their memory.
            on_written: called with the number of tensors that are about to change.

        Raises:
            TransferError and its kin: live memory is then a mixture of versions.
        """
        deadline = time.monotonic() + deadline_s
        seconds = {"wire": 0.0, "load": 0.0}
        last: torch.cuda.Event | None = None  # a group's broadcasts end in their order
        self._digests_N.zero_()
        for chunk in self._chunks:
            if chunk.kind == "live":
                on_written(len(chunk.tensors))
            buffer_B = chunk.target_B
            if buffer_B is None:
                buffer_B = torch.empty(chunk.nbytes, dtype=torch.uint8, device=self._device)
            began = time.monotonic()
            event = group.broadcast(buffer_B, deadline_s=max(0.001, deadline - time.monotonic()))
            if chunk.kind != "live":
                # Nothing may be copied or loaded from a buffer whose bytes did not come.
                if event is not None:
                    group.synchronize(event, deadline_s=max(0.001, deadline - time.monotonic()))
                on_written(len(chunk.tensors))
            seconds["wire"] += time.monotonic() - began
            began = time.monotonic()
            self._after(chunk, buffer_B, event, load)
            seconds["load"] += time.monotonic() - began
            if event is not None:
                last = event
        began = time.monotonic()
        if last is not None:
            group.synchronize(last, deadline_s=max(0.001, deadline - time.monotonic()))
        if self._digest_stream is not None:
            self._digest_stream.synchronize()
        seconds["wire"] += time.monotonic() - began
        return seconds

    def _after(self, chunk: _Chunk, buffer_B: torch.Tensor, event: torch.cuda.Event | None, load: Load) -> None:
        """Behind the chunk's arrival: copy or load what is not in place yet, then digest what is live."""
        if chunk.kind == "reload":
            load(list(self._cut(chunk, buffer_B)))
            return
        if self._digest_stream is None:
            if chunk.kind == "staged":
                self._copy_staged(chunk, buffer_B)
            return
        assert event is not None
        assert chunk.digest is not None
        self._digest_stream.wait_event(event)
        with torch.cuda.stream(self._digest_stream):
            if chunk.kind == "staged":
                self._copy_staged(chunk, buffer_B)
                buffer_B.record_stream(self._digest_stream)
            chunk.digest.launch(self._digests_N)

    def apply(self, buffers: Sequence[torch.Tensor], *, load: Load, on_written: Callable[[int], None]) -> None:
        """Copy chunks that came beside the live tensors to their places, then digest what is live there; queued on the current stream.

        Args:
            buffers: the layout's chunks, in order. They must live until the stream is through.
            load, on_written: as in `receive`.
        """
        on_written(sum(len(c.tensors) for c in self._chunks))
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for chunk, buffer_B in zip(self._chunks, buffers, strict=True):
            if chunk.target_B is not None:
                targets.append(_wide(chunk.target_B))
                sources.append(buffer_B.view(targets[-1].dtype))
            elif chunk.kind == "staged":
                targets += chunk.places_N
                sources += [tensor for _, tensor in self._cut(chunk, buffer_B)]
        for pairs in _by_dtype(targets, sources):
            torch._foreach_copy_(*pairs)
        self._digests_N.zero_()
        for chunk, buffer_B in zip(self._chunks, buffers, strict=True):
            if chunk.digest is not None:
                chunk.digest.launch(self._digests_N)
            if chunk.kind == "reload":
                load(list(self._cut(chunk, buffer_B)))

    def _copy_staged(self, chunk: _Chunk, buffer_B: torch.Tensor) -> None:
        torch._foreach_copy_(chunk.places_N, [tensor for _, tensor in self._cut(chunk, buffer_B)])

    def _cut(self, chunk: _Chunk, buffer_B: torch.Tensor):  # type: ignore[no-untyped-def]
        offset = 0
        for index in chunk.tensors:
            spec = self._manifest.tensors[index]
            piece = buffer_B[offset : offset + spec.nbytes]
            dtype = getattr(torch, spec.dtype)
            if offset % dtype.itemsize:
                piece = piece.clone()
            yield spec.name, piece.view(dtype).view(spec.shape)
            offset += spec.nbytes

    def digests(self) -> dict[int, int]:
        """Manifest index -> digest of its live tensor, of what went direct on CUDA in the last receive; empty on the CPU."""
        if self._digest_stream is None:
            return {}
        values = self._digests_N.tolist()
        return {i: values[i] for i in self._direct_indices}


def _wide(flat_B: torch.Tensor) -> torch.Tensor:
    """The same bytes as int64 where size and address allow it: a copy of eight bytes an element is nearer to the memory's speed."""
    aligned = flat_B.numel() % 8 == 0 and flat_B.data_ptr() % 8 == 0 and flat_B.storage_offset() % 8 == 0
    return flat_B.view(torch.int64) if aligned else flat_B


def _by_dtype(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """The pairs, those of one dtype together, because only such a list is copied by few launches."""
    found: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        pairs = found.setdefault(target.dtype, ([], []))
        pairs[0].append(target)
        pairs[1].append(source)
    return list(found.values())
