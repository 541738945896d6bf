"""The orchestrator's end of the control socket: one ZeroMQ ROUTER, the peers behind it, and requests to nodes.

Nothing a peer sends can end this process: garbage, unknown kinds and oversized frames are counted, logged once per peer and dropped.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlparse

import zmq
import zmq.asyncio
import zmq.auth
from zmq.auth.asyncio import AsyncioAuthenticator

from orchestrator.errors import ConfigError, JobFailed, NodeLost, ProtocolError
from orchestrator.liveness import HEARTBEAT_S, LOST_AFTER_S, lost_peers, stalled
from orchestrator.protocol.frames import MAX_BUFFER_BYTES, Envelope, OtherProtocolVersion, decode, encode
from orchestrator.protocol.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    Completed,
    Failed,
    Heartbeat,
    Hello,
    NodeEnded,
    Progress,
    Ready,
    Rejected,
    Unready,
    Welcome,
)

log = logging.getLogger("splice.orchestrator")
OnProgress = Callable[[str, Progress], None]
OnClient = Callable[[str, Envelope], Awaitable[None]]
STALL_AFTER_S = 600.0
READ_AT_ONCE = 64
"""Messages that are read before everything else gets its turn, where that many wait."""


@dataclass(slots=True, kw_only=True)
class Peer:
    """A node or client as the orchestrator sees it."""

    hello: Hello
    last_seen_s: float
    state: str = "connected"
    detail: dict[str, object] = field(default_factory=dict)
    times_ready: int = 0
    said_ready: bool = False
    """Its last word on it."""

    @property
    def life(self) -> str:
        """Changes when the process, or the server below it, was started anew: what it held before is gone."""
        return f"{self.hello.incarnation}/{self.times_ready}"


@dataclass(slots=True, kw_only=True)
class _Open:
    """A request on its way."""

    peer_id: str
    incarnation: str
    phase: str
    message: AnyMessage
    buffers: Sequence[bytes | memoryview]
    done: asyncio.Future[tuple[Completed, tuple[bytes, ...]]]
    on_progress: OnProgress | None
    started_s: float
    deadline_s: float
    """As the node has it, from `started_s` on."""
    last_progress_s: float
    next_sequence: int = 0


def check_bind_address(endpoint: str, *, has_keys: bool) -> None:
    """Off loopback CURVE is mandatory.

    Raises:
        ConfigError: `endpoint` is not tcp://HOST:PORT, or reaches beyond loopback without keys.
    """
    parsed = urlparse(endpoint)
    if parsed.scheme != "tcp" or not parsed.hostname:
        raise ConfigError(f"the control endpoint must be tcp://HOST:PORT (PORT 0 lets the kernel choose), got {endpoint!r}")
    try:
        loopback = ipaddress.ip_address(parsed.hostname).is_loopback
    except ValueError:
        loopback = parsed.hostname == "localhost"
    if not loopback and not has_keys:
        raise ConfigError(
            f"{endpoint} reaches beyond loopback; run `splice keys DIR` and pass --curve-dir DIR, or bind 127.0.0.1"
        )


class ControlRouter:
    """Binds the ROUTER, keeps the peers, and matches answers to requests.

    Args:
        endpoint: tcp://HOST:PORT; port 0 lets the kernel choose (read `.endpoint` after `start`).
        run_token: peers must know it; a stale run's peers are rejected.
        on_client: called with (peer id, envelope) for what clients send.
        curve_dir: folder with `server.key_secret` and `clients/`, from `splice keys`.
    """

    def __init__(self, *, endpoint: str, run_token: str, on_client: OnClient, curve_dir: Path | None = None) -> None:
        check_bind_address(endpoint, has_keys=curve_dir is not None)
        self._bind_to, self._run_token, self._on_client, self._curve_dir = endpoint, run_token, on_client, curve_dir
        # Not zmq.asyncio's, whose own work is an eighth of what an empty job costs this process.
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._arrived: asyncio.Queue[list[bytes] | Exception] = asyncio.Queue()
        self._will_take = False
        self._incarnation = uuid.uuid4().hex
        self._authenticator: AsyncioAuthenticator | None = None
        self._open: dict[str, _Open] = {}
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self.peers: dict[str, Peer] = {}
        self.dropped: Counter[str] = Counter()
        self.endpoint = ""

    async def start(self) -> None:
        """Bind and begin to read.

        Raises:
            ConfigError: the address is in use or cannot be bound.
        """
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_BUFFER_BYTES)
        self._secure(socket)
        parsed = urlparse(self._bind_to)
        address = f"tcp://{parsed.hostname}:{parsed.port or '*'}"
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self._end_sockets(socket, linger_ms=0)
            raise ConfigError(f"cannot bind the control socket to {address}: {error}; choose another port, or 0") from error
        self._socket = socket
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        asyncio.get_running_loop().add_reader(socket.FD, self._take_arrived)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    async def fail(self) -> None:
        """Does not return while the router works; raises what ended its reading or its watching."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def close(self) -> None:
        """End the tasks and the socket; what was sent gets one second to leave."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.FD)
        self._end_sockets(self._socket, linger_ms=1000)

    def _end_sockets(self, socket: zmq.Socket[bytes] | None, *, linger_ms: int) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()  # has a socket that the context does not know and would wait for
        if socket is not None:
            socket.close(linger=linger_ms)
        self._context.destroy(linger=linger_ms)

    async def send(self, peer_id: str, message: AnyMessage, buffers: Sequence[bytes | memoryview] = ()) -> None:
        """Send to a peer.

        Raises:
            NodeLost: no such peer is connected.
        """
        await self.send_frames(peer_id, encode(message, buffers))

    async def send_frames(self, peer_id: str, frames: Sequence[bytes | memoryview]) -> None:
        """The same for a message that was encoded before."""
        try:
            self._send_raw(peer_id.encode(errors="surrogateescape"), frames)
        except zmq.Again:
            raise NodeLost(f"{peer_id} reads nothing: a thousand messages wait for it") from None
        except zmq.ZMQError as error:
            raise NodeLost(f"{peer_id} is not connected ({error})") from error

    def _send_raw(self, identity: bytes, frames: Sequence[bytes | memoryview]) -> None:
        assert self._socket is not None, "start() first"
        try:
            # Not to be waited for: the queue of a peer that reads nothing (suspended, say) stays full.
            self._socket.send_multipart([identity, *frames], zmq.DONTWAIT)
        finally:
            # Sending takes in what the descriptor had to say of arrivals, which is then silent about them.
            if _has_arrivals(self._socket):
                self._take_soon()

    async def request(
        self,
        peer_id: str,
        message: AnyMessage,
        buffers: Sequence[bytes | memoryview] = (),
        *,
        phase: str,
        on_progress: OnProgress | None = None,
    ) -> tuple[Completed, tuple[bytes, ...]]:
        """Send a request and wait for its terminal message.

        Raises:
            JobFailed: the node answered `Failed`, or overran the request's deadline.
            NodeLost: the node went away or was restarted meanwhile.
        """
        peer = self.peers.get(peer_id)
        if peer is None or peer.state == "lost":
            raise NodeLost(f"{peer_id} is not connected")
        request_id: str = message.request_id  # type: ignore[union-attr,assignment]
        started_s = time.monotonic()
        entry = _Open(
            peer_id=peer_id,
            incarnation=peer.hello.incarnation,
            phase=phase,
            message=message,
            buffers=buffers,
            done=asyncio.get_running_loop().create_future(),
            on_progress=on_progress,
            started_s=started_s,
            deadline_s=message.deadline_s,  # type: ignore[union-attr]
            last_progress_s=started_s,
        )
        self._open[request_id] = entry
        try:
            await self.send(peer_id, message, buffers)
            return await entry.done  # `_give_up_stalled` ends it if the node does not
        finally:
            del self._open[request_id]

    async def wait_ready(
        self,
        peer_ids: Sequence[str],
        *,
        timeout_s: float,
        one_is_enough: bool = False,
    ) -> None:
        """Wait until all these nodes, or one of them, are ready.

        Raises:
            NodeLost: not within `timeout_s`; names the missing ones.
        """

        def missing() -> list[str]:
            return [p for p in peer_ids if p not in self.peers or self.peers[p].state != "ready"]

        if not missing():
            return
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: len(missing()) < len(peer_ids) if one_is_enough else not missing())
        except TimeoutError:
            raise NodeLost(f"not ready within {timeout_s:.0f} s: {', '.join(missing())}; look at their logs") from None

    async def wait_heard(self, peer_ids: Sequence[str], *, since_s: float) -> None:
        """Wait until each has been heard of after `since_s` or is lost, so that its state is true of now; at most as long as losing it takes."""
        while any(p.state != "lost" and p.last_seen_s <= since_s for i in peer_ids if (p := self.peers.get(i)) is not None):
            await asyncio.sleep(0.05)

    def is_connected(self, peer_id: str) -> bool:
        """Whether the peer has said Hello and was heard of since."""
        return peer_id in self.peers and self.peers[peer_id].state != "lost"

    def forget(self, peer_id: str) -> None:
        """The peer's process was ended on purpose: it is not lost, it is gone."""
        peer = self.peers.pop(peer_id, None)
        if peer is not None:
            self._fail_open(peer_id, "its process was ended", incarnation=peer.hello.incarnation)

    def nodes(self, role: str, *, state: str = "ready") -> list[str]:
        """Ids of the nodes of this role in this state, sorted."""
        return sorted(i for i, p in self.peers.items() if p.hello.role == role and p.state == state)

    # ------------------------------------------------------------ inside

    def _secure(self, socket: zmq.Socket[bytes]) -> None:
        if self._curve_dir is None:
            return
        public, secret = zmq.auth.load_certificate(self._curve_dir / "server.key_secret")
        if secret is None:
            raise ConfigError(
                f"{self._curve_dir}/server.key_secret holds no secret key; run `splice keys {self._curve_dir}` again"
            )
        self._authenticator = AsyncioAuthenticator(zmq.asyncio.Context(self._context))
        self._authenticator.start()
        self._authenticator.configure_curve(domain="*", location=str(self._curve_dir / "clients"))
        socket.curve_publickey, socket.curve_secretkey, socket.curve_server = public, secret, True

    async def _read(self) -> None:
        while True:
            arrived = await self._arrived.get()
            if isinstance(arrived, Exception):
                raise arrived
            identity, *frames = arrived
            peer_id = identity.decode(errors="surrogateescape")  # a stranger's identity is any bytes
            try:
                await self._handle(peer_id, decode(frames))
            except OtherProtocolVersion as error:
                self._drop(peer_id, str(error))
                self._reject_raw(identity, str(error))
            except ProtocolError as error:
                self._drop(peer_id, str(error))
            except NodeLost as error:
                log.warning("%r went away while being answered: %s", peer_id, error)

    def _take_soon(self) -> None:
        if not self._will_take:
            self._will_take = True
            asyncio.get_running_loop().call_soon(self._take_arrived)

    def _take_arrived(self) -> None:
        self._will_take = False
        if self._socket is None or self._socket.closed:
            return
        try:
            for _ in range(READ_AT_ONCE):
                if not _has_arrivals(self._socket):
                    return
                self._arrived.put_nowait(self._socket.recv_multipart())
        except Exception as error:  # noqa: BLE001  - ends the reading, and with it the orchestrator
            self._arrived.put_nowait(error)
        else:
            self._take_soon()

    def _drop(self, peer_id: str, why: str) -> None:
        self.dropped[peer_id] += 1
        if self.dropped[peer_id] == 1:
            log.warning("dropped a message of %r (further ones are counted, not logged): %s", peer_id, why)

    def _reject_raw(self, identity: bytes, reason: str) -> None:
        try:
            self._send_raw(identity, encode(Rejected(reason=reason)))
        except zmq.ZMQError:
            log.warning("could not tell %r that it was rejected", identity[:40])

    async def _handle(self, peer_id: str, envelope: Envelope) -> None:
        message = envelope.message
        if isinstance(message, Hello):
            await self._on_hello(peer_id, message)
            return
        peer = self.peers.get(peer_id)
        if peer is None or peer.state == "lost":
            # A peer of before our restart, or one that was silent for too long: ask it who it is.
            await self.send(peer_id, Hello(role="client", node_id="orchestrator", incarnation="", run_token=""))
            return
        peer.last_seen_s = time.monotonic()
        if isinstance(message, Heartbeat):
            await self.send(peer_id, Heartbeat(node_id="orchestrator"))
        elif isinstance(message, Ready):
            if peer.state != "ready" or message.detail.get("restarted") != peer.detail.get("restarted"):
                peer.times_ready += 1
            peer.said_ready = True
            await self._set_state(peer_id, "ready", message.detail)
        elif isinstance(message, Unready):
            log.warning("%s takes no requests for now: %s", peer_id, message.reason)
            peer.said_ready = False
            await self._set_state(peer_id, "connected")
        elif isinstance(message, NodeEnded) and peer.hello.role == "launcher":
            if self.is_connected(message.node_id):
                await self._lose(message.node_id, f"its process ended with code {message.code}")
        elif isinstance(message, Progress):
            self._on_progress(message)
        elif isinstance(message, Completed | Failed):
            self._on_terminal(message, envelope.buffers)
        elif peer.hello.role == "client":
            await self._on_client(peer_id, envelope)
        else:
            self._drop(peer_id, f"a {peer.hello.role} node may not send {message.kind}")

    async def _on_hello(self, peer_id: str, hello: Hello) -> None:
        if hello.run_token != self._run_token:
            await self.send(peer_id, Rejected(reason="another run's token; start the node with this run's SPLICE_RUN_TOKEN"))
            return
        known = self.peers.get(peer_id)
        if known is not None and known.hello.incarnation != hello.incarnation:
            self._fail_open(peer_id, "its process was restarted", incarnation=known.hello.incarnation)
        if known is None or known.hello.incarnation != hello.incarnation:
            self.peers[peer_id] = Peer(hello=hello, last_seen_s=time.monotonic())
            log.info("%s %s joined (protocol %d, %s)", hello.role, peer_id, PROTOCOL_VERSION, hello.packages)
        else:
            known.last_seen_s = time.monotonic()
            if known.state == "lost":
                await self._set_state(peer_id, "ready" if known.said_ready else "connected")
        await self.send(peer_id, Welcome(heartbeat_s=HEARTBEAT_S, incarnation=self._incarnation))
        # A reconnect may have lost a request or its answer. The node runs an id once and repeats the outcome of one that has ended.
        for entry in [e for e in self._open.values() if e.peer_id == peer_id and not e.done.done()]:
            await self.send(peer_id, entry.message, entry.buffers)

    async def _set_state(self, peer_id: str, state: str, detail: dict[str, object] | None = None) -> None:
        peer = self.peers[peer_id]
        peer.state = state
        if detail is not None:
            peer.detail = detail
        async with self._changed:
            self._changed.notify_all()

    def _on_progress(self, message: Progress) -> None:
        entry = self._open.get(message.request_id)
        if entry is None or message.sequence != entry.next_sequence:
            return
        entry.next_sequence += 1
        entry.last_progress_s = time.monotonic()
        if entry.on_progress is not None:
            entry.on_progress(entry.peer_id, message)

    def _on_terminal(self, message: Completed | Failed, buffers: tuple[bytes, ...]) -> None:
        entry = self._open.get(message.request_id)
        if entry is None or entry.done.done():
            return
        if isinstance(message, Completed):
            entry.done.set_result((message, buffers))
        else:
            entry.done.set_exception(
                JobFailed(
                    code=message.code, node=message.node, phase=message.phase, message=message.message, remedy=message.remedy,
                    steps_taken=message.steps_taken,
                )
            )  # fmt: skip

    def _fail_open(self, peer_id: str, why: str, *, incarnation: str) -> None:
        for entry in self._open.values():
            if entry.peer_id == peer_id and entry.incarnation == incarnation and not entry.done.done():
                entry.done.set_exception(NodeLost(f"{peer_id} was lost while {entry.phase}: {why}"))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            seen = {i: p.last_seen_s for i, p in self.peers.items() if p.state != "lost"}
            for peer_id in lost_peers(last_seen_s=seen, now_s=time.monotonic(), lost_after_s=LOST_AFTER_S):
                peer = self.peers[peer_id]
                if peer.hello.role == "client":
                    del self.peers[peer_id]
                    continue
                await self._lose(peer_id, f"silent for more than {LOST_AFTER_S:.0f} s")
            self._give_up_stalled(time.monotonic())

    def _give_up_stalled(self, now_s: float) -> None:
        """The node has the same deadline and ends the request itself; this is for a node that cannot."""
        for entry in self._open.values():
            why = stalled(
                started_s=entry.started_s,
                last_progress_s=entry.last_progress_s,
                now_s=now_s,
                deadline_s=entry.deadline_s + 15.0,
                stall_after_s=max(STALL_AFTER_S, entry.deadline_s),
            )
            if why is not None and not entry.done.done():
                entry.done.set_exception(
                    JobFailed(
                        code="transfer_timeout", node=entry.peer_id, phase=entry.phase, message=why,
                        remedy="look at the node's log; it is treated as stuck and should be restarted", is_answer=False,
                    )
                )  # fmt: skip

    async def _lose(self, peer_id: str, why: str) -> None:
        incarnation = self.peers[peer_id].hello.incarnation  # another process may say Hello meanwhile
        log.warning("%s is lost: %s", peer_id, why)
        await self._set_state(peer_id, "lost")
        self._fail_open(peer_id, why, incarnation=incarnation)


def _has_arrivals(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def new_id(prefix: str) -> str:
    """A request or job id."""
    return f"{prefix}-{uuid.uuid4().hex[:12]}"
