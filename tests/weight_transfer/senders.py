"""Two senders and two workers in one group over TCP."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from orchestrator.protocol.messages import Rendezvous
from weight_transfer.groups import GroupListener, TransferGroup, join_tcp, open_listener

DEADLINE_S = 20.0
SOON_S = 8.0
SENDERS = WORKERS = 2


def open_all(*, workers: int = WORKERS) -> tuple[list[GroupListener], Rendezvous]:
    """The senders' listeners, and the rendezvous for the workers."""
    listeners = [
        open_listener(
            transport="tcp",
            host="127.0.0.1",
            world_size=SENDERS + workers,
            device="cpu",
            senders=SENDERS,
            rank=rank,
        )
        for rank in range(SENDERS)
    ]
    everyones = [listener.rendezvous for listener in listeners]
    met = [listener.meet(everyones) for listener in listeners]
    assert met[0] == met[1]
    # As the control channel carries it.
    return listeners, Rendezvous.model_validate(met[0].model_dump(mode="python"))


class Ends:
    """The ranks' groups, and a thread for each rank: senders are ranks 0 and 1."""

    def __init__(self, *, workers: int = WORKERS) -> None:
        self.pool = ThreadPoolExecutor(SENDERS + workers)
        listeners, where = open_all(workers=workers)
        joining = [self.pool.submit(listener.join, DEADLINE_S) for listener in listeners]
        joining += [
            self.pool.submit(join_tcp, where, rank=SENDERS + w, deadline_s=DEADLINE_S)
            for w in range(workers)
        ]
        self.groups: list[TransferGroup] = [join.result(2 * DEADLINE_S) for join in joining]
        self.senders, self.workers = self.groups[:SENDERS], self.groups[SENDERS:]

    def start(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        return self.pool.submit(call, *args, deadline_s=DEADLINE_S)

    def close(self) -> None:
        for group in self.groups:
            group.close()
        self.pool.shutdown()
