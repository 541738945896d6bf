"""Transfer groups, one per replica: the trainer's ranks that send come first, then the workers.

A group carries uint8 buffers from rank 0 to all workers, or from any sender to any worker. Any
thread can end it: `abort` frees every waiting call within some 50 ms, and every later call raises
`TransferAborted` with the reason. Every wait has a deadline. After any exception a group must be
aborted, closed and replaced.

    listener = open_listener(
        transport="tcp", host="127.0.0.1", world_size=2, device=torch.device("cpu")
    )
    ...  # send listener.rendezvous to the worker, which calls join_tcp(rendezvous, ...)
    group = listener.join(deadline_s=30)
    group.broadcast(buffer_B, deadline_s=60)
    group.close()

With several senders, each opens a listener. All exchange their rendezvous and give them to
`GroupListener.meet`, which returns the one for the workers.

Axes: B = bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import Rendezvous, Transport


class TransferGroup(Protocol):
    """A transport, as the senders and the workers see it."""

    def broadcast(self, buffer_B: torch.Tensor, *, deadline_s: float) -> torch.cuda.Event | None:
        """Copy rank 0's contiguous uint8 buffer into the workers' buffers of the same size.

        The other senders take no part: there the call does nothing.

        On CUDA the call may only queue the transfer after the work of the current stream. It then
        returns an event, and the buffer must live until that event. None: the transfer is done.

        Raises:
            TransferAborted: `abort` was called.
            TransferTimeout: not done after `deadline_s`.
            TransferError: the peer is gone.
        """

    def send(
        self, messages: Sequence[tuple[int, torch.Tensor]], *, deadline_s: float
    ) -> torch.cuda.Event | None:
        """Send buffers to workers, all at the same time; otherwise as `broadcast`. For senders.

        Every rank makes the same number of calls of `send` or `receive`. A call without messages
        does nothing.

        Args:
            messages: (worker's position, from 0; contiguous uint8 buffer). Those to one worker
                arrive in this order.

        Raises:
            TransferError: a size differs from that of the receiver's buffer.
        """

    def receive(
        self, messages: Sequence[tuple[int, torch.Tensor]], *, deadline_s: float
    ) -> torch.cuda.Event | None:
        """Receive buffers from senders, all at the same time; otherwise as `send`. For workers.

        Args:
            messages: (sender's rank; contiguous uint8 buffer).
        """

    def synchronize(self, event: torch.cuda.Event, *, deadline_s: float) -> None:
        """Wait for the call that returned the event. Raises as `broadcast`."""

    def abort(self, reason: str) -> None:
        """End the group at once, from any thread. The first reason counts."""

    def close(self) -> None:
        """Free everything, in any state. Safe to call twice."""


class GroupListener(Protocol):
    """A sender's listening end. Workers can join as soon as all senders have one."""

    @property
    def rendezvous(self) -> Rendezvous:
        """Address and secret with which the workers join this sender."""

    def meet(self, everyones: Sequence[Rendezvous]) -> Rendezvous:
        """Learn the rendezvous of all senders, by rank, before `join`. Returns the workers'."""

    def join(self, deadline_s: float) -> TransferGroup:
        """Wait for all workers. A listener joins once; on failure it is closed.

        Raises:
            TransferTimeout: a worker did not join in time.
            TransferAborted: `close` was called.
            TransferError: a worker disconnected while joining.
        """

    def close(self) -> None:
        """Stop listening; a running `join` raises. A joined group is left open.

        Safe to call twice and from any thread.
        """


def open_listener(
    *,
    transport: Transport,
    host: str,
    world_size: int,
    device: torch.device | str,
    senders: int = 1,
    rank: int = 0,
) -> GroupListener:
    """Open a sender's end of a group.

    Args:
        host: address of this process for the workers. tcp listens on no other, on a port that the
            kernel chooses.
        world_size: senders + workers.
        device: device of the buffers. nccl needs CUDA; tcp carries CUDA buffers through the host.
        rank: this sender.

    Raises:
        ConfigError: the transport does not support the device, or `host` is not an address of this
            machine.
    """
    device = torch.device(device)
    if transport == "nccl" and device.type != "cuda":
        raise ConfigError(f"transport 'nccl' cannot send {device.type} buffers; use tcp")
    if transport == "tcp":
        from weight_transfer.socket_group import SocketListener

        return SocketListener(host=host, world_size=world_size, senders=senders, rank=rank)
    from weight_transfer.nccl_group import NcclListener

    return NcclListener(host=host, world_size=world_size, device=device, senders=senders, rank=rank)


def join_tcp(
    rendezvous: Rendezvous, *, rank: int, deadline_s: float, other_end: str = "the trainer"
) -> TransferGroup:
    """Join a TCP group as the worker of this rank (`rendezvous.senders` and more).

    Args:
        other_end: whom the errors name.

    Raises:
        ConfigError: the rendezvous is not tcp's or lacks a sender, or the rank is not a worker's.
        TransferTimeout: the group was not complete in time.
        TransferError: the trainer is gone, or a listener lacks its rendezvous's secret.
    """
    from weight_transfer.socket_group import join

    return join(rendezvous, rank=rank, deadline_s=deadline_s, other_end=other_end)
