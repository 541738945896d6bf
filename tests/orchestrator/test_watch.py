"""`splice watch`: what a frame holds, as lines and as tables."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

from orchestrator.protocol.messages import InitialSyncJob
from splice.rl import decisions
from tests.orchestrator.run import BUFFERS, JOB
from tests.orchestrator.serving import REPO


def watch(run, *options):
    argv = [sys.executable, "-m", "splice", "watch", str(run.dir), "--once", *options]
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_frame_has_nodes_versions_and_the_last_publication(run, caplog):
    run.replica(run.trainer())
    assert "serves nothing yet" in watch(run)
    run.client.run(InitialSyncJob())
    caplog.set_level(logging.INFO, "splice.orchestrator")
    result = run.client.run(JOB, buffers=BUFFERS)
    lines = [r.message for r in caplog.records if " is served: " in r.message]
    assert len(lines) == 1 and result["alias"] in lines[0], "one line for each publication"
    found = json.loads(watch(run, "--json"))
    row, first = found["publications"]
    assert first["version"] == 0 and found["alias"] == result["alias"]
    assert row["version"] == result["version"] and row["mode"] == result["mode"]
    assert row["bytes_sent"] == result["bytes_sent"]
    assert row["pause_s"] == result["seconds"]["pause"]
    assert (row["num_verified"], row["num_tensors"]) == (
        result["num_verified"],
        result["num_tensors"],
    )
    assert found["training"] == result["metrics"] and found["job"] is None
    assert {n["node_id"]: n["state"] for n in found["nodes"]} == {
        "trainer": "ready",
        "inference-0": "ready",
    }
    text = watch(run)
    assert f"serves {result['alias']}" in text and "no job runs" in text
    assert f"@{result['version']}" in text and "inference-0" in text


def test_the_loop_says_who_waits(run):
    run.replica(run.trainer())
    assert "loop:" not in watch(run)
    status = run.dir / decisions.LOOP_DIR / decisions.STATUS
    status.parent.mkdir()
    status.write_text(json.dumps({"step": 3, "text": "trainer waits 40%"}))
    assert "loop: trainer waits 40%" in watch(run)
    assert json.loads(watch(run, "--json"))["loop"]["step"] == 3
    argv = [sys.executable, "-m", "splice", "status", str(run.dir)]
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, timeout=60, check=True)
    assert "loop: trainer waits 40%" in done.stdout
