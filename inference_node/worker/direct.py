"""Receives a layout's chunks into live kernel tensors, without vLLM's reload where that is proven.

`chunk_plan` says which tensors arrive in place ("live"), through a buffer ("staged"), or through
the model's own loaders ("reload"). A worker receives whole chunks by broadcast, or in steps only
what it keeps, from each rank of the trainer (`weight_transfer.edges`).

Staged chunks and steps go through a ring of two buffers: chunk k+1 arrives while chunk k is copied.
The first chunk is never live, so until it has arrived whole, a failure leaves all live tensors
unchanged. On CUDA the host waits for that chunk, and then queues up to `QUEUED_CHUNKS` ahead of the
wire.

Axes: B = bytes, N = tensors, P = parts of tensors on this worker.
"""

from __future__ import annotations

import array
import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from inference_node.worker import chunk_plan
from inference_node.worker.chunk_plan import Live
from inference_node.worker.local_chunk import LocalChunk, Widened, present_bytes
from inference_node.worker.placement import PlacementPlan, Region
from orchestrator.protocol.messages import DTYPE_BYTES, Manifest, WireChunk
from weight_transfer import changes
from weight_transfer.boxes import Strided, cut, matrix
from weight_transfer.copies import PreparedCopy
from weight_transfer.cuda_events import QUEUED_CHUNKS
from weight_transfer.digest import PreparedDigest
from weight_transfer.edges import Delivery, Placed, Step, receive_into, view_of_piece
from weight_transfer.groups import TransferGroup
from weight_transfer.layout import chunk_offsets, torch_dtype, views_of
from weight_transfer.strides import Part

Load = Callable[[list[tuple[str, torch.Tensor]]], None]


def ring_slots(sizes: Sequence[int], *, usual: int) -> list[int]:
    """Choose which of the ring's two buffers receives each staged chunk. Pure.

    They take turns, but chunks larger than `usual` share the first buffer. The ring then holds one
    large buffer and one of a usual chunk's size.
    """
    slots: list[int] = []
    for nbytes in sizes:
        slots.append(0 if nbytes > usual else 1 - slots[-1] if slots else 0)
    return slots


# ------------------------------------------------------------ the receive


@dataclass(frozen=True, slots=True)
class _Landing:
    """Elements that land in live memory, and the digest that they count in."""

    part: Part
    sent: torch.dtype
    row: int
    region: Strided


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
    incomplete: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)
    """Index of a tensor of the reload path -> its memory, and its elements that have yet to
    come."""
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
        steps: what this worker receives from each trainer rank. None: whole chunks by broadcast.
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
        steps: Sequence[Step] | None = None,
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
        self._chunks = [self._chunk(c) for c in chunks] if steps is None else self._in_steps(steps)
        self._ring_bytes = self._lay_out_ring()
        self._stream = _side_stream(device) if device.type == "cuda" else None
        """Runs copies and digests at the same time as the wire."""

    def _chunk(self, chunk: WireChunk) -> LocalChunk:
        specs = [self._manifest.tensors[i] for i in chunk.tensors]
        made = LocalChunk(chunk.kind, sum(s.nbytes for s in specs), chunk.tensors)
        if chunk.kind == "reload":
            return made
        landing: list[_Landing] = []
        for index, spec, offset in zip(chunk.tensors, specs, chunk_offsets(specs), strict=True):
            for row, region in self._regions_of(index):
                first = offset + region.first_index * DTYPE_BYTES[spec.dtype]
                part = Part(
                    target=region.view_in(self._target(region)),
                    offset_bytes=first,
                    strides=region.index_strides,
                )
                landing.append(_Landing(part, torch_dtype(spec.dtype), row, region))
        if chunk.kind == "live":
            first_view = landing[0].part.target
            numel = made.nbytes // first_view.element_size()
            flat = torch.as_strided(first_view, (numel,), (1,), first_view.storage_offset())
            made.target_B = flat.view(torch.uint8)
        self._land(made, landing)
        return made

    def _in_steps(self, steps: Sequence[Step]) -> list[LocalChunk]:
        """The steps in which trainer ranks send this worker its own pieces."""
        known = set[int]()
        chunks = []
        for step in steps:
            indices = {placed.piece.index for placed in step.placed}
            made = LocalChunk(
                "staged", step.nbytes, tuple(sorted(indices - known)), deliveries=step.deliveries
            )
            known |= indices
            made.reloaded = tuple(p for p in step.placed if p.piece.index not in self._first_part)
            self._land(made, [one for placed in step.placed for one in self._pieces(placed)])
            chunks.append(made)
        return chunks

    def _pieces(self, placed: Placed) -> Iterator[_Landing]:
        """Where the elements of a piece land; nowhere if its tensor is reloaded."""
        index, box = placed.piece.index, placed.piece.box
        spec = self._manifest.tensors[index]
        _, width = matrix(spec.shape)
        for row, region in self._regions_of(index) if index in self._first_part else ():
            target = self._target(region)
            for some in cut(region, box, spec.shape):
                down, across = divmod(some.first_index, width)
                first = (down - box.first_row) * box.columns + across - box.first_column
                part = Part(
                    target=torch.as_strided(
                        target, some.size, some.strides, target.storage_offset() + some.offset
                    ),
                    offset_bytes=placed.offset + first * DTYPE_BYTES[spec.dtype],
                    strides=tuple(
                        s if s % width else s // width * box.columns for s in some.index_strides
                    ),
                )
                yield _Landing(part, torch_dtype(spec.dtype), row, some)

    def _land(self, made: LocalChunk, landing: Sequence[_Landing]) -> None:
        """Prepare copies and digests of what lands in live memory."""
        made.widened = [
            Widened(part=one.part, sent=one.sent, row=one.row, region=one.region)
            for one in landing
            if one.part.target.dtype.itemsize > one.sent.itemsize
        ]
        same = [one for one in landing if one.part.target.dtype.itemsize <= one.sent.itemsize]
        if made.kind != "live":
            made.copy = PreparedCopy([one.part for one in same])
        if self._is_digested:
            made.digest = PreparedDigest(
                [one.part.target for one in same],
                rows=[one.row for one in same],
                origins=[(one.region.first_index, one.region.index_strides) for one in same],
            )

    def _regions_of(self, index: int) -> Iterator[tuple[int, Region]]:
        """The regions of a tensor that is not reloaded, each with its row of the digests."""
        regions = self._regions.get(self._manifest.tensors[index].name, ())
        return enumerate(regions, start=self._first_part[index])

    def _target(self, region: Region) -> torch.Tensor:
        live = self._live[self._plan.owner_of(region)]
        assert isinstance(live, torch.Tensor)
        return live

    def _lay_out_ring(self) -> list[int]:
        """Give each staged chunk its buffer; returns the bytes of the two."""
        staged, ring_bytes = [c for c in self._chunks if c.kind == "staged"], [0, 0]
        sizes = [c.nbytes for c in staged]
        is_steps = any(c.deliveries is not None for c in staged)
        usual = max(sizes, default=0) if is_steps else chunk_plan.MAX_CHUNK_BYTES
        for chunk, slot in zip(staged, ring_slots(sizes, usual=usual), strict=True):
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
            if not chunk.nbytes:  # a step in which nothing comes here
                continue
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
        """Whether to ask for chunk k before the previous chunk is copied.

        Not if both use the same buffer, nor if live memory would change too early.
        """
        if k >= len(self._chunks) or not self._chunks[k].nbytes:
            return False
        chunk, ahead = self._chunks[k], self._chunks[k - 1]
        if chunk.kind == "live":
            return k > 1
        return not (chunk.kind == ahead.kind == "staged" and chunk.slot == ahead.slot)

    def _start(
        self, run: _Receive, chunk: LocalChunk
    ) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Ask for a chunk; returns its buffer and the event after its arrival, if any."""
        if chunk.kind == "live":
            run.on_written(len(chunk.tensors))
        began = time.monotonic()
        buffer_B = self._buffer(run, chunk)
        event = receive_into(buffer_B, chunk.deliveries, group=run.group, deadline_s=run.left_s())
        if event is not None:
            run.arriving.append(event)
        run.seconds["wire"] += time.monotonic() - began
        return buffer_B, event

    def _buffer(self, run: _Receive, chunk: LocalChunk) -> torch.Tensor:
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
        chunk: LocalChunk,
        buffer_B: torch.Tensor,
        event: torch.cuda.Event | None,
    ) -> None:
        """Copy or load an arrived chunk that is not in place, then digest its live parts."""
        if chunk.kind != "live":
            # An abort completes the event too, so it does not prove arrival. Wait for a checked
            # receive before the first write to live memory. Later writes change a mixture.
            is_queued = (
                self._stream is not None
                and chunk.kind == "staged"
                and not chunk.reloaded
                and run.has_written
            )
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
        if whole := self._completed(chunk, buffer_B, run.incomplete):
            run.load(whole)
        run.seconds["load"] += time.monotonic() - began

    def _completed(
        self,
        chunk: LocalChunk,
        buffer_B: torch.Tensor,
        incomplete: dict[int, tuple[torch.Tensor, int]],
    ) -> list[tuple[str, torch.Tensor]]:
        """Collect the pieces of tensors of the reload path; returns those that are whole now."""
        whole = []
        for placed in chunk.reloaded:
            index, box = placed.piece.index, placed.piece.box
            spec = self._manifest.tensors[index]
            if index not in incomplete:
                tensor = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=self._device)
                incomplete[index] = tensor, spec.numel
            tensor, missing = incomplete.pop(index)
            there = tensor.view(matrix(spec.shape))
            there = there.narrow(0, box.first_row, box.rows)
            there.narrow(1, box.first_column, box.columns).copy_(
                view_of_piece(buffer_B, placed, spec)
            )
            if missing > box.numel:
                incomplete[index] = tensor, missing - box.numel
            else:
                whole.append((spec.name, tensor))
        return whole

    @staticmethod
    def _place(chunk: LocalChunk, buffer_B: torch.Tensor) -> None:
        if chunk.copy is not None:
            chunk.copy.launch(buffer_B)
        for widened in chunk.widened:
            widened.place(buffer_B)

    def _digest(self, chunk: LocalChunk) -> None:
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
        incomplete: dict[int, tuple[torch.Tensor, int]] = {}
        for chunk, buffer_B in arrived:
            self._digest(chunk)
            if chunk.kind == "reload":
                load(self._tensors(chunk, buffer_B))
            if whole := self._completed(chunk, buffer_B, incomplete):
                load(whole)

    # ------------------------------------------------------------ changed elements

    def deliveries(self) -> list[Sequence[Delivery]]:
        """What comes of each chunk or step, in order."""
        return [
            changes.whole(c.nbytes) if c.deliveries is None else c.deliveries for c in self._chunks
        ]

    def apply_changes(
        self,
        arrived: changes.Buffers,
        olds: Mapping[str, torch.Tensor],
        *,
        load: Load,
        on_written: Callable[[int], None],
    ) -> None:
        """Make each chunk's new bytes of its live ones, and place them as ever.

        Args:
            arrived: all messages, as `changes.receive_changes` returns them.
            olds: the present tensors of the reload path (`verify.read_tensors`).
            load, on_written: as in `receive`.

        Raises:
            TransferError: a change of what this worker cannot read, or no code.
        """
        self._begin()
        on_written(sum(len(c.tensors) for c in self._chunks))
        incomplete: dict[int, tuple[torch.Tensor, int]] = {}
        each = zip(self._chunks, arrived, changes.restoring(arrived), strict=True)
        for chunk, messages, restore in each:
            if not chunk.nbytes:
                continue
            buffer_B = present_bytes(
                chunk,
                self._manifest.tensors,
                olds if any(m.is_code for m in messages) else None,
                device=self._device,
            )
            restore(buffer_B)
            self._place(chunk, buffer_B)
            self._digest(chunk)
            if chunk.kind == "reload":
                load(self._tensors(chunk, buffer_B))
            if whole := self._completed(chunk, buffer_B, incomplete):
                load(whole)

    def _tensors(self, chunk: LocalChunk, buffer_B: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
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
