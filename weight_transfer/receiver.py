"""The inference worker's end of a publication: buckets come in, tensors go to `load`.

Each bucket gets a buffer of its own that is never written again, because vLLM's layerwise reload keeps references to the tensors it
is given until a layer is complete. On CUDA the next bucket is received while this one is loaded, so that up to two buckets are held
besides what `load` keeps. Axes: B = bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from orchestrator.errors import TransferTimeout
from orchestrator.protocol.messages import Manifest
from weight_transfer.buckets import Bucket, plan_buckets
from weight_transfer.groups import TransferGroup
from weight_transfer.layout import bucket_layout, view_of

Load = Callable[[list[tuple[str, torch.Tensor]]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveReport:
    """What came. `seconds`: "wire" (waiting for bytes), "load" (inside `load`)."""

    nbytes: int
    seconds: dict[str, float]


def receive_weights(
    *,
    group: TransferGroup,
    manifest: Manifest,
    bucket_bytes: int,
    device: torch.device | str,
    deadline_s: float,
    load: Load,
) -> ReceiveReport:
    """Receive every tensor of the manifest and hand them on, bucket by bucket, in manifest order.

    Args:
        bucket_bytes: cut size, the one of the rendezvous.
        load: gets (name, tensor) pairs; may keep the tensors. What it raises ends the receive.

    Raises:
        TransferTimeout, TransferAborted, TransferError: the wire. The group is then aborted, so that the sender hears of it.
    """
    run = _Receive(group=group, manifest=manifest, device=torch.device(device), deadline=time.monotonic() + deadline_s)
    try:
        return run.all(plan_buckets(manifest, bucket_bytes), load)
    except BaseException as error:
        group.abort(f"the receiver stopped: {type(error).__name__}: {error}")
        raise


class _Receive:
    def __init__(self, *, group: TransferGroup, manifest: Manifest, device: torch.device, deadline: float) -> None:
        self._group, self._manifest, self._device, self._deadline = group, manifest, device, deadline
        self._seconds = {"wire": 0.0, "load": 0.0}

    def all(self, buckets: tuple[Bucket, ...], load: Load) -> ReceiveReport:
        ahead = self._device.type == "cuda"  # elsewhere a broadcast blocks and there is nothing to overlap
        started: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        for k, bucket in enumerate(buckets):
            buffer_B, event = started if started is not None else self._start(bucket)
            started = self._start(buckets[k + 1]) if ahead and k + 1 < len(buckets) else None
            self._finish(event)
            clock = time.monotonic()
            load(self._tensors(bucket, buffer_B))
            self._seconds["load"] += time.monotonic() - clock
        return ReceiveReport(nbytes=self._manifest.nbytes, seconds=self._seconds)

    def _start(self, bucket: Bucket) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        clock = time.monotonic()
        buffer_B = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device)
        event = self._group.broadcast(buffer_B, deadline_s=self._left_s()) if bucket.nbytes else None
        self._seconds["wire"] += time.monotonic() - clock
        return buffer_B, event

    def _finish(self, event: torch.cuda.Event | None) -> None:
        clock = time.monotonic()
        if event is not None:
            self._group.synchronize(event, deadline_s=self._left_s())
        self._seconds["wire"] += time.monotonic() - clock

    def _tensors(self, bucket: Bucket, buffer_B: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        specs = self._manifest.tensors[bucket.first : bucket.last]
        offsets = bucket_layout(specs)
        return [(s.name, view_of(buffer_B, s, offset)) for s, offset in zip(specs, offsets, strict=True)]

    def _left_s(self) -> float:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TransferTimeout("the receive's deadline passed before all buckets had come")
        return left_s
