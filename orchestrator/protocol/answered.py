"""The requests of one node: those that run, and the outcomes of those that have ended."""

from __future__ import annotations

from collections import OrderedDict

from orchestrator.protocol.messages import AnyMessage, Cancelled, Completed, Failed

OUTCOMES_KEPT, OUTCOME_BYTES_KEPT = 64, 64 * 2**20
"""Limits of the outcomes kept for repeated requests. The newest is kept whatever its size."""


class Answered:
    """Has each request run once: one that is repeated gets the first outcome."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self._outcomes: OrderedDict[str, tuple[AnyMessage, tuple[bytes, ...]]] = OrderedDict()
        self._progress_counts: dict[str, int] = {}

    def outcome(self, request_id: str) -> tuple[AnyMessage, tuple[bytes, ...]] | None:
        """Return the terminal message and buffers of a request that has ended, or None."""
        return self._outcomes.get(request_id)

    def next_sequence(self, request_id: str) -> int:
        """Return the number of the request's next `Progress`."""
        sequence = self._progress_counts.get(request_id, 0)
        self._progress_counts[request_id] = sequence + 1
        return sequence

    def end(self, message: Completed | Failed | Cancelled, buffers: tuple[bytes, ...]) -> None:
        """Keep an outcome. The oldest go, beyond `OUTCOMES_KEPT` and `OUTCOME_BYTES_KEPT`."""
        self._outcomes[message.request_id] = (message, buffers)
        self.running.discard(message.request_id)
        self._progress_counts.pop(message.request_id, None)
        kept_bytes = sum(
            len(buffer) for _, buffers in self._outcomes.values() for buffer in buffers
        )
        while len(self._outcomes) > OUTCOMES_KEPT or (
            len(self._outcomes) > 1 and kept_bytes > OUTCOME_BYTES_KEPT
        ):
            _, (_, dropped) = self._outcomes.popitem(last=False)
            kept_bytes -= sum(map(len, dropped))
