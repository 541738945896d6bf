"""The orchestrator's ROUTER socket: address, keys, and messages as frames."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from orchestrator.errors import ConfigError
from orchestrator.protocol.curve import Principal, server_keys
from orchestrator.protocol.frames import MAX_FRAME_BYTES, Frames, to_wire

HANDSHAKE_MS = 5000
"""Timeout of the CURVE handshake, in milliseconds."""
LINGER_MS = 1000
"""How long sent messages may take to leave after the end, in milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A message as it came. `key`: the sender's public key; empty without key folders."""

    address: bytes
    key: bytes
    parts: list[bytes]


def check_bind_address(endpoint: str, *, has_keys: bool) -> None:
    """Refuse an address beyond loopback without key folders.

    Raises:
        ConfigError: `endpoint` is not tcp://HOST:PORT, or reaches beyond loopback without keys.
    """
    wrong = ConfigError(
        "the orchestrator's endpoint must be tcp://HOST:PORT (PORT 0 lets the kernel choose), "
        f"got {endpoint!r}"
    )
    try:
        parsed = urlparse(endpoint)
        _ = parsed.port  # raises if it is not a port
    except ValueError:
        raise wrong from None
    if parsed.scheme != "tcp" or not parsed.hostname:
        raise wrong
    try:
        loopback = ipaddress.ip_address(parsed.hostname).is_loopback
    except ValueError:
        loopback = parsed.hostname == "localhost"
    if not loopback and not has_keys:
        raise ConfigError(
            f"{endpoint} reaches beyond loopback; run `splice keys DIR` and pass "
            "orchestrator.curve_dir = DIR/orchestrator, or bind 127.0.0.1"
        )


class ControlSocket:
    """Owns the ZeroMQ context, the socket and its authenticator.

    Raises:
        ConfigError: the address is refused, or `curve_dir` holds no keys.
    """

    def __init__(self, endpoint: str, *, run_token: str, curve_dir: Path | None) -> None:
        check_bind_address(endpoint, has_keys=curve_dir is not None)
        self._bind_to = endpoint
        self._keys = server_keys(run_token, curve_dir)
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._authenticator: AsyncioAuthenticator | None = None

    def bind(self) -> str:
        """Bind; returns the endpoint with its port.

        Raises:
            ConfigError: the address is in use or cannot be bound.
        """
        socket = self._socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._keys.secure(socket)
        if self._keys.principals is not None:
            self._authenticator = AsyncioAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(
                domain="*", credentials_provider=self._keys
            )
        parsed = urlparse(self._bind_to)
        address = f"tcp://{parsed.hostname}:{parsed.port or '*'}"
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self.close(linger_ms=0)
            raise ConfigError(
                f"cannot bind the control socket to {address}: {error}; choose another port, or 0"
            ) from error
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def send(self, address: bytes, frames: Frames) -> None:
        """Send without waiting, because the queue of a suspended peer stays full.

        Raises:
            zmq.Again: the peer's queue is full.
            zmq.ZMQError: the connection is gone.
        """
        assert self._socket is not None, "bind() first"
        await self._socket.send_multipart([address, *to_wire(frames)], zmq.DONTWAIT)

    async def receive(self) -> Arrival:
        """Return the next message."""
        assert self._socket is not None, "bind() first"
        first, *rest = await self._socket.recv_multipart(copy=False)
        key = "" if self._keys.principals is None else str(first.get("User-Id"))
        return Arrival(address=first.bytes, key=key.encode(), parts=[part.bytes for part in rest])

    def principal(self, key: bytes) -> Principal | None:
        """Return whom a key stands for, or None without key folders."""
        if self._keys.principals is None:
            return None
        return self._keys.principals.get(key, ("nobody", ""))

    def close(self, *, linger_ms: int = LINGER_MS) -> None:
        """End the socket and its context."""
        if self._authenticator is not None:
            self._authenticator.stop()  # the context would wait for its socket
        if self._socket is not None:
            self._socket.close(linger=linger_ms)
        self._context.destroy(linger=linger_ms)
