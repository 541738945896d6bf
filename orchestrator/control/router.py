"""The orchestrator's end of the control socket: one ZeroMQ ROUTER.

ZeroMQ admits only holders of the run's keys (`orchestrator.protocol.curve`). A peer is a connection
that has sent `Hello`. No two living connections share an address, so no peer can speak for another.

Before its `Hello`, a connection may send nothing else. Afterwards it may send what its role allows.
The router counts and drops malformed and forbidden messages. No message from a peer ends this
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import zmq
from pydantic import ValidationError

from orchestrator.control.control_socket import Arrival, ControlSocket
from orchestrator.control.liveness import HEARTBEAT_S, LOST_AFTER_S, lost_peers
from orchestrator.control.open_requests import Answer, OnProgress, OpenRequests
from orchestrator.control.peers import LAUNCHER, Peer, Peers
from orchestrator.control.waiting import Waits
from orchestrator.errors import JournalError, NodeLost, ProcessEnded, ProtocolError
from orchestrator.processes.interfaces import reachable_url
from orchestrator.processes.restarts import EXIT_AFRESH, EXIT_LINK_LOST
from orchestrator.protocol.frames import (
    Envelope,
    Frames,
    KindNotAllowed,
    OtherProtocolVersion,
    briefly,
    decode,
    encode,
    from_wire,
)
from orchestrator.protocol.messages import (
    CANARY,
    PROTOCOL_VERSION,
    READY_DETAILS,
    AnyMessage,
    Completed,
    EndedDuring,
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
OnClient = Callable[[str, Envelope], Awaitable[None]]
READ_AT_ONCE = 64
"""Messages to read before other tasks get a turn."""
MAX_PEERS = 1024
WHO_ARE_YOU = Hello(role="client", node_id="orchestrator", incarnation="", run_token="")
"""Asks a connection for its Hello."""
_TRAINS = frozenset({"TrainMerged", "TrainLora", "ForwardBackward", "OptimStep"})
"""Requests whose end is progress of the run."""
_COUNTED = _TRAINS | {"Forward"}
"""Requests with a batch, which may be why the process ends. `TrainerRequests` counts that, but not
for a canary, whose batch is always the same."""
_FIRST = frozenset({"Hello"})
_ANY_PEER = _FIRST | {"Heartbeat"}
_NODE = _ANY_PEER | {"Ready", "Unready", "Progress", "Completed", "Failed"}
MAY_SEND: dict[Role, frozenset[str]] = {
    "client": _ANY_PEER
    | {"SubmitJob", "CancelJob", "NextBatch", "GetStatus", "Subscribe", "StopRun"},
    "trainer": _NODE,
    "inference": _NODE,
    "launcher": _NODE | {"NodeEnded"},
}
"""Role -> the kinds of message that are decoded."""


class NotConnected(NodeLost):
    """The peer has no connection at present."""


class ControlRouter:
    """Talks to the peers: greets them, sends requests, and passes on what clients send.

    Args:
        endpoint: tcp://HOST:PORT. With port 0 the kernel chooses; `.endpoint` has it after `start`.
        run_token: the run's secret. Peers of another run are rejected.
        name: the alias that inference nodes must serve; None: any.
        on_client: called with (peer id, envelope) for what clients send.
        curve_dir: the orchestrator's folder from `splice keys`; None: keys come from the token.

    Raises:
        ConfigError: the address is refused, or `curve_dir` holds no keys.
    """

    def __init__(
        self,
        *,
        endpoint: str,
        run_token: str,
        on_client: OnClient,
        name: str | None = None,
        curve_dir: Path | None = None,
    ) -> None:
        self._socket = ControlSocket(endpoint, run_token=run_token, curve_dir=curve_dir)
        self._run_token, self._on_client, self._name = run_token, on_client, name
        self._incarnation = uuid.uuid4().hex
        self._open = OpenRequests()
        self._table = Peers()
        self.peers, self.dropped = self._table.by_id, self._table.dropped
        self.nodes, self.missing = self._table.nodes, self._table.missing
        self.is_connected = self._table.is_connected
        waits = Waits(self._table, lambda: reachable_url(self.endpoint))
        self.wait, self.wait_ready, self.wait_heard = waits.wait, waits.wait_ready, waits.wait_heard
        self._tasks: list[asyncio.Task[None]] = []
        self.endpoint = ""

    async def start(self) -> None:
        """Bind and begin to read.

        Raises:
            ConfigError: the address is in use or cannot be bound.
        """
        self.endpoint = self._socket.bind()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    async def fail(self) -> None:
        """Wait until reading or watching fails, and raise its error."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def close(self) -> None:
        """End the tasks and the socket; sent messages have a second to leave."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()

    async def send(self, peer_id: str, message: AnyMessage, buffers: Frames = ()) -> None:
        """Send to a peer.

        Raises:
            NotConnected: no such peer is connected.
            NodeLost: the peer reads nothing.
        """
        await self.send_frames(peer_id, encode(message, buffers))

    async def send_frames(self, peer_id: str, frames: Frames) -> None:
        """Send an encoded message, as `send` does."""
        peer = self.peers.get(peer_id)
        if peer is None:
            raise NotConnected(f"{peer_id} is not connected")
        try:
            await self._socket.send(peer.address, frames)
        except zmq.Again:
            raise NodeLost(f"{peer_id} reads nothing: a thousand messages wait for it") from None
        except zmq.ZMQError as error:
            raise NotConnected(f"{peer_id} is not connected ({error})") from error

    async def request(
        self,
        peer_id: str,
        message: AnyMessage,
        buffers: Sequence[bytes | memoryview] = (),
        *,
        phase: str,
        on_progress: OnProgress | None = None,
    ) -> Answer:
        """Send a request and wait for its terminal message.

        Raises:
            JobFailed: the node answered `Failed`, or overran the request's deadline.
            NodeLost: the node went away, was restarted, or reads nothing.
        """
        peer = self.peers.get(peer_id)
        if peer is None or peer.state == "lost":
            raise NodeLost(f"{peer_id} is not connected")
        entry = self._open.add(
            message,
            buffers,
            peer_id=peer_id,
            incarnation=peer.hello.incarnation,
            phase=phase,
            on_progress=on_progress,
        )
        try:
            # A node without a connection opens another one, and its Hello repeats the request.
            with contextlib.suppress(NotConnected):
                await self.send(peer_id, message, buffers)
            return await entry.done  # ended by the node, or by `_watch`
        finally:
            self._open.remove(entry)

    def forget(self, peer_id: str) -> None:
        """Remove a peer whose process was ended on purpose, and end the requests to it."""
        peer = self._table.remove(peer_id)
        if peer is not None:
            why = "its process was ended"
            self._open.lose(peer_id, why, incarnation=peer.hello.incarnation)

    # ------------------------------------------------------------ what arrives

    async def _read(self) -> None:
        for count in itertools.count(1):
            await self._on_arrival(await self._socket.receive())
            if count % READ_AT_ONCE == 0:
                await asyncio.sleep(0)  # receiving a waiting message yields to no other task

    async def _on_arrival(self, arrival: Arrival) -> None:
        """Decode a message if its sender may send it, and act on it."""
        peer_id = self._table.id_at(arrival.address)
        try:
            if peer_id is None:
                await self._on_stranger(arrival)
            else:
                kinds = MAY_SEND[self.peers[peer_id].hello.role]
                if self.peers[peer_id].key != arrival.key:
                    raise ProtocolError("its key is not the one that this connection began with")
                await self._on_message(
                    arrival, peer_id, decode(from_wire(arrival.parts, kinds=kinds))
                )
        except OtherProtocolVersion as error:
            self._table.drop(peer_id, str(error))
            await self._tell_stranger(arrival.address, Rejected(reason=str(error)))
        except ProtocolError as error:
            self._table.drop(peer_id, str(error))
        except NodeLost as error:
            log.info("%s went away while it was answered: %s", peer_id or "a stranger", error)
        except JournalError:
            raise
        except Exception as error:  # noqa: BLE001  - a peer's message must not end the run
            self._table.drop(
                peer_id,
                f"a defect of the orchestrator: {type(error).__name__}: {error}",
                defect=error,
            )

    async def _tell_stranger(self, address: bytes, message: AnyMessage) -> None:
        try:
            await self._socket.send(address, encode(message))
        except zmq.ZMQError as error:
            self._table.drop(None, f"gone before it was answered {message.kind}: {error}")

    async def _on_stranger(self, arrival: Arrival) -> None:
        """Take a `Hello`. Ask for one after anything else: the orchestrator may be new."""
        try:
            frames = from_wire(arrival.parts, kinds=_FIRST)
        except KindNotAllowed:
            await self._tell_stranger(arrival.address, WHO_ARE_YOU)
            return
        hello = decode(frames).message
        assert isinstance(hello, Hello)
        await self._on_hello(arrival, hello)

    async def _on_message(self, arrival: Arrival, peer_id: str, envelope: Envelope) -> None:
        message, peer = envelope.message, self.peers[peer_id]
        if isinstance(message, Hello):
            await self._on_hello(arrival, message)
            return
        if peer.state == "lost":
            await self.send(peer_id, WHO_ARE_YOU)
            return
        peer.last_seen_s = time.monotonic()
        if isinstance(message, Heartbeat):
            peer.memory = message.memory
            await self.send(peer_id, Heartbeat(node_id="orchestrator"))
        elif isinstance(message, Ready):
            await self._on_ready(peer_id, peer, message)
        elif isinstance(message, Unready):
            log.warning("%s takes no requests for now: %s", peer_id, message.reason)
            peer.said_ready = False
            await self._table.set_state(peer_id, "connected")
        elif isinstance(message, NodeEnded):
            await self._on_node_ended(peer_id, message)
        elif isinstance(message, Progress):
            self._open.on_progress(peer_id, message)
        elif isinstance(message, Completed | Failed):
            done = self._open.on_terminal(peer_id, message, envelope.buffers)
            peer.has_trained = peer.has_trained or done in _TRAINS
        else:
            await self._on_client(peer_id, envelope)

    async def _on_hello(self, arrival: Arrival, hello: Hello) -> None:
        peer_id = f"client:{hello.node_id}" if hello.role == "client" else hello.node_id
        refusal = await self._refusal(arrival, peer_id, hello)
        if refusal is not None:
            self._table.drop(
                None, f"Hello of {hello.role} {hello.node_id} refused: {refusal.reason}"
            )
            await self._tell_stranger(arrival.address, refusal)
            return
        known = self.peers.get(peer_id)
        if known is None or known.hello.incarnation != hello.incarnation:
            if known is not None:
                why, old = "its process was restarted", known.hello.incarnation
                self._open.lose(peer_id, why, incarnation=old, error=ProcessEnded)
            self._table.put(
                peer_id,
                Peer(
                    hello=hello,
                    address=arrival.address,
                    key=arrival.key,
                    last_seen_s=time.monotonic(),
                ),
            )
            log.info(
                "%s %s joined (protocol %d, %s)",
                hello.role,
                peer_id,
                PROTOCOL_VERSION,
                hello.packages,
            )
        else:
            self._table.bind(peer_id, arrival.address)
            known.address, known.key = arrival.address, arrival.key
            known.last_seen_s = time.monotonic()
            if known.state == "lost":
                state = "ready" if known.said_ready else "connected"
                await self._table.set_state(peer_id, state)
        await self.send(peer_id, Welcome(heartbeat_s=HEARTBEAT_S, incarnation=self._incarnation))
        # A reconnect may have lost a request or its answer. A node runs each id once, and repeats
        # the outcome of one that has ended.
        for entry in self._open.of_peer(peer_id):
            await self.send(peer_id, entry.message, entry.buffers)

    async def _refusal(self, arrival: Arrival, peer_id: str, hello: Hello) -> Rejected | None:
        """Return why this connection cannot be that peer, or None."""
        if not hmac.compare_digest(hello.run_token.encode(), self._run_token.encode()):
            return Rejected(
                reason="another run's token; start the node with this run's SPLICE_RUN_TOKEN"
            )
        spoken_for = self._table.id_at(arrival.address)
        if spoken_for not in (None, peer_id):
            return Rejected(reason=f"this connection is {spoken_for}'s; open another one")
        principal = self._socket.principal(arrival.key)
        if principal is not None:
            role, node_id = principal
            if role != hello.role or (role != "client" and node_id != hello.node_id):
                return Rejected(
                    reason=f"this key is for {role} {node_id}, not for {hello.role} "
                    f"{hello.node_id}; see `splice keys`"
                )
        if self._name is not None and hello.serves not in (None, self._name):
            return Rejected(reason=self._other_name(hello.serves))
        known = self.peers.get(peer_id)
        if known is None:
            if len(self.peers) >= MAX_PEERS and not self._forget_one_lost():
                return Rejected(
                    reason=f"{MAX_PEERS} peers are connected, which is the most; "
                    "close some clients",
                    retry=True,
                )
            return None
        if known.hello.role != hello.role:
            return Rejected(
                reason=f"{peer_id} is a {known.hello.role} of this run; choose another node id"
            )
        is_same = hmac.compare_digest(known.hello.incarnation.encode(), hello.incarnation.encode())
        if is_same or not await self._still_lives(known):
            return None
        return Rejected(
            reason=f"another process (pid {known.hello.pid}) is {peer_id} and is alive; "
            "end it first, "
            "or choose another node id. "
            f"If it has ended, this one is taken in after {LOST_AFTER_S:.0f} s",
            retry=True,
        )

    def _other_name(self, served: str | None) -> str:
        return f"it serves {served!r}, this run publishes {self._name!r}; give both the same name"

    def _forget_one_lost(self) -> bool:
        """Make room in the table of peers. False: all peers live."""
        lost = self._table.one_lost()
        if lost is not None:
            self.forget(lost)
        return lost is not None

    async def _still_lives(self, peer: Peer) -> bool:
        """Whether the peer is not lost and its connection is open: an ended process has none."""
        if peer.state == "lost":
            return False
        try:
            await self._socket.send(peer.address, encode(Heartbeat(node_id="orchestrator")))
        except zmq.Again:
            return True
        except zmq.ZMQError:
            return False
        return True

    async def _on_ready(self, peer_id: str, peer: Peer, message: Ready) -> None:
        try:
            detail = READY_DETAILS[peer.hello.role].model_validate(message.detail)
        except ValidationError as error:
            raise ProtocolError(
                f"its Ready is not one of a {peer.hello.role}: {briefly(error)}"
            ) from None
        served = getattr(detail, "name", None)
        if self._name is not None and served not in (None, self._name):
            why = self._other_name(served)
            log.error("%s is refused: %s", peer_id, why)
            await self.send(peer_id, Rejected(reason=why))
            self.forget(peer_id)
            return
        if peer.state != "ready" or message.detail.get("restarted") != peer.detail.get("restarted"):
            peer.times_ready += 1
        peer.said_ready = True
        await self._table.set_state(peer_id, "ready", message.detail)

    async def _on_node_ended(self, launcher_id: str, message: NodeEnded) -> None:
        prefix = f"{message.node_id}{LAUNCHER}"
        if not launcher_id.startswith(prefix):
            raise ProtocolError(f"it is not the launcher of {message.node_id}")
        if message.given_up:
            log.error("%s has given %s up: %s", launcher_id, message.node_id, message.given_up)
            self._table.give_up(message.node_id, message.given_up)
            return
        peer, cause, kind, has_trained = self.peers.get(message.node_id), "", "", False
        if peer is not None and peer.state != "lost" and peer.hello.start_id == message.start_id:
            has_trained = peer.has_trained
            cause, kind = self._open.cause_at(message.node_id, incarnation=peer.hello.incarnation)
            is_crash = message.code not in (0, EXIT_LINK_LOST, EXIT_AFRESH)
            error = ProcessEnded if is_crash else NodeLost
            await self._lose(
                message.node_id, f"its process ended with code {message.code}", error=error
            )
        answer = EndedDuring(
            node_id=message.node_id,
            cause=cause,
            is_counted=kind in _COUNTED and not cause.startswith(CANARY),
            has_trained=has_trained,
        )
        for one in {launcher_id, *self.nodes("launcher")}:
            if one.startswith(prefix):
                await self.send(one, answer)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            seen = {i: p.last_seen_s for i, p in self.peers.items() if p.state != "lost"}
            for peer_id in lost_peers(
                last_seen_s=seen, now_s=time.monotonic(), lost_after_s=LOST_AFTER_S
            ):
                peer = self.peers.get(peer_id)
                if peer is not None and peer.hello.role == "client":
                    self.forget(peer_id)
                elif peer is not None:
                    await self._lose(peer_id, f"silent for more than {LOST_AFTER_S:.0f} s")
            self._open.give_up_stalled(time.monotonic())

    async def _lose(self, peer_id: str, why: str, *, error: type[NodeLost] = NodeLost) -> None:
        incarnation = self.peers[
            peer_id
        ].hello.incarnation  # another process may join during the wait
        log.warning("%s is lost: %s", peer_id, why)
        await self._table.set_state(peer_id, "lost")
        self._open.lose(peer_id, why, incarnation=incarnation, error=error)
