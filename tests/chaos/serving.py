"""`splice serve` with traps at every journal commit and every state of a publication, clocks that
can be stepped, and waits that are shorter by SPLICE_CHAOS_PACE. Nothing
else of it is changed.
"""

from __future__ import annotations

import functools
import os
import sqlite3
from typing import Any

import orchestrator.control.liveness
import orchestrator.control.open_requests
import orchestrator.control.router
import orchestrator.resync
from orchestrator import between_jobs
from orchestrator.protocol import node_link
from orchestrator.storage.journal import Journal
from splice import cli
from tests.chaos.clocks import stepped_clocks
from tests.chaos.traps import Traps


class Trapped(sqlite3.Connection):
    """Reaches "commit before" and "commit after" at what makes something durable."""

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        commits = not self.in_transaction and sql.split()[0] in ("INSERT", "UPDATE", "DELETE")
        return self._around(commits, functools.partial(super().execute, sql, *args))

    def __exit__(self, *error: Any) -> bool:
        return self._around(self.in_transaction, functools.partial(super().__exit__, *error))

    @staticmethod
    def _around(commits: bool, step: functools.partial[Any]) -> Any:
        if commits:
            traps.reach("commit before")
        result = step()
        if commits:
            traps.reach("commit after")
        return result


def record_publication(self: Journal, *, state: str, **facts: Any) -> None:
    """At a state of a publication."""
    recorded(self, state=state, **facts)
    traps.reach(f"state {state}")


def quicken(pace: float) -> None:
    """What no setting shortens."""
    orchestrator.control.router.LOST_AFTER_S /= pace  # type: ignore[misc]
    orchestrator.control.open_requests.STALL_AFTER_S /= pace  # type: ignore[misc]
    orchestrator.resync.RESYNC_LONGEST_S = 20.0 / pace  # type: ignore[misc]
    node_link.REDIAL_AFTER_S /= pace
    between_jobs.LAUNCHERS_BACK_S /= pace


if __name__ == "__main__":
    traps = Traps({"clock": stepped_clocks()})
    sqlite3.connect = functools.partial(sqlite3.connect, factory=Trapped)  # type: ignore[assignment]
    recorded, Journal.record_publication = Journal.record_publication, record_publication  # type: ignore[method-assign]
    quicken(float(os.environ.get("SPLICE_CHAOS_PACE", "1")))
    cli.app()
