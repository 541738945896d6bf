"""What the server must know after a restart: sessions, models, samplers, checkpoints, futures.

One SQLite file in the run's folder. A training request is written before its future's id leaves the
server, and its result before anybody sees that. Samples are not written: after a restart their
futures are gone (410), and the SDK asks again.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splice.tinker.refused import GONE, Refused, unknown

INITIAL = "initial"
"""State of the trainer when the server first saw the run: what create_model starts from."""
UNKNOWN = -2
"""In the place of a version or snapshot: it is not known, or somebody else published it."""
RESULTS_KEPT = 2000
"""Newest results of training requests. An older future is gone (410)."""
_TABLES = """
CREATE TABLE IF NOT EXISTS sessions (
    session_id TEXT PRIMARY KEY, created REAL, finished TEXT, facts TEXT);
CREATE TABLE IF NOT EXISTS models (
    model_id TEXT PRIMARY KEY, session_id TEXT, created REAL, used REAL, next_seq INTEGER,
    ended TEXT, has_unsaved INTEGER DEFAULT 0, facts TEXT);
CREATE TABLE IF NOT EXISTS samplers (
    sampler_id TEXT PRIMARY KEY, session_id TEXT, kind TEXT, version INTEGER, model_path TEXT);
CREATE TABLE IF NOT EXISTS checkpoints (
    path TEXT PRIMARY KEY, model_id TEXT, kind TEXT, folder TEXT, version INTEGER, created REAL,
    expires REAL, facts TEXT);
CREATE TABLE IF NOT EXISTS requests (
    number INTEGER PRIMARY KEY AUTOINCREMENT, request_id TEXT UNIQUE, model_id TEXT, seq_id INTEGER,
    kind TEXT, digest TEXT, body BLOB, state TEXT, result BLOB);
CREATE INDEX IF NOT EXISTS by_model ON requests (model_id, seq_id);
CREATE INDEX IF NOT EXISTS with_result ON requests (number) WHERE state NOT IN ('waiting', 'gone');
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS failed_passes (
    model_id TEXT, seq_id INTEGER, PRIMARY KEY (model_id, seq_id));
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What `retrieve_future` answers."""

    body: bytes
    media: str = "application/json"
    versions: str = ""
    """Samples: the versions of each sequence's tokens, such as `4x17,5x3;5x20`."""
    is_failure: bool = False


def json_result(**values: Any) -> Result:
    """Return a JSON result."""
    return Result(body=json.dumps(values).encode())


def failure(text: str, *, is_user: bool) -> Result:
    """Return the result of a request that failed, as the SDK reads it."""
    facts = {"error": text, "category": "user" if is_user else "server"}
    return Result(body=json.dumps(facts).encode(), is_failure=True)


def defect(error: Exception) -> Result:
    """Return the result of a request that met a defect of the server."""
    text = f"a defect of the server; its log says more: {type(error).__name__}: {error}"
    return failure(text, is_user=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """An accepted training request."""

    request_id: str
    model_id: str
    seq_id: int
    kind: str
    body: bytes
    """As sent, decompressed."""


class Books:
    """The file. Threads may share it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        self._lock = threading.Lock()
        self._opened_s, self._heard_s = time.monotonic(), dict[str, float]()
        self._db.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;" + _TABLES)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _run(self, statement: str, *values: Any) -> list[sqlite3.Row]:
        with self._lock:
            return self._db.execute(statement, values).fetchall()

    def _one(self, statement: str, *values: Any) -> dict[str, Any] | None:
        rows = self._run(statement, *values)
        if not rows:
            return None
        row = dict(rows[0])
        if "facts" in row:
            row["facts"] = json.loads(row["facts"])
        return row

    def _known(self, table: str, key: str, value: str, hint: str) -> dict[str, Any]:
        row = self._one(f"SELECT * FROM {table} WHERE {key} = ?", value)
        if row is None:
            raise unknown(f"no {table.removesuffix('s')} {value!r}; {hint}")
        return row

    def _all(self, statement: str, *values: Any) -> list[dict[str, Any]]:
        rows = [dict(row) for row in self._run(statement, *values)]
        return [{**row, "facts": json.loads(row["facts"])} for row in rows]

    # ------------------------------------------------------------ facts of the run

    def fact(self, name: str) -> Any:
        """Return a fact, or None."""
        row = self._one("SELECT value FROM facts WHERE name = ?", name)
        return None if row is None else json.loads(row["value"])

    def set_fact(self, name: str, value: Any) -> None:
        """Set a fact."""
        self._run("INSERT OR REPLACE INTO facts VALUES (?, ?)", name, json.dumps(value))

    def set_served(self, version: int, state: str, *, snapshot: int | None = None) -> None:
        """Note which state of the trainer the served version has, and, if it was served before,
        under which version first."""
        snapshot = version if snapshot is None else snapshot
        served = {"version": version, "state": state, "snapshot": snapshot}
        self.set_fact("served", served)
        self.set_fact(f"version {version}", state)

    def forget_served(self) -> None:
        """Note that a publication runs: until its outcome is known, nobody knows what is served."""
        self.set_served(UNKNOWN, "unknown")

    def served_snapshot(self) -> int:
        """Return the version under which the served weights were served first."""
        served = self.fact("served")
        return int(served.get("snapshot", served["version"]))

    def add_snapshot(self, version: int, facts: Mapping[str, Any], *, keep: int) -> list[str]:
        """Note what is needed to serve a new version again. Returns the folders of snapshots that
        are too old now."""
        known = [*(self.fact("snapshots") or []), {"version": version, **facts}]
        self.set_fact("snapshots", known[-keep:])
        return [s["folder"] for s in known[:-keep]]

    def snapshot(self, version: int) -> dict[str, Any] | None:
        """Return what is needed to serve a version again: its checkpoint's folder, the trainer's
        state and adapter. None: it cannot be served again."""
        initial = self.fact("initial")
        first = {"folder": initial["folder"], "state": INITIAL, "version": initial.get("version")}
        for found in (first, *(self.fact("snapshots") or [])):
            if found["version"] == version:
                return dict(found)
        return None

    def is_base(self, version: int | None) -> bool:
        """Whether a version is the base model: the run's first state, never trained."""
        if version is None or self.fact(f"version {version}") != INITIAL:
            return False
        return bool(self.fact("initial")["is_base"])

    # ------------------------------------------------------------ sessions

    def add_session(self, session_id: str, facts: Mapping[str, Any]) -> None:
        """Note a new session."""
        self._run(
            "INSERT INTO sessions (session_id, created, facts) VALUES (?, ?, ?)",
            session_id,
            time.time(),
            json.dumps(facts),
        )
        self._heard_s[session_id] = time.monotonic()

    def session(self, session_id: str) -> dict[str, Any]:
        """Return a session.

        Raises:
            Refused: there is none.
        """
        return self._known("sessions", "session_id", session_id, "create_session makes one")

    def live_session(self, session_id: str) -> dict[str, Any]:
        """Return a session that has not finished.

        Raises:
            Refused: there is none, or it has finished.
        """
        row = self.session(session_id)
        if row["finished"] is not None:
            raise Refused(GONE, f"session {session_id} has finished ({row['finished']})")
        return row

    def sessions(self) -> list[dict[str, Any]]:
        """Return all sessions, newest first."""
        return self._all("SELECT * FROM sessions ORDER BY created DESC")

    def see(self, session_id: str) -> None:
        """Note that the session's client lives.

        Raises:
            Refused: there is no such session, or it has finished.
        """
        self.live_session(session_id)
        self._heard_s[session_id] = time.monotonic()

    def heard_s(self, session_id: str) -> float:
        """Return when the session's client was heard last, on the monotonic clock.

        A server that was away has missed heartbeats, so its start counts as one.
        """
        return self._heard_s.get(session_id, self._opened_s)

    def finish(self, session_id: str, reason: str) -> None:
        """End a session and its model. The first reason stays.

        Raises:
            Refused: there is no such session.
        """
        self.session(session_id)
        self._run(
            "UPDATE sessions SET finished = ? WHERE session_id = ? AND finished IS NULL",
            reason,
            session_id,
        )
        self._run(
            "UPDATE models SET ended = ? WHERE session_id = ? AND ended IS NULL",
            f"its session finished ({reason})",
            session_id,
        )
        self._heard_s.pop(session_id, None)

    # ------------------------------------------------------------ models

    def add_model(self, model_id: str, session_id: str, facts: Mapping[str, Any]) -> None:
        """Note a new model; its first request has the number 1."""
        now = time.time()
        self._run(
            "INSERT INTO models VALUES (?, ?, ?, ?, 1, NULL, 0, ?)",
            model_id,
            session_id,
            now,
            now,
            json.dumps(facts),
        )

    def find_model(self, model_id: str) -> dict[str, Any] | None:
        """Return a model, or None."""
        return self._one("SELECT * FROM models WHERE model_id = ?", model_id)

    def model(self, model_id: str) -> dict[str, Any]:
        """Return a model.

        Raises:
            Refused: there is none.
        """
        return self._known("models", "model_id", model_id, "create_model makes one")

    def open_model(self) -> dict[str, Any] | None:
        """Return the one model that may train, or None."""
        return self._one("SELECT * FROM models WHERE ended IS NULL ORDER BY created DESC")

    def models(self) -> list[dict[str, Any]]:
        """Return all models, newest first."""
        return self._all("SELECT * FROM models ORDER BY created DESC")

    def end_model(self, model_id: str, why: str) -> None:
        """Note that the model does not train any more."""
        self._run("UPDATE models SET ended = ? WHERE model_id = ? AND ended IS NULL", why, model_id)

    def set_unsaved(self, model_id: str, has_unsaved: bool) -> None:
        """Note whether training would be lost with the model."""
        self._run(
            "UPDATE models SET has_unsaved = ?, used = ? WHERE model_id = ?",
            int(has_unsaved),
            time.time(),
            model_id,
        )

    def set_facts(self, model_id: str, facts: Mapping[str, Any]) -> None:
        """Replace a model's facts."""
        self._run("UPDATE models SET facts = ? WHERE model_id = ?", json.dumps(facts), model_id)

    def advance(self, model_id: str, next_seq: int) -> None:
        """Note the number of the model's next request."""
        self._run("UPDATE models SET next_seq = ? WHERE model_id = ?", next_seq, model_id)

    # ------------------------------------------------------------ samplers and checkpoints

    def add_sampler(
        self,
        sampler_id: str,
        *,
        session_id: str,
        kind: str,
        version: int | None = None,
        model_path: str | None = None,
    ) -> None:
        """Note a sampler: a snapshot, inflight or base. A repeated request changes nothing."""
        self._run(
            "INSERT OR IGNORE INTO samplers VALUES (?, ?, ?, ?, ?)",
            sampler_id,
            session_id,
            kind,
            version,
            model_path,
        )

    def sampler(self, sampler_id: str) -> dict[str, Any]:
        """Return a sampler.

        Raises:
            Refused: there is none.
        """
        hint = "create_sampling_session makes one"
        return self._known("samplers", "sampler_id", sampler_id, hint)

    def samplers_of(self, session_id: str) -> list[str]:
        """Return the ids of a session's samplers."""
        rows = self._run("SELECT sampler_id FROM samplers WHERE session_id = ?", session_id)
        return [row["sampler_id"] for row in rows]

    def add_checkpoint(
        self,
        path: str,
        *,
        model_id: str,
        kind: str,
        folder: str | None = None,
        version: int | None = None,
        ttl_s: int | None = None,
        facts: Mapping[str, Any],
    ) -> None:
        """Note a training or sampler checkpoint. An earlier one of that path is replaced."""
        now = time.time()
        self._run(
            "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            path,
            model_id,
            kind,
            folder,
            version,
            now,
            None if ttl_s is None else now + ttl_s,
            json.dumps(facts),
        )

    def find_checkpoint(self, path: str) -> dict[str, Any] | None:
        """Return a checkpoint, or None."""
        return self._one("SELECT * FROM checkpoints WHERE path = ?", path)

    def checkpoint(self, path: str) -> dict[str, Any]:
        """Return a checkpoint.

        Raises:
            Refused: there is none.
        """
        return self._known("checkpoints", "path", path, "GET /api/v1/checkpoints lists them")

    def checkpoints(self, model_id: str | None = None) -> list[dict[str, Any]]:
        """Return all checkpoints, or a model's, newest first."""
        if model_id is None:
            return self._all("SELECT * FROM checkpoints ORDER BY created DESC")
        return self._all(
            "SELECT * FROM checkpoints WHERE model_id = ? ORDER BY created DESC", model_id
        )

    def expired(self) -> list[str]:
        """Return the paths of checkpoints whose time is over."""
        rows = self._run("SELECT path FROM checkpoints WHERE expires < ?", time.time())
        return [row["path"] for row in rows]

    def expire(self, path: str, ttl_s: int | None) -> None:
        """Set when a checkpoint expires; None: never."""
        until = None if ttl_s is None else time.time() + ttl_s
        self._run("UPDATE checkpoints SET expires = ? WHERE path = ?", until, path)

    def forget_checkpoint(self, path: str) -> None:
        """Drop a checkpoint."""
        self._run("DELETE FROM checkpoints WHERE path = ?", path)

    # ------------------------------------------------------------ training requests

    def add_failed_pass(self, model_id: str, seq_id: int) -> None:
        """Note that a model's `forward_backward` was refused or failed."""
        self._run("INSERT OR IGNORE INTO failed_passes VALUES (?, ?)", model_id, seq_id)

    def failed_pass(self, model_id: str, *, before: int) -> int | None:
        """Return the number of one before a request, or None."""
        row = self._one(
            "SELECT MIN(seq_id) AS first FROM failed_passes WHERE model_id = ? AND seq_id < ?",
            model_id,
            before,
        )
        return None if row is None else row["first"]

    def forget_failed_passes(self, model_id: str, *, before: int) -> None:
        """Drop those before a request: nothing of their batches is pending any more."""
        self._run("DELETE FROM failed_passes WHERE model_id = ? AND seq_id < ?", model_id, before)

    def add_request(self, request: Request, digest: str) -> None:
        """Write a request down. Its `request_id` must be new."""
        self._run(
            "INSERT INTO requests (request_id, model_id, seq_id, kind, digest, body, state) "
            "VALUES (?, ?, ?, ?, ?, ?, 'waiting')",
            request.request_id,
            request.model_id,
            request.seq_id,
            request.kind,
            digest,
            request.body,
        )

    def request_digest(self, request_id: str) -> str | None:
        """Return the digest of a known request's body, or None."""
        row = self._one("SELECT digest FROM requests WHERE request_id = ?", request_id)
        return None if row is None else row["digest"]

    def waiting(self) -> list[Request]:
        """Return the requests without a result, oldest first."""
        rows = self._run("SELECT * FROM requests WHERE state = 'waiting' ORDER BY number")
        return [
            Request(**{name: row[name] for name in Request.__dataclass_fields__}) for row in rows
        ]

    def end_request(self, request_id: str, result: Result) -> None:
        """Write a result down, and drop the request's body and the oldest results."""
        self._run(
            "UPDATE requests SET state = ?, result = ?, body = x'' WHERE request_id = ?",
            result.media,
            result.body,
            request_id,
        )
        self._run(
            "UPDATE requests SET result = NULL, state = 'gone' WHERE state NOT IN ('waiting', "
            "'gone') AND number <= (SELECT MAX(number) FROM requests) - ?",
            RESULTS_KEPT,
        )

    def result(self, request_id: str) -> Result | None:
        """Return a request's result; None while it waits.

        Raises:
            Refused: the request is unknown, or its result is too old.
        """
        row = self._one("SELECT state, result FROM requests WHERE request_id = ?", request_id)
        if row is None or row["state"] == "gone":
            raise Refused(
                GONE,
                f"no future {request_id!r}: samples end with the server's process, and only the "
                f"newest {RESULTS_KEPT} results are kept",
            )
        if row["state"] == "waiting":
            return None
        return Result(body=row["result"], media=row["state"])
