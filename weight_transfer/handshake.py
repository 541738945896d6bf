"""The handshake of a TCP transfer: each end proves that it knows the rendezvous's secret.

The secret reaches the worker over the control channel and serves one join. It is never sent here.

    trainer -> worker    challenge                                      32 random bytes
    worker -> trainer    rank, challenge, HMAC(secret, "worker", all)   4 + 32 + 32 bytes
    trainer -> worker    HMAC(secret, "trainer", all)                   32 bytes
    trainer -> worker    length, text                                   2 bytes and more

Each of the trainer's ranks that send has a listener and a secret. The last message follows once all
workers have joined the listener. Its text says why the join failed, or is empty.

The trainer drops a connection that has not proved itself within `PROOF_S`. All connections run the
handshake at the same time. More than `MOST_UNPROVEN` strangers can push out a worker's connection;
the worker then tries again. A stranger can delay a join, but neither take part in it nor end it.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import selectors
import socket
import threading
import time

from orchestrator.errors import TransferAborted, TransferError, TransferTimeout
from orchestrator.protocol.messages import Rendezvous

log = logging.getLogger("splice.transfer")
SECRET_BYTES = CHALLENGE_BYTES = PROOF_BYTES = 32
RANK_BYTES, LENGTH_BYTES = 4, 2
ANSWER_BYTES = RANK_BYTES + CHALLENGE_BYTES + PROOF_BYTES
MOST_TEXT_BYTES = 300
PROOF_S = 5.0
"""Time that a new connection has to prove itself."""
MOST_UNPROVEN = 128
"""Connections that may be unproven at a time. One more drops the oldest."""
POLL_S = 0.05
"""Seconds within which a join notices that its listener was closed."""
RETRY_S = 0.1


class Dropped(Exception):
    """The connection ended before the trainer had proved itself."""


def proof(secret: bytes, who: bytes, transcript: bytes) -> bytes:
    """HMAC of both challenges and the rank, which only an owner of the secret can compute.

    `who` differs between the ends, so that a proof cannot be reflected.
    """
    return hmac.digest(secret, who + transcript, "sha256")


# ------------------------------------------------------------ the worker


def introduce(connection: socket.socket, secret: bytes, *, rank: int, deadline: float) -> None:
    """Prove this end, check the other, wait until all ranks have joined.

    Raises:
        Dropped, ConnectionError: the connection ended before the trainer proved itself. The caller
            may try another connection.
        TransferError: the listener is not the trainer, or the trainer ended the join.
        TimeoutError: past the deadline.
    """
    challenge = _receive(connection, CHALLENGE_BYTES, deadline)
    answer = rank.to_bytes(RANK_BYTES) + secrets.token_bytes(CHALLENGE_BYTES)
    connection.sendall(answer + proof(secret, b"worker", challenge + answer))
    if not hmac.compare_digest(
        _receive(connection, PROOF_BYTES, deadline), proof(secret, b"trainer", challenge + answer)
    ):
        raise TransferError(
            "the listener does not know the trainer's secret; nothing was received from it"
        )
    try:
        length = int.from_bytes(_receive(connection, LENGTH_BYTES, deadline))
        why = _receive(connection, length, deadline).decode(errors="replace")
    except (Dropped, ConnectionError) as error:
        raise TransferError(
            "the trainer is gone: its connection ended while other ranks joined"
        ) from error
    if why:
        raise TransferError(f"the trainer ended the join: {why}")


def _receive(connection: socket.socket, count: int, deadline: float) -> bytes:
    came = b""
    while len(came) < count:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        fresh = connection.recv(count - len(came))
        if not fresh:
            raise Dropped
        came += fresh
    return came


# ------------------------------------------------------------ a trainer's rank


class Reception:
    """Admits one worker for each rank.

    A context manager: on exit it closes every unproven connection, and after an error every
    connection. The caller closes `listening`.
    """

    def __init__(self, listening: socket.socket, rendezvous: Rendezvous) -> None:
        self._listening, self._rendezvous = listening, rendezvous
        self._unproven: dict[socket.socket, _Unproven] = {}  # oldest first
        self._workers: dict[socket.socket, int] = {}
        self._num_dropped = 0
        self._waiting = selectors.PollSelector()
        listening.setblocking(False)
        self._waiting.register(listening, selectors.EVENT_READ)

    def __enter__(self) -> Reception:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._waiting.close()
        if self._num_dropped:
            where = f"{self._rendezvous.host}:{self._rendezvous.port}"
            log.warning(
                "dropped %d connections to %s that did not prove to be workers",
                self._num_dropped,
                where,
            )
        if error is not None:
            self._tell_workers(str(error) or type(error).__name__)
        for connection in [*self._unproven, *(self._workers if error is not None else ())]:
            connection.close()

    def wait(self, deadline: float, closed: threading.Event) -> dict[int, socket.socket]:
        """The workers' connections by rank, once all have joined.

        Raises:
            TransferTimeout, TransferAborted, TransferError: as `GroupListener.join` does.
        """
        missing = set(range(self._rendezvous.senders, self._rendezvous.world_size))
        while missing:
            if closed.is_set():
                raise TransferAborted(
                    "transfer aborted: the listener was closed while it waited for the workers"
                )
            if time.monotonic() > deadline:
                raise TransferTimeout(
                    "the transfer group was not complete in time; "
                    f"still missing: ranks {sorted(missing)}"
                )
            for key, _ in self._waiting.select(POLL_S):
                self._hear(key.fileobj)  # type: ignore[arg-type]
            for late in [c for c, one in self._unproven.items() if one.until < time.monotonic()]:
                self._drop(late)
            missing -= set(self._workers.values())
        self._tell_workers("")
        return {rank: connection for connection, rank in self._workers.items()}

    def _hear(self, connection: socket.socket) -> None:
        if connection is self._listening:
            self._accept()
        elif connection in self._workers:  # a proven worker sends nothing more
            rank = self._workers[connection]
            num_workers = self._rendezvous.world_size - self._rendezvous.senders
            num_missing = num_workers - len(self._workers)
            raise TransferError(
                f"rank {rank} disconnected while {num_missing} others were missing; "
                "it is gone, or its deadline passed"
            )
        elif connection in self._unproven:
            one = self._unproven[connection]
            if not one.read():
                self._drop(connection)
            elif len(one.came) == ANSWER_BYTES:
                self._judge(one)

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:  # the peer has disconnected
            return
        if len(self._unproven) >= MOST_UNPROVEN:
            self._drop(next(iter(self._unproven)))
        self._unproven[connection] = _Unproven(connection)
        self._waiting.register(connection, selectors.EVENT_READ)

    def _judge(self, one: _Unproven) -> None:
        transcript = one.challenge + one.came[:-PROOF_BYTES]
        expected = proof(self._rendezvous.secret, b"worker", transcript)
        rank = int.from_bytes(one.came[:RANK_BYTES])
        is_proven = hmac.compare_digest(one.came[-PROOF_BYTES:], expected)
        if (
            not is_proven
            or not self._rendezvous.senders <= rank < self._rendezvous.world_size
            or rank in self._workers.values()
        ):
            self._drop(one.connection)
            return
        del self._unproven[one.connection]
        self._workers[one.connection] = rank
        _tell(one.connection, proof(self._rendezvous.secret, b"trainer", transcript))

    def _tell_workers(self, why_not: str) -> None:
        text = why_not.encode()[:MOST_TEXT_BYTES]
        for connection in self._workers:
            _tell(connection, len(text).to_bytes(LENGTH_BYTES) + text)

    def _drop(self, connection: socket.socket) -> None:
        self._num_dropped += 1
        self._waiting.unregister(connection)
        del self._unproven[connection]
        connection.close()


class _Unproven:
    """A new connection and the bytes received over it."""

    def __init__(self, connection: socket.socket) -> None:
        self.until = time.monotonic() + PROOF_S
        self.connection, self.came = connection, b""
        self.challenge = secrets.token_bytes(CHALLENGE_BYTES)
        connection.setblocking(False)
        _tell(connection, self.challenge)

    def read(self) -> bool:
        """Receive available bytes. False: the other end is gone."""
        try:
            fresh = self.connection.recv(ANSWER_BYTES - len(self.came))
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.came += fresh
        return bool(fresh)


def _tell(connection: socket.socket, data: bytes) -> None:
    """Send a few bytes, for which the socket's buffer has room.

    The next read reports a lost connection.
    """
    with contextlib.suppress(OSError):
        connection.send(data)
