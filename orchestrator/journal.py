"""The run's memory: jobs, their outcomes, every step of every publication, and facts (what the trainer holds, how far a job has
come), in SQLite (WAL, synchronous=FULL).

What is written here is on disk when the call returns; what is written inside `together()` when its block ends, all of it or nothing. One file
per run; a file of another run is refused.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from orchestrator.errors import ConfigError, JournalError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS run (token TEXT NOT NULL, name TEXT NOT NULL, started REAL NOT NULL);
CREATE TABLE IF NOT EXISTS jobs (
  job_id TEXT PRIMARY KEY, kind TEXT NOT NULL, client BLOB NOT NULL, request BLOB NOT NULL, submitted REAL NOT NULL,
  state TEXT NOT NULL, outcome BLOB, ended REAL);
CREATE TABLE IF NOT EXISTS publications (
  id INTEGER PRIMARY KEY, version INTEGER NOT NULL, state TEXT NOT NULL, checkpoint_dir TEXT, detail TEXT, at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS digests (version INTEGER PRIMARY KEY, digest TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS facts (key TEXT PRIMARY KEY, value BLOB NOT NULL);
"""
_SCHEMA_VERSION = 4
"""In the file's header; counts up with the tables and with `PROTOCOL_VERSION`, because jobs are kept as wire frames."""
VERSIONS_KEPT = 10_000
"""Versions whose publication steps are kept. Digests of all versions are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """One job as journaled. `request` and `outcome` are wire frames; `client` submitted it first."""

    job_id: str
    kind: str
    client: str
    request: tuple[bytes, ...]
    state: str
    outcome: tuple[bytes, ...] | None


class Journal:
    """Opens (or creates) the journal of one run.

    Raises:
        ConfigError: the file belongs to another run, or its tables are another version's.
        JournalError: from every method, where the file cannot be read or written (a full disk, say).
    """

    def __init__(self, path: Path, *, run_token: str, name: str) -> None:
        self._path = path
        with self._said():
            self._open(run_token=run_token, name=name)

    def _open(self, *, run_token: str, name: str) -> None:
        path = self._path
        # It holds the run's token. SQLite gives its other files the same mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        path.chmod(0o600)
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        # Some builds write zeros over what goes: once more all of a job's batch, when it ends.
        self._db.execute("PRAGMA secure_delete=OFF")
        self._db.executescript(_SCHEMA)
        row = self._db.execute("SELECT token FROM run").fetchone()
        if row is None:
            self._db.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
            self._db.execute("INSERT INTO run VALUES (?, ?, ?)", (run_token, name, time.time()))
        elif row[0] != run_token:
            self._db.close()
            raise ConfigError(f"{path} is the journal of another run; choose a new run folder")
        elif self._db.execute("PRAGMA user_version").fetchone()[0] != _SCHEMA_VERSION:
            self._db.close()
            raise ConfigError(
                f"{path} was written by another version of splice; end the run with that one, or choose a new run folder"
            )
        self._facts = self._read_facts()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What one moment changes, in one durable commit: all of it or, where the block or the disk fails, nothing. No `await` inside.

        A block inside another is part of it.
        """
        if self._db.in_transaction:
            yield
            return
        try:
            with self._said(), self._db:  # commits, or rolls back
                self._db.execute("BEGIN")
                yield
        except BaseException:
            self._facts = self._read_facts()
            raise

    @contextlib.contextmanager
    def _said(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise JournalError(
                f"the journal {self._path} cannot be read or written: {error}; see to its disk, then go on with --resume"
            ) from error

    def _execute(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        with self._said():
            return self._db.execute(sql, parameters)

    def add_job(self, *, job_id: str, kind: str, client: str, frames: Sequence[bytes | memoryview]) -> None:
        """Journal a job before it is acknowledged."""
        request = msgpack.packb([bytes(f) for f in frames])
        self._execute(
            "INSERT INTO jobs (job_id, kind, client, request, submitted, state) VALUES (?, ?, ?, ?, ?, 'open')",
            (job_id, kind, client.encode(errors="surrogateescape"), request, time.time()),
        )

    def end_job(self, job_id: str, *, state: str, frames: Sequence[bytes | memoryview]) -> None:
        """Journal the one terminal message, before it is sent. The request's buffers are no longer needed and go."""
        outcome = msgpack.packb([bytes(f) for f in frames])
        self._execute(
            "UPDATE jobs SET state = ?, outcome = ?, request = x'90', ended = ? WHERE job_id = ?",
            (state, outcome, time.time(), job_id),
        )

    def job(self, job_id: str) -> JobRow | None:
        """The job, or None."""
        row = self._execute(
            "SELECT job_id, kind, client, request, state, outcome FROM jobs WHERE job_id = ?", (job_id,)
        ).fetchone()
        if row is None:
            return None
        outcome = None if row[5] is None else tuple(msgpack.unpackb(row[5]))
        return JobRow(
            job_id=row[0],
            kind=row[1],
            client=row[2].decode(errors="surrogateescape"),  # a ROUTER's name of it: any bytes
            request=tuple(msgpack.unpackb(row[3])),
            state=row[4],
            outcome=outcome,
        )

    def unfinished_jobs(self) -> list[str]:
        """Ids of jobs without an outcome, oldest first."""
        return [r[0] for r in self._execute("SELECT job_id FROM jobs WHERE outcome IS NULL ORDER BY rowid")]

    def record_publication(self, *, version: int, state: str, checkpoint_dir: str | None = None, detail: str = "") -> None:
        """Journal one step of a publication."""
        with self.together():
            self._execute(
                "INSERT INTO publications (version, state, checkpoint_dir, detail, at) VALUES (?, ?, ?, ?, ?)",
                (version, state, checkpoint_dir, detail, time.time()),
            )
            if state == "committed":
                self._execute("DELETE FROM publications WHERE version < ?", (version - VERSIONS_KEPT,))

    def set_digest(self, version: int, digest: str) -> None:
        """Journal what a version is: the digest of its content."""
        self._execute("INSERT OR REPLACE INTO digests VALUES (?, ?)", (version, digest))

    def digest(self, version: int) -> str | None:
        """The digest of the version's content when it was first committed, or None."""
        row = self._execute("SELECT digest FROM digests WHERE version = ?", (version,)).fetchone()
        return None if row is None else row[0]

    def committed_version(self) -> int | None:
        """The newest version that was committed, or None."""
        row = self._execute("SELECT MAX(version) FROM publications WHERE state = 'committed'").fetchone()
        return None if row is None else row[0]

    def checkpoint_dir(self, version: int) -> str | None:
        """Where what `version` is made of lies on disk, or None."""
        row = self._execute(
            "SELECT checkpoint_dir FROM publications WHERE version = ? AND checkpoint_dir IS NOT NULL ORDER BY id DESC",
            (version,),
        ).fetchone()
        return None if row is None else row[0]

    def publication_steps(self, version: int) -> list[str]:
        """Every state that the publication of `version` went through, in order."""
        return [r[0] for r in self._execute("SELECT state FROM publications WHERE version = ? ORDER BY id", (version,))]

    def all_publication_steps(self) -> list[tuple[int, str]]:
        """(version, state) of every step of every publication, in order."""
        return [(r[0], r[1]) for r in self._execute("SELECT version, state FROM publications ORDER BY id")]

    def set_facts(self, facts: Mapping[str, dict[str, Any] | None]) -> None:
        """All of them or none; None: the fact goes. What the journal says already is not written again."""
        packed = {key: None if value is None else msgpack.packb(value) for key, value in facts.items()}
        changed = {key: value for key, value in packed.items() if self._facts.get(key) != value}
        if not changed:
            return
        with self.together():
            for key, value in changed.items():
                if value is None:
                    self._execute("DELETE FROM facts WHERE key = ?", (key,))
                    del self._facts[key]
                else:
                    self._execute(
                        "INSERT INTO facts VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, value)
                    )
                    self._facts[key] = value

    def fact(self, key: str) -> dict[str, Any]:
        """What was set last; empty without it."""
        found: dict[str, Any] = msgpack.unpackb(self._facts[key]) if key in self._facts else {}
        return found

    def _read_facts(self) -> dict[str, bytes]:
        return dict(self._execute("SELECT key, value FROM facts"))

    def close(self) -> None:
        """Close the file."""
        self._db.close()
