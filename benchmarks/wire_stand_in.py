"""A transfer group for one GPU: a copy by a few thread blocks, as NCCL's kernels on NVLink.

It has NCCL's priority, keeps its blocks on the GPU for the whole copy, and moves about
`WIRE_BYTES_PER_S`. The number of blocks is found on the first copies.

Axes: B = bytes.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.timing import seconds
from weight_transfer.cuda_events import WIRE_PRIORITY, wait_for_event

WIRE_BYTES_PER_S = 370e9
"""NCCL between two H200s, pieces of 192 MiB."""
_BLOCKS = (4, 6, 8, 10, 12, 14, 16, 20, 24, 32)


class StandIn:
    """See the module; a `TransferGroup`. On a CPU a copy."""

    rank, world_size = 0, 2

    def __init__(self, largest: int, device: str) -> None:
        self._device = device
        self._there_B = torch.empty(largest, dtype=torch.uint8, device=device)
        if device == "cuda":
            self._stream = torch.cuda.Stream(priority=WIRE_PRIORITY)
            self._blocks = self._calibrated()

    def _calibrated(self) -> int:
        here_B = torch.empty_like(self._there_B)
        size, rates = here_B.numel(), dict[int, float]()
        for blocks in _BLOCKS:
            self._copy(here_B, blocks)
            rates[blocks] = size / min(
                seconds(lambda n=blocks: self._copy(here_B, n), "cuda") for _ in range(5)
            )
        return min(rates, key=lambda n: abs(rates[n] - WIRE_BYTES_PER_S))

    def _copy(self, buffer_B: torch.Tensor, blocks: int) -> None:
        from benchmarks import wire_stand_in_kernels as kernels

        kernels.copy(buffer_B, self._there_B, blocks=blocks)

    def broadcast(self, buffer_B: torch.Tensor, *, deadline_s: float) -> Any:
        """Copy the buffer on the group's stream, behind the current stream's work."""
        if self._device != "cuda":
            self._there_B[: buffer_B.numel()].copy_(buffer_B)
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(buffer_B, self._blocks)
            event = torch.cuda.Event()
            event.record()
        return event

    def synchronize(self, event: Any = None, *, deadline_s: float) -> None:
        """Wait for a copy as NCCL's group does."""
        if event is not None:
            wait_for_event(event, deadline_s=deadline_s, check=lambda: None, late="the copy hangs")

    def abort(self, reason: str) -> None:
        """Nothing runs on."""

    def close(self) -> None:
        """Nothing to free."""
