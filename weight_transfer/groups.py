"""Who is on the wire: rank 0 is the trainer, ranks 1.. are the inference workers of one replica. One group per replica.

A group carries uint8 buffers from rank 0 to all others and can be ended from any thread: after `abort` whoever waits is freed within
some 50 ms and every later call raises `TransferAborted` with the reason. Every wait has a deadline. A group whose call raised
anything is of no more use: abort and close it, open a new one.

    listener = open_listener(transport="tcp", host="127.0.0.1", world_size=2, bucket_bytes=1 << 30, device=torch.device("cpu"))
    ...                                            # send listener.rendezvous to the worker, which calls join_tcp(rendezvous, ...)
    group = listener.join(deadline_s=30)
    group.broadcast(buffer_B, deadline_s=60)
    group.close()

Axes: B = bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from orchestrator.errors import ConfigError, TransferAborted, TransferTimeout
from orchestrator.protocol.messages import Rendezvous, Transport


class TransferGroup(Protocol):
    """What the sender and the receiver need of a group."""

    @property
    def rank(self) -> int:
        """0 is the sender."""

    @property
    def world_size(self) -> int:
        """1 + receivers."""

    def broadcast(self, buffer_B: torch.Tensor, *, deadline_s: float) -> torch.cuda.Event | None:
        """Carry a contiguous uint8 buffer from rank 0 into the others' buffers of the same size.

        On CUDA this may only queue the transfer, behind what the current stream holds: the event returned lies behind it, and
        the buffer must live until then. None: the transfer is over.

        Raises:
            TransferAborted: `abort` was called.
            TransferTimeout: not done after `deadline_s`.
            TransferError: the peer is gone.
        """

    def synchronize(self, event: torch.cuda.Event | None = None, *, deadline_s: float) -> None:
        """Wait until the broadcast behind `event` (None: all of them) is over. Raises as `broadcast` does."""

    def abort(self, reason: str) -> None:
        """End the group at once, from any thread; the first reason counts. Never blocks for more than a moment."""

    def close(self) -> None:
        """Free everything, whatever state the group is in. Safe to call twice."""


class GroupListener(Protocol):
    """The trainer's open door: the workers can join as soon as it exists."""

    @property
    def rendezvous(self) -> Rendezvous:
        """What the workers need to join."""

    def join(self, deadline_s: float) -> TransferGroup:
        """Wait for all workers; once. The listener is then spent, and on failure closed.

        Raises:
            TransferTimeout: not all of them came in time.
            TransferAborted: `close` was called meanwhile.
            TransferError: a worker broke off while joining.
        """

    def close(self) -> None:
        """Stop listening; a `join` under way raises. Does nothing to a group that has joined. Safe to call twice, from any thread."""


def open_listener(
    *, transport: Transport, host: str, world_size: int, bucket_bytes: int, device: torch.device | str
) -> GroupListener:
    """Open the trainer's end of a group.

    Args:
        host: address that the workers reach this process at; tcp listens on it alone, on a port that the kernel chooses.
        world_size: 1 + workers.
        bucket_bytes: travels in the rendezvous, so that both ends cut the same buckets.
        device: where the buffers lie; "cpu" for tcp, a CUDA device for nccl.

    Raises:
        ConfigError: the transport does not fit the device, or `host` is not an address of this machine.
    """
    device = torch.device(device)
    if (transport == "nccl") != (device.type == "cuda"):
        raise ConfigError(f"transport {transport!r} does not carry {device.type} buffers; use nccl on cuda and tcp on the cpu")
    if transport == "tcp":
        from weight_transfer.socket_group import SocketListener

        return SocketListener(host=host, world_size=world_size, bucket_bytes=bucket_bytes)
    from weight_transfer.nccl_group import NcclListener

    return NcclListener(host=host, world_size=world_size, bucket_bytes=bucket_bytes, device=device)


def join_tcp(rendezvous: Rendezvous, *, rank: int, deadline_s: float) -> TransferGroup:
    """Join the trainer's TCP group as worker `rank` (1 ..).

    Raises:
        ConfigError: the rendezvous is not tcp's, or the rank is not a worker's.
        TransferTimeout: the group was not complete in time.
        TransferError: the trainer is gone, or whoever listens there does not have the rendezvous's secret.
    """
    from weight_transfer.socket_group import join

    return join(rendezvous, rank=rank, deadline_s=deadline_s)


FIRST_POLL_S, LAST_POLL_S = 0.00005, 0.002
WIRE_PRIORITY = -1
"""Of a CUDA stream with NCCL's kernels: they wait for the other end, so they go before the merges, copies and digests that are queued beside them."""


def wait_for_event(event: torch.cuda.Event, *, deadline_s: float, check: Callable[[], None], late: str) -> None:
    """Wait for a CUDA event by polling, so that an abort and the deadline are heard.

    Args:
        check: called between polls; raises what should end the wait.
        late: what to say when the deadline has passed.

    Raises:
        TransferTimeout: not done after `deadline_s`.
    """
    deadline, poll_s = time.monotonic() + deadline_s, FIRST_POLL_S
    while not event.query():
        check()
        if time.monotonic() > deadline:
            raise TransferTimeout(late)
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, LAST_POLL_S)


class GroupOwner:
    """The groups of one sender, ended together, and the ring of buffers beside them."""

    def __init__(self, groups: Mapping[str, TransferGroup]) -> None:
        self._groups = dict(groups)
        self._ring: list[torch.Tensor] = []
        self._aborted: str | None = None
        self._lock = threading.Lock()

    def abort(self, reason: str) -> None:
        """End a `send` under way and every group; from any thread. The first reason counts."""
        self._note(reason)
        for group in list(self._groups.values()):
            group.abort(reason)

    def release(self) -> None:
        """Free the ring but leave the groups open, for another sender. This one is of no more use."""
        self._note("the sender was replaced")
        self._groups.clear()
        self._ring.clear()

    def close(self) -> None:
        """Close every group and free the ring. Safe to call twice."""
        self._note("the sender is closed")
        for group in list(self._groups.values()):
            group.close()
        self._groups.clear()
        self._ring.clear()

    def _note(self, reason: str) -> None:
        with self._lock:
            if self._aborted is None:
                self._aborted = reason

    def _raise_if_aborted(self) -> None:
        if self._aborted is not None:
            raise TransferAborted(f"transfer aborted: {self._aborted}")
