"""`splice trace`: the file against Chrome's trace-event format, and against what ran."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.storage.journal import Journal
from splice.cli import app
from splice.rl import decisions
from splice.trace import ORCHESTRATOR, SAMPLER, TRAINER
from tests.rl.stand_in import StandIn
from tests.rl.stood_in import run_loop

WANTED = {"X": {"ts", "dur", "tid", "cat"}, "C": {"ts", "args"}, "i": {"ts", "s"}, "M": {"args"}}
"""Phase -> what the format asks of such an event, in addition to name and pid."""


def traced(folder: Path, *options: str) -> dict:
    out = folder / "trace.json"
    done = CliRunner().invoke(app, ["trace", str(folder), "-o", str(out), *options])
    assert done.exit_code == 0, done.output
    return json.loads(out.read_text())


def check(found: dict) -> list[dict]:
    """What Perfetto's and Chrome's importers ask of a file."""
    events = found["traceEvents"]
    assert found["displayTimeUnit"] in ("ms", "ns")
    ends: dict[tuple[int, int], float] = {}
    for event in events:
        assert {"ph", "name", "pid"} | WANTED[event["ph"]] <= event.keys()
        assert isinstance(event["pid"], int) and isinstance(event["name"], str)
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
    spans = [event for event in events if event["ph"] == "X"]
    for span in sorted(spans, key=lambda span: span["ts"]):  # on a thread, spans nest or follow
        place = span["pid"], span["tid"]
        assert span["ts"] >= ends.get(place, 0.0) - 0.2, "two spans of a lane overlap"
        ends[place] = span["ts"] + span["dur"]
    return spans


def test_a_loop_is_steps_and_requests(tmp_path):
    steps = asyncio.run(run_loop(StandIn(train_s=0.02, token_s=0.002), tmp_path, steps=4))
    found = traced(tmp_path)
    spans = check(found)
    trained = [span for span in spans if span["pid"] == TRAINER]
    assert [span["name"] for span in trained] == [f"step {step.number}" for step in steps]
    assert [span["args"]["version"] for span in trained] == [step.version for step in steps]
    requests = [span for span in spans if span["pid"] == SAMPLER]
    assert len(requests) == 4 * 6, "one for each rollout"
    first = steps[0].groups[0][0]
    own = next(span for span in requests if span["name"] == f"{first.group}.{first.sample}")
    assert own["args"]["tokens"] == len(first.completion.answer_ids)
    assert own["args"]["versions"] == [list(span) for span in first.spans]
    counts = [e["args"]["requests"] for e in found["traceEvents"] if e["ph"] == "C"]
    assert max(counts) == max(span["tid"] for span in requests), "as many lanes as were in flight"
    assert counts[-1] == 0 and min(counts) >= 0
    at = {
        e: [x["at"] for x in decisions.read(tmp_path / decisions.LOG) if x["event"] == e]
        for e in ("train", "trained")
    }
    took = [end - begin for begin, end in zip(at["train"], at["trained"], strict=True)]
    assert [span["dur"] / 1e6 for span in trained] == pytest.approx(took, abs=1e-6)
    fewer = [span["name"] for span in check(traced(tmp_path, "--steps", "2"))]
    assert "step 4" in fewer and "step 2" not in fewer


def test_publications_and_jobs_come_from_the_journal(tmp_path, monkeypatch):
    clock = iter(100.0 + k for k in range(100))
    monkeypatch.setattr("orchestrator.storage.journal.time.time", lambda: next(clock))
    journal = Journal(tmp_path / "journal.sqlite", run_token="t", name="m")
    for version in (0, 1):
        for state in ("planned", "durable", "paused", "applying", "committed"):
            journal.record_publication(version=version, state=state)
    journal.record_publication(version=2, state="planned")
    journal.record_publication(version=2, state="failed:planned", detail="the trainer is gone")
    journal.close()
    folder = tmp_path / decisions.LOOP_DIR
    folder.mkdir()
    spans = check(traced(tmp_path))
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "3.json.gz").write_bytes(b"")
    out = str(tmp_path / "trace.json")
    assert (
        "3.json.gz: kernels" in CliRunner().invoke(app, ["trace", str(tmp_path), "-o", out]).output
    )
    assert {span["pid"] for span in spans} == {ORCHESTRATOR}
    names = [span["name"] for span in spans]
    assert names[:4] == [
        "@0 planned to durable",
        "@0 durable to paused",
        "@0 paused to applying",
        "@0 applying to committed",
    ]
    assert names[-1] == "@2 planned to failed:planned"
    assert spans[-1]["args"]["detail"] == "the trainer is gone"
    assert len(spans) == 9 and all(span["dur"] == 1e6 for span in spans)


@pytest.mark.parametrize("has_folder", [True, False])
def test_nothing_has_run(tmp_path, has_folder):
    (tmp_path / "endpoint").write_text("")
    if has_folder:
        (tmp_path / "loop").mkdir()
    done = CliRunner().invoke(app, ["trace", str(tmp_path)])
    assert done.exit_code == 2 and "nothing has run here" in " ".join(done.output.split())
