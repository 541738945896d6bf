"""A worker's end of the handshake by hand, so that a test can stop in the middle of it or say
something else.
"""

from __future__ import annotations

import secrets
import socket

from orchestrator.protocol.messages import Rendezvous
from weight_transfer.handshake import CHALLENGE_BYTES, PROOF_BYTES, RANK_BYTES, proof
from weight_transfer.socket_group import SIZE_BYTES


def knock(rendezvous: Rendezvous, *, timeout_s: float = 10.0) -> socket.socket:
    """Connect, and say nothing."""
    return socket.create_connection((rendezvous.host, rendezvous.port), timeout=timeout_s)


def answer_to(challenge: bytes, secret: bytes, *, rank: int) -> bytes:
    said = rank.to_bytes(RANK_BYTES) + secrets.token_bytes(CHALLENGE_BYTES)
    return said + proof(secret, b"worker", challenge + said)


def read(connection: socket.socket, count: int) -> bytes:
    """This many bytes, or what came before the end."""
    came = b""
    while len(came) < count and (fresh := connection.recv(count - len(came))):
        came += fresh
    return came


def prove(connection: socket.socket, secret: bytes, *, rank: int) -> None:
    """Up to the trainer's proof."""
    connection.sendall(answer_to(read(connection, CHALLENGE_BYTES), secret, rank=rank))
    assert len(read(connection, PROOF_BYTES)) == PROOF_BYTES


def want(connection: socket.socket, count: int) -> None:
    """Ask for a buffer, as a receiver's broadcast does."""
    connection.sendall(count.to_bytes(SIZE_BYTES))
