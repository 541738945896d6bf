"""What stands in for the wire and for `Control` around receivers by themselves."""

from __future__ import annotations

import torch

from inference_node.worker import chunk_plan, placement
from inference_node.worker.placement import PlacementPlan
from orchestrator.errors import TransferError
from orchestrator.protocol.messages import Manifest


class Wire:
    """Carries prepared bytes into whatever buffer it is given; dies at a chunk if told to."""

    def __init__(self, pieces, dies_at=-1):
        self.pieces, self.dies_at, self.count = pieces, dies_at, 0

    def broadcast(self, buffer_B, *, deadline_s):
        if self.count == self.dies_at:
            raise TransferError("the trainer is gone")
        buffer_B.copy_(self.pieces[self.count])
        self.count += 1

    def synchronize(self, event=None, *, deadline_s):
        pass


class CudaWire(Wire):
    """Broadcasts on a separate stream, as NCCL's do: the bytes are there after the event, not
    before.
    """

    def __init__(self, pieces, dies_at=-1):
        super().__init__(pieces, dies_at)
        self.stream, self.waited = torch.cuda.Stream(), []

    def broadcast(self, buffer_B, *, deadline_s):
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(2_000_000)
            super().broadcast(buffer_B, deadline_s=deadline_s)
            event = torch.cuda.Event()
            event.record()
        return event

    def synchronize(self, event=None, *, deadline_s):
        self.waited.append(self.count)
        event.synchronize()


def placed_together(
    manifest: Manifest, plans: list[PlacementPlan], lives: list[chunk_plan.Live]
) -> list[int]:
    """As `Control` does it: what any worker cannot place, with all that shares a layer with it on
    any worker, until nothing is added.
    """
    found = sorted(
        {
            i
            for p, live in zip(plans, lives, strict=True)
            for i in chunk_plan.obstacles(p, manifest, live)
        }
    )
    while (
        more := sorted({i for p in plans for i in placement.whole_layers(p, manifest, found)})
    ) != found:
        found = more
    return found
