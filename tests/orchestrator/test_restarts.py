"""Crashed processes are started again, a limited number of times within an hour and without
progress."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from orchestrator.control import peers
from orchestrator.control.liveness import LOST_AFTER_S
from orchestrator.errors import ErrorCode, JobFailed, LinkLost, NodeLost
from orchestrator.processes import launch
from orchestrator.processes.launch import Launcher, NodeProcess
from orchestrator.processes.restarts import (
    EXIT_CONFIG,
    EXIT_LINK_LOST,
    JOB_FAILS,
    LONGEST_PAUSE_S,
    BackOff,
    RestartBudget,
)
from orchestrator.protocol.config import TrainerConfig
from orchestrator.protocol.messages import InitialSync, NodeEnded, Unready
from orchestrator.protocol.node_link import NodeLink
from tests.orchestrator.fake_nodes import FakeLauncher, soon
from tests.orchestrator.run import BUFFERS, JOB, TOKEN, Run
from trainer_node.launcher import host as trainer_host
from trainer_node.launcher.host import RanksProcess, TrainerHost, TrainerLaunch


def test_starts_count_within_the_window_only():
    budget = RestartBudget(2, within_s=100.0)
    assert budget.take(0.0) and budget.take(60.0)
    assert not budget.has_left(100.0) and not budget.take(100.0) and budget.used(100.0) == 2
    assert budget.take(101.0), "the first start is longer ago than the window"
    assert not budget.take(160.0) and budget.take(161.0)
    assert not RestartBudget(0).take(0.0)


def test_crashes_with_one_cause_count_once():
    budget = RestartBudget(2, within_s=100.0)
    assert budget.take(0.0) and budget.explain("a", since_s=0.0)
    assert not budget.explain("b", since_s=0.0), "it is explained"
    assert budget.take(1.0) and budget.used(1.0) == 2, "nobody has said why yet"
    assert not budget.explain("a", since_s=1.5) and budget.explain("a", since_s=0.5)
    assert budget.used(1.0) == 1
    assert budget.take(2.0, "a") and budget.used(2.0) == 1
    assert budget.take(3.0, "b") and budget.used(3.0) == 2
    assert not budget.take(4.0, "c") and not budget.take(4.0)
    assert budget.take(4.0, "b"), "one more of the same"
    assert budget.used(102.5) == 1 and budget.take(102.5, "c")


def test_crashes_in_a_job_that_fails_by_itself_do_not_count():
    budget = RestartBudget(1, within_s=100.0)
    for now_s in (0.0, 1.0, 2.0):
        assert budget.take(now_s) and not budget.has_left(now_s)
        assert budget.explain(JOB_FAILS, since_s=now_s) and budget.used(now_s) == 0
    assert budget.take(3.0) and not budget.take(4.0, "a"), "others count as before"
    assert budget.take(4.0, JOB_FAILS) and not budget.take(5.0)
    assert RestartBudget(0).take(0.0, JOB_FAILS)


def test_crashes_before_the_last_progress_do_not_count():
    budget = RestartBudget(1, within_s=100.0)
    assert budget.take(0.0, "a") and not budget.take(1.0)
    budget.renew()
    assert budget.used(1.0) == 0 and budget.take(2.0) and not budget.take(3.0)


def test_pauses_after_lost_links_grow_and_shrink():
    pauses = BackOff()
    assert [pauses.next_s(float(i)) for i in range(7)] == [
        1.0,
        2.0,
        4.0,
        8.0,
        16.0,
        LONGEST_PAUSE_S,
        LONGEST_PAUSE_S,
    ]
    assert pauses.next_s(10_000.0) == 1.0


def crashing(starts: Path, code: int = 3) -> tuple[str, ...]:
    """A command that notes each start and ends, whatever arguments follow."""
    return (
        sys.executable,
        "-c",
        f"open({str(starts)!r}, 'a').write('x'); raise SystemExit({code})",
    )


RANKS = """
import os, subprocess, sys
from pathlib import Path
starts, codes = Path(sys.argv[1]), sys.argv[2].split(",")
print("ready", flush=True)
for line in sys.stdin:
    if line == "ping\\n":
        print("pong", flush=True)
    elif line.startswith("start "):
        with starts.open("a") as file:
            file.write("t" if "--template" in sys.argv else "p")
        number = len(starts.read_text())
        code = codes[min(number, len(codes)) - 1]
        if code == "hangs":
            os.read(os.pipe()[0], 1)
        if code == "leaves":
            subprocess.Popen(["sleep", "100"])
        print("started", flush=True)
        if code not in ("runs", "leaves"):
            print("ended", code, flush=True)
    elif line == "end\\n":
        print("ended", -9, flush=True)
"""


def ending(starts: Path, *codes: object) -> tuple[str, ...]:
    """A command that speaks as `trainer_node.launcher.ranks` does: the ranks' n-th life ends with
    the n-th code, the last one again and again.

    "runs": it ends when it is told to. "leaves": so too, but a process of it stays. "hangs":
    nothing more is said.
    """
    return (sys.executable, "-c", RANKS, str(starts), ",".join(map(str, codes)))


def host(run: Run, tmp_path: Path, prefix: tuple[str, ...], **options: object) -> TrainerHost:
    launch = TrainerLaunch(
        endpoint=run.endpoint,
        config=tmp_path / "trainer.json",
        python="python",
        prefix=prefix,
        **options,
    )
    return TrainerHost(launch, config=TrainerConfig(model=tmp_path), run_token=TOKEN)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@contextlib.contextmanager
def serving(host: TrainerHost):
    """The host on a thread; its exit codes."""
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(host.serve()), daemon=True)
    thread.start()
    yield codes
    host.stop()
    thread.join(40)
    assert not thread.is_alive()


def test_a_trainer_that_cannot_live_ends_its_launcher(tmp_path):
    with Run(tmp_path / "run") as run:
        assert host(run, tmp_path, crashing(tmp_path / "starts"), template=False).serve() == 3
        assert host(run, tmp_path, ending(tmp_path / "lives", -9), max_restarts=1).serve() == 1
    assert read(tmp_path / "starts") == "xxx"
    assert read(tmp_path / "lives") == "tt", "the template outlives its ranks"


def test_a_wrong_configuration_is_final(tmp_path):
    """Neither the trainer's launcher nor a cluster's starts such a process again."""
    with Run(tmp_path / "run") as run:
        assert host(run, tmp_path, ending(tmp_path / "lives", EXIT_CONFIG)).serve() == EXIT_CONFIG
    assert read(tmp_path / "lives") == "t"
    starts = tmp_path / "starts"
    node = NodeProcess(
        name="n",
        argv=crashing(starts, EXIT_CONFIG),
        env={},
        log_file=tmp_path / "log",
        restarts=RestartBudget(2),
    )
    with Launcher() as launcher:
        launcher.start(node)
        assert soon(lambda: node.is_lost(time.monotonic()))
        time.sleep(1.5)  # the launcher looks every second
        with pytest.raises(NodeLost, match="n ended with code 2"):
            launcher.check()
    assert read(starts) == "x"


def test_who_lost_the_link_is_started_again_for_ever_and_who_was_told_to_end_is_not(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(BackOff, "next_s", lambda *_: 0.01)
    starts = tmp_path / "starts"
    with (
        Run(tmp_path / "run") as run,
        serving(host(run, tmp_path, ending(starts, *[EXIT_LINK_LOST] * 8, 0), max_restarts=0)),
    ):
        assert soon(lambda: read(starts) == "t" * 9)
        time.sleep(0.5)
        assert read(starts) == "t" * 9


def test_starts_after_a_lost_link_pause(tmp_path):
    starts = tmp_path / "starts"
    with Run(tmp_path / "run") as run, serving(host(run, tmp_path, ending(starts, EXIT_LINK_LOST))):
        assert soon(lambda: read(starts) == "tt")
        time.sleep(1.0)
        assert read(starts) == "tt"


@pytest.mark.parametrize("failure", ["dies", "hangs"])
def test_a_template_that_does_not_fork_is_done_without_once(failure, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_host, "SILENT_S", 1.0)
    starts = tmp_path / "starts"
    if failure == "dies":
        script = (
            sys.executable,
            "-c",
            "import sys\nif '--template' in sys.argv: sys.exit(4)\n" + RANKS,
            str(starts),
            "9,runs",
        )
    else:
        script = ending(starts, "hangs", 9, "runs")
    with Run(tmp_path / "run") as run, serving(host(run, tmp_path, script)):
        # The crash of the plain one is followed by another try with a template.
        assert soon(lambda: read(starts) == ("tpt" if failure == "hangs" else "pp"))
        time.sleep(2.5)
        assert read(starts) == ("tpt" if failure == "hangs" else "pp")


@pytest.mark.parametrize("leaves", [False, True])
def test_a_prefix_that_stays_a_process_may_stay_and_what_a_rank_leaves_may_not(leaves, tmp_path):
    prefix = ("timeout", "1000", *ending(tmp_path / "starts", "leaves" if leaves else "runs"))
    launch = TrainerLaunch(
        endpoint="tcp://127.0.0.1:1", config=tmp_path, python="python", prefix=prefix
    )
    ranks = RanksProcess(launch, config=TrainerConfig(model=tmp_path))
    ranks.start()
    try:
        assert soon(lambda: ranks.look() is None and not ranks._is_starting)
        left = [
            psutil.Process(pid).name() for pid in ranks.end(grace_s=0.0, is_hurried=lambda: False)
        ]
        assert left == (["sleep"] if leaves else []) and ranks._starter.is_running
    finally:
        ranks.stop()


def test_an_idle_template_that_ends_is_replaced(tmp_path):
    starts = tmp_path / "starts"
    with (
        Run(tmp_path / "run") as run,
        serving(served := host(run, tmp_path, ending(starts, 0, "runs"))),
    ):
        assert soon(lambda: read(starts) == "t" and not served._ranks.are_running)
        first = served._ranks._starter.pid
        os.kill(first, signal.SIGKILL)
        assert soon(
            lambda: served._ranks._is_ready and served._ranks._starter.pid not in (None, first)
        )
        assert read(starts) == "t", "the trainer was told to end"


def test_the_launcher_outlives_its_link(tmp_path, monkeypatch):
    """A connection that is dead is replaced by a new one, and the trainer continues meanwhile."""
    starts, lost, real = tmp_path / "starts", threading.Event(), NodeLink.recv

    def recv(link, *, timeout_s):
        if not lost.is_set():
            lost.set()
            raise LinkLost("silent")
        return real(link, timeout_s=timeout_s)

    monkeypatch.setattr(NodeLink, "recv", recv)
    with Run(tmp_path / "run") as run:
        served = host(run, tmp_path, ending(starts, "runs"))
        first = served._link
        with serving(served) as codes:
            assert soon(
                lambda: lost.is_set() and served._lost_s is None and served._link is not first
            )
            assert soon(lambda: run.states().get("trainer-launcher-0") == "ready")
            assert soon(lambda: read(starts) == "t") and codes == []


def test_a_launcher_without_an_orchestrator_ends_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_host, "ORPHAN_S", 0.5)
    monkeypatch.setattr(trainer_host, "RECONNECT_S", 0.2)
    monkeypatch.setattr(TrainerHost, "_reconnect", lambda _: time.sleep(0.1))
    with Run(tmp_path / "run") as run:
        served = host(run, tmp_path, ending(tmp_path / "starts", "runs"))
        monkeypatch.setattr(served._link, "_lost_after_s", 0.0)
        assert served.serve() == EXIT_LINK_LOST
        assert not served._ranks.are_running


def test_a_trainer_that_has_ended_is_not_waited_for_until_its_silence_tells(tmp_path):
    with Run(tmp_path / "run") as run:
        served = host(run, tmp_path, ending(tmp_path / "starts", "runs"), max_restarts=0)
        with serving(served):
            assert soon(lambda: served._ranks.are_running and not served._ranks._is_starting)
            trainer = run.trainer(start_id=served._ranks.start_id)
            assert soon(lambda: run.states().get("trainer") == "ready")
            trainer.die()
            silent_s = time.monotonic()
            os.kill(served._ranks._starter.pid, signal.SIGKILL)
            assert (
                soon(lambda: run.states()["trainer"] == "lost")
                and time.monotonic() - silent_s < LOST_AFTER_S
            )
        run.trainer()
        assert soon(lambda: run.states()["trainer"] == "ready")


def test_a_job_does_not_wait_for_a_trainer_that_was_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "GIVEN_UP_S", 2.0)
    with Run(tmp_path / "run") as run:
        waiting = run.client.submit(InitialSync())
        assert host(run, tmp_path, ending(tmp_path / "lives", -9), max_restarts=0).serve() == 1
        with pytest.raises(JobFailed, match="does not come back: it ended with code -9") as failed:
            run.client.wait(waiting, timeout_s=30)
        assert failed.value.code == ErrorCode.NODE_LOST
        with pytest.raises(JobFailed, match="start it again with `splice trainer`"):
            run.client.run(InitialSync(), timeout_s=30)
        trainer = run.trainer()
        run.replica(lambda: trainer)
        assert run.client.run(InitialSync(), timeout_s=30).version == 0


def test_what_is_said_late_of_an_ended_process_is_not_said_of_the_next(tmp_path):
    with Run(tmp_path / "run") as run:
        run.trainer(start_id="first").die()
        run.trainer(start_id="second")
        launcher = FakeLauncher(
            make=run.trainer, endpoint=run.endpoint, node_id="trainer-launcher-0", token=TOKEN
        ).start()
        run.nodes.append(launcher)
        assert soon(lambda: run.states().get("trainer-launcher-0") == "ready")
        launcher.link.send(NodeEnded(node_id="trainer", start_id="first", code=-9))
        launcher.link.send(
            Unready(
                node_id="trainer-launcher-0", reason="a sign that the message before it has come"
            )
        )
        assert (
            soon(lambda: run.states().get("trainer-launcher-0") == "connected")
            and run.states()["trainer"] == "ready"
        )
        launcher.link.send(NodeEnded(node_id="trainer", start_id="second", code=-9))
        assert soon(lambda: run.states()["trainer"] == "lost", 5)


def test_only_a_launcher_is_believed_that_another_node_has_ended(tmp_path):
    with Run(tmp_path / "run") as run:
        trainer, other = run.trainer(), run.replica(lambda: None)
        other.link.send(NodeEnded(node_id="trainer", code=1))
        assert soon(lambda: run.orchestrator._router.dropped["inference-0"] == 1)
        assert run.states()["trainer"] == "ready" and trainer.log == []


def test_the_launcher_gives_a_node_up_and_says_so(tmp_path):
    starts = tmp_path / "starts"
    node = NodeProcess(
        name="node",
        argv=crashing(starts),
        env={},
        log_file=tmp_path / "log",
        restarts=RestartBudget(1),
    )
    with Launcher() as launcher:
        launcher.start(node)
        with pytest.raises(NodeLost, match="node ended with code 3"):
            check_until_lost(launcher)
    assert starts.read_text() == "xx"


def ends(name: str, *, group: str, folder: Path, lives: int = 10**6) -> NodeProcess:
    """A node that ends with code 3; after that many starts it stays."""
    starts = folder / name
    script = (
        f"import time; from pathlib import Path; p = Path({str(starts)!r})\n"
        "p.open('a').write('x')\n"
        f"time.sleep(1000) if len(p.read_text()) > {lives} else exit(3)"
    )
    return NodeProcess(
        name=name,
        argv=(sys.executable, "-c", script),
        env={},
        log_file=folder / f"{name}.log",
        is_supervisor=True,
        group=group,
    )


def test_one_of_several_that_gives_up_is_not_missed_and_starts_again_later(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "RETRY_S", 2.0)
    with Launcher() as launcher:
        launcher.start(ends("one", group="inference", folder=tmp_path, lives=0))
        spare = launcher.start(ends("two", group="inference", folder=tmp_path, lives=2))
        assert soon(lambda: launcher.given_up() == {"two": "ended with code 3"})
        launcher.check()
        with pytest.raises(NodeLost, match="two ended with code 3"):
            launcher.check(each=True)  # a start waits for all
        assert soon(lambda: read(tmp_path / "two") == "xxx" and not launcher.given_up())
        launcher.check(each=True)
        os.kill(launcher.nodes["one"].pid, signal.SIGKILL)
        assert soon(lambda: list(launcher.given_up()) == ["one"])
        launcher.check()
        os.kill(spare.pid, signal.SIGKILL)  # and none is left
        with pytest.raises(NodeLost, match="one ended with code -9"):
            check_until_lost(launcher)


def test_who_has_a_work_of_its_own_is_missed(tmp_path):
    with Launcher() as launcher:
        launcher.start(ends("replica", group="inference", folder=tmp_path, lives=0))
        launcher.start(ends("trainer", group="", folder=tmp_path))
        launcher.start(ends("orchestrator", group="", folder=tmp_path, lives=0))
        with pytest.raises(NodeLost, match="trainer ended with code 3"):
            check_until_lost(launcher)
        assert launcher.given_up() == {}


def test_a_trainer_that_works_between_its_crashes_is_started_again_for_ever(tmp_path):
    """Crashes in a row count: one that has trained begins a new row."""
    lives, trainers = tmp_path / "lives", []
    with Run(tmp_path / "run") as run:
        served = host(run, tmp_path, ending(lives, "runs"), max_restarts=2)

        def crash(number: int, *, works: bool) -> None:
            assert soon(lambda: read(lives) == "t" * number and served._ranks.are_running)
            trainers.append(run.trainer(start_id=served._ranks.start_id))
            assert soon(lambda: run.states().get("trainer") == "ready")
            if number == 1:
                run.client.run(InitialSync(), timeout_s=30)
            if works:
                run.client.run(JOB, buffers=BUFFERS, timeout_s=30)
            trainers[-1].die()
            served._ranks._say("end")

        with serving(served) as codes:
            assert soon(lambda: run.states().get("trainer-launcher-0") == "ready")
            run.replica(lambda: trainers[-1])
            for number in range(1, 6):
                crash(number, works=True)
            crash(6, works=False), crash(7, works=False)
            assert soon(lambda: read(lives) == "t" * 8) and codes == []
            crash(8, works=False)
            assert soon(lambda: codes == [1])


@pytest.mark.parametrize(("code", "count"), [(3, 1), (-9, 3)])
def test_a_supervisor_is_started_again_after_a_signal_alone(tmp_path, code, count):
    """Its own exit code says that its children crashed too often."""
    starts = tmp_path / "starts"
    dies = f"open({str(starts)!r}, 'a').write('x'); import os; os.kill(os.getpid(), 9)"
    node = NodeProcess(
        name="node",
        argv=crashing(starts) if code > 0 else (sys.executable, "-c", dies),
        env={},
        log_file=tmp_path / "log",
        restarts=RestartBudget(2),
        is_supervisor=True,
    )
    with Launcher() as launcher:
        launcher.start(node)
        with pytest.raises(NodeLost, match=f"node ended with code {code}"):
            check_until_lost(launcher)
    assert starts.read_text() == count * "x"


def test_a_node_that_lost_the_link_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(BackOff, "next_s", lambda *_: 0.01)
    starts = tmp_path / "starts"
    node = NodeProcess(
        name="node", argv=crashing(starts, EXIT_LINK_LOST), env={}, log_file=tmp_path / "log"
    )
    with Launcher() as launcher:
        launcher.start(node)
        until_s = time.monotonic() + 30
        while len(read(starts)) < 3 and time.monotonic() < until_s:
            launcher.check()
            time.sleep(0.01)
        assert len(read(starts)) >= 3


def test_a_node_that_is_being_started_for_the_last_time_is_not_lost(tmp_path, monkeypatch):
    starts, start = tmp_path / "starts", NodeProcess.start
    monkeypatch.setattr(NodeProcess, "start", lambda node: (time.sleep(0.5), start(node)))
    node = NodeProcess(
        name="node",
        argv=crashing(starts),
        env={},
        log_file=tmp_path / "log",
        restarts=RestartBudget(1),
    )
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
