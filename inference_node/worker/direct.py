"""Receives a layout's chunks into live kernel tensors, without vLLM's reload where that is proven.

A tensor is *placeable* on a worker if each of its elements there belongs in a live parameter that
holds all its values and is kept exactly as loaded: the same shape, strides and dtype, no permuting
packing, no additional packed copy. A tensor travels in one of three ways:

    live      received in place, on a replica of one worker, if it is one contiguous run;
              neighbours in memory share a chunk
    staged    received whole into a buffer; each worker copies its parts, strided or not, in a few
              launches for each chunk
    reload    not placeable on some worker: the model's own loaders take it, with all tensors that
              share a layer with it, on all workers

All workers of a replica reach the same layout. Each reports what it cannot place (`obstacles`), and
the replica adds every tensor that shares a layer with those. The chunks follow only from the
manifest and that set (`plan_chunks`; with one worker also from its runs).

Staged chunks go through a ring of two buffers: chunk k+1 arrives while chunk k is copied. The first
chunk is never live, so until it has arrived whole, a failure leaves all live tensors unchanged. On
CUDA the host waits for that chunk, and then queues up to `QUEUED_CHUNKS` ahead of the wire.

Axes: B = bytes, N = tensors, P = parts of tensors on this worker.
"""

from __future__ import annotations

import array
import functools
import itertools
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from inference_node.worker import verify
from inference_node.worker.placement import PlacementPlan, Region, is_kept_whole
from orchestrator.protocol.messages import DTYPE_BYTES, Manifest, WireChunk
from weight_transfer.copies import PreparedCopy, elements_of
from weight_transfer.cuda_events import QUEUED_CHUNKS
from weight_transfer.digest import PreparedDigest, row_major_strides
from weight_transfer.groups import TransferGroup
from weight_transfer.layout import chunk_offsets, in_vectors, views_of
from weight_transfer.strides import Part

MAX_CHUNK_BYTES = 192 * 2**20
"""Large enough for the wire's full rate; both rings hold a few within 2 GiB."""
SMALL_BYTES = 64 * 2**20
"""Smaller runs are staged, many to a chunk.

A receive has a fixed cost of 50 us, as much as 18 MB; a copy on the GPU costs almost nothing.
"""
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


def live_parameters(
    model: torch.nn.Module, plan: PlacementPlan
) -> dict[tuple[str, str], torch.Tensor | str]:
    """Map each parameter to its live tensor, or to why it cannot be written in place."""
    layers = dict(model.named_modules())
    paths: dict[int, int] = {}
    for _, layer in model.named_modules(remove_duplicate=False):
        paths[id(layer)] = paths.get(id(layer), 0) + 1
    found: dict[tuple[str, str], torch.Tensor | str] = {}
    for key, fmt in plan.formats.items():
        if fmt.alias_of is not None:
            continue
        holders = [fmt, *(f for f in plan.formats.values() if f.alias_of == key)]
        whys = (
            verify.why_not_in_place(
                layer := layers[h.module],
                h,
                plan.formats_of(h.module),
                is_shared=paths[id(layer)] > 1,
            )
            for h in holders
        )
        reasons = [why for why in whys if why is not None]
        found[key] = reasons[0] if reasons else layers[fmt.module]._parameters[fmt.param].data  # type: ignore[union-attr]
    return found


def obstacles(plan: PlacementPlan, manifest: Manifest, live: Live) -> dict[int, str]:
    """Manifest index -> why this worker cannot place the tensor. Pure."""
    by_name = plan.regions_by_name()
    found: dict[int, str] = {}
    for index, spec in enumerate(manifest.tensors):
        reasons = (_why_not(region, plan, live) for region in by_name.get(spec.name, ()))
        why = next((r for r in reasons if r is not None), None)
        if why is not None:
            found[index] = why
    return found


def _why_not(region: Region, plan: PlacementPlan, live: Live) -> str | None:
    fmt, tensor = plan.format_of(region), live[plan.owner_of(region)]
    if isinstance(tensor, str):
        return tensor
    if not is_kept_whole(plan.sent_dtypes[region.name], fmt.dtype):
        return f"it is sent as {plan.sent_dtypes[region.name]} and kept as {fmt.dtype}"
    if any(
        step == 0 and extent > 1
        for step, extent in zip(region.index_strides, region.size, strict=True)
    ):
        return "one element of it lands in many places"
    return None


def whole_runs(plan: PlacementPlan, manifest: Manifest, reload: Collection[int]) -> list[Run]:
    """The tensors outside `reload` that are one whole run of one parameter. Pure."""
    by_name = plan.regions_by_name()
    runs = []
    for index, spec in enumerate(manifest.tensors):
        regions = by_name.get(spec.name, [])
        if index in reload or len(regions) != 1:
            continue
        region, dense = regions[0], row_major_strides(regions[0].size)
        is_whole = (
            spec.dtype == plan.format_of(region).dtype
            and region.numel == spec.numel
            and region.first_index == 0
            and _same(region.index_strides, dense, region.size)
        )
        if is_whole and _same(region.strides, dense, region.size):
            runs.append(
                Run(
                    index=index,
                    key=plan.owner_of(region),
                    offset=region.offset,
                    numel=spec.numel,
                    nbytes=spec.nbytes,
                )
            )
    return runs


def plan_chunks(
    manifest: Manifest,
    *,
    reload: Collection[int],
    runs: Sequence[Run] = (),
    together: Sequence[tuple[int, ...]] = (),
) -> tuple[WireChunk, ...]:
    """The chunks in which the manifest's tensors travel, in order. Pure.

    Args:
        reload: indices that take the reload path.
        runs: tensors that the only worker of a replica may receive in place.
        together: indices that must share a chunk and follow each other; in no run.
    """
    big = _groups(runs)
    small = [group for group in big if sum(r.nbytes for r in group) < SMALL_BYTES]
    big = [group for group in big if sum(r.nbytes for r in group) >= SMALL_BYTES]
    live = {r.index for group in big for r in group}
    if big and not small and len(live) + len(reload) == len(manifest.tensors):
        # The first chunk must not be live.
        big.remove(smallest := min(big, key=lambda group: sum(r.nbytes for r in group)))
        live -= {r.index for r in smallest}
    staged = [i for i in range(len(manifest.tensors)) if i not in live and i not in reload]
    units = _units(_families(staged, manifest), together)
    chunks = [WireChunk(kind="staged", tensors=t) for t in _packed(units, manifest)]
    chunks += [WireChunk(kind="live", tensors=tuple(r.index for r in group)) for group in big]
    single = [(i,) for i in sorted(reload)]
    chunks += [WireChunk(kind="reload", tensors=t) for t in _packed(single, manifest)]
    return tuple(chunks)


def _groups(runs: Sequence[Run]) -> list[list[Run]]:
    """Group neighbours in memory into chunks of similar size, about MAX_CHUNK_BYTES."""
    groups: list[list[Run]] = []
    for run in sorted(runs, key=lambda r: (r.key, r.offset)):
        last = groups[-1][-1] if groups else None
        if last is not None and last.key == run.key and last.offset + last.numel == run.offset:
            groups[-1].append(run)
        else:
            groups.append([run])
    return [chunk for group in groups for chunk in _cut(group)]


def _cut(group: Sequence[Run]) -> list[list[Run]]:
    """Cut neighbours into chunks of similar size, at most a quarter above MAX_CHUNK_BYTES.

    Each tensor goes to the chunk that contains its middle. A small last chunk would cost another
    receive.
    """
    total = sum(r.nbytes for r in group)
    count = -(-4 * total // (5 * MAX_CHUNK_BYTES))
    chunks: list[list[Run]] = [[] for _ in range(count)]
    begin = 0
    for run in group:
        chunks[(2 * begin + run.nbytes) * count // (2 * total)].append(run)
        begin += run.nbytes
    return [chunk for chunk in chunks if chunk]


def _families(indices: Sequence[int], manifest: Manifest) -> list[int]:
    """Order: all gates of a layer's experts, then all ups, all downs; else as in the manifest.

    The sender merges equal shapes in one launch.
    """
    first: dict[str, int] = {}
    for index in indices:
        first.setdefault(_family(manifest.tensors[index].name), index)
    return sorted(indices, key=lambda i: (first[_family(manifest.tensors[i].name)], i))


def _family(name: str) -> str:
    """The name without its expert's number, which is the last of several numbers."""
    return _EXPERT.sub(".*.", name) if len(re.findall(r"\.\d+(?=\.)", name)) > 1 else name


def _units(indices: Sequence[int], together: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The indices, with those that must share a chunk in the place of the first of them."""
    unit_of = {i: unit for unit in together for i in unit}
    return list(dict.fromkeys(unit_of.get(i, (i,)) for i in indices))


def _packed(units: Sequence[tuple[int, ...]], manifest: Manifest) -> list[tuple[int, ...]]:
    """Pack units into chunks of at most MAX_CHUNK_BYTES; a larger unit is a separate chunk."""
    chunks: list[list[tuple[int, ...]]] = []
    size = 0
    for unit in units:
        nbytes = sum(manifest.tensors[i].nbytes for i in unit)
        if chunks and size + nbytes <= MAX_CHUNK_BYTES:
            chunks[-1].append(unit)
            size += nbytes
        else:
            chunks.append([unit])
            size = nbytes
    return [in_vectors(chunk, manifest) for chunk in chunks]


def _same(strides: Sequence[int], dense: Sequence[int], size: Sequence[int]) -> bool:
    return all(s == d or extent == 1 for s, d, extent in zip(strides, dense, size, strict=True))


def ring_slots(sizes: Sequence[int]) -> list[int]:
    """Choose which of the ring's two buffers receives each staged chunk. Pure.

    They take turns, but tensors larger than a chunk share the first buffer. The ring then holds one
    large buffer and one of a chunk's size.
    """
    slots: list[int] = []
    for nbytes in sizes:
        slots.append(0 if nbytes > MAX_CHUNK_BYTES else 1 - slots[-1] if slots else 0)
    return slots


# ------------------------------------------------------------ the receive


@dataclass(frozen=True, slots=True, kw_only=True)
class _Widened:
    """A part that vLLM keeps in a wider dtype, such as a router or a decay in fp32. There are few,
    so torch copies them, and digests them as they were sent."""

    part: Part
    sent: torch.dtype
    row: int
    region: Region

    def place(self, buffer_B: torch.Tensor) -> None:
        self.part.target.copy_(self.part.source_in(elements_of(buffer_B, self.sent)))

    def digest(self, digests_P: torch.Tensor) -> None:
        digests_P[self.row] = self.region.digest(self.part.target.to(self.sent))


@dataclass(slots=True)
class _LocalChunk:
    """A `WireChunk` as this worker receives it."""

    kind: str
    nbytes: int
    tensors: tuple[int, ...]
    target_B: torch.Tensor | None = None
    """live: the bytes in place. None for other kinds."""
    copy: PreparedCopy | None = None
    """staged: copies the parts that land here."""
    widened: list[_Widened] = field(default_factory=list)
    """staged: those that are kept in a wider dtype."""
    digest: PreparedDigest | None = None
    """Digests the live parts, if they are digested on arrival."""
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
    """Event after the last copy from each of the ring's buffers."""
    arriving: deque[torch.cuda.Event] = field(default_factory=deque)
    """Events after the queued receives, oldest first."""
    has_written: bool = False
    """Whether live memory has changed."""
    seconds: dict[str, float] = field(default_factory=lambda: {"wire": 0.0, "load": 0.0})

    def left_s(self) -> float:
        return max(0.001, self.deadline - time.monotonic())

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Wait for one receive."""
        began = time.monotonic()
        self.group.synchronize(event, deadline_s=self.left_s())
        self.seconds["wire"] += time.monotonic() - began

    def wait(self, *, leaving: int = 0) -> None:
        """Wait for the oldest receives, until `leaving` of them are left."""
        while len(self.arriving) > leaving:
            self.wait_for(self.arriving.popleft())


class DirectReceiver:
    """One worker's receives of one layout.

    Views and tables are made once and stay valid, because kernel tensors never move.

    Args:
        digests_on_arrival: digest live parts as each chunk completes. Default: on CUDA; on the CPU
            everything is read back after the update.
    """

    def __init__(
        self,
        *,
        chunks: Sequence[WireChunk],
        manifest: Manifest,
        plan: PlacementPlan,
        live: Live,
        device: torch.device,
        digests_on_arrival: bool | None = None,
    ) -> None:
        self._manifest, self._device = manifest, device
        self._plan, self._live, self._regions = plan, live, plan.regions_by_name()
        self._is_digested = (
            device.type == "cuda" if digests_on_arrival is None else digests_on_arrival
        )
        self.needs_reload = any(c.kind == "reload" for c in chunks)
        direct = sorted(i for c in chunks if c.kind != "reload" for i in c.tensors)
        self.direct_names = frozenset(manifest.tensors[i].name for i in direct)
        counts = [len(self._regions.get(manifest.tensors[i].name, ())) for i in direct]
        self._first_part = dict(zip(direct, itertools.accumulate(counts, initial=0), strict=False))
        self._digests_P = torch.zeros(sum(counts), dtype=torch.int64, device=device)
        self._chunks = [self._chunk(c) for c in chunks]
        self._ring_bytes = self._lay_out_ring()
        self._stream = _side_stream(device) if device.type == "cuda" else None
        """Runs copies and digests at the same time as the wire."""

    def _chunk(self, chunk: WireChunk) -> _LocalChunk:
        specs = [self._manifest.tensors[i] for i in chunk.tensors]
        made = _LocalChunk(chunk.kind, sum(s.nbytes for s in specs), chunk.tensors)
        if chunk.kind == "reload":
            return made
        parts: list[Part] = []
        rows: list[int] = []
        origins: list[tuple[int, tuple[int, ...]]] = []
        for index, spec, offset in zip(chunk.tensors, specs, chunk_offsets(specs), strict=True):
            for row, region in enumerate(
                self._regions.get(spec.name, ()), start=self._first_part[index]
            ):
                first = offset + region.first_index * DTYPE_BYTES[spec.dtype]
                part = Part(
                    target=self._view(region), offset_bytes=first, strides=region.index_strides
                )
                sent = getattr(torch, spec.dtype)
                if part.target.dtype.itemsize > sent.itemsize:
                    made.widened.append(_Widened(part=part, sent=sent, row=row, region=region))
                    continue
                parts.append(part)
                rows.append(row)
                origins.append((region.first_index, region.index_strides))
        views = [p.target for p in parts]
        if chunk.kind == "live":
            flat = torch.as_strided(
                views[0], (made.nbytes // views[0].element_size(),), (1,), views[0].storage_offset()
            )
            made.target_B = flat.view(torch.uint8)
        else:
            made.copy = PreparedCopy(parts)
        if self._is_digested:
            made.digest = PreparedDigest(views, rows=rows, origins=origins)
        return made

    def _view(self, region: Region) -> torch.Tensor:
        live = self._live[self._plan.owner_of(region)]
        assert isinstance(live, torch.Tensor)
        return region.view_in(live)

    def _lay_out_ring(self) -> list[int]:
        """Give each staged chunk its buffer; returns the bytes of the two."""
        staged, ring_bytes = [c for c in self._chunks if c.kind == "staged"], [0, 0]
        for chunk, slot in zip(staged, ring_slots([c.nbytes for c in staged]), strict=True):
            chunk.slot, ring_bytes[slot] = slot, max(ring_bytes[slot], chunk.nbytes)
        return ring_bytes

    def receive(
        self,
        *,
        group: TransferGroup,
        deadline_s: float,
        load: Load,
        on_written: Callable[[int], None],
    ) -> dict[str, float]:
        """Receive every chunk to its place; returns seconds {"wire", "load"}.

        Args:
            load: takes tensors of the reload path; they own their memory.
            on_written: called with the number of tensors that are about to change.

        Raises:
            TransferError or a subclass: live memory is a mixture, unless `on_written` was
                never called.
        """
        run = _Receive(
            group=group, deadline=time.monotonic() + deadline_s, load=load, on_written=on_written
        )
        self._begin()
        started: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        for k, chunk in enumerate(self._chunks):
            buffer_B, event = self._start(run, chunk) if started is None else started
            # A broadcast that is not queued blocks; the sender fills its next chunk meanwhile.
            is_queued = event is not None
            started = (
                self._start(run, self._chunks[k + 1])
                if is_queued and self._may_start_ahead(k + 1)
                else None
            )
            self._finish(run, chunk, buffer_B, event)
            run.wait(leaving=QUEUED_CHUNKS)
        run.wait()
        began = time.monotonic()
        if self._stream is not None:
            self._stream.synchronize()
        run.seconds["wire"] += time.monotonic() - began
        return run.seconds

    def _begin(self) -> None:
        """Let the next work wait for copies and digests that a failed receive may have left."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._digests_P.zero_()

    def _may_start_ahead(self, k: int) -> bool:
        """Whether to ask for chunk k before the one ahead of it is copied.

        Not if both use the same buffer, nor if live memory would change too early.
        """
        if k >= len(self._chunks):
            return False
        chunk, ahead = self._chunks[k], self._chunks[k - 1]
        if chunk.kind == "live":
            return k > 1
        return not (chunk.kind == ahead.kind == "staged" and chunk.slot == ahead.slot)

    def _start(
        self, run: _Receive, chunk: _LocalChunk
    ) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Ask for a chunk; returns its buffer and the event after its arrival, if any."""
        if chunk.kind == "live":
            run.on_written(len(chunk.tensors))
        began = time.monotonic()
        buffer_B = self._buffer(run, chunk)
        event = run.group.broadcast(buffer_B, deadline_s=run.left_s())
        if event is not None:
            run.arriving.append(event)
        run.seconds["wire"] += time.monotonic() - began
        return buffer_B, event

    def _buffer(self, run: _Receive, chunk: _LocalChunk) -> torch.Tensor:
        if chunk.target_B is not None:
            return chunk.target_B
        if chunk.kind == "reload":  # the reload keeps its tensors, so each has separate memory
            return torch.empty(chunk.nbytes, dtype=torch.uint8, device=self._device)
        if not run.ring:
            run.ring = [
                torch.empty(nbytes, dtype=torch.uint8, device=self._device)
                for nbytes in self._ring_bytes
            ]
            if (
                self._stream is not None
            ):  # after a free, nobody gets the memory before the copies end
                for slot_B in run.ring:
                    slot_B.record_stream(self._stream)
        copied = run.copied[chunk.slot]
        if (
            copied is not None
        ):  # the broadcast waits on the device for the current stream; the host does not
            torch.cuda.current_stream(self._device).wait_event(copied)
        return run.ring[chunk.slot][: chunk.nbytes]

    def _finish(
        self,
        run: _Receive,
        chunk: _LocalChunk,
        buffer_B: torch.Tensor,
        event: torch.cuda.Event | None,
    ) -> None:
        """Copy or load an arrived chunk that is not in place, then digest its live parts."""
        if chunk.kind != "live":
            # An abort completes the event too, so it does not prove arrival. Wait for a checked
            # receive before the first write to live memory. Later writes change a mixture.
            is_queued = self._stream is not None and chunk.kind == "staged" and run.has_written
            if event is not None and not is_queued:
                run.wait_for(event)
            run.on_written(len(chunk.tensors))
        run.has_written = True
        began = time.monotonic()
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
        run.seconds["load"] += time.monotonic() - began

    @staticmethod
    def _place(chunk: _LocalChunk, buffer_B: torch.Tensor) -> None:
        if chunk.copy is not None:
            chunk.copy.launch(buffer_B)
        for widened in chunk.widened:
            widened.place(buffer_B)

    def _digest(self, chunk: _LocalChunk) -> None:
        if chunk.digest is not None:
            chunk.digest.launch(self._digests_P)
            for widened in chunk.widened:
                widened.digest(self._digests_P)

    def apply(
        self, buffers: Sequence[torch.Tensor], *, load: Load, on_written: Callable[[int], None]
    ) -> None:
        """Copy chunks from shadow memory to their places, then digest live parts.

        The work is queued on the current stream.

        Args:
            buffers: the layout's chunks, in order. They must live until the stream is done.
            load, on_written: as in `receive`.
        """
        self._begin()
        on_written(sum(len(c.tensors) for c in self._chunks))
        arrived = list(zip(self._chunks, buffers, strict=True))
        in_place = [
            (_wide(c.target_B), buffer_B) for c, buffer_B in arrived if c.target_B is not None
        ]
        for pairs in _by_dtype([t for t, _ in in_place], [b.view(t.dtype) for t, b in in_place]):
            torch._foreach_copy_(*pairs)
        for chunk, buffer_B in arrived:
            self._place(chunk, buffer_B)
        for chunk, buffer_B in arrived:
            self._digest(chunk)
            if chunk.kind == "reload":
                load(self._tensors(chunk, buffer_B))

    def _tensors(
        self, chunk: _LocalChunk, buffer_B: torch.Tensor
    ) -> list[tuple[str, torch.Tensor]]:
        specs = [self._manifest.tensors[i] for i in chunk.tensors]
        return list(zip((s.name for s in specs), views_of(buffer_B, specs), strict=True))

    def digests(self) -> array.array[int] | None:
        """Digests (int64) taken on arrival in the last receive, in the order of `Arrivals`.

        None: the tensors must be read back.
        """
        if not self._is_digested:
            return None
        return array.array("q", self._digests_P.cpu().numpy().tobytes())


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for copies and digests of all receivers."""
    return torch.cuda.Stream(device)


def _wide(flat_B: torch.Tensor) -> torch.Tensor:
    """View the bytes as int64 if size and address allow it, which copies faster."""
    aligned = (
        flat_B.numel() % 8 == 0 and flat_B.data_ptr() % 8 == 0 and flat_B.storage_offset() % 8 == 0
    )
    return flat_B.view(torch.int64) if aligned else flat_B


def _by_dtype(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """The pairs ordered by dtype, because only lists of one dtype are copied in few launches."""
    found: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        pairs = found.setdefault(target.dtype, ([], []))
        pairs[0].append(target)
        pairs[1].append(source)
    return list(found.values())
