"""Shadow mode's half in the worker: an update is received beside the live tensors, on a thread, while the engine goes on stepping.

    shadow = Shadow(manifest=..., chunks=..., device=..., stream=...)     buffers, allocated whole or not at all
    shadow.start(group=..., watchdog=..., update_id=..., deadline_s=...)  returns at once
    shadow.poll()                                                         None until all has come; then the digests of what came
    shadow.tensors(k), shadow.buffers[k]                                  for the swap
    shadow.close()                                                        ends the thread; on every path

Nothing here touches a live tensor: until the swap a failure leaves @N as it was. On CUDA the thread works on a stream of its own, behind
which the group's stream and the digests run, so it waits neither for the model's stream nor the model's for it; and the buffers come from that
stream's memory, or they might be ones that a kernel of the model still reads. The thread holds the GIL only to queue work and to look at
an event every two milliseconds at most.

Axes: B = bytes, N = tensors of the manifest.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from inference_node.watchdog import Watchdog
from orchestrator.errors import TransferError, TransferTimeout
from orchestrator.protocol.messages import Manifest, WireChunk
from weight_transfer.buckets import plan_buckets
from weight_transfer.digest import PreparedDigest
from weight_transfer.groups import TransferGroup, wait_for_event
from weight_transfer.layout import bucket_layout, view_of

RESERVE_BYTES = 512 * 2**20
"""What must stay free beside the shadow, for what generation may yet allocate."""
END_S = 5.0
"""How long `close` waits for the thread after its group was aborted."""


def chunks_of(manifest: Manifest, chunks: tuple[WireChunk, ...] | None, bucket_bytes: int) -> tuple[WireChunk, ...]:
    """What travels together: the layout's chunks, or (None) the buckets of manifest order, all of them for the reload. Pure."""
    if chunks is not None:
        return chunks
    buckets = plan_buckets(manifest, bucket_bytes)
    return tuple(WireChunk(kind="reload", tensors=tuple(range(b.first, b.last))) for b in buckets)


def why_not(nbytes: int, *, free_bytes: int, budget_bytes: int) -> str | None:
    """Why an update of so many bytes cannot be received beside the live tensors; None if it can. Pure."""
    if nbytes > budget_bytes:
        return f"it brings {nbytes:,} bytes, more than the {budget_bytes:,} that shadow mode may use (shadow_bytes)"
    if nbytes + RESERVE_BYTES > free_bytes:
        return f"it brings {nbytes:,} bytes, but the worker has {free_bytes:,} free, of which {RESERVE_BYTES:,} are kept free"
    return None


def free_bytes(device: torch.device) -> int:
    """Bytes that this worker could allocate now: of the GPU, with what torch holds but does not use; of the host on a CPU."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    import psutil

    return int(psutil.virtual_memory().available)


@dataclass(slots=True)
class Arrived:
    """What the thread received. `seconds`: "wire", "digest"."""

    digests: list[int]
    seconds: dict[str, float] = field(default_factory=dict)


class Shadow:
    """One update beside the live tensors.

    Args:
        stream: on CUDA the stream of all shadows of this worker; None elsewhere.

    Raises:
        torch.OutOfMemoryError: the buffers could not be allocated; none is.
    """

    def __init__(
        self, *, manifest: Manifest, chunks: Sequence[WireChunk], device: torch.device, stream: torch.cuda.Stream | None
    ) -> None:
        self._manifest, self._chunks, self._device, self._stream = manifest, tuple(chunks), device, stream
        with self._on_stream():
            sizes = [sum(manifest.tensors[i].nbytes for i in c.tensors) for c in self._chunks]
            self.buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device) for nbytes in sizes]
        self._group: TransferGroup | None = None
        self._thread: threading.Thread | None = None
        self._arrived: Arrived | None = None
        self._error: BaseException | None = None

    def start(self, *, group: TransferGroup, watchdog: Watchdog, update_id: str, deadline_s: float) -> None:
        """Receive on a thread from now on; `watchdog` guards it as it guards any update.

        Raises:
            TransferError: this shadow was started before.
        """
        if self._thread is not None:
            raise TransferError("this update is being received, or was, beside the live tensors; open another one")
        self._group = group
        arguments = (group, watchdog, update_id, deadline_s)
        self._thread = threading.Thread(target=self._run, args=arguments, name="splice-shadow", daemon=True)
        self._thread.start()

    def poll(self) -> Arrived | None:
        """What has arrived; None while it is still coming.

        Raises:
            TransferError and its kin: the receive failed. Nothing was changed.
        """
        if self._thread is None:
            raise TransferError("nothing is being received beside the live tensors; start it first")
        if self._thread.is_alive():
            return None
        if self._error is not None:
            raise self._error
        return self._arrived

    @property
    def is_whole(self) -> bool:
        """Everything has come."""
        return self._arrived is not None

    def tensors(self, k: int) -> list[tuple[str, torch.Tensor]]:
        """The HF tensors of chunk k: views of its buffer, copies where they would not be aligned."""
        specs = [self._manifest.tensors[i] for i in self._chunks[k].tensors]
        return [(s.name, view_of(self.buffers[k], s, at)) for s, at in zip(specs, bucket_layout(specs), strict=True)]

    def close(self) -> bool:
        """End the thread, free the buffers; whether it has ended. One that has not keeps its own hold of the buffers and can do no harm."""
        thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive():
            assert self._group is not None
            self._group.abort("the update was dropped")
            thread.join(timeout=END_S)
        self.buffers, self._arrived = [], None
        return thread is None or not thread.is_alive()

    # ------------------------------------------------------------ the thread

    def _run(self, group: TransferGroup, watchdog: Watchdog, update_id: str, deadline_s: float) -> None:
        try:
            with watchdog.guard(update_id=update_id, group=group, deadline_s=deadline_s), self._on_stream():
                self._arrived = self._receive(group, self.buffers, time.monotonic() + deadline_s)
        except BaseException as error:  # noqa: BLE001 - whatever it is, `poll` raises it
            group.abort(f"the receiver stopped: {type(error).__name__}: {error}")
            self._error = error

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def _receive(self, group: TransferGroup, buffers: Sequence[torch.Tensor], deadline: float) -> Arrived:
        began = time.monotonic()
        last: torch.cuda.Event | None = None  # a group's broadcasts end in their order
        for buffer_B in buffers:
            if buffer_B.numel():
                last = group.broadcast(buffer_B, deadline_s=_left_s(deadline))
        if last is not None and self._stream is not None:
            self._stream.wait_event(last)
            group.synchronize(last, deadline_s=_left_s(deadline))
        arrived = time.monotonic()
        digests_N = torch.zeros(len(self._manifest.tensors), dtype=torch.int64, device=self._device)
        # All in one: many small tables made while the bytes come would hold the GIL that the engine needs.
        tensors = [tensor for k in range(len(buffers)) for _, tensor in self.tensors(k)]
        digest = PreparedDigest(tensors, rows=[i for c in self._chunks for i in c.tensors])
        digest.launch(digests_N)
        if self._stream is not None:
            done = torch.cuda.Event()
            done.record(self._stream)
            late = "the digests of what came were not done before the deadline; the GPU is stuck"
            wait_for_event(done, deadline_s=_left_s(deadline), check=lambda: None, late=late)
        seconds = {"wire": arrived - began, "digest": time.monotonic() - arrived}
        return Arrived(digests=digests_N.tolist(), seconds=seconds)


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TransferTimeout("the deadline passed before all of the update had come")
    return left_s
