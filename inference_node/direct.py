"""Receiving into live kernel tensors without vLLM's reload, where the placement plan proves that this is right.

A tensor is *placeable* on a worker if every element of it that lands there lands in a live parameter of its dtype that is kept just as it is loaded
(the same shape, strides and dtype, a packing that is the identity, no packed copy beside it). It then travels

    live      received in place: on a replica of one worker, where all of it lies in one contiguous run. Neighbours in memory are one chunk.
    staged    received beside, whole, and each worker copies the parts that land on it, strided or not, by a few launches for each chunk
    reload    not placeable on some worker: handed to the model's own loaders, with all that shares a layer with it, on all workers alike

How all workers of a replica come to the same layout: each says what it cannot place (`obstacles`), the replica unites that with what shares a
layer with it, and the chunks follow from the manifest and that set alone (`plan_chunks`; with one worker also from its runs).

Staged chunks go through a ring of two buffers: chunk k+1 arrives while chunk k is copied. The first chunk is never live: until it has come
whole, a failure leaves all live tensors as they were.

Axes: B = bytes, N = tensors, P = parts of tensors on this worker.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from inference_node import verify
from inference_node.placement import PlacementPlan, Region
from orchestrator.protocol.messages import DTYPE_BYTES, Manifest, WireChunk
from weight_transfer.copies import Part, PreparedCopy
from weight_transfer.digest import PreparedDigest, row_major_strides
from weight_transfer.groups import TransferGroup
from weight_transfer.layout import bucket_layout, view_of

MAX_CHUNK_BYTES = 192 * 2**20
"""Pieces on the wire: large enough for its rate, and both ends' rings hold a few of them well within 2 GiB."""
SMALL_BYTES = 64 * 2**20
"""Runs below this are staged, many to a chunk: each receive costs some 50 us beside its bytes, as much as 18 MB take, and a copy on the GPU nearly nothing."""
ITS_LAYER = "its layer is reloaded"
Live = Mapping[tuple[str, str], torch.Tensor | str]
"""(module, parameter) -> its live tensor, or why it cannot be written in place."""
Load = Callable[[list[tuple[str, torch.Tensor]]], None]
_EXPERT = re.compile(r"\.\d+\.(?!.*\.\d+\.)")


# ------------------------------------------------------------ the layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A whole HF tensor in one contiguous run of a live parameter; offset in elements."""

    index: int
    key: tuple[str, str]
    offset: int
    numel: int
    nbytes: int


def live_parameters(model: torch.nn.Module, plan: PlacementPlan) -> dict[tuple[str, str], torch.Tensor | str]:
    """Every parameter of the plan: its live tensor if it may be written in place, else the reason."""
    layers = dict(model.named_modules())
    paths: dict[int, int] = {}
    for _, layer in model.named_modules(remove_duplicate=False):
        paths[id(layer)] = paths.get(id(layer), 0) + 1
    found: dict[tuple[str, str], torch.Tensor | str] = {}
    for key, fmt in plan.formats.items():
        if fmt.alias_of is not None:
            continue
        holders = [fmt, *(f for f in plan.formats.values() if f.alias_of == key)]
        whys = (verify.why_not_in_place(layer := layers[h.module], h, is_shared=paths[id(layer)] > 1) for h in holders)
        reasons = [why for why in whys if why is not None]
        found[key] = reasons[0] if reasons else layers[fmt.module]._parameters[fmt.param].data  # type: ignore[union-attr]
    return found


def obstacles(plan: PlacementPlan, manifest: Manifest, live: Live) -> dict[int, str]:
    """Manifest index -> why this worker cannot put the tensor in its place; what does not land here is no obstacle. Pure."""
    by_name = plan.regions_by_name()
    found: dict[int, str] = {}
    for index, spec in enumerate(manifest.tensors):
        reasons = (_why_not(region, plan, live) for region in by_name.get(spec.name, ()))
        why = next((r for r in reasons if r is not None), None)
        if why is not None:
            found[index] = why
    return found


def _why_not(region: Region, plan: PlacementPlan, live: Live) -> str | None:
    fmt = plan.formats[(region.module, region.param)]
    tensor = live[fmt.alias_of or (region.module, region.param)]
    if isinstance(tensor, str):
        return tensor
    if plan.sent_dtypes[region.name] != fmt.dtype:
        return f"it is sent as {plan.sent_dtypes[region.name]} and kept as {fmt.dtype}"
    if any(step == 0 and extent > 1 for step, extent in zip(region.index_strides, region.size, strict=True)):
        return "one element of it lands in many places"
    return None


def whole_runs(plan: PlacementPlan, manifest: Manifest, reload: Collection[int]) -> list[Run]:
    """The tensors beside `reload` that lie whole in one run of one parameter. Pure."""
    by_name = plan.regions_by_name()
    runs = []
    for index, spec in enumerate(manifest.tensors):
        regions = by_name.get(spec.name, [])
        if index in reload or len(regions) != 1:
            continue
        region, dense = regions[0], row_major_strides(regions[0].size)
        is_whole = region.numel == spec.numel and region.first_index == 0 and _same(region.index_strides, dense, region.size)
        if is_whole and _same(region.strides, dense, region.size):
            key = plan.formats[(region.module, region.param)].alias_of or (region.module, region.param)
            runs.append(Run(index=index, key=key, offset=region.offset, numel=spec.numel, nbytes=spec.nbytes))
    return runs


def plan_chunks(manifest: Manifest, *, reload: Collection[int], runs: Sequence[Run] = ()) -> tuple[WireChunk, ...]:
    """How each tensor of the manifest travels, and in which order. Pure.

    Args:
        reload: indices that take the reload path.
        runs: tensors that may be received in place, on the only worker of a replica.
    """
    big = _pieces(runs)
    small = [piece for piece in big if sum(r.nbytes for r in piece) < SMALL_BYTES]
    big = [piece for piece in big if sum(r.nbytes for r in piece) >= SMALL_BYTES]
    live = {r.index for piece in big for r in piece}
    if big and not small and len(live) + len(reload) == len(manifest.tensors):
        # Something must come first that is not live, see above.
        big.remove(smallest := min(big, key=lambda piece: sum(r.nbytes for r in piece)))
        live -= {r.index for r in smallest}
    staged = [i for i in range(len(manifest.tensors)) if i not in live and i not in reload]
    chunks = [WireChunk(kind="staged", tensors=t) for t in _packed(_families(staged, manifest), manifest)]
    chunks += [WireChunk(kind="live", tensors=tuple(r.index for r in piece)) for piece in big]
    chunks += [WireChunk(kind="reload", tensors=t) for t in _packed(sorted(reload), manifest)]
    return tuple(chunks)


def explain(
    manifest: Manifest, reasons: Mapping[str, Collection[int]], reload: Collection[int], *, within: Collection[int]
) -> dict[str, str]:
    """Reason -> an example among the indices `within`, for `WireLayout.why_not_live`. Pure."""
    named = {why: sorted(set(indices) & set(within)) for why, indices in reasons.items()}
    known = {i for indices in named.values() for i in indices}
    named[ITS_LAYER] = sorted((set(reload) & set(within)) - known)
    return {why: manifest.tensors[indices[0]].name for why, indices in named.items() if indices}


def _pieces(runs: Sequence[Run]) -> list[list[Run]]:
    """Neighbours in memory, in pieces of about MAX_CHUNK_BYTES and alike in size: a small rest would cost a receive of its own."""
    pieces: list[list[Run]] = []
    for run in sorted(runs, key=lambda r: (r.key, r.offset)):
        last = pieces[-1][-1] if pieces else None
        if last is not None and last.key == run.key and last.offset + last.numel == run.offset:
            pieces[-1].append(run)
        else:
            pieces.append([run])
    return [part for piece in pieces for part in _cut(piece)]


def _cut(piece: Sequence[Run]) -> list[list[Run]]:
    """A piece in parts alike in size, at most a quarter above MAX_CHUNK_BYTES; each tensor goes to the part its middle lies in."""
    total = sum(r.nbytes for r in piece)
    count = -(-4 * total // (5 * MAX_CHUNK_BYTES))
    parts: list[list[Run]] = [[] for _ in range(count)]
    begin = 0
    for run in piece:
        parts[(2 * begin + run.nbytes) * count // (2 * total)].append(run)
        begin += run.nbytes
    return [part for part in parts if part]


def _families(indices: Sequence[int], manifest: Manifest) -> list[int]:
    """All gates of a layer's experts, then all ups, all downs; else as in the manifest. Equal shapes are merged by one launch at the sender."""
    first: dict[str, int] = {}
    for index in indices:
        first.setdefault(_family(manifest.tensors[index].name), index)
    return sorted(indices, key=lambda i: (first[_family(manifest.tensors[i].name)], i))


def _family(name: str) -> str:
    """The name without its expert's number: the last of several."""
    return _EXPERT.sub(".*.", name) if len(re.findall(r"\.\d+(?=\.)", name)) > 1 else name


def _packed(indices: Sequence[int], manifest: Manifest) -> list[tuple[int, ...]]:
    """Indices in pieces of at most MAX_CHUNK_BYTES (a single larger tensor is a piece of its own), wide elements first: each is then aligned."""
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
    return [tuple(sorted(p, key=lambda i: -DTYPE_BYTES[manifest.tensors[i].dtype])) for p in pieces]


def _same(strides: Sequence[int], dense: Sequence[int], size: Sequence[int]) -> bool:
    return all(s == d or extent == 1 for s, d, extent in zip(strides, dense, size, strict=True))


def ring_slots(sizes: Sequence[int]) -> list[int]:
    """Which of the ring's two buffers each staged chunk comes into. Pure.

    In turns; but tensors larger than a chunk ought to be share the first buffer, so that one large buffer and one chunk's are all that is held.
    """
    slots: list[int] = []
    for nbytes in sizes:
        slots.append(0 if nbytes > MAX_CHUNK_BYTES else 1 - slots[-1] if slots else 0)
    return slots


# ------------------------------------------------------------ the receive


@dataclass(slots=True)
class _Chunk:
    """A chunk as this worker receives it."""

    kind: str
    nbytes: int
    tensors: tuple[int, ...]
    target_B: torch.Tensor | None = None
    """live: the bytes in place; else None."""
    copy: PreparedCopy | None = None
    """staged: of the parts that land here."""
    digest: PreparedDigest | None = None
    """Of the live parts, where they are digested as they arrive."""
    slot: int = 0


@dataclass(slots=True)
class _Receive:
    """One receive under way."""

    group: TransferGroup
    deadline: float
    load: Load
    on_written: Callable[[int], None]
    ring: list[torch.Tensor] = field(default_factory=list)
    copied: list[torch.cuda.Event | None] = field(default_factory=lambda: [None, None])
    """Behind the last copy from each of the ring's buffers."""
    seconds: dict[str, float] = field(default_factory=lambda: {"wire": 0.0, "load": 0.0})

    def left_s(self) -> float:
        return max(0.001, self.deadline - time.monotonic())


class DirectReceiver:
    """One worker's receives of one layout. Views and tables are made once and stay valid: kernel tensors never move.

    Args:
        digests_on_arrival: digest what is live as each chunk completes (always on CUDA; on the CPU everything is read back after the update).
    """

    def __init__(
        self, *, chunks: Sequence[WireChunk], manifest: Manifest, plan: PlacementPlan, live: Live, device: torch.device,
        digests_on_arrival: bool | None = None,
    ) -> None:  # fmt: skip
        self._manifest, self._device = manifest, device
        self._plan, self._live, self._regions = plan, live, plan.regions_by_name()
        self._is_digested = device.type == "cuda" if digests_on_arrival is None else digests_on_arrival
        self.needs_reload = any(c.kind == "reload" for c in chunks)
        direct = sorted(i for c in chunks if c.kind != "reload" for i in c.tensors)
        self.direct_names = frozenset(manifest.tensors[i].name for i in direct)
        counts = [len(self._regions.get(manifest.tensors[i].name, ())) for i in direct]
        self._first_part = dict(zip(direct, itertools.accumulate(counts, initial=0), strict=False))
        self._digests_P = torch.zeros(sum(counts), dtype=torch.int64, device=device)
        self._chunks = [self._chunk(c) for c in chunks]
        self._ring_bytes = self._lay_out_ring()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        """Copies and digests, beside the wire."""

    def _chunk(self, chunk: WireChunk) -> _Chunk:
        specs = [self._manifest.tensors[i] for i in chunk.tensors]
        made = _Chunk(chunk.kind, sum(s.nbytes for s in specs), chunk.tensors)
        if chunk.kind == "reload":
            return made
        parts: list[Part] = []
        rows: list[int] = []
        origins: list[tuple[int, tuple[int, ...]]] = []
        for index, spec, offset in zip(chunk.tensors, specs, bucket_layout(specs), strict=True):
            for row, region in enumerate(self._regions.get(spec.name, ()), start=self._first_part[index]):
                first = offset + region.first_index * DTYPE_BYTES[spec.dtype]
                parts.append(Part(target=self._view(region), offset_bytes=first, strides=region.index_strides))
                rows.append(row)
                origins.append((region.first_index, region.index_strides))
        views = [p.target for p in parts]
        if chunk.kind == "live":
            flat = torch.as_strided(views[0], (made.nbytes // views[0].element_size(),), (1,), views[0].storage_offset())
            made.target_B = flat.view(torch.uint8)
        else:
            made.copy = PreparedCopy(parts)
        if self._is_digested:
            made.digest = PreparedDigest(views, rows=rows, origins=origins)
        return made

    def _view(self, region: Region) -> torch.Tensor:
        key = (region.module, region.param)
        live = self._live[self._plan.formats[key].alias_of or key]
        assert isinstance(live, torch.Tensor)
        return region.view_in(live)

    def _lay_out_ring(self) -> list[int]:
        """Give each staged chunk its buffer; the bytes of the two."""
        staged, ring_bytes = [c for c in self._chunks if c.kind == "staged"], [0, 0]
        for chunk, slot in zip(staged, ring_slots([c.nbytes for c in staged]), strict=True):
            chunk.slot, ring_bytes[slot] = slot, max(ring_bytes[slot], chunk.nbytes)
        return ring_bytes

    def receive(
        self, *, group: TransferGroup, deadline_s: float, load: Load, on_written: Callable[[int], None]
    ) -> dict[str, float]:
        """Receive every chunk to its place; returns seconds {"wire", "load"}.

        Args:
            load: gets what takes the reload path; the tensors own their memory.
            on_written: called with the number of tensors that are about to change.

        Raises:
            TransferError and its kin: live memory is then a mixture of versions, unless `on_written` was never called.
        """
        run = _Receive(group=group, deadline=time.monotonic() + deadline_s, load=load, on_written=on_written)
        self._digests_P.zero_()
        started: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        last: torch.cuda.Event | None = None  # a group's broadcasts end in their order
        for k, chunk in enumerate(self._chunks):
            buffer_B, event = self._start(run, chunk) if started is None else started
            # Not queued, a broadcast blocks, and the sender fills the next chunk while this one is copied.
            is_queued = event is not None
            started = self._start(run, self._chunks[k + 1]) if is_queued and self._may_start_ahead(k + 1) else None
            self._finish(run, chunk, buffer_B, event)
            last = event
        began = time.monotonic()
        if last is not None:
            group.synchronize(last, deadline_s=run.left_s())
        if self._stream is not None:
            self._stream.synchronize()
        run.seconds["wire"] += time.monotonic() - began
        return run.seconds

    def _may_start_ahead(self, k: int) -> bool:
        """Whether chunk k may be asked for before the one ahead of it has been copied: not into the same buffer, not into live memory too early."""
        if k >= len(self._chunks):
            return False
        chunk, ahead = self._chunks[k], self._chunks[k - 1]
        if chunk.kind == "live":
            return k > 1
        return not (chunk.kind == ahead.kind == "staged" and chunk.slot == ahead.slot)

    def _start(self, run: _Receive, chunk: _Chunk) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Ask for a chunk: its buffer, and the event behind its arrival (None: it is here)."""
        if chunk.kind == "live":
            run.on_written(len(chunk.tensors))
        began = time.monotonic()
        buffer_B = self._buffer(run, chunk)
        event = run.group.broadcast(buffer_B, deadline_s=run.left_s())
        run.seconds["wire"] += time.monotonic() - began
        return buffer_B, event

    def _buffer(self, run: _Receive, chunk: _Chunk) -> torch.Tensor:
        if chunk.target_B is not None:
            return chunk.target_B
        if chunk.kind == "reload":  # the reload keeps its tensors: each has memory of its own
            return torch.empty(chunk.nbytes, dtype=torch.uint8, device=self._device)
        if not run.ring:
            run.ring = [torch.empty(nbytes, dtype=torch.uint8, device=self._device) for nbytes in self._ring_bytes]
            if self._stream is not None:  # freed, they are not given to others before the copies are through
                for slot_B in run.ring:
                    slot_B.record_stream(self._stream)
        copied = run.copied[chunk.slot]
        if copied is not None:  # a broadcast is queued behind the current stream: it waits on the device, the host does not
            torch.cuda.current_stream(self._device).wait_event(copied)
        return run.ring[chunk.slot][: chunk.nbytes]

    def _finish(self, run: _Receive, chunk: _Chunk, buffer_B: torch.Tensor, event: torch.cuda.Event | None) -> None:
        """Behind the chunk's arrival: copy or load what is not in place yet, then digest what is live."""
        began = time.monotonic()
        if chunk.kind != "live":
            # Nothing may be copied or loaded from a buffer whose bytes did not come: an abort, too, lets the event pass.
            if event is not None:
                run.group.synchronize(event, deadline_s=run.left_s())
            run.on_written(len(chunk.tensors))
        arrived = time.monotonic()
        run.seconds["wire"] += arrived - began
        if chunk.kind == "reload":
            run.load(self._tensors(chunk, buffer_B))
        elif self._stream is None:
            self._place(chunk, buffer_B)
            self._digest(chunk)
        else:
            assert event is not None
            self._stream.wait_event(event)
            with torch.cuda.stream(self._stream):
                self._place(chunk, buffer_B)
                if chunk.kind == "staged":
                    run.copied[chunk.slot] = copied = torch.cuda.Event()
                    copied.record()
                self._digest(chunk)
        run.seconds["load"] += time.monotonic() - arrived

    @staticmethod
    def _place(chunk: _Chunk, buffer_B: torch.Tensor) -> None:
        if chunk.copy is not None:
            chunk.copy.launch(buffer_B)

    def _digest(self, chunk: _Chunk) -> None:
        if chunk.digest is not None:
            chunk.digest.launch(self._digests_P)

    def apply(self, buffers: Sequence[torch.Tensor], *, load: Load, on_written: Callable[[int], None]) -> None:
        """Copy chunks that came beside the live tensors to their places, then digest what is live there; queued on the current stream.

        Args:
            buffers: the layout's chunks, in order. They must live until the stream is through.
            load, on_written: as in `receive`.
        """
        on_written(sum(len(c.tensors) for c in self._chunks))
        arrived = list(zip(self._chunks, buffers, strict=True))
        in_place = [(_wide(c.target_B), buffer_B) for c, buffer_B in arrived if c.target_B is not None]
        for pairs in _by_dtype([t for t, _ in in_place], [b.view(t.dtype) for t, b in in_place]):
            torch._foreach_copy_(*pairs)
        for chunk, buffer_B in arrived:
            self._place(chunk, buffer_B)
        self._digests_P.zero_()
        for chunk, buffer_B in arrived:
            self._digest(chunk)
            if chunk.kind == "reload":
                load(self._tensors(chunk, buffer_B))

    def _tensors(self, chunk: _Chunk, buffer_B: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        specs = [self._manifest.tensors[i] for i in chunk.tensors]
        return [(s.name, view_of(buffer_B, s, at)) for s, at in zip(specs, bucket_layout(specs), strict=True)]

    def digests(self) -> list[int] | None:
        """Digests of what went direct in the last receive, in the order of `verify.Arrivals`; None where it is to be read back."""
        return self._digests_P.tolist() if self._is_digested else None


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
