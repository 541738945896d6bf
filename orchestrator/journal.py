"""The run's memory: jobs, their outcomes, every step of every publication, and facts (what the trainer holds, how far a job has
come), in SQLite (WAL, synchronous=FULL).

What is written here is on disk when the call returns. One file per run; a file of another run is refused.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from orchestrator.errors import ConfigError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS run (token TEXT NOT NULL, name TEXT NOT NULL, started REAL NOT NULL);
CREATE TABLE IF NOT EXISTS jobs (
  job_id TEXT PRIMARY KEY, kind TEXT NOT NULL, request BLOB NOT NULL, submitted REAL NOT NULL,
  state TEXT NOT NULL, outcome BLOB, ended REAL);
CREATE TABLE IF NOT EXISTS publications (
  id INTEGER PRIMARY KEY, version INTEGER NOT NULL, state TEXT NOT NULL, checkpoint_dir TEXT, detail TEXT, at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS facts (key TEXT PRIMARY KEY, value BLOB NOT NULL);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """One job as journaled. `request` and `outcome` are wire frames."""

    job_id: str
    kind: str
    request: tuple[bytes, ...]
    state: str
    outcome: tuple[bytes, ...] | None


class Journal:
    """Opens (or creates) the journal of one run.

    Raises:
        ConfigError: the file belongs to another run.
    """

    def __init__(self, path: Path, *, run_token: str, name: str) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.executescript(_SCHEMA)
        row = self._db.execute("SELECT token FROM run").fetchone()
        if row is None:
            self._db.execute("INSERT INTO run VALUES (?, ?, ?)", (run_token, name, time.time()))
        elif row[0] != run_token:
            self._db.close()
            raise ConfigError(f"{path} is the journal of another run; choose a new run folder")

    def add_job(self, *, job_id: str, kind: str, frames: Sequence[bytes | memoryview]) -> None:
        """Journal a job before it is acknowledged."""
        request = msgpack.packb([bytes(f) for f in frames])
        self._db.execute(
            "INSERT INTO jobs (job_id, kind, request, submitted, state) VALUES (?, ?, ?, ?, 'queued')",
            (job_id, kind, request, time.time()),
        )

    def set_job_state(self, job_id: str, state: str) -> None:
        """`running`, or another non-terminal state."""
        self._db.execute("UPDATE jobs SET state = ? WHERE job_id = ?", (state, job_id))

    def end_job(self, job_id: str, *, state: str, frames: Sequence[bytes | memoryview]) -> None:
        """Journal the one terminal message, before it is sent. The request's buffers are no longer needed and go."""
        outcome = msgpack.packb([bytes(f) for f in frames])
        self._db.execute(
            "UPDATE jobs SET state = ?, outcome = ?, request = x'90', ended = ? WHERE job_id = ?",
            (state, outcome, time.time(), job_id),
        )

    def job(self, job_id: str) -> JobRow | None:
        """The job, or None."""
        row = self._db.execute("SELECT job_id, kind, request, state, outcome FROM jobs WHERE job_id = ?", (job_id,)).fetchone()
        if row is None:
            return None
        outcome = None if row[4] is None else tuple(msgpack.unpackb(row[4]))
        return JobRow(job_id=row[0], kind=row[1], request=tuple(msgpack.unpackb(row[2])), state=row[3], outcome=outcome)

    def unfinished_jobs(self) -> list[str]:
        """Ids of jobs without an outcome, oldest first."""
        return [r[0] for r in self._db.execute("SELECT job_id FROM jobs WHERE outcome IS NULL ORDER BY submitted")]

    def record_publication(self, *, version: int, state: str, checkpoint_dir: str | None = None, detail: str = "") -> None:
        """Journal one step of a publication."""
        self._db.execute(
            "INSERT INTO publications (version, state, checkpoint_dir, detail, at) VALUES (?, ?, ?, ?, ?)",
            (version, state, checkpoint_dir, detail, time.time()),
        )

    def committed_version(self) -> int | None:
        """The newest version that was committed, or None."""
        row = self._db.execute("SELECT MAX(version) FROM publications WHERE state = 'committed'").fetchone()
        return None if row is None else row[0]

    def checkpoint_dir(self, version: int) -> str | None:
        """Where what `version` is made of lies on disk, or None."""
        row = self._db.execute(
            "SELECT checkpoint_dir FROM publications WHERE version = ? AND checkpoint_dir IS NOT NULL ORDER BY id DESC",
            (version,),
        ).fetchone()
        return None if row is None else row[0]

    def publication_steps(self, version: int) -> list[str]:
        """Every state that the publication of `version` went through, in order."""
        return [r[0] for r in self._db.execute("SELECT state FROM publications WHERE version = ? ORDER BY id", (version,))]

    def all_publication_steps(self) -> list[tuple[int, str]]:
        """(version, state) of every step of every publication, in order."""
        return [(r[0], r[1]) for r in self._db.execute("SELECT version, state FROM publications ORDER BY id")]

    def set_facts(self, facts: Mapping[str, dict[str, Any] | None]) -> None:
        """All of them or none; None: the fact goes."""
        self._db.execute("BEGIN")
        for key, value in facts.items():
            if value is None:
                self._db.execute("DELETE FROM facts WHERE key = ?", (key,))
            else:
                self._db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (key, msgpack.packb(value)))
        self._db.execute("COMMIT")

    def fact(self, key: str) -> dict[str, Any]:
        """What was set last; empty without it."""
        row = self._db.execute("SELECT value FROM facts WHERE key = ?", (key,)).fetchone()
        found: dict[str, Any] = {} if row is None else msgpack.unpackb(row[0])
        return found

    def close(self) -> None:
        """Close the file."""
        self._db.close()
