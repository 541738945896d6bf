"""Says whom a wait is for, in which state they are, and how to start them.

At once, then every `SAY_EVERY_S`, in the orchestrator's log and to the clients of the job.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from orchestrator.protocol.messages import WAITING

log = logging.getLogger("splice.orchestrator")
SAY_EVERY_S = 30.0
ABSENT = "not connected"
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
        report: passes progress on to the job's clients; None: the wait is no job's.
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
