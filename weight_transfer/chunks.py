"""The trainer's end of a publication: merges chunks into a ring buffer, sends and digests them.

The receiver's `WireLayout` groups tensors into chunks, so that they arrive in place.
`fill(k, out_B)` writes the merged bytes of chunk k. On CUDA three streams run side by side: one
fills chunk k+1, one sends chunk k, one digests what is sent. The host only queues the work, up to
`QUEUED_CHUNKS` ahead of the wire: a fill waits on the device for its place in the ring.
The ring holds at most `RING_BYTES`. A chunk that already has its bytes in memory (an embedding
without an adapter) is sent from there. Any failure aborts every group, so no replica waits for the
second half of a version.

Axes: B = bytes, N = tensors of the manifest.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from orchestrator.errors import ManifestError, TransferAborted, TransferError, TransferTimeout
from orchestrator.protocol.messages import DTYPE_BYTES, Manifest
from weight_transfer.cuda_events import QUEUED_CHUNKS, wait_for_event
from weight_transfer.digest import PreparedDigest
from weight_transfer.edges import Step, digest_of_pieces, send_from
from weight_transfer.groups import TransferGroup
from weight_transfer.layout import chunk_offsets, views_of

RING_BYTES = 2 * 2**30
RING_CHUNKS = 3
"""One is filled, one is on the wire, one is digested."""
RING_ALIGN = 512
Fill = Callable[[int, torch.Tensor], None]
_Use = tuple[str | None, torch.cuda.Event]
"""(replica, event): until the event, the chunk is being sent to the replica, or digested (None)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReport:
    """Report of a send. `digests_N` is int64 on the CPU, in manifest order.

    `seconds` that the sending thread spent: "fill", "digest", "wire" (waiting for the groups),
    "total". On CUDA "fill" and "digest" only queue work.
    """

    digests_N: torch.Tensor
    nbytes: int
    seconds: dict[str, float]


def usual_bytes(sizes: Sequence[int], *, at_once: int) -> int:
    """The largest size that `at_once` chunks have. Pure.

    A wide layer's matrix is a separate chunk, and there are many. An embedding and a head are
    larger, but few.
    """
    return sorted(sizes, reverse=True)[min(at_once, len(sizes)) - 1]


def ring_bytes(sizes: Sequence[int], usual: int, *, at_once: int) -> int:
    """Bytes of a ring for `at_once` usual chunks, or for the largest and a usual one. Pure.

    The ring exceeds `RING_BYTES` only if a single chunk does.

    Args:
        sizes: bytes of every chunk.
        usual: see `usual_bytes`. An embedding can be larger.
    """
    sizes = [_aligned(s) for s in sizes]
    largest, usual = max(sizes), _aligned(usual)
    wanted = max(largest + usual, at_once * usual) if at_once > 1 else largest
    return max(largest, min(wanted, RING_BYTES, sum(sizes)))


def ring_places(sizes: Sequence[int], capacity: int, *, usual: int) -> list[int]:
    """Offset of each chunk: in the next slot of `usual` bytes, or 0 where it would not fit. Pure.

    Chunks that follow each other closely would pack better. But where their sizes vary, two of
    three large ones then share bytes, and the wire waits for a fill.
    """
    places, at = [], 0
    for size in sizes:
        room = max(_aligned(size), _aligned(usual))
        at = 0 if at + size > capacity else at
        places.append(at)
        at += room
    return places


def _aligned(nbytes: int) -> int:
    return -(-nbytes // RING_ALIGN) * RING_ALIGN


class ChunkSender:
    """Sends one manifest in one layout, again and again.

    Args:
        groups: replica's node id -> its joined group (rank 0). `close` closes them.
        chunks: manifest indices of each chunk; every tensor of the manifest once.
        steps: what this rank sends to each worker, instead of whole chunks to all.
        fill: writes the merged bytes of a chunk into a uint8 buffer. On CUDA it queues the work on
            the current stream. The sender calls it for every chunk, in order.
        resident: returns the memory that already holds a chunk's bytes, or None for a chunk to be
            filled. The set of resident chunks never changes; their addresses may.

    Raises:
        ManifestError: the chunks are not a partition of the manifest.
    """

    def __init__(
        self,
        *,
        groups: Mapping[str, TransferGroup],
        manifest: Manifest,
        chunks: Sequence[Sequence[int]],
        fill: Fill,
        device: torch.device | str,
        resident: Callable[[int], torch.Tensor | None] = lambda _: None,
        steps: Sequence[Step] | None = None,
    ) -> None:
        if sorted(i for c in chunks for i in c) != list(range(len(manifest.tensors))):
            raise ManifestError(
                f"the layout's {len(chunks)} chunks do not hold each of the manifest's "
                f"{len(manifest.tensors)} tensors exactly once"
            )
        self._groups = dict(groups)
        self._aborted: str | None = None
        self._lock = threading.Lock()
        self._manifest, self._fill, self._resident = manifest, fill, resident
        self._device = torch.device(device)
        self._chunks = [tuple(c) for c in chunks]
        self._steps = steps
        self._nbytes = (
            [sum(manifest.tensors[i].nbytes for i in c) for c in self._chunks]
            if steps is None
            else [step.nbytes for step in steps]
        )
        self._is_cuda = self._device.type == "cuda"
        self._is_resident = [resident(k) is not None for k in range(len(self._nbytes))]
        in_ring = [0 if r else n for n, r in zip(self._nbytes, self._is_resident, strict=True)]
        at_once = RING_CHUNKS if self._is_cuda else 1
        usual = usual_bytes(in_ring, at_once=at_once)
        capacity = ring_bytes(in_ring, usual, at_once=at_once)
        self._places = ring_places(in_ring, capacity, usual=usual)
        self._ring_B = torch.empty(capacity, dtype=torch.uint8, device=self._device)
        self._digests = (
            [self._prepare(k) for k in range(len(self._nbytes))] if self._is_cuda else []
        )
        self._digested_at = [self._buffer(k).data_ptr() for k in range(len(self._nbytes))]
        """Address of each chunk in its digest's table."""
        self._streams = _streams(self._device) if self._is_cuda else None
        for stream in self._streams or ():
            # A failed send may leave work queued, which must end before the memory is reused.
            self._ring_B.record_stream(stream)
        self._busy: deque[tuple[int, list[_Use]]] = deque()
        """Chunks that may still occupy the ring, oldest first, with their pending uses."""

    def _buffer(self, k: int) -> torch.Tensor:
        """Chunk k's part of the ring, or its resident memory."""
        if self._is_resident[k]:
            resident_B = self._resident(k)
            assert resident_B is not None, f"chunk {k} was resident when the ring was planned"
            return resident_B
        return self._ring_B[self._places[k] : self._places[k] + self._nbytes[k]]

    def _views(self, k: int) -> list[torch.Tensor]:
        """Views of chunk k's tensors."""
        specs = [self._manifest.tensors[i] for i in self._chunks[k]]
        for spec, offset in zip(specs, chunk_offsets(specs), strict=True):
            if offset % DTYPE_BYTES[spec.dtype]:
                raise ManifestError(
                    f"{spec.name} ({spec.dtype}) would begin at byte {offset} of a chunk, "
                    "which is not a multiple of its element size"
                )
        return views_of(self._buffer(k), specs)

    def _prepare(self, k: int) -> PreparedDigest:
        if self._steps is not None:
            return digest_of_pieces([self._buffer(k)], [self._steps[k]], self._manifest.tensors)
        return PreparedDigest(self._views(k), rows=self._chunks[k])

    def send(self, *, deadline_s: float, on_filled: Fill | None = None) -> SendReport:
        """Send every chunk to every group.

        Args:
            on_filled: takes each chunk's number and bytes, on the current stream.

        Raises:
            TransferTimeout, TransferAborted, TransferError: the text names the replica. Every
                group is then aborted.
        """
        self._raise_if_aborted()
        try:
            return self._send_all(time.monotonic() + deadline_s, on_filled)
        except BaseException as error:
            self.abort(f"{type(error).__name__}: {error}")
            raise

    def abort(self, reason: str) -> None:
        """End every group and a running `send`, from any thread. The first reason counts."""
        self._note(reason)
        for group in list(self._groups.values()):
            group.abort(reason)

    def release(self) -> None:
        """Leave the groups open for another sender. This one then refuses use."""
        self._note("the sender was replaced")
        self._groups.clear()

    def close(self) -> None:
        """Close every group. Safe to call twice."""
        self._note("the sender is closed")
        for group in list(self._groups.values()):
            group.close()
        self._groups.clear()

    def _note(self, reason: str) -> None:
        with self._lock:
            if self._aborted is None:
                self._aborted = reason

    def _raise_if_aborted(self) -> None:
        if self._aborted is not None:
            raise TransferAborted(f"transfer aborted: {self._aborted}")

    # ------------------------------------------------------------ one send

    def _send_all(self, deadline: float, on_filled: Fill | None) -> SendReport:
        began = time.monotonic()
        seconds = {"fill": 0.0, "wire": 0.0, "digest": 0.0}
        digests_N = torch.zeros(len(self._manifest.tensors), dtype=torch.int64, device=self._device)
        self._busy.clear()
        for stream in self._streams or ():
            stream.wait_stream(torch.cuda.current_stream(self._device))
            digests_N.record_stream(stream)
        for k, nbytes in enumerate(self._nbytes):
            if not nbytes:  # a step in which this rank sends nothing
                continue
            with _timed(seconds, "wire"):
                while self._is_too_far_ahead(k):
                    self._wait_for_oldest(deadline)
            with _timed(seconds, "fill"):
                self._fill_chunk(k, on_filled)
            with _timed(seconds, "wire"):
                uses = self._broadcast(k, deadline)
            with _timed(seconds, "digest"):
                uses += self._digest(k, digests_N)
            self._busy.append((k, uses))
        with _timed(seconds, "wire"):
            while self._busy:
                self._wait_for_oldest(deadline)
        result_N = digests_N.cpu()
        seconds["total"] = time.monotonic() - began
        return SendReport(digests_N=result_N, nbytes=self._manifest.nbytes, seconds=seconds)

    def _fill_chunk(self, k: int, on_filled: Fill | None) -> None:
        if self._streams is None:
            self._fill(k, self._buffer(k))
            if on_filled is not None:
                on_filled(k, self._buffer(k))
            return
        with torch.cuda.stream(self._streams[0]):
            for event in self._uses_of_place(k):
                self._streams[0].wait_event(event)
            self._fill(k, self._buffer(k))
            if on_filled is not None:
                on_filled(k, self._buffer(k))

    def _broadcast(self, k: int, deadline: float) -> list[_Use]:
        uses: list[_Use] = []
        deliveries = None if self._steps is None else self._steps[k].deliveries
        for name, group in self._groups.items():
            send = functools.partial(send_from, self._buffer(k), deliveries, group=group)
            with _named_replica(name):
                if self._streams is None:
                    send(deadline_s=self._left_s(deadline))
                    continue
                with torch.cuda.stream(self._streams[0]):
                    event = send(deadline_s=self._left_s(deadline))
                if event is not None:
                    uses.append((name, event))
        return uses

    def _digest(self, k: int, digests_N: torch.Tensor) -> list[_Use]:
        """Digest chunk k's bytes from the ring, at the same time as the wire."""
        if self._streams is None:
            self._prepare(k).launch(digests_N)
            return []
        filling, digesting = self._streams
        if self._is_resident[k] and (at := self._buffer(k).data_ptr()) != self._digested_at[k]:
            self._digests[k], self._digested_at[k] = self._prepare(k), at
        digesting.wait_stream(filling)
        with torch.cuda.stream(digesting):
            self._digests[k].launch(digests_N)
            event = torch.cuda.Event()
            event.record()
        return [(None, event)]

    def _is_too_far_ahead(self, k: int) -> bool:
        """Whether the host waits before it queues chunk k.

        With several groups it waits for chunk k's place. A broadcast of one group must not be
        queued after that of another: NCCL's abort waits for its own group's kernels, and the dead
        replica's group may come later.
        """
        if len(self._groups) > 1 and self._uses_of_place(k):
            return True
        return len(self._busy) >= QUEUED_CHUNKS

    def _uses_of_place(self, k: int) -> list[torch.cuda.Event]:
        """Events after which no earlier chunk occupies chunk k's place in the ring."""
        if self._is_resident[k]:
            return []
        first, end = self._places[k], self._places[k] + self._nbytes[k]
        return [
            event
            for j, uses in self._busy
            if not self._is_resident[j]
            and self._places[j] < end
            and first < self._places[j] + self._nbytes[j]
            for _, event in uses
        ]

    def _wait_for_oldest(self, deadline: float) -> None:
        _, uses = self._busy.popleft()
        for name, event in uses:
            if name is None:
                late = "a chunk's digest missed the send's deadline; the GPU is stuck"
                wait_for_event(
                    event,
                    deadline_s=self._left_s(deadline),
                    check=self._raise_if_aborted,
                    late=late,
                )
                continue
            with _named_replica(name):
                self._groups[name].synchronize(event, deadline_s=self._left_s(deadline))

    def _left_s(self, deadline: float) -> float:
        self._raise_if_aborted()
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TransferTimeout("the deadline passed before all chunks were sent")
        return left_s


@functools.cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Streams for fills and for digests. Work that a failed send has left there ends first."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


@contextlib.contextmanager
def _named_replica(replica: str) -> Iterator[None]:
    """Prefix the text of a transfer error with the replica's name."""
    try:
        yield
    except TransferError as error:
        raise type(error)(f"replica {replica!r}: {error}") from error


@contextlib.contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    seconds[phase] += time.monotonic() - began
