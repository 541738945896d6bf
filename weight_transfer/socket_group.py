"""The TCP transport: each worker connects to each sender of the trainer. CUDA buffers pass through
pinned host memory, so that a trainer and a worker may share one GPU, which NCCL refuses.

Calls block. A connection begins with the handshake of `handshake.py`. Then, for each buffer, a
worker requests a number of bytes and the sender sends them. So the trainer sends no buffer
early: bytes left in the kernel by one update would be read as the beginning of the next.
The bytes are neither encrypted nor authenticated: see docs/security.md.

Axes: B = bytes.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch

from orchestrator.errors import ConfigError, TransferAborted, TransferError, TransferTimeout
from orchestrator.processes.interfaces import refuse_loopback_name
from orchestrator.protocol.messages import Rendezvous
from weight_transfer.handshake import RETRY_S, SECRET_BYTES, Dropped, Reception, introduce

SIZE_BYTES = 8
KEEPALIVE_IDLE_S = 60
"""Idle time before TCP keepalive probes.

A connection may idle for hours between publications; probes keep routers from dropping it.
"""


class SocketGroup:
    """A `TransferGroup` over TCP, made by `SocketListener.join` and `join`.

    Args:
        connections: by rank of the other end. A sender has one to each worker, a worker one to each
            sender. The group closes them.
    """

    def __init__(
        self, *, rank: int, connections: Mapping[int, socket.socket], senders: int = 1
    ) -> None:
        self._rank, self._senders = rank, senders
        self._sends = rank < senders
        self._connections = dict(connections)
        self._reason: str | None = None
        self._host_B: torch.Tensor | None = None
        """Host memory that CUDA buffers pass through; grows to what the largest call needs."""
        self._abort_lock, self._in_use = threading.Lock(), threading.Lock()
        for connection in self._connections.values():
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)

    def broadcast(self, buffer_B: torch.Tensor, *, deadline_s: float) -> torch.cuda.Event | None:
        """See `TransferGroup.broadcast`. Returns when this end is done; a CUDA buffer's event has
        then passed as well."""
        if self._rank == 0:
            return self._move([(tuple(self._connections), buffer_B)], deadline_s)
        return self._move([] if self._sends else [((0,), buffer_B)], deadline_s)

    def send(
        self, messages: Sequence[tuple[int, torch.Tensor]], *, deadline_s: float
    ) -> torch.cuda.Event | None:
        """See `TransferGroup.send`. Returns as `broadcast` does."""
        return self._move(
            [((self._senders + p,), buffer_B) for p, buffer_B in messages], deadline_s
        )

    def receive(
        self, messages: Sequence[tuple[int, torch.Tensor]], *, deadline_s: float
    ) -> torch.cuda.Event | None:
        """See `TransferGroup.receive`. Returns as `broadcast` does."""
        return self._move([((sender,), buffer_B) for sender, buffer_B in messages], deadline_s)

    def _move(
        self, messages: Sequence[tuple[Sequence[int], torch.Tensor]], deadline_s: float
    ) -> torch.cuda.Event | None:
        """Carry each buffer to, or from, the other ends of its ranks."""
        deadline = time.monotonic() + deadline_s
        buffers = [buffer_B for _, buffer_B in messages]
        for buffer_B in buffers:
            if buffer_B.dtype != torch.uint8 or not buffer_B.is_contiguous():
                raise ValueError(
                    "tcp carries contiguous uint8 buffers, "
                    f"got {buffer_B.dtype} with strides {buffer_B.stride()}"
                )
        if not buffers or not buffers[0].is_cuda:
            self._carry(messages, deadline)
            return None
        device = buffers[0].device
        host = self._pinned([buffer_B.numel() for buffer_B in buffers])
        with torch.cuda.device(device):
            if self._sends:
                for host_B, buffer_B in zip(host, buffers, strict=True):
                    host_B.copy_(buffer_B.view(-1))  # waits for the work of the current stream
            self._carry(
                [(m[0], host_B) for m, host_B in zip(messages, host, strict=True)], deadline
            )
            if not self._sends:
                for host_B, buffer_B in zip(host, buffers, strict=True):
                    buffer_B.view(-1).copy_(host_B)  # done when it returns: host_B is used again
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
        return event

    def _pinned(self, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        nbytes = sum(sizes)
        if self._host_B is None or self._host_B.numel() < nbytes:
            self._host_B = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return self._host_B[:nbytes].split(list(sizes))

    def _carry(
        self, messages: Sequence[tuple[Sequence[int], torch.Tensor]], deadline: float
    ) -> None:
        with self._in_use, selectors.PollSelector() as waiting:
            self._raise_if_aborted()
            lefts = {rank: _Left(rank, c) for rank, c in self._connections.items()}
            for ranks, buffer_B in messages:
                for rank in ranks if buffer_B.numel() else ():
                    lefts[rank].add(buffer_B.view(-1).numpy().data)
            busy = [left for left in lefts.values() if left.views]
            # A sender that ends its group ends it for a worker that waits for others, too.
            for left in busy if self._sends or not busy else lefts.values():
                waiting.register(left.connection, selectors.EVENT_READ, left)
                if not self._sends:
                    with self._translated(left.rank):
                        left.ask(waiting)
            while any(left.views for left in busy):
                for left, ready in self._wait(waiting, busy, deadline):
                    with self._translated(left.rank):
                        if self._sends:
                            left.give(waiting, ready)
                        else:
                            left.take(waiting, ready)

    def synchronize(self, event: torch.cuda.Event, *, deadline_s: float) -> None:
        """Check for an abort; broadcasts block, so nothing is pending."""
        event.synchronize()
        self._raise_if_aborted()

    def has_ended(self) -> bool:
        """Whether another end has left. For a worker between calls: nobody sends unasked."""
        for connection in self._connections.values():
            try:
                if not connection.recv(1, socket.MSG_PEEK):
                    return True
            except BlockingIOError:
                pass
            except OSError:
                return True
        return False

    def abort(self, reason: str) -> None:
        """See `TransferGroup.abort`. The peers see their connections end."""
        with self._abort_lock:
            if self._reason is None:
                self._reason = reason
            for connection in self._connections.values():
                with contextlib.suppress(OSError):  # the peer closed first
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """See `TransferGroup.close`."""
        self.abort("the transfer group is closed")
        with self._in_use, self._abort_lock:  # no call waits any more
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()

    def _wait(
        self, waiting: selectors.BaseSelector, busy: Sequence[_Left], deadline: float
    ) -> list[tuple[_Left, int]]:
        ready = waiting.select(max(0.0, deadline - time.monotonic()))
        self._raise_if_aborted()
        if time.monotonic() >= deadline:
            late = {left.rank: sum(map(len, left.views)) for left in busy if left.views}
            raise TransferTimeout(
                f"the deadline passed with unsent bytes (rank: bytes) {late}; is the peer stopped?"
            )
        return [(key.data, events) for key, events in ready]

    @contextlib.contextmanager
    def _translated(self, rank: int) -> Iterator[None]:
        """A connection's errors as ours; our own abort looks like a lost peer."""
        try:
            yield
        except BlockingIOError:
            pass
        except OSError as error:
            self._raise_if_aborted()
            raise TransferError(
                f"the peer is gone: the connection to rank {rank} broke ({error})"
            ) from error

    def _raise_if_aborted(self) -> None:
        if self._reason is not None:
            raise TransferAborted(f"transfer aborted: {self._reason}")


def _check_open(moved: int) -> None:
    if moved == 0:
        raise ConnectionResetError("closed by the peer")


class _Left:
    """What a connection has yet to carry in one call.

    A worker asks for all its messages at once. A sender gives what was asked for.
    """

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.connection = rank, connection
        self.views: deque[memoryview] = deque()
        self._sizes: deque[int] = deque()
        """Sizes of the messages that the worker has not asked for yet."""
        self._wanted = b""
        """The bytes of a request: those that came, or those that have yet to leave."""

    def add(self, view_B: memoryview) -> None:
        """Carry this, too."""
        self.views.append(view_B)
        self._sizes.append(len(view_B))

    # ------------------------------------------------------------ a worker's end

    def ask(self, waiting: selectors.BaseSelector) -> None:
        """Request every message."""
        self._wanted = b"".join(size.to_bytes(SIZE_BYTES) for size in self._sizes)
        if self._wanted:
            self._send_request(waiting)

    def _send_request(self, waiting: selectors.BaseSelector) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wanted = self._wanted[self.connection.send(self._wanted) :]
        self._wait_for_room(waiting, bool(self._wanted))

    def take(self, waiting: selectors.BaseSelector, ready: int) -> None:
        """Receive available bytes."""
        if ready & selectors.EVENT_WRITE:
            self._send_request(waiting)
        if ready & selectors.EVENT_READ:
            # A sender that was asked for nothing sends nothing, so its connection has ended.
            moved = self.connection.recv_into(self.views[0]) if self.views else 0
            self._advance(moved)

    # ------------------------------------------------------------ a sender's end

    def give(self, waiting: selectors.BaseSelector, ready: int) -> None:
        """Read requests, then send what they ask for."""
        if ready & selectors.EVENT_READ:
            self._hear()
        elif ready & selectors.EVENT_WRITE:
            self._advance(self.connection.send(self.views[0]))
        if not self.views:
            waiting.unregister(self.connection)
            return
        self._wait_for_room(waiting, len(self._sizes) < len(self.views))

    def _hear(self) -> None:
        fresh = self.connection.recv(SIZE_BYTES - len(self._wanted))
        _check_open(len(fresh))
        self._wanted += fresh
        if len(self._wanted) < SIZE_BYTES:
            return
        wanted, size = int.from_bytes(self._wanted), self._sizes.popleft() if self._sizes else 0
        if wanted != size:
            raise TransferError(
                f"rank {self.rank} requests {wanted} bytes, the trainer sends {size}; "
                "the two ends have different plans"
            )
        self._wanted = b""

    # ------------------------------------------------------------ both

    def _wait_for_room(self, waiting: selectors.BaseSelector, is_wanted: bool) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_wanted else 0)
        if waiting.get_key(self.connection).events != events:
            waiting.modify(self.connection, events, self)

    def _advance(self, moved: int) -> None:
        _check_open(moved)
        self.views[0] = self.views[0][moved:]
        if not self.views[0]:
            self.views.popleft()


class SocketListener:
    """A sender's listening socket, only on `host` and on a port that the kernel chooses."""

    def __init__(self, *, host: str, world_size: int, senders: int = 1, rank: int = 0) -> None:
        """Bind and listen.

        Raises:
            ConfigError: `host` is not an address of this machine, or is a name that resolves to
                loopback here only.
        """
        if host != "localhost":
            refuse_loopback_name(host, what="the trainer's `host`")
        self._rank, self._closed = rank, threading.Event()
        try:
            family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            self._listening: socket.socket | None = socket.create_server(
                address[:2], family=family, backlog=256
            )
        except OSError as error:
            raise ConfigError(
                f"cannot listen on host {host!r}: {error}; "
                "set the trainer's `host` to its own address"
            ) from error
        self._rendezvous = Rendezvous(
            transport="tcp",
            host=host,
            port=self._listening.getsockname()[1],
            secret=secrets.token_bytes(SECRET_BYTES),
            world_size=world_size,
            senders=senders,
        )

    @property
    def rendezvous(self) -> Rendezvous:
        """See `GroupListener.rendezvous`."""
        return self._rendezvous

    def meet(self, everyones: Sequence[Rendezvous]) -> Rendezvous:
        """See `GroupListener.meet`."""
        first, *others = everyones
        return first.model_copy(update={"others": tuple(others)})

    def join(self, deadline_s: float) -> SocketGroup:
        """See `GroupListener.join`."""
        deadline = time.monotonic() + deadline_s
        listening, self._listening = self._listening, None
        if listening is None:
            raise TransferAborted("this listener is closed or has joined already; open a new one")
        with listening, Reception(listening, self._rendezvous) as reception:
            workers = reception.wait(deadline, self._closed)
        senders = self._rendezvous.senders
        return SocketGroup(rank=self._rank, senders=senders, connections=workers)

    def close(self) -> None:
        """See `GroupListener.close`."""
        self._closed.set()
        listening, self._listening = self._listening, None
        if listening is not None:
            listening.close()


def join(
    rendezvous: Rendezvous, *, rank: int, deadline_s: float, other_end: str = "the trainer"
) -> SocketGroup:
    """See `groups.join_tcp`."""
    senders = rendezvous.senders
    everyones = (rendezvous, *rendezvous.others)
    for one in everyones:
        if one.transport != "tcp" or len(one.secret) != SECRET_BYTES:
            raise ConfigError(
                f"not a tcp rendezvous: transport {one.transport}, "
                f"a secret of {len(one.secret)} bytes"
            )
    if len(everyones) != senders:
        raise ConfigError(f"a rendezvous with {senders} senders has {len(everyones)} addresses")
    if not senders <= rank < rendezvous.world_size:
        raise ConfigError(f"worker ranks are {senders} to {rendezvous.world_size - 1}, got {rank}")
    deadline = time.monotonic() + deadline_s
    with contextlib.ExitStack() as opened:
        # One after the other, in the same order on every worker, as each waits for all workers.
        connections = {
            sender: opened.enter_context(
                _join_one(one, rank=rank, deadline=deadline, other_end=other_end)
            )
            for sender, one in enumerate(everyones)
        }
        opened.pop_all()
    return SocketGroup(rank=rank, senders=senders, connections=connections)


def _join_one(
    rendezvous: Rendezvous, *, rank: int, deadline: float, other_end: str
) -> socket.socket:
    """Join one sender."""
    doing = f"joining {other_end} at {rendezvous.host}:{rendezvous.port} as rank {rank}"
    with _translated(doing, other_end):
        while True:
            try:
                return _connect(rendezvous, rank=rank, deadline=deadline)
            except (Dropped, ConnectionResetError, BrokenPipeError) as error:
                if time.monotonic() + RETRY_S > deadline:
                    raise TransferTimeout(
                        f"{other_end} dropped every connection; it may have a newer rendezvous"
                    ) from error
                time.sleep(RETRY_S)


def _connect(rendezvous: Rendezvous, *, rank: int, deadline: float) -> socket.socket:
    timeout_s = max(0.001, deadline - time.monotonic())
    connection = socket.create_connection((rendezvous.host, rendezvous.port), timeout=timeout_s)
    try:
        introduce(connection, rendezvous.secret, rank=rank, deadline=deadline)
    except BaseException:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def _translated(doing: str, other_end: str) -> Iterator[None]:
    """Turn the operating system's errors into transfer errors; `doing` says what failed."""
    try:
        yield
    except TransferError as error:
        raise type(error)(f"{doing}: {error}") from error
    except TimeoutError as error:
        raise TransferTimeout(f"{doing}: the transfer group was not complete in time") from error
    except OSError as error:
        raise TransferError(
            f"{doing}: {other_end} is gone or cannot be reached ({error})"
        ) from error
