"""Shadow mode in the worker: receives an update into separate memory while the engine steps.

    shadow = Shadow(manifest=..., chunks=..., device=..., stream=...)     buffers, all or none
    shadow.start(group=..., watchdog=..., update_id=..., deadline_s=...)  returns immediately
    shadow.poll()                                                         None, then the digests
    shadow.buffers                                                        for the swap
    shadow.close()                                                        ends the thread

Nothing here touches a live tensor, so until the swap a failure leaves @N as it was. On CUDA the
thread has its own stream, which the group's stream and the digests follow. Neither it nor the
model's stream waits for the other. The buffers come from that stream's memory; other memory might
still be read by a kernel of the model. The thread holds the GIL only to queue work, and to look at
an event at most every two milliseconds.

Axes: B = bytes, N = tensors of the manifest.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from inference_node.shared.watchdog import Watchdog
from orchestrator.errors import TransferError, TransferTimeout, without_frames
from orchestrator.protocol.messages import Manifest, WireChunk
from weight_transfer.changes import Buffers, receive_changes
from weight_transfer.cuda_events import wait_for_event
from weight_transfer.digest import PreparedDigest
from weight_transfer.edges import Delivery, Step, digest_of_pieces, receive_into
from weight_transfer.groups import TransferGroup
from weight_transfer.layout import views_of

RESERVE_BYTES = 512 * 2**20
"""Bytes that stay free for generation."""
END_S = 5.0
"""Seconds that `close` waits for the thread after aborting its group."""


def why_not(nbytes: int, *, free_bytes: int, budget_bytes: int) -> str | None:
    """Why an update does not fit into shadow memory; None if it fits. Pure."""
    if nbytes > budget_bytes:
        return (
            f"it brings {nbytes:,} bytes, more than the {budget_bytes:,} that shadow mode may use "
            "(shadow_bytes)"
        )
    if nbytes + RESERVE_BYTES > free_bytes:
        return (
            f"it brings {nbytes:,} bytes, but the worker has {free_bytes:,} free, "
            f"of which {RESERVE_BYTES:,} are kept free"
        )
    return None


def free_bytes(device: torch.device) -> int:
    """Bytes that this worker could allocate now.

    On a GPU they include what torch holds but does not use; on a CPU they are the host's.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    import psutil

    return int(psutil.virtual_memory().available)


@dataclass(slots=True)
class Arrived:
    """Digests of what the thread received, of tensors or of pieces in steps; none of changed
    elements. `seconds`: "wire", "digest"."""

    digests: list[int]
    seconds: dict[str, float] = field(default_factory=dict)


class Shadow:
    """One update in shadow memory.

    Args:
        steps: what comes from each trainer rank. None: the chunks, by broadcast.
        elements: changed elements come, of these parts of each chunk or step. They are kept in host
            memory as they come, because only the live tensors make them whole. None: everything.
        stream: on CUDA, the stream of all shadows of this worker. None elsewhere.

    Raises:
        torch.OutOfMemoryError: the buffers do not fit; none is allocated.
    """

    def __init__(
        self,
        *,
        manifest: Manifest,
        chunks: Sequence[WireChunk],
        device: torch.device,
        stream: torch.cuda.Stream | None,
        steps: Sequence[Step] | None = None,
        elements: Sequence[Sequence[Delivery]] | None = None,
    ) -> None:
        self._elements = elements
        self.changes: Buffers | None = None
        """The messages of changed elements, once all have arrived."""
        self._manifest, self._chunks, self._steps = manifest, tuple(chunks), steps
        self._device, self._stream = device, stream
        with self._on_stream():
            sizes = (
                [sum(manifest.tensors[i].nbytes for i in c.tensors) for c in self._chunks]
                if steps is None
                else [step.nbytes for step in steps]
            )
            sizes = [] if elements is not None else sizes
            self.buffers = [
                torch.empty(nbytes, dtype=torch.uint8, device=device) for nbytes in sizes
            ]
        self._group: TransferGroup | None = None
        self._thread: threading.Thread | None = None
        self._arrived: Arrived | None = None
        self._error: BaseException | None = None

    def start(
        self, *, group: TransferGroup, watchdog: Watchdog, update_id: str, deadline_s: float
    ) -> None:
        """Receive on a thread from now on, guarded by `watchdog`.

        Raises:
            TransferError: this shadow was started before.
        """
        if self._thread is not None:
            raise TransferError(
                "this shadow was started before; open another one with PrepareShadow"
            )
        self._group = group
        arguments = (group, watchdog, update_id, deadline_s)
        self._thread = threading.Thread(
            target=self._run, args=arguments, name="splice-shadow", daemon=True
        )
        self._thread.start()

    def poll(self) -> Arrived | None:
        """Digests of what has arrived; None while bytes arrive.

        Raises:
            TransferError or a subclass: the receive failed. Nothing was changed.
        """
        if self._thread is None:
            raise TransferError("nothing is being received into shadow memory; start it first")
        if self._thread.is_alive():
            return None
        if self._error is not None:
            raise self._error
        return self._arrived

    @property
    def is_whole(self) -> bool:
        """Whether everything has arrived."""
        return self._arrived is not None

    def close(self) -> bool:
        """End the thread and free the buffers; returns whether the thread has ended.

        A thread that has not ended keeps its buffers and can do no harm.
        """
        thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive():
            assert self._group is not None
            self._group.abort("the update was dropped")
            thread.join(timeout=END_S)
        # `poll` raised the error, so its frames hold this shadow.
        self.buffers, self.changes, self._arrived, self._error = [], None, None, None
        return thread is None or not thread.is_alive()

    # ------------------------------------------------------------ the thread

    def _run(
        self, group: TransferGroup, watchdog: Watchdog, update_id: str, deadline_s: float
    ) -> None:
        try:
            with (
                watchdog.guard(update_id=update_id, group=group, deadline_s=deadline_s),
                self._on_stream(),
            ):
                self._arrived = self._receive(group, self.buffers, time.monotonic() + deadline_s)
        except BaseException as error:  # noqa: BLE001 - `poll` raises it
            group.abort(f"the receiver stopped: {type(error).__name__}: {error}")
            self._error = without_frames(error)

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def _tensors(self, chunk: WireChunk, buffer_B: torch.Tensor) -> list[torch.Tensor]:
        """The HF tensors of a chunk: views of its buffer, or copies to align them."""
        return views_of(buffer_B, [self._manifest.tensors[i] for i in chunk.tensors])

    def _receive(
        self, group: TransferGroup, buffers: Sequence[torch.Tensor], deadline: float
    ) -> Arrived:
        began = time.monotonic()
        if self._elements is not None:
            self.changes = receive_changes(
                group, self._elements, device=self._device, deadline=deadline
            )
            return Arrived(digests=[], seconds={"wire": time.monotonic() - began})
        last: torch.cuda.Event | None = None  # a group's broadcasts end in order
        for k, buffer_B in enumerate(buffers):
            if buffer_B.numel():
                deliveries = None if self._steps is None else self._steps[k].deliveries
                last = receive_into(buffer_B, deliveries, group=group, deadline_s=_left_s(deadline))
        if last is not None and self._stream is not None:
            self._stream.wait_event(last)
            group.synchronize(last, deadline_s=_left_s(deadline))
        arrived = time.monotonic()
        digests_N = self._digest(buffers)
        if self._stream is not None:
            done = torch.cuda.Event()
            done.record(self._stream)
            late = "the digests were not done before the deadline; the GPU is stuck"
            wait_for_event(done, deadline_s=_left_s(deadline), check=lambda: None, late=late)
        seconds = {"wire": arrived - began, "digest": time.monotonic() - arrived}
        return Arrived(digests=digests_N.tolist(), seconds=seconds)

    def _digest(self, buffers: Sequence[torch.Tensor]) -> torch.Tensor:
        """The digests of all tensors, or of all pieces in steps: int64 [N].

        One table for all: many small ones would hold the GIL that the engine needs.
        """
        specs = self._manifest.tensors
        if self._steps is not None:
            indices = [placed.piece.index for step in self._steps for placed in step.placed]
            count = len(indices)
            # The order of `Arrivals`: a tensor's pieces follow each other.
            rows = np.empty(count, np.int64)
            rows[np.argsort(indices, kind="stable")] = np.arange(count)
            digest = digest_of_pieces(buffers, self._steps, specs, rows=rows.tolist())
        else:
            count = len(specs)
            tensors = [
                t
                for chunk, buffer_B in zip(self._chunks, buffers, strict=True)
                for t in self._tensors(chunk, buffer_B)
            ]
            digest = PreparedDigest(tensors, rows=[i for c in self._chunks for i in c.tensors])
        digests_N = torch.zeros(count, dtype=torch.int64, device=self._device)
        digest.launch(digests_N)
        return digests_N


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TransferTimeout("the deadline passed before the whole update had arrived")
    return left_s
