"""This worker's place in the transfer groups, also in a chain of replicas.

The trainer sends to the first replica of a chain. Each worker passes on what arrives to the worker
of the same position in the next replica: the two are a group of their own. All replicas have the
same layout, so a worker needs to know nothing more.

Over NCCL a buffer leaves while the next one arrives. Over TCP calls block: on links of equal speed
a chain takes twice as long as one replica, however many replicas follow.

Axes: B = bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch

from orchestrator.errors import TransferAborted, TransferError
from orchestrator.processes.interfaces import address_towards
from orchestrator.protocol.messages import JoinTransferGroup, OpenRelay, Rendezvous
from weight_transfer.groups import GroupListener, TransferGroup, join_tcp, open_listener
from weight_transfer.socket_group import SocketGroup

POLL_S = 0.05


def listen(request: OpenRelay, *, device: torch.device) -> GroupListener:
    """Listen for the worker after this one.

    Raises:
        ConfigError: see `weight_transfer.groups.open_listener`.
    """
    if request.transport == "nccl":
        from inference_node.worker.nccl_group import NcclRelay

        return NcclRelay(device)
    host = address_towards(request.towards)
    return open_listener(transport="tcp", host=host, world_size=2, device=device)


def join(
    request: JoinTransferGroup,
    *,
    position: int,
    relay: GroupListener | None,
    device: torch.device,
) -> TransferGroup:
    """Join the trainer, or the worker before this one, and wait for the one after it.

    Args:
        relay: where the next worker joins; used if the request says so.

    Raises:
        TransferTimeout, TransferError: a group did not form.
    """
    deadline = time.monotonic() + request.deadline_s
    if not request.before:
        other_end, place = "the trainer", request.rendezvous
        rank = request.rendezvous.senders + position
    else:
        other_end, place, rank = "the replica before this one", request.before[position], 1
    group = _join(place, rank, device, request.deadline_s, other_end)
    if not request.before and not request.relays:
        return group
    after: TransferGroup | None = None
    try:
        if request.relays:
            assert relay is not None, "OpenRelay comes first"
            after = _wait_for_next(relay, group, deadline, other_end)
        _connect(group if request.before else None, after, device, deadline)
    except BaseException:
        for one in (after, group):
            if one is not None:
                one.close()
        raise
    return Relayed(group, after, is_first=not request.before)


def _connect(
    before: TransferGroup | None, after: TransferGroup | None, device: torch.device, deadline: float
) -> None:
    """Pass a byte along the chain: NCCL connects two ranks with their first message, which would
    otherwise be in a pause."""
    byte_B = torch.zeros(1, dtype=torch.uint8, device=device)

    def wait(group: TransferGroup, event: torch.cuda.Event | None) -> None:
        if event is not None:
            group.synchronize(event, deadline_s=_left_s(deadline))

    if before is not None:
        wait(before, before.receive([(0, byte_B)], deadline_s=_left_s(deadline)))
    if after is not None:
        wait(after, after.send([(0, byte_B)], deadline_s=_left_s(deadline)))


def _join(
    rendezvous: Rendezvous, rank: int, device: torch.device, deadline_s: float, other_end: str
) -> TransferGroup:
    if rendezvous.transport == "tcp":
        return join_tcp(rendezvous, rank=rank, deadline_s=deadline_s, other_end=other_end)
    from inference_node.worker.nccl_group import join_nccl

    return join_nccl(
        rendezvous, rank=rank, device=device, deadline_s=deadline_s, other_end=other_end
    )


def _wait_for_next(
    relay: GroupListener, before: TransferGroup, deadline: float, other_end: str
) -> TransferGroup:
    """Wait for the next worker. Over TCP, until the other end leaves: the engine stands still."""
    is_over, has_left = threading.Event(), threading.Event()

    def watch() -> None:
        while isinstance(before, SocketGroup) and not is_over.wait(POLL_S):
            if before.has_ended():
                has_left.set()
                relay.close()
                return

    watching = threading.Thread(target=watch, name="splice-chain", daemon=True)
    watching.start()
    try:
        return relay.join(_left_s(deadline))
    except TransferAborted:
        if has_left.is_set():
            why = f"{other_end} left while this worker waited for the next replica"
            raise TransferError(why) from None
        raise
    finally:
        is_over.set()
        watching.join(timeout=1.0)


def _left_s(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


class Relayed:
    """A worker's `TransferGroup` in a chain.

    Args:
        before: where bytes arrive.
        after: where they leave. None: this is the last replica.
        is_first: bytes arrive from the trainer's ranks, else all from one worker.
    """

    def __init__(
        self, before: TransferGroup, after: TransferGroup | None, *, is_first: bool
    ) -> None:
        self._before, self._after, self._is_first = before, after, is_first
        self._stream: torch.cuda.Stream | None = None
        self._leaving: torch.cuda.Event | None = None
        """Event after the last buffer has left. None: the host has waited for it."""

    def broadcast(self, buffer_B: torch.Tensor, *, deadline_s: float) -> torch.cuda.Event | None:
        """Receive a buffer, and pass it on; see `TransferGroup.broadcast`."""
        deadline = time.monotonic() + deadline_s
        event = self._before.broadcast(buffer_B, deadline_s=deadline_s)
        return self._pass_on(
            event, deadline, lambda after, left_s: after.broadcast(buffer_B, deadline_s=left_s)
        )

    def send(
        self, messages: Sequence[tuple[int, torch.Tensor]], *, deadline_s: float
    ) -> torch.cuda.Event | None:
        """Refuse: this end only receives."""
        raise ValueError("a worker's group sends nothing")

    def receive(
        self, messages: Sequence[tuple[int, torch.Tensor]], *, deadline_s: float
    ) -> torch.cuda.Event | None:
        """Receive buffers, and pass them on in the same order; see `TransferGroup.receive`."""
        deadline = time.monotonic() + deadline_s
        passed = [(0, buffer_B) for _, buffer_B in messages]
        event = self._before.receive(messages if self._is_first else passed, deadline_s=deadline_s)
        return self._pass_on(
            event, deadline, lambda after, left_s: after.send(passed, deadline_s=left_s)
        )

    def _pass_on(
        self,
        arrived: torch.cuda.Event | None,
        deadline: float,
        send: Callable[[TransferGroup, float], torch.cuda.Event | None],
    ) -> torch.cuda.Event | None:
        """Returns the event after which the buffer may be used again."""
        if self._after is None:
            return arrived
        if arrived is None:
            return send(self._after, _left_s(deadline))
        if self._leaving is None:
            # It may be an update's first buffer. An aborted receive completes its event without
            # its bytes, and the next replica would write what is there instead.
            self._before.synchronize(arrived, deadline_s=_left_s(deadline))
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(arrived)
            self._leaving = send(self._after, _left_s(deadline))
            return self._leaving

    def synchronize(self, event: torch.cuda.Event, *, deadline_s: float) -> None:
        """See `TransferGroup.synchronize`. What has left has arrived."""
        (self._after or self._before).synchronize(event, deadline_s=deadline_s)
        if event is self._leaving:
            self._leaving = None

    def abort(self, reason: str) -> None:
        """End both groups: the workers before and after this one learn of it.

        First the one that `synchronize` asks: an aborted receive completes its event without its
        bytes.
        """
        if self._after is not None:
            self._after.abort(reason)
        self._before.abort(reason)

    def close(self) -> None:
        """See `TransferGroup.close`."""
        if self._after is not None:
            self._after.close()
        self._before.close()
