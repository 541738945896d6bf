"""One of two ranks that open transfer groups together: `torchrun ... -m
tests.trainer_node.ranks.joins`. Rank 0 also has the workers, on threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from orchestrator.errors import ConfigError, TransferAborted, TransferError, TransferTimeout
from orchestrator.protocol.messages import OpenTransferGroup, Rendezvous
from trainer_node.ranks.lockstep import SendFailed
from trainer_node.transfer import Transfer
from weight_transfer.groups import TransferGroup, join_tcp

REPLICAS = {"a": 1, "b": 2}
SENDERS = 2
LONG_S = 60.0
CPU = torch.device("cpu")


class Ranks:
    """This rank's `Transfer`, and on rank 0 the workers."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.group = dist.new_group(backend="gloo")
        self.transfer = Transfer(host="127.0.0.1", device=CPU)
        self.pool = ThreadPoolExecutor(8)
        self.workers: dict[tuple[str, int], Future[TransferGroup]] = {}

    def open(
        self,
        *,
        deadline_s: float = LONG_S,
        absent: tuple[str, int] | None = None,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        message = OpenTransferGroup(transport="tcp", replicas=REPLICAS, deadline_s=deadline_s)

        def on_listening(addresses: dict[str, Any]) -> None:
            if self.rank == 0:
                self._join(addresses, absent)
            then()

        self.transfer.open(message, on_listening=on_listening, group=self.group)

    def _join(self, addresses: dict[str, Any], absent: tuple[str, int] | None) -> None:
        for replica, count in REPLICAS.items():
            where = Rendezvous.model_validate(addresses[replica])
            assert where.senders == 1 + len(where.others) == SENDERS
            for position in range(count):
                if (replica, position) != absent:
                    self.workers[replica, position] = self.pool.submit(
                        join_tcp, where, rank=SENDERS + position, deadline_s=LONG_S
                    )

    def end(self) -> None:
        """Every worker's join has ended, and so has its group."""
        for joining in self.workers.values():
            if joining.exception(LONG_S) is None:
                got_B = torch.zeros(1, dtype=torch.uint8)
                with pytest.raises(TransferError):
                    joining.result().receive([(1, got_B)], deadline_s=LONG_S)
                joining.result().close()
        self.workers = {}
        dist.barrier(self.group)


def main() -> None:
    dist.init_process_group("gloo")
    ranks = Ranks()
    rank, transfer = ranks.rank, ranks.transfer

    def sent(sender: int) -> torch.Tensor:
        return torch.full((1000,), 7 + sender, dtype=torch.uint8)

    ranks.open()  # every rank sends to every worker
    assert transfer.problem() is None and set(transfer._groups) == set(REPLICAS)
    for replica, group in transfer._groups.items():
        num_workers = REPLICAS[replica]
        got = [[torch.zeros_like(sent(0)) for _ in range(SENDERS)] for _ in range(num_workers)]
        receiving = [
            ranks.pool.submit(
                ranks.workers[replica, w].result().receive, list(enumerate(got[w])), deadline_s=20
            )
            for w in range(num_workers if rank == 0 else 0)
        ]
        group.send([(w, sent(rank)) for w in range(num_workers)], deadline_s=20)
        for call, parts in zip(receiving, got, strict=False):
            call.result()
            assert torch.equal(torch.stack(parts), torch.stack([sent(0), sent(1)]))
    dist.barrier(ranks.group)  # a sender that leaves early ends it for a worker that still receives
    transfer.close()
    assert transfer.problem() is not None
    ranks.end()

    # A worker does not come: rank 0's deadline ends all, although the other rank's came first.
    if rank == 0:
        threading.Event().wait(0.5)
    with pytest.raises(TransferTimeout if rank == 0 else SendFailed, match="missing: ranks"):
        ranks.open(deadline_s=2.0, absent=("b", 1))
    ranks.end()

    # Rank 0 is told to abort meanwhile.
    def abort() -> None:
        if rank == 0:
            threading.Timer(0.3, transfer.abort, ["the operator said so"]).start()

    with pytest.raises(TransferAborted if rank == 0 else SendFailed, match="aborted"):
        ranks.open(absent=("b", 1), then=abort)
    ranks.end()

    # Rank 1 fails before its joins, or cannot listen.
    def fail() -> None:
        if rank == 1:
            raise ValueError("a test said so")

    with pytest.raises(SendFailed, match="rank 1: ValueError: a test said so"):
        ranks.open(absent=("b", 1), then=fail)
    ranks.end()
    if rank == 1:
        transfer._host = "203.0.113.7"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LOCAL_RANK", str(rank))
        with pytest.raises(SendFailed, match=r"rank 1: ConfigError: cannot listen on host '203"):
            ranks.open()
        # As if rank 1 were on another host: it listens where it reaches rank 0.
        patched.setenv("LOCAL_RANK", "0")
        ranks.open()
    transfer.close()
    ranks.end()

    # Only rank 0 cannot listen.
    if rank == 0:
        transfer._host = "203.0.113.7"
    with pytest.raises(ConfigError if rank == 0 else SendFailed, match="cannot listen"):
        ranks.open()
    ranks.pool.shutdown()
    dist.barrier(ranks.group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
