"""The TCP transport: the trainer (rank 0) connects to each worker. CUDA buffers pass through pinned
host memory, so that a trainer and a worker may share one GPU, which NCCL refuses.

Broadcasts block. A connection begins with the handshake of `handshake.py`. Then, for each buffer,
a worker requests a number of bytes and the trainer sends them. So the trainer sends no buffer
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
from collections.abc import Iterator, Mapping

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
        connections: by rank of the other end. A worker has one, to rank 0. The group closes them.
    """

    def __init__(self, *, rank: int, connections: Mapping[int, socket.socket]) -> None:
        self._rank = rank
        self._connections = dict(connections)
        self._reason: str | None = None
        self._host_B: torch.Tensor | None = None
        """Host memory that CUDA buffers pass through; grows to the largest of them."""
        self._abort_lock, self._in_use = threading.Lock(), threading.Lock()
        for connection in self._connections.values():
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)

    def broadcast(self, buffer_B: torch.Tensor, *, deadline_s: float) -> torch.cuda.Event | None:
        """See `TransferGroup.broadcast`. Returns when this end is done; a CUDA buffer's event has
        then passed as well."""
        deadline = time.monotonic() + deadline_s
        if buffer_B.dtype != torch.uint8 or not buffer_B.is_contiguous():
            raise ValueError(
                "tcp carries contiguous uint8 buffers, "
                f"got {buffer_B.dtype} with strides {buffer_B.stride()}"
            )
        if not buffer_B.is_cuda:
            self._carry(buffer_B, deadline)
            return None
        stream = torch.cuda.current_stream(buffer_B.device)
        host_B = self._pinned(buffer_B.numel())
        with torch.cuda.device(buffer_B.device):
            if self._rank == 0:
                host_B.copy_(buffer_B.view(-1))  # waits for the work of the current stream
            self._carry(host_B, deadline)
            if self._rank:
                buffer_B.view(-1).copy_(host_B)  # done when it returns: host_B is used again
            event = torch.cuda.Event()
            event.record(stream)
        return event

    def _pinned(self, nbytes: int) -> torch.Tensor:
        if self._host_B is None or self._host_B.numel() < nbytes:
            self._host_B = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return self._host_B[:nbytes]

    def _carry(self, buffer_B: torch.Tensor, deadline: float) -> None:
        whole = buffer_B.view(-1).numpy().data
        with self._in_use, selectors.PollSelector() as waiting:
            self._raise_if_aborted()
            for rank, connection in self._connections.items() if whole else ():
                waiting.register(connection, selectors.EVENT_READ, _Left(rank, connection, whole))
                if self._rank:
                    with self._translated(rank):
                        connection.send(len(whole).to_bytes(SIZE_BYTES))
            while waiting.get_map():
                for left, ready in self._wait(waiting, deadline):
                    with self._translated(left.rank):
                        self._move(waiting, left, ready)

    def synchronize(self, event: torch.cuda.Event, *, deadline_s: float) -> None:
        """Check for an abort; broadcasts block, so nothing is pending."""
        event.synchronize()
        self._raise_if_aborted()

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

    def _wait(self, waiting: selectors.BaseSelector, deadline: float) -> list[tuple[_Left, int]]:
        ready = waiting.select(max(0.0, deadline - time.monotonic()))
        self._raise_if_aborted()
        if time.monotonic() >= deadline:
            late = {key.data.rank: len(key.data.view_B) for key in waiting.get_map().values()}
            raise TransferTimeout(
                f"the deadline passed with unsent bytes (rank: bytes) {late}; is the peer stopped?"
            )
        return [(key.data, events) for key, events in ready]

    def _move(self, waiting: selectors.BaseSelector, left: _Left, ready: int) -> None:
        """Receive available bytes (worker), or read the request and then send (trainer)."""
        if self._rank == 0 and len(left.wanted) < SIZE_BYTES:
            self._hear(waiting, left)
            return
        if self._rank:
            moved = left.connection.recv_into(left.view_B)
        else:  # the worker sends nothing now, so a readable connection has ended
            moved = 0 if ready & selectors.EVENT_READ else left.connection.send(left.view_B)
        _check_open(moved)
        left.view_B = left.view_B[moved:]
        if not left.view_B:
            waiting.unregister(left.connection)

    def _hear(self, waiting: selectors.BaseSelector, left: _Left) -> None:
        fresh = left.connection.recv(SIZE_BYTES - len(left.wanted))
        _check_open(len(fresh))
        left.wanted += fresh
        if len(left.wanted) < SIZE_BYTES:
            return
        wanted, size = int.from_bytes(left.wanted), len(left.view_B)
        if wanted != size:
            raise TransferError(
                f"rank {left.rank} requests {wanted} bytes, the trainer sends {size}; "
                "the two ends have different plans"
            )
        waiting.modify(left.connection, selectors.EVENT_READ | selectors.EVENT_WRITE, left)

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
    """The rest of a buffer that a connection has yet to carry."""

    def __init__(self, rank: int, connection: socket.socket, view_B: memoryview) -> None:
        self.rank, self.connection, self.view_B = rank, connection, view_B
        self.wanted = b""


class SocketListener:
    """The trainer's listening socket, only on `host` and on a port that the kernel chooses."""

    def __init__(self, *, host: str, world_size: int) -> None:
        """Bind and listen.

        Raises:
            ConfigError: `host` is not an address of this machine, or is a name that resolves to
                loopback here only.
        """
        if host != "localhost":
            refuse_loopback_name(host, what="the trainer's `host`")
        self._closed = threading.Event()
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
        )

    @property
    def rendezvous(self) -> Rendezvous:
        """Address and secret with which the workers join."""
        return self._rendezvous

    def join(self, deadline_s: float) -> SocketGroup:
        """See `GroupListener.join`."""
        deadline = time.monotonic() + deadline_s
        listening, self._listening = self._listening, None
        if listening is None:
            raise TransferAborted("this listener is closed or has joined already; open a new one")
        with listening, Reception(listening, self._rendezvous) as reception:
            workers = reception.wait(deadline, self._closed)
        return SocketGroup(rank=0, connections=workers)

    def close(self) -> None:
        """See `GroupListener.close`."""
        self._closed.set()
        listening, self._listening = self._listening, None
        if listening is not None:
            listening.close()


def join(rendezvous: Rendezvous, *, rank: int, deadline_s: float) -> SocketGroup:
    """See `groups.join_tcp`."""
    if rendezvous.transport != "tcp" or len(rendezvous.secret) != SECRET_BYTES:
        raise ConfigError(
            f"not a tcp rendezvous: transport {rendezvous.transport}, "
            f"a secret of {len(rendezvous.secret)} bytes"
        )
    if not 0 < rank < rendezvous.world_size:
        raise ConfigError(f"worker ranks are 1 to {rendezvous.world_size - 1}, got {rank}")
    deadline = time.monotonic() + deadline_s
    with _translated(f"joining the trainer at {rendezvous.host}:{rendezvous.port} as rank {rank}"):
        while True:
            try:
                connection = _connect(rendezvous, rank=rank, deadline=deadline)
                return SocketGroup(rank=rank, connections={0: connection})
            except (Dropped, ConnectionResetError, BrokenPipeError) as error:
                if time.monotonic() + RETRY_S > deadline:
                    raise TransferTimeout(
                        "the trainer dropped every connection; it may have a newer rendezvous"
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
def _translated(doing: str) -> Iterator[None]:
    """Turn the operating system's errors into transfer errors; `doing` says what failed."""
    try:
        yield
    except TransferError as error:
        raise type(error)(f"{doing}: {error}") from error
    except TimeoutError as error:
        raise TransferTimeout(f"{doing}: the transfer group was not complete in time") from error
    except OSError as error:
        raise TransferError(
            f"{doing}: the trainer is gone or cannot be reached ({error})"
        ) from error
