"""The run's replicas, as the orchestrator names them, and the choice of one for a request."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from orchestrator.protocol.messages import NodeStatus

AVOID_S, AVOID_AT_MOST_S = 0.25, 10.0
"""A replica that fails is avoided for twice the first time, then ever longer up to the second."""
MOST_FAILURES = 16


@dataclass(slots=True, kw_only=True, eq=False)
class Replica:
    """One inference node.

    Attributes:
        in_flight: number of its requests.
        turn: number of the request that it got last.
        stopped: it is not ready. Without a vLLM its socket still accepts connections.
        failures: outages in a row; the requests that one outage ends count once.
    """

    node_id: str
    url: str
    state: str = ""
    in_flight: int = 0
    turn: int = 0
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    failures: int = 0
    avoid_until_s: float = 0.0

    def say(self, state: str) -> None:
        """Take the orchestrator's word on its state."""
        if self.state != "ready":
            self.failures, self.avoid_until_s = 0, 0.0
        self.state = state
        (self.stopped.clear if state == "ready" else self.stopped.set)()

    def failed(self) -> None:
        """Ask others for a while, longer each time."""
        now_s = time.monotonic()
        if now_s >= self.avoid_until_s:
            self.failures = min(self.failures + 1, MOST_FAILURES)
            self.avoid_until_s = now_s + min(AVOID_S * 2.0**self.failures, AVOID_AT_MOST_S)


class Replicas:
    """The replicas that the orchestrator has named, by node id."""

    def __init__(self) -> None:
        self.by_id: dict[str, Replica] = {}
        self._turns = 0

    def update(self, nodes: Iterable[NodeStatus]) -> list[Replica]:
        """Take the orchestrator's word; returns those that are gone.

        A node that it does not name stays as it was: a restarted orchestrator names none at first,
        while the replicas serve on.
        """
        gone: list[Replica] = []
        for node in nodes:
            if node.role != "inference":
                continue
            url, known = str(node.detail.get("base_url", "")), self.by_id.get(node.node_id)
            if known is not None and (node.state == "lost" or url not in ("", known.url)):
                del self.by_id[node.node_id]
                known.say("lost")
                gone.append(known)
                known = None
            if known is None and url and node.state != "lost":
                known = self.by_id[node.node_id] = Replica(node_id=node.node_id, url=url)
            if known is not None:
                known.say(node.state)
        return gone

    def ready(self) -> list[Replica]:
        """Return the ready replicas, the idlest first; among equals, in turn."""
        found = [replica for replica in self.by_id.values() if replica.state == "ready"]
        return sorted(found, key=lambda replica: (replica.in_flight, replica.turn))

    @contextlib.contextmanager
    def counted(self, replica: Replica) -> Iterator[None]:
        """Count a request."""
        self._turns += 1
        replica.turn = self._turns
        replica.in_flight += 1
        try:
            yield
        finally:
            replica.in_flight -= 1
