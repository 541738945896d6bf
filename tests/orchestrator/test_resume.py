"""The orchestrator as a process, ended by SIGKILL at every kind of moment and started again with
--resume. Nodes and client live on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from orchestrator.errors import ErrorCode, JobFailed
from orchestrator.protocol.messages import (
    WAITING,
    Forward,
    ForwardBackward,
    Hello,
    InitialSync,
    OptimStep,
    Resync,
    SubmitJob,
    TrainLora,
    forward_specs,
)
from orchestrator.publication.state import State, after_restart
from orchestrator.storage.journal import Journal
from splice.client.clients import SpliceClient
from tests import forked
from tests.orchestrator.fake_nodes import FakeLauncher, FakeReplica, FakeTrainer, soon
from tests.orchestrator.raw import raw_peer
from tests.orchestrator.run import BATCH, BUFFERS, JOB, TOKEN
from tests.orchestrator.serving import run_file, start_serve


class Killed:
    """`splice serve` with fake nodes; `kill_in(node, kind)` kills and restarts it when the node is
    asked that.
    """

    def __init__(self, folder: Path) -> None:
        self.dir, self.starts = folder / "run", 0
        self.log = (folder / "log").open("a")
        self.start()
        deadline = time.monotonic() + 60
        while not (self.dir / "endpoint").exists():
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.02)
        self.endpoint = (self.dir / "endpoint").read_text()
        self.client = SpliceClient(endpoint=self.endpoint, run_token=TOKEN).__enter__()
        self.trainer = FakeTrainer(endpoint=self.endpoint, node_id="trainer", token=TOKEN).start()
        self.replica = FakeReplica(
            source=lambda: self.trainer.weights,
            endpoint=self.endpoint,
            node_id="inference-0",
            token=TOKEN,
        ).start()

    def start(self, *, die_at: str = "") -> None:
        """`die_at`: see `tests/orchestrator/dying.py`."""
        module = "tests.orchestrator.dying" if die_at else "splice"
        self.process = start_serve(self.dir, log=self.log, module=module, DIE_AT=die_at)
        self.starts += 1

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(5)

    def restart(self) -> None:
        self.kill()
        self.start()

    def kill_in(self, node, kind: str, *, after: bool = False) -> None:
        """Before the node does what it is asked, or after it has answered (the answer may or may
        not have arrived).
        """
        handler = getattr(node, f"on_{kind}", node._done)

        def script(message) -> None:
            if after:
                handler(message)
            self.restart()
            if not after:
                handler(message)

        node.script[kind] = script

    def served(self, wanted: tuple[int, list[int]]) -> bool:
        return soon(lambda: self.replica.served[-1:] == [wanted], 60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.client.stop_run()
        self.client.__exit__()
        try:
            self.process.wait(10)
        finally:
            self.kill()
            for end in (self.trainer.stop, self.replica.stop, self.log.close):
                end()


@pytest.fixture
def killed(tmp_path):
    run = Killed(tmp_path)
    try:
        yield run
    except BaseException:
        print((tmp_path / "log").read_text()[-4000:])
        raise
    finally:
        run.close()


def test_a_status_asked_for_while_it_is_down_is_answered(killed):
    """What a client sends to an orchestrator that does not know it yet is dropped: it is asked for
    again after the greeting.
    """
    assert killed.client.status(timeout_s=60).version is None
    killed.kill()
    threading.Timer(0.5, killed.start).start()
    assert killed.client.status(timeout_s=60).version is None


def test_a_client_that_slept_through_a_restart_stops_the_run(killed):
    """It still has to read that the orchestrator is new. An orchestrator that is told to stop
    before it is asked for its status may end without an answer.
    """
    killed.restart()
    link, sent = killed.client._link, []
    assert soon(lambda: link.has_mail, 60)
    send = link.send
    link.send = lambda message: sent.append(message.kind) or send(message)
    killed.client.stop_run()
    asked = sent.count("GetStatus")  # again after each new connection
    assert sent == ["GetStatus"] * asked + ["StopRun"] and killed.process.wait(30) == 0


def test_killed_while_idle_and_in_the_step(killed):
    """The version counter continues, the replica is verified again, and a step that was under way
    is taken once.
    """
    killed.client.run(InitialSync())
    killed.client.run(JOB, buffers=BUFFERS)
    killed.restart()
    assert soon(lambda: len(killed.replica.served) >= 3, 60) and killed.replica.times_forgotten > 0
    assert killed.replica.served[1:] == [(1, [11, 21, 31])] * 2, "the served version is sent again"
    assert killed.client.status().version == 1
    killed.kill_in(killed.trainer, "TrainMerged")
    result = killed.client.run(
        JOB, buffers=BUFFERS, timeout_s=40
    )  # the same call: the client notices and asks again
    assert (result.version, result.metrics) == (2, {"loss": 1.0})
    assert killed.served((2, [12, 22, 32])) and killed.trainer.log.count("TrainMerged") == 2
    killed.kill()
    threading.Timer(0.5, killed.start).start()
    again = killed.client.run(
        JOB, buffers=BUFFERS, timeout_s=40
    )  # submitted while nobody was there
    assert again.version == 3 and killed.starts == 4
    journal = Journal(killed.dir / "journal.sqlite", run_token=TOKEN, name="m")
    assert journal.unfinished_jobs() == []
    journal.close()


def _new_nodes(killed) -> None:
    """The nodes start again, as after a reboot."""
    for node in (killed.trainer, killed.replica):
        node.stop()
    killed.endpoint = (killed.dir / "endpoint").read_text()
    common = {"endpoint": killed.endpoint, "token": TOKEN}
    trainer = FakeTrainer(node_id="trainer", **common)

    def load(message) -> None:
        trainer.script["LoadCheckpoint"] = load
        if Path(message.checkpoint_dir).exists():
            trainer.on_LoadCheckpoint(message)
        else:
            trainer.refuse(message, code=ErrorCode.CHECKPOINT_FAILED)

    trainer.script["LoadCheckpoint"] = load
    killed.trainer = trainer.start()
    killed.replica = FakeReplica(
        source=lambda: killed.trainer.weights, node_id="inference-0", **common
    ).start()


def test_a_run_goes_on_in_another_folder(killed, tmp_path):
    """Renamed or moved while it was down."""
    killed.client.run(InitialSync())
    killed.client.run(JOB, buffers=BUFFERS)
    killed.kill()
    killed.dir = killed.dir.rename(tmp_path / "moved")
    killed.start()
    assert soon(lambda: "run m listens" in (tmp_path / "log").read_text().split("resuming")[-1])
    _new_nodes(killed)  # the trainer has the base's weights
    assert killed.served((1, [11, 21, 31])), (tmp_path / "log").read_text()[-3000:]
    assert f"the run was in {tmp_path / 'run'}" in (tmp_path / "log").read_text()


def test_a_saved_copy_that_is_gone_is_not_missed(killed, tmp_path):
    """`save_checkpoint` right after a version holds the same step."""
    killed.client.run(InitialSync())
    killed.client.run(JOB, buffers=BUFFERS)
    killed.client.save_checkpoint(str(tmp_path / "mine"))
    killed.kill()
    shutil.rmtree(tmp_path / "mine")
    killed.start()
    _new_nodes(killed)  # the trainer has the base's weights
    assert killed.served((1, [11, 21, 31])), (tmp_path / "log").read_text()[-3000:]


@pytest.mark.parametrize(
    "moment",
    [
        "SaveCheckpoint",
        "ReceiveWeights",
        "applying",
        "CommitUpdate",
        "committed",
        "with the trainer",
    ],
)
def test_killed_in_a_publication(moment, killed):
    """It rolls forward from its durable state: what is served at the end is the version the job
    made, once trained, and the job ends.
    """
    killed.client.run(InitialSync())
    if moment == "SaveCheckpoint":
        killed.kill_in(killed.trainer, "TrainMerged", after=True)
    elif moment == "applying":

        def receive(message) -> None:
            killed.replica.stand_still(message)
            time.sleep(0.3)
            killed.restart()

        killed.replica.script["ReceiveWeights"] = receive
    elif moment == "with the trainer":

        def die(_message) -> None:
            killed.restart()
            killed.trainer.die()
            killed.trainer = FakeTrainer(
                endpoint=killed.endpoint, node_id="trainer", token=TOKEN
            ).start()

        killed.replica.script["CommitUpdate"] = die
    elif moment == "committed":
        killed.kill_in(killed.replica, "CommitUpdate", after=True)
    else:
        killed.kill_in(killed.replica, moment)
    result = killed.client.run(JOB, buffers=BUFFERS, timeout_s=40)
    assert (result.version, result.metrics) == (1, {"loss": 1.0}) and killed.starts == 2
    assert killed.served((1, [11, 21, 31])), "what the disk had, trained once"
    assert killed.trainer.log.count("TrainMerged") == (0 if moment == "with the trainer" else 1)
    assert killed.trainer.aborted.is_set() and killed.replica.aborted.is_set(), (
        "what may have been in flight was ended"
    )
    assert killed.client.run(JOB, buffers=BUFFERS, timeout_s=40).version == 2
    assert killed.served((2, [12, 22, 32]))


def test_a_job_cancelled_while_it_is_down_is_not_run(killed):
    first_may_end = threading.Event()

    def first(message) -> None:
        first_may_end.wait(40)
        killed.trainer.on_ForwardBackward(message)

    killed.trainer.script["ForwardBackward"] = first
    killed.kill()
    jobs = [killed.client.submit(ForwardBackward(tensors=BATCH), buffers=BUFFERS) for _ in range(2)]
    killed.client.cancel(jobs[1])
    killed.start()
    with pytest.raises(JobFailed, match="cancelled before it started"):
        killed.client.wait(jobs[1], timeout_s=40)
    first_may_end.set()
    assert killed.client.wait(jobs[0], timeout_s=40).pending_batches == 1
    assert killed.trainer.pending == 1


def test_killed_with_queued_jobs_and_pending_gradients(killed):
    """Open jobs are run, each once; what the trainer holds is still known, and missed when the
    trainer dies as well.
    """
    killed.kill_in(killed.trainer, "ForwardBackward")
    results = []

    def run(job, buffers) -> None:
        client = SpliceClient(endpoint=killed.endpoint, run_token=TOKEN).__enter__()
        results.append(client.run(job, buffers=buffers, timeout_s=40))
        client.__exit__()

    threads = []
    for job, buffers in (
        (ForwardBackward(tensors=BATCH), BUFFERS),
        (ForwardBackward(tensors=BATCH), BUFFERS),
    ):
        threads.append(threading.Thread(target=run, args=(job, buffers)))
        threads[-1].start()
        time.sleep(0.1)
    for thread in threads:
        thread.join(60)
    assert sorted(r.pending_batches for r in results) == [1, 2] and killed.trainer.pending == 2
    killed.kill()
    killed.trainer.die()
    killed.start()
    killed.trainer = FakeTrainer(endpoint=killed.endpoint, node_id="trainer", token=TOKEN).start()
    with pytest.raises(
        JobFailed, match="gradients of 2 batches since the base weights are lost"
    ) as lost:
        killed.client.run(OptimStep(), timeout_s=40)
    assert lost.value.code == "work_lost"


def test_killed_in_memory_mode_exit(killed):
    """Whenever it dies, the trainer is found or started, and its step is neither lost nor taken
    twice.
    """
    trainers = [killed.trainer]

    def make():
        trainers.append(
            FakeTrainer(endpoint=killed.endpoint, node_id="trainer", token=TOKEN).start()
        )
        killed.trainer = trainers[-1]
        killed.kill_in(
            killed.trainer,
            ("TrainLora", "SaveCheckpoint", "Forward")[len(trainers) - 2],
            after=len(trainers) == 3,
        )
        return trainers[-1]

    launcher = FakeLauncher(
        make=make, endpoint=killed.endpoint, node_id="trainer-launcher-0", token=TOKEN
    ).start()
    launcher.trainer = killed.trainer
    try:
        killed.client.run(InitialSync(), timeout_s=40)
        for _ in range(2):
            killed.client.run(
                TrainLora(tensors=BATCH, output_dir="/nowhere"), buffers=BUFFERS, timeout_s=40
            )
        forward = Forward(tensors=forward_specs(num_sequences=1, num_tokens=2))
        killed.client.run(forward, buffers=BUFFERS[:2], timeout_s=40)
        assert killed.starts == 4 and launcher.trainer is None
        assert [t.log.count("TrainLora") for t in trainers] == [0, 1, 1, 0]
        assert trainers[3].log.count("Forward") == 1
        assert "LoadCheckpoint" in trainers[3].log
    finally:
        launcher.stop()
        for trainer in trainers:
            trainer.die()


def test_a_run_is_not_resumed_unasked(killed):
    killed.client.run(InitialSync())
    killed.kill()
    ran = forked.run("serve", run_file(killed.dir), env={**os.environ, "SPLICE_RUN_TOKEN": TOKEN})
    assert (ran.returncode, "--resume" in ran.stderr) == (2, True)
    killed.start()


def outcome_by_its_death(killed, job_id):
    """What the client was told of the job by the orchestrator that ends meanwhile."""
    is_dead = False
    while not is_dead:
        is_dead = killed.process.poll() is not None
        with contextlib.suppress(TimeoutError):
            return killed.client.wait(job_id, timeout_s=0.3)
    assert killed.process.returncode == -signal.SIGKILL
    return None


def test_killed_at_each_commit_of_a_job(killed):
    """Whatever is on disk then: the job runs once, its outcome is told only once it is journaled,
    together with what the trainer holds.
    """
    job, jobs = TrainLora(tensors=BATCH, output_dir="/nowhere"), 1
    killed.client.run(job, buffers=BUFFERS, timeout_s=40)
    for die_at, has_job, has_outcome in (
        ("1 before", False, False),
        ("1 after", True, False),
        ("2 before", True, False),
        ("2 after", True, True),
    ):
        killed.kill()
        killed.start(die_at=die_at)
        heard: list[str] = []
        job_id = killed.client.submit(
            job, buffers=BUFFERS, on_progress=lambda p, heard=heard: heard.append(p.phase)
        )
        assert outcome_by_its_death(killed, job_id) is None
        assert heard == [] or has_job, "acknowledged before it was on disk"
        assert killed.trainer.log.count("TrainLora") == jobs + die_at.startswith("2")
        journal = Journal(killed.dir / "journal.sqlite", run_token=TOKEN, name="m")
        row, steps = journal.job(job_id), journal.fact("trainer")["steps"]
        journal.close()
        assert (row is not None, row is not None and row.outcome is not None) == (
            has_job,
            has_outcome,
        )
        assert steps == jobs + has_outcome, (
            "what the trainer holds and the outcome are not of one moment"
        )
        killed.start()
        killed.client.wait(job_id, timeout_s=40)
        jobs += 1
        assert killed.trainer.log.count("TrainLora") == jobs
    killed.kill()
    killed.start(die_at="3 before")
    killed.client.run(job, buffers=BUFFERS, timeout_s=40)
    assert killed.process.poll() is None, "a job made more than two commits"
    killed.kill()
    killed.trainer.die()
    killed.start()
    killed.trainer = FakeTrainer(endpoint=killed.endpoint, node_id="trainer", token=TOKEN).start()
    with pytest.raises(
        JobFailed, match=f"{jobs + 1} optimizer steps and the gradients of 0 batches .* are lost"
    ):
        killed.client.run(OptimStep(), timeout_s=40)


def test_a_job_that_was_taken_is_run_and_told_though_nobody_asks_again(killed):
    """Once the job is journaled its client need not do anything but be connected."""

    def after_a_second(message) -> None:
        time.sleep(1)
        killed.trainer._done(message)

    killed.trainer.script["TrainLora"] = after_a_second
    killed.kill()
    killed.start(die_at="1 after")
    submit = SubmitJob(
        job_id="job", job=TrainLora(tensors=BATCH, output_dir="/nowhere"), progress=False
    )
    hello = Hello(role="client", node_id="listener", incarnation="1", run_token=TOKEN)
    with raw_peer(killed.endpoint, token=TOKEN, hello=hello, timeout_s=40) as client:
        client.send(submit, BUFFERS)
        assert client.recv().message.kind == "Welcome"
        assert killed.process.wait(40) == -signal.SIGKILL
        killed.start()
        client.send(hello)
        assert client.recv().message.kind == "Welcome"
        while (told := client.recv().message).kind == "Progress":
            assert told.phase == WAITING, "everybody is told of a wait for nodes"
        assert told.kind == "Completed"


def test_killed_in_the_release_of_a_job_that_is_done(killed):
    """It is not run again, though its outcome was not journaled yet; what died with the trainer
    meanwhile is said.
    """
    killed.trainer.die()

    def die_both() -> None:
        killed.kill()
        trainer.die()
        killed.start()
        killed.trainer = FakeTrainer(endpoint=killed.endpoint, node_id="trainer", token=TOKEN)
        killed.trainer.start()

    trainer = FakeTrainer(endpoint=killed.endpoint, node_id="trainer", token=TOKEN)
    trainer.detail = {"memory": "offload"}
    trainer.script["ReleaseMemory"] = lambda _: threading.Thread(target=die_both).start()
    killed.trainer = trainer.start()
    with pytest.raises(JobFailed, match=r"The job succeeded, but .* 1 optimizer steps .* are lost"):
        killed.client.run(
            TrainLora(tensors=BATCH, output_dir="/nowhere"), buffers=BUFFERS, timeout_s=40
        )
    assert trainer.log.count("TrainLora") == 1 and "TrainLora" not in killed.trainer.log


def test_killed_while_a_resync_has_put_the_trainer_back(killed):
    """Steps that were set aside for it are there again for the job that was under way, and for the
    next.
    """
    killed.client.run(InitialSync(), timeout_s=40)
    killed.client.run(
        TrainLora(tensors=BATCH, output_dir="/nowhere"), buffers=BUFFERS, timeout_s=40
    )
    killed.trainer.weights = [11, 21, 31]
    killed.kill_in(killed.trainer, "SendWeights")
    assert killed.client.run(Resync(), timeout_s=60).version == 0
    assert killed.served((0, [10, 20, 30])) and soon(lambda: killed.trainer.weights == [11, 21, 31])
    killed.client.run(OptimStep(), timeout_s=40)
    assert (
        killed.trainer.weights == [11, 21, 31] and killed.client.publish(timeout_s=40).version == 1
    )


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("load", [1, 2], ids=["to the served version", "to where it was"])
def test_killed_while_a_resync_of_its_own_moves_the_trainer(killed, load, after):
    killed.client.run(InitialSync(), timeout_s=40)
    killed.client.run(
        TrainLora(tensors=BATCH, output_dir="/nowhere"), buffers=BUFFERS, timeout_s=40
    )
    killed.trainer.weights = [11, 21, 31]

    def first(message) -> None:
        killed.trainer.on_LoadCheckpoint(message)
        killed.kill_in(killed.trainer, "LoadCheckpoint", after=after)

    if load == 1:
        killed.kill_in(killed.trainer, "LoadCheckpoint", after=after)
    else:
        killed.trainer.script["LoadCheckpoint"] = first
    killed.replica.restarted()
    assert soon(
        lambda: (
            killed.starts == 2
            and killed.trainer.weights == [11, 21, 31]
            and len(killed.replica.served) > load
        ),
        60,
    )
    assert killed.client.publish(timeout_s=40).version == 1 and killed.served((1, [11, 21, 31]))
    assert set(map(str, killed.replica.served)) == {"(0, [10, 20, 30])", "(1, [11, 21, 31])"}, (
        "another state was served as a version"
    )


def test_a_run_is_stopped_though_its_orchestrator_is_being_restarted(killed):
    killed.kill()
    stopping = threading.Thread(target=killed.client.stop_run)
    stopping.start()
    killed.start()
    stopping.join(40)
    assert killed.process.wait(10) == 0 and not (killed.dir / "endpoint").exists()


def test_killed_in_the_release_of_a_job_that_failed(killed):
    """That the trainer's state is lost counts as said once the failure is noted; the job is not run
    after all.
    """
    job = TrainLora(tensors=BATCH, output_dir="/nowhere")
    killed.client.run(job, buffers=BUFFERS, timeout_s=40)
    killed.trainer.die()
    trainer = FakeTrainer(endpoint=killed.endpoint, node_id="trainer", token=TOKEN)
    trainer.detail = {"memory": "offload"}
    killed.trainer = trainer.start()
    killed.kill_in(trainer, "ReleaseMemory")
    with pytest.raises(JobFailed, match=r"1 optimizer steps .* are lost"):
        killed.client.run(job, buffers=BUFFERS, timeout_s=40)
    assert killed.starts == 2 and "TrainLora" not in trainer.log


@pytest.mark.parametrize(
    ("steps", "version", "state"),
    [
        ([], None, State.IDLE),
        ([(0, "planned"), (0, "durable")], None, State.IDLE),
        ([(0, "committed"), (1, "planned"), (1, "durable")], 0, State.IDLE),
        ([(0, "committed"), (1, "durable"), (1, "paused")], None, State.POISONED),
        ([(0, "committed"), (1, "applying"), (1, "failed:applying")], None, State.POISONED),
        (
            [
                (0, "committed"),
                (1, "applying"),
                (1, "failed:applying"),
                (1, "planned"),
                (1, "failed:planned"),
            ],
            None,
            State.POISONED,
        ),
        ([(0, "committed"), (1, "paused"), (1, "failed:paused")], 0, State.IDLE),
        ([(0, "committed"), (0, "applying")], 0, State.POISONED),
        ([(0, "committed"), (1, "verified"), (1, "committed")], 1, State.IDLE),
    ],
)
def test_what_the_journal_says_of_a_publication(steps, version, state):
    assert after_restart(steps) == (version, state)
