"""What `splice up` publishes, over a real orchestrator with fake nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest

from orchestrator.errors import ConfigError, JobFailed
from orchestrator.processes.identity import identity
from orchestrator.protocol.messages import ErrorCode, InitialSync
from splice import cli, watch
from splice.client.run_file import load
from splice.cluster import up
from tests.orchestrator.run import BUFFERS, JOB, TOKEN, Run

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def run(tmp_path):
    with Run(tmp_path) as run:
        run.fake_trainer = run.trainer()
        run.fake_replica = run.replica(run.fake_trainer)
        yield run


def test_a_new_run_gets_its_first_version_and_a_served_one_nothing(run):
    said = []
    for _ in range(2):
        up.publish_first(run.client, said.append)
    assert said == ["publishing m@0"] and run.client.status().version == 0


@pytest.mark.parametrize("was_served", [True, False])
def test_after_a_publication_that_failed_no_version_is_made_anew(run, was_served):
    """@0 is made again only if it was never served."""
    if was_served:
        run.client.run(InitialSync(), timeout_s=30)
    run.fake_replica.fail_transfers()
    job, buffers = (JOB, BUFFERS) if was_served else (InitialSync(), ())
    with pytest.raises(JobFailed):
        run.client.run(job, buffers=buffers, timeout_s=30)
    assert run.client.status().version is None
    run.fake_replica.script.clear()
    up.publish_first(run.client, lambda _: None)
    assert run.client.status().version == 0
    assert run.fake_replica.live == [10, 20, 30], "version 0's own weights"


def test_a_restarted_orchestrator_binds_its_earlier_port(run, tmp_path):
    """Also for a run.toml with port 0, as `splice init` writes it."""
    bound = (run.dir / "bound").read_text().strip()
    assert cli._old_endpoint(run.dir, "tcp://127.0.0.1:0", resume=True) == bound
    assert cli._old_endpoint(run.dir, "tcp://127.0.0.1:0", resume=False) != bound


class Models(BaseHTTPRequestHandler):
    """A replica that lists one model."""

    served = ""

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": self.served}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_up_waits_for_the_version_that_is_served_now(run):
    """A job that a crash had interrupted publishes m@1 while `up` waits for m@0."""
    run.client.run(InitialSync(), timeout_s=30)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("One", (Models,), {"served": "m@1"}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    said = []

    def wait(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            run.client.run(JOB, buffers=BUFFERS, timeout_s=30)
        assert len(said) < 10

    try:
        up._wait_served(run.client, [f"http://127.0.0.1:{server.server_port}"], wait)
    finally:
        server.shutdown()
        server.server_close()
    assert said == ["waiting until m@0 is served"] * 2 + ["waiting until m@1 is served"]


def _wait_served(run):
    """What `up` says while no replica answers, and how it ends; at most 20 looks."""
    said = []

    def wait(text: str) -> None:
        said.append(text)
        assert len(said) < 20, said

    try:
        up._wait_served(run.client, [], wait)
    except ConfigError as error:
        return said, str(error)
    return said, ""


def test_up_says_why_the_trainer_cannot_hold_the_version_again(run):
    """Its checkpoint is gone, or of another model: every attempt would fail alike."""
    run.client.run(InitialSync(), timeout_s=30)
    for node in (run.fake_trainer, run.fake_replica):
        node.die()
    run.lose("trainer"), run.lose("inference-0")
    trainer = run.trainer()

    def refuse(message):
        trainer.script["LoadCheckpoint"] = refuse
        trainer.refuse(message, code=ErrorCode.CHECKPOINT_FAILED)

    trainer.script["LoadCheckpoint"] = refuse
    run.replica(trainer)
    said, error = _wait_served(run)
    assert len(said) < 10 and "m@0 cannot be served again" in error and "told to" in error
    assert run.client.status().is_final
    with pytest.raises(JobFailed, match="nothing is served"):
        run.client.run(JOB, buffers=BUFFERS, timeout_s=30)


def test_up_says_that_a_version_has_another_content(run):
    """Other base weights under the same folder."""
    run.client.run(InitialSync(), timeout_s=30)
    run.fake_replica.die()
    run.lose("inference-0")
    run.fake_trainer.weights = [7, 7, 7]
    run.replica(run.fake_trainer)
    _, error = _wait_served(run)
    assert "m@0 cannot be served again" in error and "is not what it was" in error


class Seen(Exception):
    """The text that a test waits for."""


def test_up_waits_after_a_failure_that_may_pass(run):
    run.client.run(InitialSync(), timeout_s=30)
    run.fake_replica.die()
    run.lose("inference-0")
    replica = run.replica(run.fake_trainer)

    def refuse(message):
        replica.script["PrepareUpdate"] = refuse
        replica.refuse(message, code=ErrorCode.TRANSFER_FAILED)

    replica.script["PrepareUpdate"] = refuse

    def wait(text: str) -> None:
        if "until m@0 is served (the last attempt failed: " in text:
            raise Seen

    with pytest.raises(Seen):
        up._wait_served(run.client, [], wait)
    assert not run.client.status().is_final


def test_up_says_that_the_last_attempt_left_nothing_served(run):
    """Nobody sends a version again to replicas with half of it, but a job."""
    run.client.run(InitialSync(), timeout_s=30)
    run.fake_replica.die()
    run.lose("inference-0")
    run.replica(run.fake_trainer).fail_transfers()
    _, error = _wait_served(run)
    assert "m@0 cannot be served again" in error and "told to" in error


def test_a_new_version_is_progress_and_an_orchestrator_that_is_away_is_none(run, monkeypatch):
    progress = up._Progress(run.client)
    run.client.run(InitialSync(), timeout_s=30)
    assert not progress.look(0.0), "the first look"
    run.client.run(JOB, buffers=BUFFERS, timeout_s=30)
    assert not progress.look(up.LOOK_S / 2) and progress.look(up.LOOK_S)
    assert not progress.look(2 * up.LOOK_S)
    monkeypatch.setattr(up, "STATUS_S", 0.0)
    assert not progress.look(3 * up.LOOK_S)


def test_status_names_a_replica_that_was_given_up(tmp_path):
    up._State(tmp_path).write("up", "serving", given_up={"inference-1": "ended with code 3"})
    said = str(watch.render(up.status(tmp_path)))
    assert "inference-1 ended with code 3" in said and "starts again every 10 minutes" in said


# ---------------------------------------------------------------- one run in a folder


@pytest.fixture
def own_state(tmp_path):
    """The state that a background process in this process writes."""
    (tmp_path / "run").mkdir()
    up._State(tmp_path / "run").write("up", "serving")
    return up.read_state(tmp_path / "run")


def test_a_step_of_the_clock_kills_no_run(own_state, monkeypatch):
    """The kernel's start times are times of day, so they move with the clock."""
    assert up.is_alive(own_state)
    before = psutil.Process().create_time()
    boot_s = psutil.boot_time()
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot_s + 2.5)
    assert abs(psutil.Process().create_time() - before) > 2, "the clock has made no step"
    assert up.is_alive(own_state)


def test_another_process_or_boot_is_not_the_run(own_state):
    boot, ticks = own_state["identity"].split()
    for other in (f"{boot} {int(ticks) + 1}", f"{uuid.uuid4()} {ticks}", None):
        assert not up.is_alive({**own_state, "identity": other})
    with subprocess.Popen(["true"]) as ended:
        found = identity(ended.pid)
        assert found is None or found.startswith(boot)
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert identity(ended.pid) is None, "a zombie does not run"
    assert not up.is_alive({}) and not up.is_alive({"pid": 1, "created": 0.0})


def test_the_folder_of_a_living_run_is_left_as_it_is(run, tmp_path, monkeypatch):
    """Its orchestrator lives, whatever is known of its background process."""
    monkeypatch.setattr(up, "LEAVES_S", 0.1)
    (tmp_path / "run.toml").write_text('name="m"\nmodel="model"\n[trainer]\n[inference]\n')
    before = {path: path.stat() for path in run.dir.iterdir()}
    with pytest.raises(ConfigError, match=r"an orchestrator lives in .*splice stop"):
        up.start(load(tmp_path / "run.toml"), resume=True)
    assert (run.dir / "bound").exists() and before.keys() == {*run.dir.iterdir()}


def test_two_starts_at_once_are_one(tmp_path):
    lock = up._take_lock(tmp_path)
    with pytest.raises(ConfigError, match="another `splice up`"):
        up._take_lock(tmp_path)
    with subprocess.Popen(["sleep", "60"], pass_fds=[lock]) as background:
        os.close(lock)
        with pytest.raises(ConfigError, match="another `splice up`"):
            up._take_lock(tmp_path)
        background.kill()
    os.close(up._take_lock(tmp_path))


def test_a_token_that_a_power_loss_emptied_is_in_the_journal(run):
    (run.dir / "token").write_text("")
    assert up.some_token(run.dir) == TOKEN
    assert up.some_token(run.dir / "nowhere") != TOKEN


@pytest.mark.parametrize(
    ("phase", "more", "code"),
    [
        ("ended", {}, 0),
        ("failed", {"is_config": False}, 1),
        ("failed", {"is_config": True}, 2),
        ("up", {}, 1),  # it was killed
    ],
)
def test_a_start_in_the_foreground_ends_as_the_run_does(tmp_path, monkeypatch, phase, more, code):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with subprocess.Popen(["sleep", "0.2"]) as background:
        state = {"pid": background.pid, "phase": phase, "text": "why", **more}
        (tmp_path / up.STATE).write_text(json.dumps(state))
        assert up.follow(tmp_path, background.pid) == code
