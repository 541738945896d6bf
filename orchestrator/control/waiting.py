"""Waits for nodes. Says whom a wait is for, in which state they are, and how to start them: at
once, then every `SAY_EVERY_S`, in the orchestrator's log and to the clients of the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from orchestrator.control.peers import ABSENT, Peers
from orchestrator.errors import NodeLost
from orchestrator.protocol.messages import WAITING

log = logging.getLogger("splice.orchestrator")
SAY_EVERY_S = 30.0
LOOK_S = 1.0
"""Longest time between two looks at the nodes, in seconds."""
Report = Callable[[str, dict[str, object]], None]
_STATES = {
    "connected": "connected, but not ready yet; its log says what it does",
    "lost": "lost; whoever started it starts it again, or has given up: read its log",
}


def describe(missing: Mapping[str, str], *, endpoint: str) -> str:
    """Return one sentence for each missing node, and the command that starts it.

    Args:
        missing: node id -> its state.
        endpoint: where nodes reach the orchestrator.
    """
    said = [
        f"{node} is {_STATES.get(state, state)}"
        + (f": start it with `{_command(node)}`" if state == ABSENT else "")
        for node, state in missing.items()
    ]
    if ABSENT in missing.values():
        said.append(
            f"A host that does not see the run's folder needs SPLICE_ENDPOINT={endpoint} and "
            "SPLICE_RUN_TOKEN"
        )
    return ". ".join(said)


def _command(node: str) -> str:
    if node.startswith("trainer"):
        return "splice trainer run.toml"
    index = node.rpartition("-")[2]
    return f"splice inference run.toml --index {index if index.isdigit() else 'K'}"


class Waiting:
    """Speaks for one wait.

    Args:
        report: passes progress on to the job's clients; None: the wait belongs to no job.
    """

    def __init__(self, report: Report | None, *, endpoint: str, timeout_s: float) -> None:
        self._report, self._endpoint = report, endpoint
        self._began_s, self._timeout_s = time.monotonic(), timeout_s
        self._next_s = 0.0

    def say(self, missing: Mapping[str, str]) -> None:
        """Say whom the wait is for, if it is time to."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + SAY_EVERY_S
        left_s = max(0.0, self._began_s + self._timeout_s - now_s)
        text = f"{describe(missing, endpoint=self._endpoint)}. The wait ends in {left_s:.0f} s"
        log.warning("%s: %s", WAITING, text)
        if self._report is not None:
            self._report(WAITING, {"missing": dict(missing), "text": text})


class Waits:
    """Waits for the nodes of a table.

    Args:
        endpoint: returns the address at which nodes reach the orchestrator.
    """

    def __init__(self, peers: Peers, endpoint: Callable[[], str]) -> None:
        self._peers, self._endpoint = peers, endpoint

    async def wait(
        self,
        missing: Callable[[], Mapping[str, str]],
        *,
        timeout_s: float,
        needed: Sequence[str] = (),
        report: Report | None = None,
    ) -> None:
        """Wait until no node is missing.

        Args:
            missing: returns the nodes that the wait is for, with their states.
            needed: nodes without which the others cannot be used.
            report: passes progress on to a job's clients.

        Raises:
            NodeLost: the timeout passed, or the launcher has given up a node that is needed; names
                the missing nodes.
        """
        speaker = Waiting(report, endpoint=self._endpoint(), timeout_s=timeout_s)
        deadline_s = time.monotonic() + timeout_s
        while absent := missing():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                states = ", ".join(f"{node} ({state})" for node, state in absent.items())
                raise NodeLost(f"not ready within {timeout_s:.0f} s: {states}; read their logs")
            self._peers.refuse_given_up(needed)
            speaker.say(self._peers.missing(needed) | dict(absent))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, LOOK_S)), self._peers.changed:
                    await self._peers.changed.wait_for(lambda: not missing())

    async def wait_ready(
        self,
        peer_ids: Sequence[str],
        *,
        timeout_s: float,
        one_is_enough: bool = False,
        report: Report | None = None,
    ) -> None:
        """Wait until all these nodes, or one of them, are ready. Raises as `wait` does."""

        def missing() -> dict[str, str]:
            found = self._peers.missing(peer_ids)
            return {} if one_is_enough and len(found) < len(peer_ids) else found

        needed = () if one_is_enough else peer_ids
        await self.wait(missing, timeout_s=timeout_s, needed=needed, report=report)

    async def wait_heard(self, peer_ids: Sequence[str], *, since_s: float) -> None:
        """Wait until each peer was heard after `since_s` or is lost: its state is then current."""
        while any(
            p.state != "lost" and p.last_seen_s <= since_s
            for i in peer_ids
            if (p := self._peers.by_id.get(i)) is not None
        ):
            await asyncio.sleep(0.05)
