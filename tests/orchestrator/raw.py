"""A peer that says whatever a test wants: a bare socket with the run's keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgpack
import zmq

from orchestrator.protocol.curve import peer_keys
from orchestrator.protocol.frames import Envelope, decode, encode, from_wire, to_wire
from orchestrator.protocol.messages import PROTOCOL_VERSION, AnyMessage, Hello

VERSION = b"splice/%d" % PROTOCOL_VERSION


class RawPeer:
    """Sends frames or messages as they are given."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket

    def send(self, message: AnyMessage, buffers: Sequence[bytes] = ()) -> None:
        """A message in order."""
        self.socket.send_multipart(to_wire(encode(message, buffers)))

    def send_frames(self, *frames: bytes) -> None:
        """Whatever it is."""
        self.socket.send_multipart(list(frames))

    def send_body(self, kind: str, body: bytes | dict[str, object]) -> None:
        """A body that pydantic on this side would not let through."""
        packed = body if isinstance(body, bytes) else msgpack.packb({"kind": kind, **body})
        self.socket.send_multipart(to_wire([VERSION, kind.encode(), packed]))

    def recv(self) -> Envelope:
        """What comes next; zmq.Again after the socket's timeout."""
        return decode(from_wire(self.socket.recv_multipart()))


@contextmanager
def raw_peer(
    endpoint: str, *, token: str, hello: Hello | None = None, timeout_s: float = 20.0
) -> Iterator[RawPeer]:
    """Connected with the token's keys; says this Hello first."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger, socket.rcvtimeo, socket.sndtimeo, socket.reconnect_ivl = (
            0,
            int(1000 * timeout_s),
            20_000,
            20,
        )
        peer_keys(token, role="client", node_id="raw").secure(socket)
        socket.connect(endpoint)
        peer = RawPeer(socket)
        if hello is not None:
            peer.send(hello)
        yield peer
