"""A receiver on the second GPU, as a separate process: a cupy communicator that does what a vLLM
worker does on the wire.

`python nccl_peer.py RENDEZVOUS_JSON CHUNK_BYTES`, the manifest on stdin. Prints one JSON line per
event, as peer.py does.
"""

from __future__ import annotations

import os
import sys
import threading

import torch
from cupy.cuda import nccl

from orchestrator.errors import SpliceError
from orchestrator.protocol.messages import Manifest, Rendezvous
from tests.weight_transfer.peer import in_chunks, receive_chunks, say, sha256
from weight_transfer.digest import tensor_digest


class CupyReceiver:
    """Rank 1 of a `TransferGroup`, every broadcast waited for at once."""

    rank = 1

    def __init__(self, rendezvous: Rendezvous) -> None:
        assert rendezvous.nccl_unique_id is not None
        self.world_size = rendezvous.world_size
        self.communicator = nccl.NcclCommunicator(self.world_size, rendezvous.nccl_unique_id, 1)
        one = torch.zeros(1, device="cuda")
        stream = torch.cuda.current_stream().cuda_stream
        self.communicator.allReduce(
            one.data_ptr(), one.data_ptr(), 1, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream
        )
        torch.cuda.synchronize()

    def broadcast(self, buffer_B: torch.Tensor, *, deadline_s: float) -> None:
        stream = torch.cuda.current_stream()
        self.communicator.bcast(
            buffer_B.data_ptr(), buffer_B.numel(), nccl.NCCL_UINT8, 0, stream.cuda_stream
        )
        stream.synchronize()

    def synchronize(self, event: torch.cuda.Event | None = None, *, deadline_s: float) -> None:
        torch.cuda.synchronize()

    def abort(self, reason: str) -> None:
        self.communicator.abort()

    def close(self) -> None:
        self.communicator.abort()


def main() -> None:
    threading.Timer(
        120, os._exit, args=(9,)
    ).start()  # whatever happens to NCCL here, the test machine gets its process back
    rendezvous = Rendezvous.model_validate_json(sys.argv[1])
    manifest = Manifest.model_validate_json(sys.stdin.readline())
    torch.cuda.set_device(0)
    group = CupyReceiver(rendezvous)
    say("joined")
    got: dict[str, torch.Tensor] = {}
    order = in_chunks(manifest, int(sys.argv[2]))

    def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
        got.update(tensors)
        say("chunk")

    try:
        while sys.stdin.readline().strip() == "receive":
            receive_chunks(group, manifest, order, deadline_s=60, load=load, device="cuda")
            digests = [int(tensor_digest(got[s.name])) for s in manifest.tensors]
            say("received", digests=digests, sha256={n: sha256(t.cpu()) for n, t in got.items()})
    except SpliceError as error:
        say("failed", error=type(error).__name__, text=str(error))
    say("done")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
