"""Two trainer ranks that send straight to two workers over TCP: the plan, the ends, and a send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from inference_node.worker.direct import DirectReceiver
from inference_node.worker.plan import WorkerUpdate
from orchestrator.errors import TransferError
from tests.inference_node.two_workers import CPU, Replica
from weight_transfer import edges
from weight_transfer.boxes import Box, matrix
from weight_transfer.chunks import ChunkSender
from weight_transfer.groups import join_tcp, open_listener

SENDERS = WORKERS = 2


def of_wrap(values: Any) -> list[int]:
    """int64 sums, modulo 2^64."""
    return [int(v) for v in values]


class Planned:
    """A replica, and the edges from two ranks to its workers. Ranks hold halves of some tensors'
    rows, halves of columns of others, and copies of the rest."""

    def __init__(self, packed_layers: tuple[str, ...] = (), *, step_bytes: int = 300) -> None:
        self.replica = replica = Replica(packed_layers=packed_layers)
        self.specs = replica.manifest.tensors
        self.updates = [
            WorkerUpdate(
                manifest=replica.manifest,
                plan=plan,
                asked=(None, frozenset(), "edges"),
                chunks=replica.chunks,
                receiver=receiver,
            )
            for plan, receiver in zip(replica.plans, replica.receivers, strict=True)
        ]
        holders = []
        for n, spec in enumerate(self.specs):
            height, width = matrix(spec.shape)
            if n % 3 == 0 and height > 1:
                half = height // 2
                boxes = [Box(0, half, 0, width), Box(half, height - half, 0, width)]
                holders.append([((r,), box) for r, box in enumerate(boxes)])
            elif n % 3 == 1 and width > 1:
                half = width // 2
                boxes = [Box(0, height, 0, half), Box(0, height, half, width - half)]
                holders.append([((r,), box) for r, box in enumerate(boxes)])
            else:
                holders.append([((0, 1), Box(0, height, 0, width))])
        self.plan = edges.plan(
            self.specs,
            holders,
            [update.keeps() for update in self.updates],
            order=[i for c in replica.chunks for i in c.tensors],
            ranks=SENDERS,
            step_bytes=step_bytes,
        )
        self.tables = [edges.table_of(self.plan, w) for w in range(WORKERS)]
        self.steps = [edges.steps_of_worker(table, self.specs) for table in self.tables]
        for w, update in enumerate(self.updates):
            edges.check_coverage(self.steps[w], update.keeps(), str)
            replica.receivers[w] = DirectReceiver(
                chunks=replica.chunks,
                manifest=replica.manifest,
                plan=update.plan,
                live=replica.receivers[w]._live,
                device=CPU,
                steps=self.steps[w],
                digests_on_arrival=True,
            )

    def sender(self, rank: int, group: Any, *, dies_at: int = -1) -> ChunkSender:
        steps = edges.steps_of_rank(self.plan, rank, self.specs)

        def fill(k: int, out_B: torch.Tensor) -> None:
            if k == dies_at:
                raise TransferError("the rank died")
            for placed in steps[k].placed:
                spec, box = self.specs[placed.piece.index], placed.piece.box
                whole = self.replica.weights[spec.name].view(matrix(spec.shape))
                rows = whole[box.first_row : box.first_row + box.rows]
                piece = rows[:, box.first_column : box.first_column + box.columns]
                edges.view_of_piece(out_B, placed, spec).copy_(piece)

        return ChunkSender(
            groups={"r": group},
            manifest=self.replica.manifest,
            chunks=[c.tensors for c in self.replica.chunks],
            steps=steps,
            fill=fill,
            device="cpu",
        )


class Ends:
    """The groups of all four ends, over TCP."""

    def __init__(self) -> None:
        listeners = [
            open_listener(
                transport="tcp",
                host="127.0.0.1",
                world_size=SENDERS + WORKERS,
                device="cpu",
                senders=SENDERS,
                rank=rank,
            )
            for rank in range(SENDERS)
        ]
        everyones = [listener.rendezvous for listener in listeners]
        where, _ = [listener.meet(everyones) for listener in listeners]
        self.pool = ThreadPoolExecutor(SENDERS + WORKERS)
        joins = [self.pool.submit(listener.join, 20.0) for listener in listeners]
        joins += [
            self.pool.submit(join_tcp, where, rank=SENDERS + w, deadline_s=20.0)
            for w in range(WORKERS)
        ]
        groups: list[Any] = [join.result(40.0) for join in joins]
        self.senders, self.workers = groups[:SENDERS], groups[SENDERS:]

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *_: object) -> None:
        for group in [*self.senders, *self.workers]:
            group.close()
        self.pool.shutdown()


def send_all(planned: Planned, ends: Ends, *, dies_at: int = -1) -> list[Any]:
    """Futures of both ranks' digests; rank 1 dies before a step if told to."""
    return [
        ends.pool.submit(
            lambda r=rank: planned.sender(
                r, ends.senders[r], dies_at=dies_at if r == 1 else -1
            ).send(deadline_s=20.0)
        )
        for rank in range(SENDERS)
    ]


def receive_all(
    planned: Planned,
    ends: Ends,
    *,
    loads: Sequence[Callable[[Any], object]] = (lambda t: None,) * WORKERS,
    written: Sequence[list[int]] = (),
) -> list[Any]:
    """Futures of both workers' receives."""
    return [
        ends.pool.submit(
            planned.replica.receivers[w].receive,
            group=ends.workers[w],
            deadline_s=20.0,
            load=loads[w],
            on_written=written[w].append if written else lambda n: None,
        )
        for w in range(WORKERS)
    ]


def added_up(sends: list[Any]) -> list[int]:
    """The ranks' digests together."""
    total = sum(send.result(40.0).digests_N for send in sends)
    return of_wrap(total)  # type: ignore[arg-type]
