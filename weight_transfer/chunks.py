"""The trainer's end of a publication in the receiver's own order: chunks are merged straight into a ring and leave from there.

The receiver says which tensors travel side by side (`WireLayout`), so that they arrive in place. `fill(k, out_B)` writes chunk k's merged
bytes. On CUDA three streams run: filling chunk k+1, the wire of chunk k, and the digest of what leaves; the host only queues. The
ring holds at most `RING_BYTES`.

Axes: B = bytes, N = tensors of the manifest.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from orchestrator.errors import ManifestError, TransferTimeout
from orchestrator.protocol.messages import DTYPE_BYTES, Manifest
from weight_transfer.digest import PreparedDigest
from weight_transfer.groups import GroupOwner, TransferGroup, wait_for_event
from weight_transfer.layout import view_of
from weight_transfer.sender import SendReport, named_replica

RING_BYTES = 2 * 2**30
RING_SLOTS = 3
"""One is filled, one is on the wire, one is digested."""
Fill = Callable[[int, torch.Tensor], None]


class ChunkSender(GroupOwner):
    """Sends one manifest in one layout, again and again.

    Args:
        groups: replica's node id -> its joined group (rank 0). Owned from here on: `close` closes them.
        chunks: manifest indices of each chunk; every tensor of the manifest once.
        fill: writes the merged bytes of a chunk into a uint8 buffer; on CUDA queues that on the current stream.

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
    ) -> None:
        if sorted(i for c in chunks for i in c) != list(range(len(manifest.tensors))):
            raise ManifestError(
                f"the layout's {len(chunks)} chunks are not a partition of the manifest's {len(manifest.tensors)} tensors"
            )
        super().__init__(groups)
        self._manifest, self._fill, self._device = manifest, fill, torch.device(device)
        self._chunks = [tuple(c) for c in chunks]
        self._nbytes = [sum(manifest.tensors[i].nbytes for i in c) for c in self._chunks]
        self._is_cuda = self._device.type == "cuda"
        self._ring = self._make_ring()
        self._digests = [self._prepare(k) for k in range(len(self._chunks))] if self._is_cuda else []
        self._streams = (torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)) if self._is_cuda else None

    def _make_ring(self) -> list[torch.Tensor]:
        largest = max(self._nbytes)
        slots = max(2, min(RING_SLOTS, RING_BYTES // largest, len(self._nbytes))) if self._is_cuda else 1
        return [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(slots)]

    def _views(self, k: int) -> list[torch.Tensor]:
        """Chunk k's tensors in its slot of the ring."""
        slot_B, offset, views = self._ring[k % len(self._ring)], 0, []
        for index in self._chunks[k]:
            spec = self._manifest.tensors[index]
            if offset % DTYPE_BYTES[spec.dtype]:
                raise ManifestError(
                    f"{spec.name} ({spec.dtype}) would lie at byte {offset} of a chunk, which its element size does not divide"
                )
            views.append(view_of(slot_B, spec, offset))
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
        busy: list[list[tuple[str, torch.cuda.Event]]] = [[] for _ in self._ring]
        fill_stream = torch.cuda.current_stream(self._device) if self._is_cuda else None
        if self._streams is not None and fill_stream is not None:
            self._streams[0].wait_stream(fill_stream)
            self._streams[1].wait_stream(fill_stream)
        for k in range(len(self._chunks)):
            slot = k % len(self._ring)
            with _timed(seconds, "wire"):
                self._wait(busy, slot, deadline)
            with _timed(seconds, "fill"):
                self._fill_slot(k, slot)
            with _timed(seconds, "wire"):
                self._broadcast(k, slot, busy, deadline)
            with _timed(seconds, "digest"):
                self._digest(k, slot, digests_N, busy)
        with _timed(seconds, "wire"):
            for slot in range(len(self._ring)):
                self._wait(busy, slot, deadline)
        result_N = digests_N.cpu()
        seconds["total"] = time.monotonic() - began
        return SendReport(digests_N=result_N, nbytes=self._manifest.nbytes, seconds=seconds)

    def _fill_slot(self, k: int, slot: int) -> None:
        buffer_B = self._ring[slot][: self._nbytes[k]]
        if self._streams is None:
            self._fill(k, buffer_B)
            return
        with torch.cuda.stream(self._streams[0]):
            self._fill(k, buffer_B)

    def _broadcast(self, k: int, slot: int, busy: list[list[tuple[str, torch.cuda.Event]]], deadline: float) -> None:
        buffer_B = self._ring[slot][: self._nbytes[k]]
        for name, group in self._groups.items():
            with named_replica(name):
                if self._streams is None:
                    group.broadcast(buffer_B, deadline_s=self._left_s(deadline))
                    continue
                with torch.cuda.stream(self._streams[0]):
                    event = group.broadcast(buffer_B, deadline_s=self._left_s(deadline))
                if event is not None:
                    busy[slot].append((name, event))

    def _digest(self, k: int, slot: int, digests_N: torch.Tensor, busy: list[list[tuple[str, torch.cuda.Event]]]) -> None:
        """Of what leaves, from the ring, beside the wire."""
        if self._streams is None:
            PreparedDigest(self._views(k), rows=self._chunks[k]).launch(digests_N)
            return
        filling, digesting = self._streams
        digesting.wait_stream(filling)
        with torch.cuda.stream(digesting):
            self._digests[k].launch(digests_N)
            event = torch.cuda.Event()
            event.record()
        # The next fill of this slot must come after its digest.
        busy[slot].append(("", event))

    def _wait(self, busy: list[list[tuple[str, torch.cuda.Event]]], slot: int, deadline: float) -> None:
        for name, event in busy[slot]:
            if name == "":
                late = "the digest of a chunk was not done before the send's deadline; the GPU is stuck"
                wait_for_event(event, deadline_s=self._left_s(deadline), check=self._raise_if_aborted, late=late)
                continue
            with named_replica(name):
                self._groups[name].synchronize(event, deadline_s=self._left_s(deadline))
        busy[slot].clear()

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
