"""The orchestrator's end of the control socket: one ZeroMQ ROUTER, the peers behind it, and requests to nodes.

ZeroMQ lets in only who holds the run's keys (`orchestrator.protocol.curve`). A peer is a connection that has said Hello: no two
living connections have the same address, so no peer can speak on another one's. Until its Hello nothing but a Hello is decoded, and after it only what its role may send. What is
malformed or not allowed is counted, logged at most every ten seconds for each peer, and dropped; nothing that a peer sends ends this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
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
from pydantic import ValidationError
from zmq.auth.asyncio import AsyncioAuthenticator

from orchestrator.errors import ConfigError, JobFailed, JournalError, NodeLost, ProtocolError
from orchestrator.liveness import HEARTBEAT_S, LOST_AFTER_S, lost_peers, stalled
from orchestrator.protocol.curve import server_keys
from orchestrator.protocol.frames import (
    MAX_FRAME_BYTES,
    Envelope,
    Frames,
    KindNotAllowed,
    OtherProtocolVersion,
    briefly,
    decode,
    encode,
    from_wire,
    to_wire,
)
from orchestrator.protocol.messages import (
    PROTOCOL_VERSION,
    READY_DETAILS,
    AnyMessage,
    Completed,
    ErrorCode,
    Failed,
    Heartbeat,
    Hello,
    NodeEnded,
    Progress,
    Ready,
    Rejected,
    Role,
    Unready,
    Welcome,
)

log = logging.getLogger("splice.orchestrator")
OnProgress = Callable[[str, Progress], None]
OnClient = Callable[[str, Envelope], Awaitable[None]]
STALL_AFTER_S = 600.0
READ_AT_ONCE = 64
"""Messages that are read before everything else gets its turn, where that many wait."""
HANDSHAKE_MS = 5000
"""How long a connection may take to prove that it holds a key."""
MAX_PEERS = 1024
LOG_EVERY_S = 10.0
"""Between two log lines about one peer's dropped messages."""
STRANGERS = "strangers"
"""In the counts: connections that have not said Hello."""
WHO_ARE_YOU = Hello(role="client", node_id="orchestrator", incarnation="", run_token="")
"""Asks a connection for its Hello."""
_FIRST = frozenset({"Hello"})
_ANY_PEER = _FIRST | {"Heartbeat"}
_NODE = _ANY_PEER | {"Ready", "Unready", "Progress", "Completed", "Failed"}
MAY_SEND: dict[Role, frozenset[str]] = {
    "client": _ANY_PEER | {"SubmitJob", "CancelJob", "GetStatus", "Subscribe", "StopRun"},
    "trainer": _NODE,
    "inference": _NODE,
    "launcher": _NODE | {"NodeEnded"},
}
"""Role -> the kinds of message that are decoded."""


@dataclass(slots=True, kw_only=True)
class Peer:
    """A node or client as the orchestrator sees it."""

    hello: Hello
    address: bytes
    """ZeroMQ's name of the connection, which no other living connection can have."""
    key: bytes
    """The public key that the connection proved; empty without key folders."""
    last_seen_s: float
    state: str = "connected"
    detail: dict[str, object] = field(default_factory=dict)
    times_ready: int = 0
    said_ready: bool = False
    """Whether its latest status message was `Ready`."""

    @property
    def life(self) -> str:
        """Changes when the process, or the server below it, was started anew: what it held before is gone."""
        return f"{self.hello.incarnation}/{self.times_ready}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrival:
    """A message as it came. `key`: the sender's public key, where there are key folders."""

    address: bytes
    key: bytes
    parts: list[bytes]


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
        name: the alias that inference nodes must serve; None: any.
        on_client: called with (peer id, envelope) for what clients send.
        curve_dir: the orchestrator's folder from `splice keys`; None: keys are derived from the token.

    Raises:
        ConfigError: the address reaches beyond loopback without `curve_dir`, or the folder holds no keys.
    """

    def __init__(
        self, *, endpoint: str, run_token: str, on_client: OnClient, name: str | None = None, curve_dir: Path | None = None
    ) -> None:
        check_bind_address(endpoint, has_keys=curve_dir is not None)
        self._bind_to, self._run_token, self._on_client, self._name = endpoint, run_token, on_client, name
        self._keys = server_keys(run_token, curve_dir)
        # Not zmq.asyncio's, whose own work is an eighth of what an empty job costs this process.
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._arrived: asyncio.Queue[_Arrival | Exception] = asyncio.Queue()
        self._will_take = False
        self._incarnation = uuid.uuid4().hex
        self._authenticator: AsyncioAuthenticator | None = None
        self._open: dict[str, _Open] = {}
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self.peers: dict[str, Peer] = {}
        self._peer_ids: dict[bytes, str] = {}
        """Address -> peer id, of the connections that count."""
        self.dropped: Counter[str] = Counter()
        self._next_log_s: dict[str, float] = {}
        self.endpoint = ""

    async def start(self) -> None:
        """Bind and begin to read.

        Raises:
            ConfigError: the address is in use or cannot be bound.
        """
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._keys.secure(socket)
        if self._keys.principals is not None:
            self._authenticator = AsyncioAuthenticator(zmq.asyncio.Context(self._context))
            self._authenticator.start()
            self._authenticator.configure_curve_callback(domain="*", credentials_provider=self._keys)
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

    async def send(self, peer_id: str, message: AnyMessage, buffers: Frames = ()) -> None:
        """Send to a peer.

        Raises:
            NodeLost: no such peer is connected.
        """
        await self.send_frames(peer_id, encode(message, buffers))

    async def send_frames(self, peer_id: str, frames: Frames) -> None:
        """The same for a message that was encoded before."""
        peer = self.peers.get(peer_id)
        if peer is None:
            raise NodeLost(f"{peer_id} is not connected")
        try:
            self._send_raw(peer.address, frames)
        except zmq.Again:
            raise NodeLost(f"{peer_id} reads nothing: a thousand messages wait for it") from None
        except zmq.ZMQError as error:
            raise NodeLost(f"{peer_id} is not connected ({error})") from error

    def _send_raw(self, address: bytes, frames: Frames) -> None:
        assert self._socket is not None, "start() first"
        try:
            # Not to be waited for: the queue of a peer that reads nothing (suspended, say) stays full.
            self._socket.send_multipart([address, *to_wire(frames)], zmq.DONTWAIT)
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
        request_id: str = message.request_id  # type: ignore[union-attr, assignment]
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
            # A node whose connection is gone opens another one and is asked again with its Hello, or is soon found to be lost.
            with contextlib.suppress(NodeLost):
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
            self._peer_ids.pop(peer.address, None)
            self._fail_open(peer_id, "its process was ended", incarnation=peer.hello.incarnation)

    def nodes(self, role: str, *, state: str = "ready") -> list[str]:
        """Ids of the nodes of this role in this state, sorted."""
        return sorted(i for i, p in self.peers.items() if p.hello.role == role and p.state == state)

    # ------------------------------------------------------------ what arrives

    async def _read(self) -> None:
        while True:
            arrival = await self._arrived.get()
            if isinstance(arrival, Exception):
                raise arrival
            peer_id = self._peer_ids.get(arrival.address)
            try:
                if peer_id is None:
                    await self._on_stranger(arrival)
                else:
                    kinds = MAY_SEND[self.peers[peer_id].hello.role]
                    if self.peers[peer_id].key != arrival.key:
                        raise ProtocolError("its key is not the one that this connection began with")
                    await self._on_message(arrival, peer_id, decode(from_wire(arrival.parts, kinds=kinds)))
            except OtherProtocolVersion as error:
                self._drop(peer_id, str(error))
                self._tell_stranger(arrival.address, Rejected(reason=str(error)))
            except ProtocolError as error:
                self._drop(peer_id, str(error))
            except NodeLost as error:
                log.info("%s went away while it was answered: %s", peer_id or "a stranger", error)
            except JournalError:
                raise
            except Exception as error:  # noqa: BLE001  - a defect of ours, which a peer's message must not turn into the end of the run
                self._drop(peer_id, f"a defect of the orchestrator: {type(error).__name__}: {error}", defect=error)

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
                self._arrived.put_nowait(self._receive(self._socket))
        except Exception as error:  # noqa: BLE001  - ends the reading, and with it the orchestrator
            self._arrived.put_nowait(error)
        else:
            self._take_soon()

    def _receive(self, socket: zmq.Socket[bytes]) -> _Arrival:
        first = socket.recv(copy=False)
        parts = socket.recv_multipart() if first.more else []
        key = "" if self._keys.principals is None else str(first.get("User-Id"))
        return _Arrival(address=first.bytes, key=key.encode(), parts=parts)

    def _drop(self, peer_id: str | None, why: str, *, defect: Exception | None = None) -> None:
        counted_as, now_s = peer_id or STRANGERS, time.monotonic()
        self.dropped[counted_as] += 1
        if now_s >= self._next_log_s.get(counted_as, 0.0):
            self._next_log_s[counted_as] = now_s + LOG_EVERY_S
            log.warning(
                "dropped %d messages of %s so far, the last one: %s", self.dropped[counted_as], counted_as, why, exc_info=defect
            )

    def _tell_stranger(self, address: bytes, message: AnyMessage) -> None:
        try:
            self._send_raw(address, encode(message))
        except zmq.ZMQError as error:
            self._drop(None, f"gone before it was answered {message.kind}: {error}")

    async def _on_stranger(self, arrival: _Arrival) -> None:
        """The first message of a connection: a Hello, or else the question who it is (we may have been restarted)."""
        try:
            frames = from_wire(arrival.parts, kinds=_FIRST)
        except KindNotAllowed:
            self._tell_stranger(arrival.address, WHO_ARE_YOU)
            return
        hello = decode(frames).message
        assert isinstance(hello, Hello)
        await self._on_hello(arrival, hello)

    async def _on_message(self, arrival: _Arrival, peer_id: str, envelope: Envelope) -> None:
        message, peer = envelope.message, self.peers[peer_id]
        if isinstance(message, Hello):
            await self._on_hello(arrival, message)
            return
        if peer.state == "lost":  # silent for too long: ask it who it is
            await self.send(peer_id, WHO_ARE_YOU)
            return
        peer.last_seen_s = time.monotonic()
        if isinstance(message, Heartbeat):
            await self.send(peer_id, Heartbeat(node_id="orchestrator"))
        elif isinstance(message, Ready):
            await self._on_ready(peer_id, peer, message)
        elif isinstance(message, Unready):
            log.warning("%s takes no requests for now: %s", peer_id, message.reason)
            peer.said_ready = False
            await self._set_state(peer_id, "connected")
        elif isinstance(message, NodeEnded):
            await self._on_node_ended(peer_id, message)
        elif isinstance(message, Progress):
            self._on_progress(peer_id, message)
        elif isinstance(message, Completed | Failed):
            self._on_terminal(peer_id, message, envelope.buffers)
        else:
            await self._on_client(peer_id, envelope)

    async def _on_hello(self, arrival: _Arrival, hello: Hello) -> None:
        peer_id = f"client:{hello.node_id}" if hello.role == "client" else hello.node_id
        refusal = self._refusal(arrival, peer_id, hello)
        if refusal is not None:
            self._drop(None, f"Hello of {hello.role} {hello.node_id} refused: {refusal.reason}")
            self._tell_stranger(arrival.address, refusal)
            return
        known = self.peers.get(peer_id)
        if known is not None and known.address != arrival.address:
            self._peer_ids.pop(known.address, None)
        self._peer_ids[arrival.address] = peer_id
        if known is None or known.hello.incarnation != hello.incarnation:
            if known is not None:
                self._fail_open(peer_id, "its process was restarted", incarnation=known.hello.incarnation)
            self.peers[peer_id] = Peer(hello=hello, address=arrival.address, key=arrival.key, last_seen_s=time.monotonic())
            log.info("%s %s joined (protocol %d, %s)", hello.role, peer_id, PROTOCOL_VERSION, hello.packages)
        else:
            known.address, known.key, known.last_seen_s = arrival.address, arrival.key, time.monotonic()
            if known.state == "lost":
                await self._set_state(peer_id, "ready" if known.said_ready else "connected")
        await self.send(peer_id, Welcome(heartbeat_s=HEARTBEAT_S, incarnation=self._incarnation))
        # A reconnect may have lost a request or its answer. The node runs an id once and repeats the outcome of one that has ended.
        for entry in [e for e in self._open.values() if e.peer_id == peer_id and not e.done.done()]:
            await self.send(peer_id, entry.message, entry.buffers)

    def _refusal(self, arrival: _Arrival, peer_id: str, hello: Hello) -> Rejected | None:
        """Why this connection cannot be that peer, or None."""
        if not hmac.compare_digest(hello.run_token.encode(), self._run_token.encode()):
            return Rejected(reason="another run's token; start the node with this run's SPLICE_RUN_TOKEN")
        spoken_for = self._peer_ids.get(arrival.address)
        if spoken_for not in (None, peer_id):
            return Rejected(reason=f"this connection is {spoken_for}'s; open another one")
        if self._keys.principals is not None:
            role, node_id = self._keys.principals.get(arrival.key, ("nobody", ""))
            if role != hello.role or (role != "client" and node_id != hello.node_id):
                return Rejected(
                    reason=f"this key is for {role} {node_id}, not for {hello.role} {hello.node_id}; see `splice keys`"
                )
        known = self.peers.get(peer_id)
        if known is None:
            if len(self.peers) >= MAX_PEERS and not self._forget_one_lost():
                return Rejected(reason=f"{MAX_PEERS} peers are connected, which is the most; close some clients", retry=True)
            return None
        if known.hello.role != hello.role:
            return Rejected(reason=f"{peer_id} is a {known.hello.role} of this run; choose another node id")
        if hmac.compare_digest(known.hello.incarnation.encode(), hello.incarnation.encode()) or not self._still_lives(known):
            return None
        return Rejected(
            reason=f"another process (pid {known.hello.pid}) is {peer_id} and is alive; end it first, or choose another node id. "
            f"If it has ended, this one is taken in after {LOST_AFTER_S:.0f} s",
            retry=True,
        )

    def _forget_one_lost(self) -> bool:
        """Make room in the table of peers; False: all of them live."""
        lost = next((peer_id for peer_id, peer in self.peers.items() if peer.state == "lost"), None)
        if lost is not None:
            self.forget(lost)
        return lost is not None

    def _still_lives(self, peer: Peer) -> bool:
        """Not lost by silence, and its connection stands: a process that has ended has none."""
        if peer.state == "lost":
            return False
        try:
            self._send_raw(peer.address, encode(Heartbeat(node_id="orchestrator")))
        except zmq.Again:
            return True
        except zmq.ZMQError:
            return False
        return True

    async def _on_ready(self, peer_id: str, peer: Peer, message: Ready) -> None:
        try:
            detail = READY_DETAILS[peer.hello.role].model_validate(message.detail)
        except ValidationError as error:
            raise ProtocolError(f"its Ready is not one of a {peer.hello.role}: {briefly(error)}") from None
        served = getattr(detail, "name", None)
        if self._name is not None and served not in (None, self._name):
            why = f"it serves {served!r}, this run publishes {self._name!r}; give both the same name"
            log.error("%s is refused: %s", peer_id, why)
            await self.send(peer_id, Rejected(reason=why))
            self.forget(peer_id)
            return
        if peer.state != "ready" or message.detail.get("restarted") != peer.detail.get("restarted"):
            peer.times_ready += 1
        peer.said_ready = True
        await self._set_state(peer_id, "ready", message.detail)

    async def _on_node_ended(self, launcher_id: str, message: NodeEnded) -> None:
        if not launcher_id.startswith(f"{message.node_id}-launcher-"):
            raise ProtocolError(f"it is not the launcher of {message.node_id}")
        if self.is_connected(message.node_id):
            await self._lose(message.node_id, f"its process ended with code {message.code}")

    async def _set_state(self, peer_id: str, state: str, detail: dict[str, object] | None = None) -> None:
        peer = self.peers[peer_id]
        peer.state = state
        if detail is not None:
            peer.detail = detail
        async with self._changed:
            self._changed.notify_all()

    def _asked(self, peer_id: str, request_id: str) -> _Open | None:
        """The open request that this peer was asked."""
        entry = self._open.get(request_id)
        if entry is None or entry.done.done():
            return None
        if entry.peer_id != peer_id:
            raise ProtocolError(f"it answers the request {request_id[:128]}, which {entry.peer_id} was asked")
        return entry

    def _on_progress(self, peer_id: str, message: Progress) -> None:
        entry = self._asked(peer_id, message.request_id)
        if entry is None or message.sequence < entry.next_sequence:
            return
        entry.next_sequence = message.sequence + 1  # a connection that broke may have taken some along
        entry.last_progress_s = time.monotonic()
        if entry.on_progress is None:
            return
        try:
            entry.on_progress(entry.peer_id, message)
        except (JournalError, asyncio.CancelledError):
            raise
        except Exception as error:
            log.warning("the progress %r of %s cannot be used", message.phase, peer_id, exc_info=error)
            entry.done.set_exception(
                JobFailed(
                    code=ErrorCode.PROTOCOL, node=peer_id, phase=entry.phase, message=f"its progress {message.phase!r:.80} cannot be used: {error}",
                    remedy="install the same splice on both sides, then restart the node",
                )
            )  # fmt: skip

    def _on_terminal(self, peer_id: str, message: Completed | Failed, buffers: tuple[bytes, ...]) -> None:
        entry = self._asked(peer_id, message.request_id)
        if entry is None:
            return
        if isinstance(message, Completed):
            entry.done.set_result((message, buffers))
        else:
            entry.done.set_exception(
                JobFailed(
                    code=message.code, node=peer_id, phase=message.phase, message=message.message, remedy=message.remedy,
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
                if self.peers[peer_id].hello.role == "client":
                    self.forget(peer_id)
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
