"""Crashed processes are started again, so many times within an hour."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from orchestrator.errors import NodeLost
from orchestrator.launch import Launcher, NodeProcess
from orchestrator.liveness import LOST_AFTER_S
from orchestrator.protocol.config import TrainerConfig
from orchestrator.protocol.messages import NodeEnded
from orchestrator.protocol.restarts import RestartBudget
from orchestrator.trainer_host import TrainerHost, TrainerLaunch
from tests.orchestrator.fake_nodes import soon
from tests.orchestrator.test_orchestrator import TOKEN, Run


def test_starts_count_within_the_window_only():
    budget = RestartBudget(2, within_s=100.0)
    assert budget.take(0.0) and budget.take(60.0)
    assert not budget.has_left(100.0) and not budget.take(100.0) and budget.used(100.0) == 2
    assert budget.take(101.0), "the first start is longer ago than the window"
    assert not budget.take(160.0) and budget.take(161.0)
    assert not RestartBudget(0).take(0.0)


def crashing(starts: Path) -> tuple[str, ...]:
    """A command that notes each start and ends with 3, whatever arguments follow."""
    return (sys.executable, "-c", f"open({str(starts)!r}, 'a').write('x'); raise SystemExit(3)")


def test_a_trainer_that_cannot_live_ends_its_launcher(tmp_path):
    starts, config = tmp_path / "starts", tmp_path / "trainer.json"
    with Run(tmp_path / "run") as run:
        launch = TrainerLaunch(endpoint=run.endpoint, config=config, python="python", prefix=crashing(starts), max_restarts=2)
        host = TrainerHost(launch, config=TrainerConfig(model=tmp_path), run_token=TOKEN)
        assert host.serve() == 3
    assert starts.read_text() == "xxx"


def test_a_trainer_that_has_ended_is_not_waited_for_until_its_silence_tells(tmp_path):
    with Run(tmp_path / "run") as run:
        trainer = run.trainer()
        assert soon(lambda: run.states().get("trainer") == "ready")
        trainer.die()
        silent_s = time.monotonic()
        launch = TrainerLaunch(
            endpoint=run.endpoint, config=tmp_path / "trainer.json", python="python", prefix=crashing(tmp_path / "starts"), max_restarts=0,
        )  # fmt: skip
        assert TrainerHost(launch, config=TrainerConfig(model=tmp_path), run_token=TOKEN).serve() == 3
        assert soon(lambda: run.states()["trainer"] == "lost") and time.monotonic() - silent_s < LOST_AFTER_S
        run.trainer()
        assert soon(lambda: run.states()["trainer"] == "ready")


def test_only_a_launcher_is_believed_that_another_node_has_ended(tmp_path):
    with Run(tmp_path / "run") as run:
        trainer, other = run.trainer(), run.replica(lambda: None)
        other.link.send(NodeEnded(node_id="trainer", code=1))
        assert soon(lambda: run.orchestrator._router.dropped["inference-0"] == 1)
        assert run.states()["trainer"] == "ready" and trainer.log == []


def test_the_launcher_gives_a_node_up_and_says_so(tmp_path):
    starts = tmp_path / "starts"
    node = NodeProcess(name="node", argv=crashing(starts), env={}, log_file=tmp_path / "log", restarts=RestartBudget(1))
    with Launcher() as launcher:
        launcher.start(node)
        with pytest.raises(NodeLost, match="node ended with code 3"):
            check_until_lost(launcher)
    assert starts.read_text() == "xx"


def test_a_node_that_is_being_started_for_the_last_time_is_not_lost(tmp_path, monkeypatch):
    starts, start = tmp_path / "starts", NodeProcess.start
    monkeypatch.setattr(NodeProcess, "start", lambda node: (time.sleep(0.5), start(node)))
    node = NodeProcess(name="node", argv=crashing(starts), env={}, log_file=tmp_path / "log", restarts=RestartBudget(1))
    with Launcher() as launcher:
        launcher.start(node)
        with pytest.raises(NodeLost):
            check_until_lost(launcher)
        assert starts.read_text() == "xx"


def check_until_lost(launcher: Launcher) -> None:
    until_s = time.monotonic() + 30
    while time.monotonic() < until_s:
        launcher.check()
        time.sleep(0.01)
