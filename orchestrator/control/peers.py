"""The table of peers: who is connected, over which connection, in which state."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.errors import NodeLost
from orchestrator.protocol.messages import Hello, MemoryUse

log = logging.getLogger("splice.orchestrator")
LOG_EVERY_S = 10.0
"""Seconds between two log lines about one peer's dropped messages."""
LAUNCHER = "-launcher-"
"""Comes between a node's id and its host's rank, in the id of its launcher."""
ABSENT = "not connected"
GIVEN_UP_S = 60.0
"""Time for a supervisor, such as a kubelet, to start a launcher again that has given up, in
seconds."""
STRANGERS = "strangers"
"""Counts the dropped messages of connections without a `Hello`."""
FORGOTTEN = "forgotten"
"""Counts the dropped messages of peers that are gone."""


@dataclass(slots=True, kw_only=True)
class Peer:
    """A node or client as the orchestrator sees it."""

    hello: Hello
    address: bytes
    """ZeroMQ's name of the connection. No two living connections share one."""
    key: bytes
    """The public key that the connection proved; empty without key folders."""
    last_seen_s: float
    state: str = "connected"
    detail: dict[str, object] = field(default_factory=dict)
    memory: tuple[MemoryUse, ...] = ()
    """As its latest heartbeat said."""
    times_ready: int = 0
    has_trained: bool = False
    """Whether the process has completed a request that trains."""
    said_ready: bool = False
    """Whether its latest status message was `Ready`."""

    @property
    def life(self) -> str:
        """Changes when the process, or the server below it, starts again with empty memory."""
        return f"{self.hello.incarnation}/{self.times_ready}"


class Peers:
    """Owns the peers, their addresses, and the counts of dropped messages."""

    def __init__(self) -> None:
        self.by_id: dict[str, Peer] = {}
        self.dropped: Counter[str] = Counter()
        self._ids: dict[bytes, str] = {}
        self.changed = asyncio.Condition()
        """Notified after a change of a peer's state."""
        self._next_log_s: dict[str, float] = {}
        self._given_up: dict[str, tuple[str, float]] = {}
        """Node -> why its launcher has given it up, and when, on the monotonic clock."""

    def id_at(self, address: bytes) -> str | None:
        """Return the peer that speaks over a connection, or None for a stranger's."""
        return self._ids.get(address)

    def put(self, peer_id: str, peer: Peer) -> None:
        """Add a peer, or replace the earlier process under its id."""
        self.bind(peer_id, peer.address)
        self.by_id[peer_id] = peer
        self._given_up.pop(peer_id.partition(LAUNCHER)[0], None)

    def give_up(self, node_id: str, why: str) -> None:
        """Limit every wait for a node to `GIVEN_UP_S`, until the node or a launcher of it joins."""
        self._given_up[node_id] = why, time.monotonic()

    def bind(self, peer_id: str, address: bytes) -> None:
        """Have the peer speak over this connection only."""
        known = self.by_id.get(peer_id)
        if known is not None and known.address != address:
            self._ids.pop(known.address, None)
        self._ids[address] = peer_id

    def remove(self, peer_id: str) -> Peer | None:
        """Remove a peer that is gone."""
        peer = self.by_id.pop(peer_id, None)
        if peer is not None:
            self._ids.pop(peer.address, None)
            self._next_log_s.pop(peer_id, None)
            self.dropped[FORGOTTEN] += self.dropped.pop(peer_id, 0)
        return peer

    def one_lost(self) -> str | None:
        """Return a lost peer, or None if all live."""
        return next((i for i, peer in self.by_id.items() if peer.state == "lost"), None)

    def nodes(self, role: str) -> list[str]:
        """Return the ids of the ready nodes of this role, sorted."""
        ready = (i for i, p in self.by_id.items() if p.hello.role == role and p.state == "ready")
        return sorted(ready)

    def is_connected(self, peer_id: str) -> bool:
        """Whether the peer has sent `Hello` and is not lost."""
        return peer_id in self.by_id and self.by_id[peer_id].state != "lost"

    async def set_state(
        self, peer_id: str, state: str, detail: dict[str, object] | None = None
    ) -> None:
        """Change a peer's state and wake those who wait for it."""
        peer = self.by_id[peer_id]
        peer.state = state
        if detail is not None:
            peer.detail = detail
        async with self.changed:
            self.changed.notify_all()

    def missing(self, peer_ids: Sequence[str]) -> dict[str, str]:
        """Return the nodes that are not ready, with their states."""
        states = {p: self.by_id[p].state if p in self.by_id else ABSENT for p in peer_ids}
        return {p: state for p, state in states.items() if state != "ready"}

    def refuse_given_up(self, peer_ids: Sequence[str]) -> None:
        """Raise if one of these nodes is missing, and neither its launcher starts it again, nor has
        anybody started a launcher for `GIVEN_UP_S`.

        Raises:
            NodeLost: names it and says why.
        """
        for node in self._given_up.keys() & self.missing(peer_ids):
            why, since_s = self._given_up[node]
            if time.monotonic() >= since_s + GIVEN_UP_S:
                raise NodeLost(f"{node} does not come back: {why}")

    def drop(self, peer_id: str | None, why: str, *, defect: Exception | None = None) -> None:
        """Count a message that was dropped, and log it at most every LOG_EVERY_S."""
        counted_as, now_s = peer_id or STRANGERS, time.monotonic()
        self.dropped[counted_as] += 1
        if now_s >= self._next_log_s.get(counted_as, 0.0):
            self._next_log_s[counted_as] = now_s + LOG_EVERY_S
            log.warning(
                "dropped %d messages of %s so far; the last one: %s",
                self.dropped[counted_as],
                counted_as,
                why,
                exc_info=defect,
            )
