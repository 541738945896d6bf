"""The run's journal: jobs, outcomes, publication steps and facts, in SQLite (WAL,
synchronous=FULL).

A write is durable when its call returns. Writes inside `together()` are durable when the block
ends, all or nothing. Each run has one file; that of another run is refused. A large batch becomes a
file of its own in `batches`, because SQLite would block the event loop for seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from orchestrator.errors import ConfigError, JournalError
from orchestrator.protocol.frames import VERSION_FRAME
from orchestrator.protocol.messages import PROTOCOL_VERSION
from orchestrator.storage.files import sync_folder
from orchestrator.storage.layout import FILE

_SCHEMA = """
CREATE TABLE IF NOT EXISTS run (token TEXT NOT NULL, name TEXT NOT NULL, started REAL NOT NULL);
CREATE TABLE IF NOT EXISTS jobs (
  job_id TEXT PRIMARY KEY, kind TEXT NOT NULL, client BLOB NOT NULL, request BLOB NOT NULL,
  submitted REAL NOT NULL, state TEXT NOT NULL, outcome BLOB, ended REAL);
CREATE TABLE IF NOT EXISTS publications (
  id INTEGER PRIMARY KEY, version INTEGER NOT NULL, state TEXT NOT NULL,
  checkpoint_dir TEXT, detail TEXT, at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS digests (version INTEGER PRIMARY KEY, digest TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS facts (key TEXT PRIMARY KEY, value BLOB NOT NULL);
"""
_OLDEST_PROTOCOL = 17
"""The protocol is in the header, because jobs are stored as wire frames. Journals of older ones had
other tables; since then `orchestrator.storage.layout` counts those."""
LARGE_BYTES = 2**20
"""Smallest batch that becomes a file."""
HEAD = 3
"""Number of frames before the buffers."""
JOBS_KEPT = 10_000
"""Number of the newest jobs whose outcomes are kept. An older id would run again."""
VERSIONS_KEPT = 10_000
"""Number of versions whose publication steps are kept. All digests are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """One job as journaled. `outcome` has wire frames; `client` submitted the job first."""

    job_id: str
    kind: str
    client: str
    state: str
    outcome: tuple[bytes, ...] | None


class Journal:
    """Opens or creates the journal of one run.

    Raises:
        ConfigError: the file belongs to another run or name, or see `check_protocol`.
        JournalError: from every method: the file cannot be read or written.
    """

    def __init__(self, path: Path, *, run_token: str, name: str) -> None:
        self._path = path
        self._batches = path.with_name("batches")
        self._spent: list[str] = []  # files of jobs that ended in the open transaction
        with self._errors_named():
            self._open(run_token=run_token, name=name)

    def _open(self, *, run_token: str, name: str) -> None:
        path = self._path
        check_protocol(path)
        # The file holds the run's token. SQLite gives its other files the same mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        path.chmod(0o600)
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        # Some builds overwrite deleted data with zeros, which would write each batch twice.
        self._db.execute("PRAGMA secure_delete=OFF")
        self._db.executescript(_SCHEMA)
        row = self._db.execute("SELECT token, name FROM run").fetchone()
        if row is None:
            self._db.execute(f"PRAGMA user_version = {PROTOCOL_VERSION}")
            self._db.execute("INSERT INTO run VALUES (?, ?, ?)", (run_token, name, time.time()))
        elif row[0] != run_token:
            self._db.close()
            raise ConfigError(
                f"{path} was written with another SPLICE_RUN_TOKEN; set that one and pass "
                "--resume, or choose a new run folder"
            )
        elif row[1] != name:
            self._db.close()
            raise ConfigError(
                f"{path}: the run is named {row[1]!r}, not {name!r}; its replicas serve that name"
            )
        elif self._db.execute("PRAGMA user_version").fetchone()[0] != PROTOCOL_VERSION:
            self._take_over()
        self._facts = self._read_facts()

    def _take_over(self) -> None:
        """Give outcomes this version's frame: the layout says that they can be read."""
        with self.together():
            for (job_id,) in self._db.execute("SELECT job_id FROM jobs").fetchall():
                row = self.job(job_id)
                assert row is not None
                assert row.outcome is not None, "an open job; see check_protocol"
                self._db.execute(
                    "UPDATE jobs SET outcome = ? WHERE job_id = ?",
                    (msgpack.packb([VERSION_FRAME, *row.outcome[1:]]), job_id),
                )
            self._db.execute(f"PRAGMA user_version = {PROTOCOL_VERSION}")

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Make the writes of the block one durable commit, or none of them. No `await` inside.

        An inner block is part of the outer one.
        """
        if self._db.in_transaction:
            yield
            return
        try:
            with self._errors_named(), self._db:  # commits, or rolls back
                self._db.execute("BEGIN")
                yield
        except BaseException:
            self._spent.clear()
            self._facts = self._read_facts()
            raise
        self._drop_spent()

    @contextlib.contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise JournalError(
                f"Cannot read or write the journal {self._path}: {error}. "
                "Check the disk, then restart with --resume."
            ) from error

    def _execute(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        with self._errors_named():
            return self._db.execute(sql, parameters)

    def keep_batch(self, job_id: str, buffers: Sequence[bytes | memoryview]) -> None:
        """Write large buffers of a job to a file, from any thread, before `add_job`.

        Raises:
            JournalError: the write failed.
        """
        if not _is_large(buffers):
            return
        try:
            self._batches.mkdir(mode=0o700, exist_ok=True)
            with open(self._batch(job_id), "wb", opener=_private) as file:
                for buffer in buffers:
                    file.write(buffer)
                file.flush()
                os.fsync(file.fileno())
            sync_folder(self._batches)
        except OSError as error:
            raise JournalError(
                f"Cannot write the batch of a job to {self._batches}: {error}. "
                "Check the disk, then restart with --resume."
            ) from error

    def _batch(self, job_id: str) -> str:
        # No `Path`: it interns each name, which Python 3.12 keeps for good.
        return f"{self._batches}/{hashlib.sha256(job_id.encode()).hexdigest()}"

    def _drop_spent(self) -> None:
        while self._spent:
            with contextlib.suppress(OSError):  # the next start removes it instead
                os.unlink(self._spent.pop())

    def drop_stray_batches(self) -> None:
        """Remove files of jobs that ended or were never added. Call it at the start, before any
        write."""
        wanted = {self._batch(job_id) for job_id in self.unfinished_jobs()}
        if self._batches.is_dir():
            there = map(str, self._batches.iterdir())
            self._spent = [path for path in there if path not in wanted]
            self._drop_spent()

    def add_job(
        self, *, job_id: str, kind: str, client: str, frames: Sequence[bytes | memoryview]
    ) -> None:
        """Journal a job before it is acknowledged, after `keep_batch` with its buffers,
        `frames[HEAD:]`."""
        head, buffers = [bytes(f) for f in frames[:HEAD]], frames[HEAD:]
        kept = [len(b) for b in buffers] if _is_large(buffers) else [bytes(b) for b in buffers]
        self._execute(
            "INSERT INTO jobs (job_id, kind, client, request, submitted, state) VALUES (?, ?, ?, "
            "?, ?, 'open')",
            (
                job_id,
                kind,
                client.encode(errors="surrogateescape"),
                msgpack.packb([*head, *kept]),
                time.time(),
            ),
        )

    def request(self, job_id: str) -> tuple[bytes, ...]:
        """Return the wire frames of an open job.

        Raises:
            JournalError: the file of its batch is gone or has another size.
        """
        (packed,) = self._execute("SELECT request FROM jobs WHERE job_id = ?", (job_id,)).fetchone()
        frames: list[Any] = msgpack.unpackb(packed)
        sizes = [f for f in frames[HEAD:] if isinstance(f, int)]
        if not sizes:
            return tuple(frames)
        try:
            with open(self._batch(job_id), "rb") as file:
                buffers = [file.read(size) for size in sizes]
                is_whole = [len(b) for b in buffers] == sizes and not file.read(1)
        except OSError as error:
            raise JournalError(f"the batch of job {job_id} cannot be read: {error}") from error
        if not is_whole:
            raise JournalError(
                f"the batch of job {job_id}, {self._batch(job_id)}, has another size than it was "
                "written with"
            )
        return (*frames[:HEAD], *buffers)

    def end_job(self, job_id: str, *, state: str, frames: Sequence[bytes | memoryview]) -> None:
        """Journal the terminal message before it is sent, and drop the job's buffers."""
        outcome = msgpack.packb([bytes(f) for f in frames])
        self._execute(
            "UPDATE jobs SET state = ?, outcome = ?, request = x'90', ended = ? WHERE job_id = ?",
            (state, outcome, time.time(), job_id),
        )
        self._execute(
            "DELETE FROM jobs WHERE outcome IS NOT NULL AND rowid <= "
            "(SELECT MAX(rowid) FROM jobs) - ?",
            (JOBS_KEPT,),
        )
        self._spent.append(self._batch(job_id))
        if not self._db.in_transaction:
            self._drop_spent()

    def job(self, job_id: str) -> JobRow | None:
        """Return the job, or None."""
        row = self._execute(
            "SELECT job_id, kind, client, state, outcome FROM jobs WHERE job_id = ?", (job_id,)
        ).fetchone()
        if row is None:
            return None
        outcome = None if row[4] is None else tuple(msgpack.unpackb(row[4]))
        return JobRow(
            job_id=row[0],
            kind=row[1],
            client=row[2].decode(errors="surrogateescape"),  # a client's id may hold any bytes
            state=row[3],
            outcome=outcome,
        )

    def unfinished_jobs(self) -> list[str]:
        """Return the ids of jobs without an outcome, oldest first."""
        return [
            r[0]
            for r in self._execute("SELECT job_id FROM jobs WHERE outcome IS NULL ORDER BY rowid")
        ]

    def record_publication(
        self, *, version: int, state: str, checkpoint_dir: str | None = None, detail: str = ""
    ) -> None:
        """Journal one step of a publication."""
        with self.together():
            self._execute(
                "INSERT INTO publications (version, state, checkpoint_dir, detail, at) VALUES (?, "
                "?, ?, ?, ?)",
                (version, state, checkpoint_dir, detail, time.time()),
            )
            if state == "committed":
                self._execute(
                    "DELETE FROM publications WHERE version < ?", (version - VERSIONS_KEPT,)
                )

    def set_digest(self, version: int, digest: str) -> None:
        """Journal the digest of a version's content."""
        self._execute("INSERT OR REPLACE INTO digests VALUES (?, ?)", (version, digest))

    def forget_digest(self, version: int) -> None:
        """Drop the digest of a version that was never served and is made again."""
        self._execute("DELETE FROM digests WHERE version = ?", (version,))

    def digest(self, version: int) -> str | None:
        """Return the digest of the version's content at its first commit, or None."""
        row = self._execute("SELECT digest FROM digests WHERE version = ?", (version,)).fetchone()
        return None if row is None else row[0]

    def committed_version(self) -> int | None:
        """Return the newest committed version, or None."""
        row = self._execute(
            "SELECT MAX(version) FROM publications WHERE state = 'committed'"
        ).fetchone()
        return None if row is None else row[0]

    def checkpoint_dir(self, version: int) -> str | None:
        """Return the folder with the version's checkpoint, or None."""
        row = self._execute(
            "SELECT checkpoint_dir FROM publications WHERE version = ? AND checkpoint_dir IS NOT "
            "NULL ORDER BY id DESC",
            (version,),
        ).fetchone()
        return None if row is None else row[0]

    def move(self, before: str, after: str) -> None:
        """Rewrite the folders within one that has another place now."""
        self._execute(
            "UPDATE publications SET checkpoint_dir = ? || substr(checkpoint_dir, ?) "
            "WHERE substr(checkpoint_dir, 1, ?) = ?",
            (after, len(before) + 1, len(before) + 1, f"{before}/"),
        )

    def publication_steps(self) -> list[tuple[int, str]]:
        """Return (version, state) of every step of every publication, in order."""
        return [
            (r[0], r[1])
            for r in self._execute("SELECT version, state FROM publications ORDER BY id")
        ]

    def set_facts(self, facts: Mapping[str, dict[str, Any] | None]) -> None:
        """Set facts, all or none; None deletes one. Unchanged facts are not written again."""
        packed = {
            key: None if value is None else msgpack.packb(value) for key, value in facts.items()
        }
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
                        "INSERT INTO facts VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = "
                        "excluded.value",
                        (key, value),
                    )
                    self._facts[key] = value

    def fact(self, key: str) -> dict[str, Any]:
        """Return a fact, or an empty dict."""
        found: dict[str, Any] = msgpack.unpackb(self._facts[key]) if key in self._facts else {}
        return found

    def _read_facts(self) -> dict[str, bytes]:
        return dict(self._execute("SELECT key, value FROM facts"))

    def close(self) -> None:
        """Close the file."""
        self._db.close()


def kept_token(path: Path) -> str:
    """Return the token of the run whose journal this is; empty: there is none."""
    row = _peek(path, "SELECT token FROM run")
    return "" if row is None else str(row[0])


def committed_in(path: Path) -> int | None:
    """Return the newest committed version of a run that may be up."""
    row = _peek(path, "SELECT MAX(version) FROM publications WHERE state = 'committed'")
    return None if row is None or row[0] is None else int(row[0])


def check_protocol(path: Path) -> None:
    """Refuse a journal with open jobs of another version of the protocol. Changes nothing.

    Raises:
        ConfigError: it has some, or it is older than layouts.
    """
    row = _peek(
        path,
        "SELECT user_version, (SELECT COUNT(*) FROM jobs WHERE outcome IS NULL) "
        "FROM pragma_user_version",
    )
    theirs, num_open = (0, 0) if row is None else row
    if 0 < theirs < _OLDEST_PROTOCOL:
        raise ConfigError(
            f"{path} was written by an older version of splice; end the run with that one, or "
            "choose a new run folder"
        )
    if num_open and theirs != PROTOCOL_VERSION:
        raise ConfigError(
            f"{path} has {num_open} open jobs of protocol version {theirs}; this splice speaks "
            f"{PROTOCOL_VERSION}. Resume the run with the splice that {FILE} names until all jobs "
            "have ended, stop it, then resume it with this one"
        )


def _peek(path: Path, sql: str) -> Any:
    """Return the first row; None: there is none, or no journal."""
    if not path.exists():
        return None
    with contextlib.closing(sqlite3.connect(path)) as db:
        try:
            return db.execute(sql).fetchone()
        except sqlite3.Error:  # no journal yet; its orchestrator says what is wrong with it
            return None


def _is_large(buffers: Sequence[bytes | memoryview]) -> bool:
    return sum(map(len, buffers)) >= LARGE_BYTES


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
