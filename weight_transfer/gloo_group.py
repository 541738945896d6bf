"""The gloo transport: a TCPStore and a ProcessGroupGloo of its own, beside whatever default process group the process has.

Three faults of gloo (torch 2.11 to 2.13) shape this file; what works around them can go when they are mended:

- `ProcessGroupGloo.abort()` does nothing. So `abort` shuts the group's own TCP connections down, which it knows by the ports of the
  gloo devices, each made for this group alone. The peers hear of it at once.
- A send whose bytes are partly written is never told that its connection broke; it ends with gloo's timeout only, and destroying the
  group, at interpreter exit too, waits for it. So a waiting `broadcast` looks after the connections itself, and `close` leaves
  such an operation, and what it needs, to a daemon thread (`_bury`), which delays neither the caller nor the exit.
- A rank waits for five times its timeout for a peer that fails while it connects, even if that peer failed because a third one, connected
  already, was gone again. So gloo connects on a daemon thread (`_connect`), a rank that fails tells the others through the store, and none
  has joined before all are connected.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.errors import ConfigError, TransferAborted, TransferError, TransferTimeout
from orchestrator.protocol.aside import call_aside
from orchestrator.protocol.messages import Rendezvous

Address = tuple[str, int]
c10d: Any = dist  # torch's stubs know only a part of it
Store = Any  # c10d's TCPStore

FIRST_POLL_S, LAST_POLL_S = 0.0001, 0.005
STORE_TIMEOUT_S = 20.0
"""For one small question to the store, whose master answers from a thread of its own."""
ABORT_SETTLE_S = 0.2
"""How long `close` waits for gloo to drop an aborted operation (measured: 5 ms, or never)."""
GLOO_GRACE_S = 5.0
"""Gloo's own clock runs longer than ours by this, so that it is always we who say that the time is up."""
LOOK_AFTER_S = 0.1
"""How often a waiting broadcast looks whether its connections still stand."""


class GlooGroup:
    """A `TransferGroup` over gloo; broadcasts on the CPU, blocking. Made by `GlooListener.join` and `join`."""

    def __init__(
        self, *, store: Store, rank: int, world_size: int, host: str, deadline: float, closed: threading.Event | None = None
    ) -> None:
        """Connect to all others; every rank must be in its constructor, or about to be. Owns the store from here on.

        Args:
            host: this rank's own address, on which gloo listens.
            deadline: `time.monotonic()` after which it gives up.
            closed: once set, it gives up.
        """
        self._rank, self._world_size = rank, world_size
        self._reason: str | None = None
        self._abort_lock = threading.Lock()
        self._store: Store | None = store
        self._group: dist.ProcessGroup | None = None
        self._work: dist.Work | None = None
        self._listens_at, self._peers_listen_at = frozenset[Address](), frozenset[Address]()
        with _translated(f"connecting rank {rank} of {world_size}"), _telling_the_others(store, rank):
            device, self._listens_at = _make_device(host)
            self._peers_listen_at = _exchange_addresses(store, rank, world_size, self._listens_at, deadline, closed)
            self._group = _connect(store, rank, world_size, device, deadline, closed)
            self._connections = self._count_connections()
            store.set(f"connected/{rank}", b"1")
            _wait_for_keys(store, [f"connected/{r}" for r in range(world_size)], deadline, closed)

    @property
    def rank(self) -> int:
        """0 is the sender."""
        return self._rank

    @property
    def world_size(self) -> int:
        """1 + receivers."""
        return self._world_size

    def broadcast(self, buffer_B: torch.Tensor, *, deadline_s: float) -> None:
        """See `TransferGroup.broadcast`; returns when this end is done."""
        deadline = time.monotonic() + deadline_s
        if buffer_B.dtype != torch.uint8 or buffer_B.device.type != "cpu" or not buffer_B.is_contiguous():
            raise ValueError(f"gloo carries contiguous uint8 CPU buffers, got {buffer_B.dtype} on {buffer_B.device}")
        self._raise_if_aborted()
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = datetime.timedelta(seconds=deadline_s + GLOO_GRACE_S)
        with _translated(f"broadcasting {buffer_B.numel()} bytes"):
            if self._group is None:
                raise TransferAborted("the transfer group is closed")
            self._work = self._group.broadcast([buffer_B], options)
            self._wait(self._work, deadline, f"{buffer_B.numel()} bytes were not through after {deadline_s:.1f} s")
            self._work = None

    def synchronize(self, event: torch.cuda.Event | None = None, *, deadline_s: float) -> None:
        """Nothing to wait for: broadcasts block."""
        self._raise_if_aborted()

    def abort(self, reason: str) -> None:
        """See `TransferGroup.abort`; the peers see their connections end."""
        with self._abort_lock:
            if self._reason is None:
                self._reason = reason
            for connection in _connections(local=self._listens_at, remote=self._peers_listen_at):
                with contextlib.suppress(OSError):  # the peer was faster
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """See `TransferGroup.close`."""
        if self._group is None and self._store is None:
            return
        work, self._work = self._work, None
        self.abort("the transfer group is closed")
        until = time.monotonic() + ABORT_SETTLE_S
        while work is not None and not work.is_completed() and time.monotonic() < until:
            time.sleep(LAST_POLL_S)
        group, self._group = self._group, None
        store, self._store = self._store, None
        if work is not None and not work.is_completed():
            threading.Thread(target=_bury, args=(work, group, store), name="splice-gloo-leftover", daemon=True).start()

    def _wait(self, work: dist.Work, deadline: float, late: str) -> None:
        poll_s, look_at = FIRST_POLL_S, time.monotonic() + LOOK_AFTER_S
        while not work.is_completed():
            self._raise_if_aborted()
            now = time.monotonic()
            if now > deadline:
                raise TransferTimeout(f"{late}; is the peer stopped?")
            if now > look_at:
                if self._count_connections() < self._connections:
                    self._raise_if_aborted()
                    raise TransferError("the peer is gone: its connection was closed")
                look_at = now + LOOK_AFTER_S
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, LAST_POLL_S)
        try:
            work.wait()
        except RuntimeError:
            self._raise_if_aborted()  # our own abort looks like a lost peer to gloo
            raise

    def _count_connections(self) -> int:
        """By inode, because another thread that goes through the sockets just now has duplicates of its own of them open."""
        found = _connections(local=self._listens_at, remote=self._peers_listen_at)
        return len({os.fstat(connection.fileno()).st_ino for connection in found})

    def _raise_if_aborted(self) -> None:
        if self._reason is not None:
            raise TransferAborted(f"transfer aborted: {self._reason}")


class GlooListener:
    """The trainer's store, listening on `host` at a port that the kernel chose."""

    def __init__(self, *, host: str, world_size: int, bucket_bytes: int) -> None:
        """Bind and listen at once; the socket is handed to the store, never released in between."""
        self._host, self._closed = host, threading.Event()
        try:
            family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            listening = socket.create_server(address[:2], family=family, backlog=256)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on host {host!r}: {error}; set the trainer's `host` to its own address"
            ) from error
        port = listening.getsockname()[1]
        self._store: Store | None = c10d.TCPStore(
            host,
            port,
            world_size=world_size,
            is_master=True,
            timeout=datetime.timedelta(seconds=STORE_TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        self._rendezvous = Rendezvous(transport="gloo", host=host, port=port, world_size=world_size, bucket_bytes=bucket_bytes)

    @property
    def rendezvous(self) -> Rendezvous:
        """What the workers need to join."""
        return self._rendezvous

    def join(self, deadline_s: float) -> GlooGroup:
        """See `GroupListener.join`."""
        store, self._store = self._store, None
        if store is None:
            raise TransferAborted("this listener is closed or has joined already; open a new one")
        deadline = time.monotonic() + deadline_s
        world_size = self._rendezvous.world_size
        with _translated("waiting for the workers"):
            _wait_for_keys(store, [f"here/{r}" for r in range(1, world_size)], deadline, self._closed)
            store.set("go", b"1")
        return GlooGroup(store=store, rank=0, world_size=world_size, host=self._host, deadline=deadline, closed=self._closed)

    def close(self) -> None:
        """See `GroupListener.close`."""
        self._closed.set()
        self._store = None


def join(rendezvous: Rendezvous, *, rank: int, deadline_s: float) -> GlooGroup:
    """See `groups.join_gloo`."""
    if rendezvous.transport != "gloo":
        raise ConfigError(f"this rendezvous is for {rendezvous.transport}, not gloo")
    if not 0 < rank < rendezvous.world_size:
        raise ConfigError(f"worker ranks are 1 to {rendezvous.world_size - 1}, got {rank}")
    deadline = time.monotonic() + deadline_s
    with _translated(f"joining the trainer at {rendezvous.host}:{rendezvous.port} as rank {rank}"):
        store = c10d.TCPStore(
            rendezvous.host,
            rendezvous.port,
            world_size=rendezvous.world_size,
            is_master=False,
            timeout=datetime.timedelta(seconds=min(STORE_TIMEOUT_S, deadline_s)),
            wait_for_workers=False,
        )
        store.set(f"here/{rank}", b"1")
        _wait_for_keys(store, ["go"], deadline, None)
    own_address = _address_towards(rendezvous.host, rendezvous.port)
    return GlooGroup(store=store, rank=rank, world_size=rendezvous.world_size, host=own_address, deadline=deadline)


# ------------------------------------------------------------ rendezvous


def _wait_for_keys(store: Store, keys: list[str], deadline: float, closed: threading.Event | None) -> None:
    while not store.check(keys):
        _check_on_others(store, closed)
        if time.monotonic() > deadline:
            missing = [k for k in keys if not store.check([k])]
            raise TransferTimeout(f"the transfer group was not complete in time; still missing: {missing}")
        time.sleep(LAST_POLL_S)


def _check_on_others(store: Store, closed: threading.Event | None) -> None:
    if closed is not None and closed.is_set():
        raise TransferAborted("transfer aborted: the listener was closed while it waited for the workers")
    if store.check(["failed"]):
        raise TransferError(store.get("failed").decode())


@contextlib.contextmanager
def _telling_the_others(store: Store, rank: int) -> Iterator[None]:
    """Whatever ends this rank's joining ends theirs."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(RuntimeError):  # the store's master may be what is gone
            why = (str(error) or type(error).__name__).splitlines()[0][:300]
            store.compare_set("failed", "", f"rank {rank} could not join: {why}")  # the first cause stands
        raise


def _connect(
    store: Store, rank: int, world_size: int, device: object, deadline: float, closed: threading.Event | None
) -> dist.ProcessGroup:
    """Make the process group on a thread, over a connection of its own to the store (a client answers one question at a time).

    A thread that is left behind ends at gloo's own timeout, and with it what it has made.
    """
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [device]
    options._timeout = datetime.timedelta(seconds=max(0.0, deadline - time.monotonic()) + GLOO_GRACE_S)
    make = partial(c10d.ProcessGroupGloo, c10d.PrefixStore("gloo", store.clone()), rank, world_size, options)

    def check() -> None:
        _check_on_others(store, closed)
        if time.monotonic() > deadline:
            raise TransferTimeout("not connected in time; is a peer stopped?")

    return call_aside(make, check=check, poll_s=LAST_POLL_S, name="splice-gloo-connect")


def _exchange_addresses(
    store: Store, rank: int, world_size: int, own: frozenset[Address], deadline: float, closed: threading.Event | None
) -> frozenset[Address]:
    """Tell the others where this rank's gloo device listens, and learn where theirs do."""
    store.set(f"listens/{rank}", ";".join(f"{host} {port}" for host, port in own))
    others = [f"listens/{r}" for r in range(world_size) if r != rank]
    _wait_for_keys(store, others, deadline, closed)
    found: set[Address] = set()
    for key in others:
        for entry in store.get(key).decode().split(";"):
            host, _, port = entry.rpartition(" ")
            if host:
                found.add((host, int(port)))
    return frozenset(found)


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the route to `host`; connecting a UDP socket sends nothing."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


@contextlib.contextmanager
def _translated(doing: str) -> Iterator[None]:
    """Turn torch's and gloo's errors into ours."""
    try:
        yield
    except (TransferError, ConfigError):
        raise
    except (c10d.DistStoreError, c10d.DistNetworkError, c10d.DistBackendError, RuntimeError) as error:
        text = str(error).splitlines()[0][:300]
        if "timed out" in text.lower() or "timeout" in text.lower():
            raise TransferTimeout(f"{doing}: {text}") from error
        raise TransferError(f"{doing}: the peer is gone or cannot be reached ({text})") from error


# ------------------------------------------------------------ this group's own sockets


_device_lock = threading.Lock()


def _make_device(host: str) -> tuple[object, frozenset[Address]]:
    """A gloo device that listens on `host`, and the address it listens at (gloo does not tell: the new listening socket is it)."""
    with _device_lock:
        before = _listening_sockets()
        device = c10d.ProcessGroupGloo.create_device(hostname=host)
        return device, frozenset(_listening_sockets() - before)


def _open_tcp_sockets() -> Iterator[socket.socket]:
    """A duplicate of each open TCP socket of this process, so that one closed meanwhile cannot be mistaken for another."""
    if not os.path.isdir("/proc/self/fd"):
        return
    for name in os.listdir("/proc/self/fd"):
        duplicate = _duplicate_socket(int(name))
        if duplicate is None:
            continue
        with duplicate:
            if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type & socket.SOCK_STREAM:
                yield duplicate


def _duplicate_socket(descriptor: int) -> socket.socket | None:
    """A duplicate of the descriptor if it is a socket; None if it is not, or is gone."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        duplicate = os.dup(descriptor)
    except OSError:
        return None
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)  # another file took the number meanwhile
        return None


def _listening_sockets() -> set[Address]:
    return {s.getsockname()[:2] for s in _open_tcp_sockets() if s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}


def _connections(*, local: frozenset[Address], remote: frozenset[Address]) -> Iterator[socket.socket]:
    """A duplicate of every connection that was accepted at a `local` address or leads to a `remote` one."""
    for connection in _open_tcp_sockets():
        try:
            # The peer is asked for first: a listening socket has none (OSError), and gloo ends the process if its listener breaks.
            peer = connection.getpeername()[:2]
            is_ours = peer in remote or connection.getsockname()[:2] in local
        except OSError:
            continue
        if is_ours:
            yield connection


def _bury(work: dist.Work, group: dist.ProcessGroup, store: Store) -> None:
    """Keep what a stuck operation needs until gloo's own timeout has ended it."""
    with contextlib.suppress(RuntimeError):
        work.wait()
    del work, group, store
