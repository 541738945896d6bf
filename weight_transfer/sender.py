"""The trainer's end of a publication: tensors in manifest order go in, packed buckets go out to every replica, digests come back.

A ring of two bucket buffers bounds the memory: while bucket k is on the wire, bucket k+1 is packed. The tensors come from an iterator
(the export and merge run under the wire) and none is kept. A tensor that is not what the manifest says stops the send before its
bucket leaves; any failure aborts every group, because a replica that got half a version must not wait for the other half.

Axes: B = bytes, N = tensors of the manifest, T = tensors of a bucket.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from orchestrator.errors import ManifestError, TransferError, TransferTimeout
from orchestrator.protocol.messages import Manifest, TensorSpec
from weight_transfer.buckets import Bucket, plan_buckets
from weight_transfer.digest import digest_many, tensor_digest
from weight_transfer.groups import GroupOwner, TransferGroup
from weight_transfer.layout import as_bytes, bucket_layout, torch_dtype, view_of

RING_BUFFERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReport:
    """What was sent. `digests_N` is int64 on the CPU, in manifest order.

    `seconds` of the sending thread: "export" (waiting for the iterator), "pack", "digest", "wire" (waiting for the groups), "total".
    On CUDA "pack" and "digest" are the time to queue the work, which runs under the wire.
    """

    digests_N: torch.Tensor
    nbytes: int
    seconds: dict[str, float]


class WeightSender(GroupOwner):
    """Sends one model structure, again and again.

    Args:
        groups: replica's node id -> its joined group (rank 0). Owned from here on: `close` closes them.
        manifest: what every `send` will bring, in order.
        bucket_bytes: cut size, the one of the rendezvous.
        device: where the tensors and the ring lie.
    """

    def __init__(
        self, *, groups: Mapping[str, TransferGroup], manifest: Manifest, bucket_bytes: int, device: torch.device | str
    ) -> None:
        super().__init__(groups)
        self._manifest, self._device = manifest, torch.device(device)
        self._buckets = plan_buckets(manifest, bucket_bytes)
        size = max(b.nbytes for b in self._buckets)
        ring = min(RING_BUFFERS, len(self._buckets)) if self._device.type == "cuda" else 1
        self._ring = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(ring)]
        self._pack_stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        if self._pack_stream is not None:
            for buffer_B in self._ring:
                buffer_B.record_stream(self._pack_stream)  # what a failed send has queued still writes there

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], *, deadline_s: float) -> SendReport:
        """Send every tensor of the manifest, in its order, to every group.

        Raises:
            ManifestError: a tensor is missing, one too many, or not what the manifest says.
            TransferTimeout, TransferAborted, TransferError: the wire; names the replica.
        """
        self._raise_if_aborted()
        run = _Send(self, deadline=time.monotonic() + deadline_s)
        try:
            if self._pack_stream is None:
                return run.all(iter(tensors))
            self._pack_stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._pack_stream):
                return run.all(iter(tensors))
        except BaseException as error:
            self.abort(f"{type(error).__name__}: {error}")
            raise


class _Send:
    """One `send`."""

    def __init__(self, sender: WeightSender, *, deadline: float) -> None:
        self._sender, self._deadline = sender, deadline
        self._device = sender._device
        self._digests_N = torch.zeros(len(sender._manifest.tensors), dtype=torch.int64, device=self._device)
        if sender._pack_stream is not None:
            self._digests_N.record_stream(sender._pack_stream)
        self._in_flight: list[dict[str, torch.cuda.Event]] = [{} for _ in sender._ring]
        self._seconds = {"export": 0.0, "pack": 0.0, "digest": 0.0, "wire": 0.0}

    def all(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> SendReport:
        began = time.monotonic()
        for k, bucket in enumerate(self._sender._buckets):
            slot = k % len(self._sender._ring)
            self._wait_for_slot(slot)
            buffer_B = self._sender._ring[slot][: bucket.nbytes]
            self._pack(bucket, buffer_B, tensors)
            self._broadcast(slot, buffer_B)
        extra = next(tensors, None)
        if extra is not None:
            raise ManifestError(f"tensor {extra[0]!r} came after the last one of the manifest; plan the publication again")
        for slot in range(len(self._sender._ring)):
            self._wait_for_slot(slot)
        digests_N = self._digests_N.cpu()
        self._seconds["total"] = time.monotonic() - began
        return SendReport(digests_N=digests_N, nbytes=self._sender._manifest.nbytes, seconds=self._seconds)

    def _pack(self, bucket: Bucket, buffer_B: torch.Tensor, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        specs = self._sender._manifest.tensors[bucket.first : bucket.last]
        offsets = bucket_layout(specs)
        for spec, offset in zip(specs, offsets, strict=True):
            clock = time.monotonic()
            item = next(tensors, None)
            clock = self._lap("export", clock)
            tensor = _checked(item, spec, self._device)
            buffer_B[offset : offset + spec.nbytes].copy_(as_bytes(tensor))
            self._lap("pack", clock)
            self._check_time(f"before tensor {spec.name!r} was packed")
        clock = time.monotonic()
        self._digest(bucket, specs, offsets, buffer_B)
        self._lap("digest", clock)

    def _digest(self, bucket: Bucket, specs: tuple[TensorSpec, ...], offsets: list[int], buffer_B: torch.Tensor) -> None:
        """Of what is about to leave, not of what came: a fault in the packing would show."""
        views = [view_of(buffer_B, spec, offset) for spec, offset in zip(specs, offsets, strict=True)]
        if self._device.type == "cuda":
            self._digests_N[bucket.first : bucket.last] = digest_many(views)
            return
        for n, view in enumerate(views, start=bucket.first):
            self._digests_N[n] = tensor_digest(view)

    def _broadcast(self, slot: int, buffer_B: torch.Tensor) -> None:
        clock = time.monotonic()
        for name, group in self._sender._groups.items() if buffer_B.numel() else ():
            with named_replica(name):
                event = group.broadcast(buffer_B, deadline_s=self._left_s())
            if event is not None:
                self._in_flight[slot][name] = event
        self._lap("wire", clock)

    def _wait_for_slot(self, slot: int) -> None:
        clock = time.monotonic()
        while self._in_flight[slot]:
            name, event = self._in_flight[slot].popitem()
            with named_replica(name):
                self._sender._groups[name].synchronize(event, deadline_s=self._left_s())
        self._lap("wire", clock)

    def _left_s(self) -> float:
        self._check_time("before all buckets had left")
        return self._deadline - time.monotonic()

    def _check_time(self, when: str) -> None:
        self._sender._raise_if_aborted()
        if time.monotonic() >= self._deadline:
            raise TransferTimeout(f"the send's deadline passed {when}")

    def _lap(self, phase: str, since: float) -> float:
        now = time.monotonic()
        self._seconds[phase] += now - since
        return now


@contextlib.contextmanager
def named_replica(replica: str) -> Iterator[None]:
    """Puts the replica's name in front of a transfer error's text."""
    try:
        yield
    except TransferError as error:
        raise type(error)(f"replica {replica!r}: {error}") from error


def _checked(item: tuple[str, torch.Tensor] | None, spec: TensorSpec, device: torch.device) -> torch.Tensor:
    wanted = f"{spec.name!r} {spec.dtype} {list(spec.shape)}"
    if item is None:
        raise ManifestError(f"the export ended where the manifest wants {wanted}")
    name, tensor = item
    if name != spec.name or tensor.dtype != torch_dtype(spec.dtype) or tuple(tensor.shape) != spec.shape:
        came = f"{name!r} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        raise ManifestError(f"the export brought {came} where the manifest wants {wanted}; plan the publication again")
    if tensor.device.type != device.type:
        raise ManifestError(f"tensor {name!r} lies on {tensor.device}, the sender's ring on {device}")
    return tensor.detach()
