"""Makes a small folder in today's layout: `python -m tests.layouts.make tests/layouts/N`.

Run it once for each value of `orchestrator.storage.layout.LAYOUT` that is released, and keep what
it made: later versions must read it, or refuse it by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
import sys
import tempfile
from pathlib import Path

from orchestrator.protocol.messages import InitialSync
from splice.tinker.books import Books, Request, json_result
from tests.orchestrator.run import BUFFERS, JOB, Run
from tests.rl.stand_in import StandIn
from tests.rl.stood_in import run_loop
from tests.trainer_node import tiny
from tests.trainer_node.conftest import Ranks

KEPT = ("layout.json", "journal.sqlite", "token", "loop", "tinker", "versions")
JOB_ID, SESSION, MODEL, FUTURE = "a-job", "a-session", "a-model", "a-future"


def main(folder: Path) -> None:
    """Run two jobs on fake nodes, two steps of a loop, a Tinker request, and one trainer's step."""
    with tempfile.TemporaryDirectory() as made:
        parent = Path(made)
        with Run(parent) as run:
            trainer = run.trainer()
            run.replica(trainer)
            run.client.run(InitialSync(), timeout_s=30)
            run.client.run(JOB, buffers=BUFFERS, job_id=JOB_ID, timeout_s=30)
        asyncio.run(run_loop(StandIn(), run.dir / "loop", steps=2, sinks=()))
        with contextlib.closing(Books(run.dir / "tinker" / "books.sqlite")) as books:
            write_books(books)
        model = tiny.make_all(parent / "models")["dense_tied"]
        shutil.rmtree(run.dir / "versions", ignore_errors=True)
        ranks = Ranks(parent)
        ranks(1, "state.released", run.dir / "versions" / "1", model, "save")
        ranks.close()
        for database in (run.dir / "journal.sqlite", run.dir / "tinker" / "books.sqlite"):
            pack(database)
        folder.mkdir()
        for name in KEPT:
            copy = shutil.copytree if (run.dir / name).is_dir() else shutil.copy
            copy(run.dir / name, folder / name)


def write_books(books: Books) -> None:
    """A session whose model has done a request."""
    books.add_session(SESSION, {})
    books.add_model(MODEL, SESSION, {"rank": 1})
    fields = {"model_id": MODEL, "seq_id": 1, "kind": "optim_step", "body": b"{}"}
    books.add_request(Request(request_id=FUTURE, **fields), "a-digest")
    books.end_request(FUTURE, json_result(done=True))


def pack(path: Path) -> None:
    """Rewrite a database with small pages."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript("PRAGMA journal_mode = DELETE; PRAGMA page_size = 512; VACUUM;")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
