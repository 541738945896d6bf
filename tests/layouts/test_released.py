"""A folder of each released layout is read by today's code; one of a later layout is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.errors import ConfigError
from orchestrator.storage import layout
from splice import SpliceClient
from splice.cli import app
from splice.rl import Loop, checker, decisions
from splice.tinker.books import Books
from tests.layouts.make import FUTURE, JOB_ID, MODEL
from tests.orchestrator.run import BUFFERS, JOB, Run
from tests.rl.stand_in import StandIn
from tests.rl.stood_in import ROWS, run_loop
from tests.trainer_node.conftest import models, torchrun

__all__ = ["models", "torchrun"]
SAYS = "was written by splice 9.0 in layout 99"
FOLDERS = sorted(Path(__file__).parent.glob("[0-9]*"), key=lambda path: int(path.name))


@pytest.fixture(params=FOLDERS, ids=lambda path: f"layout_{path.name}")
def folder(request, tmp_path):
    """A copy that may change."""
    return shutil.copytree(request.param, tmp_path / "run")


@pytest.fixture
def later(folder):
    """The same as a later version would leave it."""
    for place in (folder, folder / "loop"):
        (place / layout.FILE).write_text(json.dumps({"layout": 99, "splice": "9.0"}))
    return folder


def test_there_is_one_for_todays_layout():
    assert FOLDERS[-1].name == str(layout.LAYOUT), "run `python -m tests.layouts.make`"


def test_the_orchestrator_continues_the_run(folder, tmp_path):
    run = Run(tmp_path)
    run.config = run.config.model_copy(update={"resume": True})
    with run:
        assert run.client.status().version == 1
        done = run.client.run(JOB, buffers=BUFFERS, job_id=JOB_ID, timeout_s=10)
        assert done.alias == "m@1", "the outcome that the earlier version wrote"


def test_a_loop_its_checker_and_its_report_continue(folder):
    run = StandIn()
    run.version = 2
    asyncio.run(run_loop(run, folder / "loop", steps=4, sinks=()))
    found = checker.check(decisions.read(folder / "loop" / decisions.LOG))
    assert (found.steps, found.starts, found.violations) == (4, 2, [])
    page = folder / "page.html"
    assert CliRunner().invoke(app, ["report", str(folder), "-o", str(page)]).exit_code == 0


def test_tinkers_books(folder):
    with contextlib.closing(Books(folder / "tinker" / "books.sqlite")) as books:
        assert books.model(MODEL)["facts"] == {"rank": 1}
        assert books.result(FUTURE).body == b'{"done": true}'


def test_a_checkpoint(folder, models, torchrun):
    checkpoint, model = folder / "versions" / "1", models["dense_tied"]
    torchrun(1, "state.released", checkpoint, model, "load")
    meta = checkpoint / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "format": 99, "splice": "9.0"}))
    torchrun(1, "state.released", checkpoint, model, "refuse")


def test_a_later_layout_is_refused_by_name_and_stays_as_it_is(later, tmp_path):
    before = {p: p.read_bytes() for p in later.rglob("*") if p.is_file()}
    file = tmp_path / "run.json"
    roles = {"trainer": {"init": "random"}, "inference": {}}
    file.write_text(json.dumps({"name": "m", "model": "m", "run_dir": str(later), **roles}))
    commands = (
        ("status", later), ("watch", later, "--once"), ("samples", later), ("report", later),
        ("tinker", later), ("serve", file, "--resume"), ("up", file, "--resume", "--on", "slurm"),
    )  # fmt: skip # a list
    for command in commands:
        done = CliRunner().invoke(app, [str(word) for word in command])
        said = " ".join(done.output.split())
        assert done.exit_code == 2 and SAYS in said and "Use splice 9.0" in said, (command, said)
    for refused in (
        lambda: SpliceClient.of_run(later),
        lambda: Loop.of_run(later, prompts=ROWS, reward=lambda row, completion: 0.0),
        lambda: decisions.DecisionLog(later / "loop" / decisions.LOG),
    ):
        with pytest.raises(ConfigError, match=SAYS):
            refused()
    assert checker.main([str(later / "loop" / decisions.LOG)]) == 2
    assert {p: p.read_bytes() for p in later.rglob("*") if p.is_file()} == before
