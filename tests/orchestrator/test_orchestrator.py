"""The orchestrator end to end over real sockets: what is served after every kind of failure."""

from __future__ import annotations

import threading
import time

import pytest

from orchestrator.errors import ConfigError, JobFailed, JournalError, ProtocolError
from orchestrator.protocol import frames
from orchestrator.protocol.messages import (
    ErrorCode,
    InitialSync,
    OptimStep,
    Rendezvous,
    TrainLora,
    TrainMerged,
    Unready,
    batch_specs,
)
from orchestrator.storage.journal import Journal
from splice.client.clients import SpliceClient
from tests.orchestrator.fake_nodes import soon
from tests.orchestrator.run import BATCH, BUFFERS, JOB, TOKEN


def test_initial_sync_then_two_versions(run):
    trainer = run.trainer()
    replica = run.replica(trainer)
    phases = []
    first = run.client.run(
        InitialSync(), on_progress=lambda p: phases.append((p.sequence, p.phase))
    )
    assert first.version == 0 and first.alias == "m@0"
    assert [s for s, _ in phases] == list(range(len(phases)))
    for version in (1, 2):
        result = run.client.run(JOB, buffers=BUFFERS)
        assert result.version == version and result.metrics == {"loss": 1.0}
        assert result.states == [
            "durable",
            "paused",
            "applying",
            "finished",
            "verified",
            "committed",
        ]
        assert {"train", "wire", "apply", "pause", "total"} <= set(result.seconds)
    assert replica.served == [(0, [10, 20, 30]), (1, [11, 21, 31]), (2, [12, 22, 32])]
    once = ("OpenTransferGroup", "PlanPublication", "UseLayout")
    assert (
        all(trainer.log.count(kind) == 1 for kind in once)
        and replica.log.count("PrepareUpdate") == 1
    )
    assert run.client.status().version == 2


def test_the_same_job_id_runs_once(run):
    trainer = run.trainer()
    run.replica(trainer)
    run.client.run(InitialSync())
    a = run.client.run(JOB, buffers=BUFFERS, job_id="one")
    b = run.client.run(JOB, buffers=BUFFERS, job_id="one")
    assert a == b and trainer.log.count("TrainMerged") == 1


def test_nothing_before_initial_sync(run):
    run.replica(run.trainer())
    with pytest.raises(JobFailed, match="InitialSync"):
        run.client.run(JOB, buffers=BUFFERS)


def test_a_refused_plan_leaves_n_serving_and_is_not_retried(run):
    trainer = run.trainer()
    replica = run.replica(trainer)
    run.client.run(InitialSync())
    # as after a change of processes: the manifest is checked again
    run.orchestrator._publisher._planner.planned = {}
    replica.script["PrepareUpdate"] = replica.refuse
    with pytest.raises(JobFailed, match="m@0 is still served") as failure:
        run.client.run(JOB, buffers=BUFFERS)
    assert failure.value.code == "plan_refused"
    assert failure.value.steps_taken == 1, "the trainer has made the step, and it is durable"
    assert replica.served == [(0, [10, 20, 30])] and "ReceiveWeights" not in replica.log[-1:]
    assert run.client.status().publication == "idle"
    run.client.run(JOB, buffers=BUFFERS)
    assert replica.served[-1][0] == 2  # the trainer is two steps on, and the served number says so


def test_one_flipped_bit_is_never_served(run):
    trainer = run.trainer()
    replica = run.replica(trainer)
    run.client.run(InitialSync())
    replica.flip = True
    seen = []
    result = run.client.run(
        JOB, buffers=BUFFERS, on_progress=lambda p: seen.append((p.phase, p.detail))
    )
    failed = [d for phase, d in seen if phase == "failed"]
    assert failed and failed[0]["left"] == "poisoned" and "w1" in failed[0]["error"]
    assert result.attempts == 2
    assert replica.served == [(0, [10, 20, 30]), (1, [11, 21, 31])]


def test_a_replica_that_fails_while_applying_is_resynced(run):
    trainer = run.trainer()
    replica = run.replica(trainer)
    run.client.run(InitialSync())

    def fail_late(message):
        replica.stand_still(message)
        from orchestrator.protocol.messages import ErrorCode

        replica.refuse(message, code=ErrorCode.TRANSFER_FAILED)

    replica.script["ReceiveWeights"] = fail_late
    result = run.client.run(JOB, buffers=BUFFERS)
    assert result.attempts == 2 and replica.served[-1] == (1, [11, 21, 31])
    assert trainer.aborted.is_set()  # the other half was ended
    assert trainer.log.count("LoadCheckpoint") == 1


def test_a_trainer_killed_in_the_transfer_is_replaced_and_finishes_the_version(run):
    current = [run.trainer()]
    replica = run.replica(lambda: current[0])
    run.client.run(InitialSync())
    first = current[0]
    first.script["SendWeights"] = lambda _: None  # silence: it will be dead

    def peer_gone(message):
        replica.stand_still(message)
        threading.Thread(target=replace).start()
        from orchestrator.protocol.messages import ErrorCode

        replica.refuse(message, code=ErrorCode.TRANSFER_FAILED)

    def replace():
        first.die()
        current[0] = run.trainer()

    replica.script["ReceiveWeights"] = peer_gone
    result = run.client.run(JOB, buffers=BUFFERS)
    assert result.version == 1 and result.attempts == 2
    assert replica.served == [(0, [10, 20, 30]), (1, [11, 21, 31])]
    assert "LoadCheckpoint" in current[0].log  # what @1 is made of came from the disk


def test_a_trainer_killed_in_the_step_repeats_it_from_the_last_durable_state(run):
    current = [run.trainer()]
    replica = run.replica(lambda: current[0])
    run.client.run(InitialSync())
    first = current[0]

    def die(_):
        def replace():
            first.die()
            current[0] = run.trainer()

        threading.Thread(target=replace).start()

    first.script["TrainMerged"] = die
    assert run.client.run(JOB, buffers=BUFFERS).version == 1
    assert replica.served[-1] == (1, [11, 21, 31])


def test_every_step_is_journaled(run, tmp_path):
    run.replica(run.trainer())
    run.client.run(InitialSync())
    run.client.run(JOB, buffers=BUFFERS)
    journal = Journal(run.dir / "journal.sqlite", run_token=TOKEN, name="m")
    steps = [state for version, state in journal.publication_steps() if version == 1]
    assert steps == [
        "planned",
        "durable",
        "paused",
        "applying",
        "finished",
        "verified",
        "committed",
    ]
    assert journal.committed_version() == 1 and journal.checkpoint_dir(1).endswith("versions/1")
    assert journal.unfinished_jobs() == []
    journal.close()
    with pytest.raises(ConfigError, match="another SPLICE_RUN_TOKEN"):
        Journal(run.dir / "journal.sqlite", run_token="x" * 32, name="m")


@pytest.mark.parametrize("is_large", [False, True])
def test_a_full_disk_ends_the_orchestrator_and_nothing_else(run, is_large):
    """It neither goes deaf nor ends the nodes: another one resumes when there is room. A large
    batch is a file next to the journal.
    """
    trainer = run.trainer()
    run.client.optim_step()
    if is_large:
        (run.dir / "batches").write_text("full: a folder cannot be made here")
    run.loop.call_soon_threadsafe(
        lambda: run.orchestrator._journal._db.execute("PRAGMA max_page_count = 16")
    )
    large = batch_specs(num_sequences=1, num_tokens=2**16 if is_large else 2**15)
    run.client.submit(TrainMerged(tensors=large), buffers=[bytes(s.nbytes) for s in large])
    run.thread.join(20)
    assert isinstance(run.error, JournalError) and ("batches" if is_large else "full") in str(
        run.error
    )
    assert "Shutdown" not in trainer.log and (run.dir / "endpoint").exists()
    run.error = None


def test_a_full_disk_is_not_taken_for_a_resync_that_can_be_tried_again(run):
    trainer = run.trainer()
    replica = run.replica(trainer)
    run.client.run(InitialSync())
    run.loop.call_soon_threadsafe(
        lambda: run.orchestrator._journal._db.execute("PRAGMA query_only = ON")
    )
    replica.restarted()
    run.thread.join(20)
    assert isinstance(run.error, JournalError) and "Shutdown" not in [*trainer.log, *replica.log]
    run.error = None


def test_a_job_that_the_journal_could_not_hold_is_refused(run, monkeypatch):
    monkeypatch.setattr(frames, "MAX_BUFFERS_BYTES", 10_000)
    trainer = run.trainer()
    large = batch_specs(num_sequences=1, num_tokens=1000)
    with pytest.raises(
        ProtocolError, match=r"buffers of 16,004 bytes together; .* 10,000 .* in parts"
    ):
        run.client.run(TrainMerged(tensors=large), buffers=[bytes(s.nbytes) for s in large])
    assert trainer.log == []
    assert run.client.optim_step().metrics == {"loss": 1.0}


def test_no_more_jobs_are_kept_than_there_is_room_for(run):
    trainer, go = run.trainer(), threading.Event()
    run.orchestrator._jobs._config = run.config.model_copy(
        update={"max_jobs": 3, "max_job_bytes": 100}
    )
    trainer.script["TrainLora"] = lambda message: (go.wait(20), trainer._done(message))
    job = TrainLora(tensors=BATCH, output_dir="/nowhere")
    kept = [run.client.submit(job, buffers=BUFFERS) for _ in range(2)]
    with pytest.raises(JobFailed, match="they exceed 100") as refused:
        run.client.run(job, buffers=BUFFERS, job_id="again")
    assert refused.value.code == "too_many_jobs"
    kept.append(run.client.submit(OptimStep()))
    with pytest.raises(JobFailed, match="3 jobs are open"):
        run.client.run(OptimStep())
    go.set()
    for job_id in kept:
        run.client.wait(job_id, timeout_s=20)
    run.client.run(job, buffers=BUFFERS, job_id="again")


def test_whoever_waits_is_told_that_the_run_was_stopped(run):
    trainer, at_work, go = run.trainer(), threading.Event(), threading.Event()
    trainer.script["OptimStep"] = lambda message: (
        at_work.set(),
        go.wait(20),
        trainer._done(message),
    )
    running, waiting = run.client.submit(OptimStep()), run.client.submit(OptimStep())
    assert at_work.wait(20)
    with SpliceClient(endpoint=run.endpoint, run_token=TOKEN) as other:
        other.stop_run(timeout_s=20)
    with pytest.raises(JobFailed, match="was stopped while the job ran") as stopped:
        run.client.wait(running, timeout_s=5)
    assert stopped.value.code == "stopped"
    with pytest.raises(JobFailed, match="stopped before it started"):
        run.client.wait(waiting, timeout_s=5)
    go.set()
    run.thread.join(20)


def test_a_replica_whose_server_was_restarted_gets_the_served_version_again(run):
    trainer = run.trainer()
    replica = run.replica(trainer)
    run.client.run(InitialSync())
    run.client.run(JOB, buffers=BUFFERS)
    trainer.weights = [
        w + 100 for w in trainer.weights
    ]  # as a TrainLora job would: ahead of what is served
    run.orchestrator._trainer.memory.steps = 1
    replica.live = [0, 0, 0]
    replica.restarted()
    assert soon(lambda: len(replica.served) >= 3)
    assert replica.served[-1] == (
        1,
        [11, 21, 31],
    )  # the version's own weights, not the trainer's newer ones
    assert replica.log.count("JoinTransferGroup") == 2
    assert soon(lambda: trainer.log[-1] == "LoadCheckpoint")
    assert trainer.log.count("LoadCheckpoint") == 2  # back to where it was


def test_the_only_replica_is_waited_for_though_it_goes_while_the_trainer_recovers(run):
    trainer = run.trainer()
    replica = run.replica(trainer)
    run.client.run(InitialSync())

    def load(message):
        replica.link.send(Unready(node_id="inference-0", reason="vLLM has ended"))
        assert soon(lambda: run.states()["inference-0"] == "connected")
        trainer.on_LoadCheckpoint(message)
        threading.Timer(1.0, replica.restarted).start()

    def fail(message):
        trainer.script["LoadCheckpoint"] = load
        replica.refuse(message, code=ErrorCode.TRANSFER_FAILED)

    replica.script["ReceiveWeights"] = fail
    assert run.client.run(JOB, buffers=BUFFERS, timeout_s=30).version == 1
    assert "LeaveAlias" not in replica.log and replica.served[-1] == (1, [11, 21, 31])
    replica.script["ReceiveWeights"] = fail  # and in a resync between jobs
    replica.restarted()
    assert soon(lambda: len(replica.served) == 3, 20) and run.thread.is_alive()
    assert "LeaveAlias" not in replica.log and replica.served[-1] == (1, [11, 21, 31])


def test_a_replica_that_cannot_join_leaves_nobody_waiting(run):
    trainer = run.trainer()
    replica = run.replica(trainer)
    run.client.run(InitialSync())

    def listen(message):
        trainer.aborted.clear()
        where = Rendezvous(transport="tcp", host="127.0.0.1", port=1, world_size=2).model_dump()
        trainer.link.progress(message.request_id, "listening", rendezvous={"inference-0": where})
        trainer.aborted.wait(30)
        trainer.refuse(message, code=ErrorCode.TRANSFER_ABORTED)

    # as after a change of processes: the groups are opened again
    run.orchestrator._publisher._members.joined = {}
    trainer.script["OpenTransferGroup"] = listen
    replica.script["JoinTransferGroup"] = lambda m: replica.refuse(m, code=ErrorCode.NOT_READY)
    began = time.monotonic()
    assert run.client.run(JOB, buffers=BUFFERS).version == 1
    assert time.monotonic() - began < 15 and replica.served[-1] == (1, [11, 21, 31])


def test_a_resync_job_sends_the_served_version_again(run):
    from orchestrator.protocol.messages import Resync

    trainer = run.trainer()
    replica = run.replica(trainer)
    with pytest.raises(JobFailed, match="InitialSync"):
        run.client.run(Resync())
    run.client.run(InitialSync())
    result = run.client.run(Resync())
    assert result.version == 0 and result.states[-1] == "committed"
    assert replica.served == [(0, [10, 20, 30])] * 2 and run.client.status().version == 0
