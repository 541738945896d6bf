"""`splice`, ended by SIGKILL at one of the journal's commits: DIE_AT is "3 before" or "3 after",
counted from 1 in this process.
"""

from __future__ import annotations

import functools
import os
import signal
import sqlite3
import time
from typing import Any

from splice.cli import app

number, when = os.environ["DIE_AT"].split()
left = int(number)


class Dying(sqlite3.Connection):
    """Counts what makes something durable: a statement that writes outside of a transaction, and
    the end of one.
    """

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        commits = not self.in_transaction and sql.split()[0] in ("INSERT", "UPDATE", "DELETE")
        return self._perhaps_die(commits, functools.partial(super().execute, sql, *args))

    def __exit__(self, *error: Any) -> bool:
        return self._perhaps_die(self.in_transaction, functools.partial(super().__exit__, *error))

    def _perhaps_die(self, commits: bool, step: functools.partial[Any]) -> Any:
        global left
        left -= commits
        dies_now = commits and left == 0
        if dies_now and when == "before":
            die()
        result = step()
        if dies_now:
            die()
        return result


def die() -> None:
    """What was sent before has left."""
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)


sqlite3.connect = functools.partial(sqlite3.connect, factory=Dying)  # type: ignore[assignment]
app()
