"""Transfer groups, one per replica: rank 0 is the trainer, ranks 1.. are the inference workers.

A group carries uint8 buffers from rank 0 to all others. Any thread can end it: `abort` frees every
waiting call within some 50 ms, and every later call raises `TransferAborted` with the reason. Every
wait has a deadline. After any exception a group must be aborted, closed and replaced.

    listener = open_listener(
        transport="tcp", host="127.0.0.1", world_size=2, device=torch.device("cpu")
    )
    ...  # send listener.rendezvous to the worker, which calls join_tcp(rendezvous, ...)
    group = listener.join(deadline_s=30)
    group.broadcast(buffer_B, deadline_s=60)
    group.close()

Axes: B = bytes.
"""

from __future__ import annotations

from typing import Protocol

import torch

from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import Rendezvous, Transport


class TransferGroup(Protocol):
    """A transport, as the sender and the receiver see it."""

    def broadcast(self, buffer_B: torch.Tensor, *, deadline_s: float) -> torch.cuda.Event | None:
        """Copy rank 0's contiguous uint8 buffer into the others' buffers of the same size.

        On CUDA the call may only queue the transfer after the work of the current stream. It then
        returns an event, and the buffer must live until that event. None: the transfer is done.

        Raises:
            TransferAborted: `abort` was called.
            TransferTimeout: not done after `deadline_s`.
            TransferError: the peer is gone.
        """

    def synchronize(self, event: torch.cuda.Event, *, deadline_s: float) -> None:
        """Wait for the broadcast that returned the event. Raises as `broadcast`."""

    def abort(self, reason: str) -> None:
        """End the group at once, from any thread. The first reason counts."""

    def close(self) -> None:
        """Free everything, in any state. Safe to call twice."""


class GroupListener(Protocol):
    """The trainer's listening end. Workers can join as soon as it exists."""

    @property
    def rendezvous(self) -> Rendezvous:
        """Address and secret with which the workers join."""

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
    *, transport: Transport, host: str, world_size: int, device: torch.device | str
) -> GroupListener:
    """Open the trainer's end of a group.

    Args:
        host: address of this process for the workers. tcp listens on no other, on a port that the
            kernel chooses.
        world_size: 1 + workers.
        device: device of the buffers. nccl needs CUDA; tcp carries CUDA buffers through the host.

    Raises:
        ConfigError: the transport does not support the device, or `host` is not an address of this
            machine.
    """
    device = torch.device(device)
    if transport == "nccl" and device.type != "cuda":
        raise ConfigError(f"transport 'nccl' cannot send {device.type} buffers; use tcp")
    if transport == "tcp":
        from weight_transfer.socket_group import SocketListener

        return SocketListener(host=host, world_size=world_size)
    from weight_transfer.nccl_group import NcclListener

    return NcclListener(host=host, world_size=world_size, device=device)


def join_tcp(rendezvous: Rendezvous, *, rank: int, deadline_s: float) -> TransferGroup:
    """Join the trainer's TCP group as worker `rank` (1 ..).

    Raises:
        ConfigError: the rendezvous is not tcp's, or the rank is not a worker's.
        TransferTimeout: the group was not complete in time.
        TransferError: the trainer is gone, or the listener lacks the rendezvous's secret.
    """
    from weight_transfer.socket_group import join

    return join(rendezvous, rank=rank, deadline_s=deadline_s)
