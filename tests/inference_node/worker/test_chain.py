"""A chain of three replicas over TCP: what arrives at the first is passed on to the last; whoever
ends, ends all."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from inference_node.worker import chain
from orchestrator.errors import TransferAborted, TransferError, TransferTimeout
from orchestrator.protocol.messages import JoinTransferGroup, OpenRelay, Rendezvous
from weight_transfer.groups import GroupListener, TransferGroup, open_listener

CPU, DEADLINE_S, SIZES = torch.device("cpu"), 20.0, (70_001, 3)


def message(sender: int, n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * sender + n)
    return torch.randint(0, 256, (SIZES[n],), dtype=torch.uint8, generator=generator)


class Chain:
    """Trainer ranks, and the only worker of each of three replicas, joined."""

    def __init__(self, senders: int) -> None:
        self.pool = ThreadPoolExecutor(8)
        listeners = [
            open_listener(
                transport="tcp",
                host="127.0.0.1",
                world_size=senders + 1,
                device=CPU,
                senders=senders,
                rank=rank,
            )
            for rank in range(senders)
        ]
        everyones = [one.rendezvous for one in listeners]
        place, *_ = [one.meet(everyones) for one in listeners]
        relays = [
            chain.listen(
                OpenRelay(request_id="r", deadline_s=9, transport="tcp", towards="127.0.0.1"),
                device=CPU,
            )
            for _ in range(2)
        ]
        senders_join = [self.pool.submit(one.join, DEADLINE_S) for one in listeners]
        before = [None, *(one.rendezvous for one in relays)]
        workers_join = [
            self.pool.submit(join, place, before[n], relay)
            for n, relay in enumerate([*relays, None])
        ]
        self.senders = [one.result(DEADLINE_S) for one in senders_join]
        self.workers: list[TransferGroup] = [one.result(DEADLINE_S) for one in workers_join]

    def close(self) -> None:
        for group in [*self.workers, *self.senders]:
            group.close()
        self.pool.shutdown()


def join(
    place: Rendezvous,
    before: Rendezvous | None,
    relay: GroupListener | None,
    deadline_s: float = DEADLINE_S,
) -> TransferGroup:
    request = JoinTransferGroup(
        request_id="j",
        deadline_s=deadline_s,
        rendezvous=place,
        before=() if before is None else (before,),
        relays=relay is not None,
    )
    return chain.join(request, position=0, relay=relay, device=CPU)


@pytest.fixture
def made(request):
    chained = Chain(request.param)
    yield chained
    chained.close()


def received(futures: list[Future[Any]]) -> list[Any]:
    return [future.result(DEADLINE_S) for future in futures]


@pytest.mark.parametrize("made", [1, 2], indirect=True, ids=["one sender", "two senders"])
def test_every_byte_reaches_every_replica(made: Chain) -> None:
    senders = range(len(made.senders))
    for _ in range(2):
        sent = [
            made.pool.submit(
                made.senders[s].send, [(0, message(s, n)) for n in range(2)], deadline_s=DEADLINE_S
            )
            for s in senders
        ]
        got = [
            [(s, torch.zeros(SIZES[n], dtype=torch.uint8)) for s in senders for n in range(2)]
            for _ in made.workers
        ]
        received(
            [
                made.pool.submit(worker.receive, mine, deadline_s=DEADLINE_S)
                for worker, mine in zip(made.workers, got, strict=True)
            ]
        )
        received(sent)
        for mine in got:
            for at, (s, buffer_B) in enumerate(mine):
                assert torch.equal(buffer_B, message(s, at % 2))
        whole = [torch.zeros(SIZES[0], dtype=torch.uint8) for _ in made.workers]
        sent = [
            made.pool.submit(one.broadcast, message(0, 0), deadline_s=DEADLINE_S)
            for one in made.senders
        ]
        received(
            [
                made.pool.submit(worker.broadcast, buffer_B, deadline_s=DEADLINE_S)
                for worker, buffer_B in zip(made.workers, whole, strict=True)
            ]
        )
        received(sent)
        assert all(torch.equal(buffer_B, message(0, 0)) for buffer_B in whole)
        assert [worker.receive([], deadline_s=1.0) for worker in made.workers] == [None] * 3


def updates_until_it_fails(group: TransferGroup) -> None:
    """As an engine: an end whose update failed leaves its group."""
    try:
        while True:
            group.broadcast(torch.zeros(1 << 20, dtype=torch.uint8), deadline_s=DEADLINE_S)
    finally:
        group.close()


@pytest.mark.parametrize("made", [1], indirect=True)
@pytest.mark.parametrize("ended", [0, 1, 2])
def test_a_replica_that_ends_ends_the_others(made: Chain, ended: int) -> None:
    """Nobody waits for its deadline."""
    ends = [*made.senders, *made.workers]
    running = [made.pool.submit(updates_until_it_fails, end) for end in ends]
    time.sleep(0.2)
    began = time.monotonic()
    made.workers[ended].abort("it ended")
    outcomes = [one.exception(DEADLINE_S) for one in running]
    assert all(isinstance(error, TransferError) for error in outcomes), outcomes
    assert not any(isinstance(error, TransferTimeout) for error in outcomes), outcomes
    assert time.monotonic() - began < DEADLINE_S / 2


class Event:
    """A CUDA event's stand-in."""


class Queued:
    """Queues calls as NCCL does: the host goes on, and an abort completes a receipt's event."""

    def __init__(self) -> None:
        self.calls, self.waited, self.reason = list[Event](), list[Event](), ""

    def broadcast(self, buffer_B: torch.Tensor, *, deadline_s: float) -> Any:
        self.calls.append(Event())
        return self.calls[-1]

    def synchronize(self, event: Any, *, deadline_s: float) -> None:
        self.waited.append(event)
        if self.reason:
            raise TransferAborted(self.reason)


def queued(monkeypatch: pytest.MonkeyPatch) -> tuple[chain.Relayed, Queued, Queued]:
    class Stream:
        def wait_event(self, event: Event) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    before, after = Queued(), Queued()
    ends: Any = (before, after)
    return chain.Relayed(*ends, is_first=True), before, after


def test_an_updates_first_buffer_is_not_passed_on_if_an_abort_ended_its_receipt(monkeypatch):
    """NCCL would send what is in the buffer, and the next replica's first chunk would be whole."""
    relayed, before, after = queued(monkeypatch)
    before.reason = "the trainer is gone"
    with pytest.raises(TransferAborted):
        relayed.broadcast(torch.zeros(1, dtype=torch.uint8), deadline_s=1.0)
    assert not after.calls


def test_later_buffers_are_queued_without_a_wait_until_an_update_ends(monkeypatch):
    relayed, before, after = queued(monkeypatch)
    for _ in range(3):
        relayed.broadcast(torch.zeros(1, dtype=torch.uint8), deadline_s=1.0)
    relayed.synchronize(after.calls[1], deadline_s=1.0)
    relayed.broadcast(torch.zeros(1, dtype=torch.uint8), deadline_s=1.0)
    assert before.waited == before.calls[:1] and len(after.calls) == 4
    relayed.synchronize(after.calls[-1], deadline_s=1.0)
    relayed.broadcast(torch.zeros(1, dtype=torch.uint8), deadline_s=1.0)
    assert before.waited == [before.calls[0], before.calls[4]]


def test_a_next_replica_that_does_not_come_ends_the_join() -> None:
    listener = open_listener(transport="tcp", host="127.0.0.1", world_size=2, device=CPU)
    relay = open_listener(transport="tcp", host="127.0.0.1", world_size=2, device=CPU)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(listener.join, DEADLINE_S)
        with pytest.raises(TransferTimeout):
            join(listener.rendezvous, None, relay, deadline_s=1.0)
        joining.result(DEADLINE_S).close()


def test_the_error_names_the_replica_before_that_cannot_be_reached() -> None:
    place, gone = (
        open_listener(transport="tcp", host="127.0.0.1", world_size=2, device=CPU) for _ in range(2)
    )
    gone.close()
    with pytest.raises(TransferError, match="the replica before this one is gone or cannot be"):
        join(place.rendezvous, gone.rendezvous, None)
    place.close()


def test_a_join_ends_if_the_trainer_leaves_while_the_next_replica_does_not_come() -> None:
    """The next attempt makes the trainer leave. The engine stands still until the join ends."""
    listener = open_listener(transport="tcp", host="127.0.0.1", world_size=2, device=CPU)
    relay = open_listener(transport="tcp", host="127.0.0.1", world_size=2, device=CPU)
    with ThreadPoolExecutor(2) as pool:
        joining = pool.submit(listener.join, DEADLINE_S)
        waiting = pool.submit(join, listener.rendezvous, None, relay)
        group = joining.result(DEADLINE_S)
        time.sleep(0.2)
        assert not waiting.done()
        group.close()
        with pytest.raises(TransferError, match="the trainer left") as caught:
            waiting.result(DEADLINE_S / 2)
        assert not isinstance(caught.value, TransferTimeout)
