"""One rank of a group over NCCL with several senders and workers, as a separate process:

    python -m tests.weight_transfer.nccl_ranks RANK SENDERS WORKERS PORT

A store at PORT brings the rendezvous from rank 0 to the others. A worker is a cupy communicator
that does what a vLLM worker does on the wire. Exit code 0: every byte arrived.
"""

from __future__ import annotations

import datetime
import os
import sys
import threading
import traceback
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from cupy.cuda import nccl

from orchestrator.errors import TransferError
from orchestrator.protocol.messages import Rendezvous
from weight_transfer.groups import TransferGroup, open_listener

DEADLINE_S = 60.0
SIZES = (5_000_000, 3)
"""Bytes of the two messages of each pair in each call."""


def message(sender: int, worker: int, n: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * sender + 100 * worker + n)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).cuda()


class Worker:
    """Joins and receives."""

    def __init__(self, where: Rendezvous, rank: int) -> None:
        self._stream = torch.cuda.current_stream()
        self._group = nccl.NcclCommunicator(where.world_size, where.nccl_unique_id, rank)
        one = torch.zeros(1, device="cuda")
        at = one.data_ptr()
        self._group.allReduce(at, at, 1, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, self._stream.cuda_stream)
        if where.world_size > 2:
            bytes_S1 = torch.zeros((where.senders, 1), dtype=torch.uint8, device="cuda")
            self.receive(list(enumerate(bytes_S1)))
        torch.cuda.synchronize()

    def receive(self, messages: Sequence[tuple[int, torch.Tensor]]) -> None:
        nccl.groupStart()
        for sender, buffer_B in messages:
            self._group.recv(
                buffer_B.data_ptr(),
                buffer_B.numel(),
                nccl.NCCL_UINT8,
                sender,
                self._stream.cuda_stream,
            )
        nccl.groupEnd()
        torch.cuda.synchronize()


def send(group: TransferGroup, rank: int, *, senders: int, workers: int) -> None:
    def wait(event: torch.cuda.Event | None) -> None:
        assert event is not None
        group.synchronize(event, deadline_s=DEADLINE_S)

    for call in range(2):
        messages = [
            (w, message(rank, w, 2 * call + n, size))
            for n, size in enumerate(SIZES)
            for w in range(workers)
        ]
        wait(group.send(messages, deadline_s=DEADLINE_S))
        assert group.send([], deadline_s=DEADLINE_S) is None
    if senders > 1:
        event = group.broadcast(message(rank, 0, 9, SIZES[0]), deadline_s=DEADLINE_S)
        if rank == 0:
            wait(event)
        else:
            assert event is None
    # Nobody receives this one. NCCL's buffers of 32 channels hold 128 MiB.
    unread_B = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    threading.Timer(1.0, group.abort, ["the operator said so"]).start()
    with pytest.raises(TransferError):
        wait(group.send([(0, unread_B)], deadline_s=DEADLINE_S))
    group.close()


def receive(worker: Worker, position: int, *, senders: int) -> None:
    for call in range(2):
        got = [
            [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in SIZES]
            for _ in range(senders)
        ]
        worker.receive([(s, got[s][n]) for s in reversed(range(senders)) for n in range(2)])
        for s in range(senders):
            for n, size in enumerate(SIZES):
                assert torch.equal(got[s][n], message(s, position, 2 * call + n, size))
    if senders > 1:
        got_B = torch.zeros(SIZES[0], dtype=torch.uint8, device="cuda")
        worker.receive([(0, got_B)])
        assert torch.equal(got_B, message(0, 0, 9, SIZES[0]))


def main() -> None:
    rank, senders, workers, port = map(int, sys.argv[1:])
    timeout = datetime.timedelta(seconds=DEADLINE_S)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    listener = None
    if rank < senders:
        listener = open_listener(
            transport="nccl",
            host="127.0.0.1",
            world_size=senders + workers,
            device="cuda:0",
            senders=senders,
            rank=rank,
        )
    if rank == 0 and listener is not None:
        store.set("where", listener.rendezvous.model_dump_json())
    where = Rendezvous.model_validate_json(store.get("where"))
    if listener is not None:
        others = [listener.rendezvous] * (senders - 1)
        assert listener.meet([where, *others]) == where
        send(listener.join(DEADLINE_S), rank, senders=senders, workers=workers)
        store.add("ended", 1)
    else:
        worker = Worker(where, rank)
        receive(worker, rank - senders, senders=senders)
    # A worker stays until the senders have aborted what it does not receive.
    while store.add("ended", 0) < senders:
        threading.Event().wait(0.1)


if __name__ == "__main__":
    threading.Timer(150, os._exit, args=(9,)).start()  # whatever NCCL does, the process ends
    try:
        main()
    except BaseException:  # noqa: BLE001 - the interpreter's end could wait for NCCL
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
