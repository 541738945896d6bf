"""The trainer's end of a publication in the receiver's own order: chunks are merged straight into a ring and leave from there.

The receiver says which tensors travel side by side (`WireLayout`), so that they arrive in place. `fill(k, out_B)` writes chunk k's merged
bytes. On CUDA three streams run: filling chunk k+1, the wire of chunk k, and the digest of what leaves; the host only queues. The
ring holds at most `RING_BYTES`. A chunk that lies somewhere already (an embedding without an adapter) leaves from there.

Axes: B = bytes, N = tensors of the manifest.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from orchestrator.errors import ManifestError, TransferTimeout
from orchestrator.protocol.messages import DTYPE_BYTES, Manifest
from weight_transfer.digest import PreparedDigest
from weight_transfer.groups import GroupOwner, TransferGroup, wait_for_event
from weight_transfer.layout import view_of
from weight_transfer.sender import SendReport, named_replica

RING_BYTES = 2 * 2**30
RING_CHUNKS = 3
"""One is filled, one is on the wire, one is digested."""
RING_ALIGN = 512
Fill = Callable[[int, torch.Tensor], None]
_Use = tuple[str | None, torch.cuda.Event]
"""A chunk on its way to a replica, or (None) being digested; until the event."""


def ring_bytes(sizes: Sequence[int], usual: int, *, at_once: int) -> int:
    """Room for `at_once` usual chunks, or for the largest and a usual one beside it; at most `RING_BYTES`, unless one chunk needs more. Pure.

    Args:
        sizes: bytes of every chunk.
        usual: of the largest that is not an outlier (a tensor larger than what chunks are cut to, as an embedding).
    """
    sizes = [_aligned(s) for s in sizes]
    largest, usual = max(sizes), _aligned(usual)
    wanted = max(largest + usual, at_once * usual) if at_once > 1 else largest
    return max(largest, min(wanted, RING_BYTES, sum(sizes)))


def ring_places(sizes: Sequence[int], capacity: int) -> list[int]:
    """Where each chunk begins: behind the one before it, or at the front where it would not fit. Pure."""
    places, at = [], 0
    for size in sizes:
        at = 0 if at + size > capacity else at
        places.append(at)
        at += _aligned(size)
    return places


def _aligned(nbytes: int) -> int:
    return -(-nbytes // RING_ALIGN) * RING_ALIGN


class ChunkSender(GroupOwner):
    """Sends one manifest in one layout, again and again.

    Args:
        groups: replica's node id -> its joined group (rank 0). Owned from here on: `close` closes them.
        chunks: manifest indices of each chunk; every tensor of the manifest once.
        fill: writes the merged bytes of a chunk into a uint8 buffer; on CUDA queues that on the current stream. It is called for every chunk, in order.
        lies_at: the memory that has a chunk's bytes already, today; None: it is to be filled. Which chunks these are never changes.

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
        lies_at: Callable[[int], torch.Tensor | None] = lambda _: None,
    ) -> None:
        if sorted(i for c in chunks for i in c) != list(range(len(manifest.tensors))):
            raise ManifestError(
                f"the layout's {len(chunks)} chunks are not a partition of the manifest's {len(manifest.tensors)} tensors"
            )
        super().__init__(groups)
        self._manifest, self._fill, self._lies_at, self._device = manifest, fill, lies_at, torch.device(device)
        self._chunks = [tuple(c) for c in chunks]
        self._nbytes = [sum(manifest.tensors[i].nbytes for i in c) for c in self._chunks]
        self._is_cuda = self._device.type == "cuda"
        self._is_lying = [lies_at(k) is not None for k in range(len(self._chunks))]
        in_ring = [0 if lying else n for n, lying in zip(self._nbytes, self._is_lying, strict=True)]
        usual = max((n for n, c in zip(in_ring, self._chunks, strict=True) if len(c) > 1), default=max(in_ring))
        capacity = ring_bytes(in_ring, usual, at_once=RING_CHUNKS if self._is_cuda else 1)
        self._places = ring_places(in_ring, capacity)
        self._ring_B = torch.empty(capacity, dtype=torch.uint8, device=self._device)
        self._digests = [self._prepare(k) for k in range(len(self._chunks))] if self._is_cuda else []
        self._digested_at = [self._buffer(k).data_ptr() for k in range(len(self._chunks))]
        """Where each digest's table says that its chunk is."""
        self._streams = (torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)) if self._is_cuda else None
        for stream in self._streams or ():
            # A send that failed may leave work queued: the memory is not given away before it is done.
            self._ring_B.record_stream(stream)
        self._busy: deque[tuple[int, list[_Use]]] = deque()
        """Chunks that have not left the ring, oldest first, and what has yet to be done with them."""

    def _buffer(self, k: int) -> torch.Tensor:
        """Chunk k's part of the ring, or where it lies."""
        if self._is_lying[k]:
            there_B = self._lies_at(k)
            assert there_B is not None, f"chunk {k} lay in memory when the ring was planned, which has no room for it"
            return there_B
        return self._ring_B[self._places[k] : self._places[k] + self._nbytes[k]]

    def _views(self, k: int) -> list[torch.Tensor]:
        """Chunk k's tensors, in the ring or where they lie."""
        buffer_B, offset, views = self._buffer(k), 0, []
        for index in self._chunks[k]:
            spec = self._manifest.tensors[index]
            if offset % DTYPE_BYTES[spec.dtype]:
                raise ManifestError(
                    f"{spec.name} ({spec.dtype}) would lie at byte {offset} of a chunk, which its element size does not divide"
                )
            views.append(view_of(buffer_B, spec, offset))
            offset += spec.nbytes
        return views

    def _prepare(self, k: int) -> PreparedDigest:
        return PreparedDigest(self._views(k), rows=self._chunks[k])

    def send(self, *, deadline_s: float) -> SendReport:
        """Send every chunk to every group.

        Raises:
            TransferTimeout, TransferAborted, TransferError: the wire; names the replica. Every group is then aborted.
        """
        self._raise_if_aborted()
        try:
            return self._send_all(time.monotonic() + deadline_s)
        except BaseException as error:
            self.abort(f"{type(error).__name__}: {error}")
            raise

    # ------------------------------------------------------------ one send

    def _send_all(self, deadline: float) -> SendReport:
        began = time.monotonic()
        seconds = {"fill": 0.0, "wire": 0.0, "digest": 0.0}
        digests_N = torch.zeros(len(self._manifest.tensors), dtype=torch.int64, device=self._device)
        self._busy.clear()
        for stream in self._streams or ():
            stream.wait_stream(torch.cuda.current_stream(self._device))
            digests_N.record_stream(stream)
        for k in range(len(self._chunks)):
            with _timed(seconds, "wire"):
                self._wait_for_room(k, deadline)
            with _timed(seconds, "fill"):
                self._fill_chunk(k)
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

    def _fill_chunk(self, k: int) -> None:
        if self._streams is None:
            self._fill(k, self._buffer(k))
            return
        with torch.cuda.stream(self._streams[0]):
            self._fill(k, self._buffer(k))

    def _broadcast(self, k: int, deadline: float) -> list[_Use]:
        uses: list[_Use] = []
        for name, group in self._groups.items():
            with named_replica(name):
                if self._streams is None:
                    group.broadcast(self._buffer(k), deadline_s=self._left_s(deadline))
                    continue
                with torch.cuda.stream(self._streams[0]):
                    event = group.broadcast(self._buffer(k), deadline_s=self._left_s(deadline))
                if event is not None:
                    uses.append((name, event))
        return uses

    def _digest(self, k: int, digests_N: torch.Tensor) -> list[_Use]:
        """Of what leaves, from the ring, beside the wire."""
        if self._streams is None:
            PreparedDigest(self._views(k), rows=self._chunks[k]).launch(digests_N)
            return []
        filling, digesting = self._streams
        if self._is_lying[k] and (at := self._buffer(k).data_ptr()) != self._digested_at[k]:
            self._digests[k], self._digested_at[k] = self._prepare(k), at
        digesting.wait_stream(filling)
        with torch.cuda.stream(digesting):
            self._digests[k].launch(digests_N)
            event = torch.cuda.Event()
            event.record()
        return [(None, event)]

    def _wait_for_room(self, k: int, deadline: float) -> None:
        """Until no earlier chunk is where chunk k goes; they leave in their order."""
        if self._is_lying[k]:
            return
        first, end = self._places[k], self._places[k] + self._nbytes[k]
        while any(
            not self._is_lying[j] and self._places[j] < end and first < self._places[j] + self._nbytes[j] for j, _ in self._busy
        ):
            self._wait_for_oldest(deadline)

    def _wait_for_oldest(self, deadline: float) -> None:
        _, uses = self._busy.popleft()
        for name, event in uses:
            if name is None:
                late = "the digest of a chunk was not done before the send's deadline; the GPU is stuck"
                wait_for_event(event, deadline_s=self._left_s(deadline), check=self._raise_if_aborted, late=late)
                continue
            with named_replica(name):
                self._groups[name].synchronize(event, deadline_s=self._left_s(deadline))

    def _left_s(self, deadline: float) -> float:
        self._raise_if_aborted()
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TransferTimeout("the send's deadline passed before all chunks had left")
        return left_s


@contextlib.contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    seconds[phase] += time.monotonic() - began
