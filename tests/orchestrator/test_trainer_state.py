"""What the trainer holds is what its clients think that it holds, whatever was done with it between
their jobs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import threading
import time

import pytest

from orchestrator.errors import JobFailed
from orchestrator.protocol.messages import (
    ErrorCode,
    InitialSync,
    NodeEnded,
    Resync,
    SaveCheckpoint,
)
from orchestrator.trainer_memory import MESSAGE_CHARS, TrainerMemory
from tests.orchestrator.fake_nodes import FakeLauncher, FakeTrainer, soon
from tests.orchestrator.run import BUFFERS, JOB, TOKEN, SmallBatch


def two_steps_ahead(run):
    """A trainer at 2 and 2 more than @0, and its replica."""
    trainer = run.trainer()
    replica = run.replica(trainer)
    run.client.run(InitialSync())
    for _ in range(2):
        step(run)
    assert trainer.weights == [12, 22, 32]
    return trainer, replica


def step(run):
    run.client.forward_backward(SmallBatch())
    return run.client.optim_step()


def test_a_status_says_how_the_trainer_is_apart_from_what_is_served(run, tmp_path):
    run.replica(run.trainer())
    run.client.run(InitialSync())
    apart = []
    run.client.run(JOB, buffers=BUFFERS)
    apart.append(run.client.status().apart)
    run.client.save_checkpoint(str(tmp_path / "saved"))  # the same state
    apart.append(run.client.status().apart)
    step(run)
    apart.append(run.client.status().apart)
    run.client.load_checkpoint(str(tmp_path / "saved"))
    apart.append(run.client.status().apart)
    assert apart == [
        "",
        "",
        "the trainer holds 1 optimizer steps after it",
        f"the trainer holds {tmp_path / 'saved'}",
    ]


def test_gradients_outlive_a_failure_of_what_only_reads(run, tmp_path):
    """As the trainer has it: scores that ran out of memory, an export to a full disk."""
    trainer = run.trainer()
    run.replica(trainer)
    run.client.run(InitialSync())
    run.client.forward_backward(SmallBatch())
    for kind, job in (
        ("Forward", lambda: run.client.forward(SmallBatch())),
        ("ExportHf", lambda: run.client.export_hf(str(tmp_path / "out"))),
    ):
        trainer.script[kind] = lambda m: trainer.refuse(m, code=ErrorCode.INTERNAL)
        with pytest.raises(JobFailed, match="told to"):
            job()
    with pytest.raises(JobFailed, match="gradients are pending"):
        run.client.run(Resync())


def restarted(replica):
    replica.live = [0, 0, 0]
    replica.restarted()


def test_steps_are_there_again_after_a_resync_that_failed(run):
    trainer, replica = two_steps_ahead(run)
    replica.script["ReceiveWeights"] = replica.refuse
    with pytest.raises(JobFailed, match="told to"):
        run.client.run(Resync())
    assert trainer.weights == [10, 20, 30]
    step(run)
    assert trainer.weights == [13, 23, 33]
    run.client.run(Resync())
    assert replica.served[-1] == (0, [10, 20, 30]) and trainer.weights == [13, 23, 33]
    step(run)
    run.client.run(Resync())
    folders = [
        m.checkpoint_dir for m in trainer.messages if "resync" in getattr(m, "checkpoint_dir", "")
    ]
    assert folders[0] != folders[1] != folders[2] and len(set(folders)) == 2, (
        "the one that is needed is not written over"
    )
    assert run.client.publish().version == 1 and replica.served[-1] == (1, [14, 24, 34])


def test_after_a_publication_that_failed_for_good_a_resync_is_the_way_back(run):
    trainer = run.trainer()
    replica = run.replica(trainer)
    run.client.run(InitialSync())
    replica.fail_transfers()
    with pytest.raises(JobFailed, match="nothing is served"):
        run.client.run(JOB, buffers=BUFFERS)
    status = run.client.status()
    assert (status.version, status.publication) == (None, "poisoned")
    replica.script.clear()
    assert run.client.run(Resync()).version == 0 and run.client.status().version == 0
    assert replica.served[-1] == (0, [10, 20, 30]) and trainer.weights == [11, 21, 31], (
        "the step stands"
    )
    assert run.client.run(JOB, buffers=BUFFERS).version == 2 and replica.served[-1] == (
        2,
        [12, 22, 32],
    )


def test_the_next_try_of_a_resync_puts_them_back(run):
    trainer, replica = two_steps_ahead(run)
    replica.script["PrepareUpdate"] = replica.refuse
    restarted(replica)
    assert soon(lambda: len(replica.served) == 2, 20) and replica.served[-1] == (0, [10, 20, 30])
    assert soon(lambda: trainer.weights == [12, 22, 32])
    assert trainer.log.count("SaveCheckpoint") == 2, "what was set aside was saved again"


def test_a_checkpoint_that_is_loaded_takes_the_place_of_what_was_set_aside(run, tmp_path):
    trainer, replica = two_steps_ahead(run)
    run.client.save_checkpoint(str(tmp_path / "saved"))
    step(run)
    replica.script["ReceiveWeights"] = replica.refuse
    with pytest.raises(JobFailed, match="told to"):
        run.client.run(Resync())
    run.client.load_checkpoint(str(tmp_path / "saved"))
    step(run)
    assert trainer.weights == [13, 23, 33] and trainer.log.count("LoadCheckpoint") == 2


def offloading(run):
    node = FakeTrainer(endpoint=run.endpoint, node_id="trainer", token=TOKEN)
    node.detail = {"memory": "offload"}
    run.nodes.append(node.start())
    return node


def test_a_loss_that_is_found_out_after_a_job_failed_of_something_else_is_said_by_the_next(
    run, tmp_path
):
    first = offloading(run)
    run.client.save_checkpoint(str(tmp_path / "saved"))
    step(run)
    first.die()
    second = offloading(run)
    with pytest.raises(JobFailed, match="submit InitialSync first"):
        run.client.publish()
    with pytest.raises(JobFailed, match=r"1 optimizer steps .* are lost with it") as lost:
        run.client.optim_step()
    assert lost.value.code == "work_lost" and "OptimStep" not in second.log
    step(run)
    assert second.weights == [11, 21, 31]


def test_a_loss_that_is_found_out_between_jobs_is_said_by_the_next(run):
    trainer = run.trainer()
    trainers = [trainer]
    replica = run.replica(lambda: trainers[-1])
    run.client.run(InitialSync())
    step(run)
    trainer.die()
    trainers.append(run.trainer())
    restarted(replica)
    assert soon(lambda: len(replica.served) == 2, 20)
    held = dataclasses.asdict(run.orchestrator._trainer.memory)  # as the journal gets it
    assert held["steps"] == 0 and "1 optimizer steps" in held["unsaid"]
    journaled = run.orchestrator._journal.fact("trainer")
    assert journaled["unsaid"] or journaled["steps"] == 1, "a resumed orchestrator would not say it"
    with pytest.raises(JobFailed, match=r"1 optimizer steps .* are lost with it"):
        run.client.optim_step()
    assert step(run).metrics == {"loss": 1.0}


def test_a_save_that_may_have_come_to_its_end_is_not_called_lost(run, tmp_path):
    trainer, folder = run.trainer(), str(tmp_path / "saved")
    run.client.save_checkpoint(folder)
    step(run)

    def die_saved(message) -> None:
        trainer._write(message)
        threading.Thread(target=trainer.die).start()

    trainer.script["SaveCheckpoint"] = die_saved
    saving = run.client.submit(SaveCheckpoint(checkpoint_dir=folder))
    assert soon(lambda: not trainer._thread.is_alive())
    second = run.trainer()
    with pytest.raises(
        JobFailed,
        match=r"1 optimizer steps .* unless the last save to that folder had come to its end",
    ):
        run.client.wait(saving, timeout_s=30)
    assert second.weights == [11, 21, 31]
    step(run)
    second.die()
    run.trainer()
    with pytest.raises(JobFailed, match="are lost with it; the new process has loaded that state"):
        run.client.optim_step()


def test_what_was_done_after_a_save_is_called_lost():
    memory = TrainerMemory(saving="/a")
    memory.loaded("/a")
    memory.stepped()
    assert memory.take_loss().endswith("since /a are lost with it")


def test_what_is_lost_fits_into_a_failure():
    memory = TrainerMemory(adapter="/x" * 5000, durable_dir="/y" * 5000, steps=1)
    said = memory.take_loss()
    assert len(said) == MESSAGE_CHARS
    memory.was_said(f"the trainer was lost since the last job; {said}"[:4000])
    assert memory.unsaid == ""


def test_a_trainer_that_was_silent_for_too_long_has_lost_nothing(run, tmp_path):
    trainer = run.trainer()
    run.client.save_checkpoint(str(tmp_path / "saved"))
    step(run)

    def is_taken_for_lost(message):
        run.lose("trainer")
        assert soon(lambda: run.states()["trainer"] == "ready")
        trainer.on_OptimStep(message)

    run.client.forward_backward(SmallBatch())
    trainer.script["OptimStep"] = is_taken_for_lost
    assert run.client.optim_step().metrics == {"loss": 1.0}
    assert trainer.weights == [12, 22, 32] and trainer.log.count("OptimStep") == 2
    assert run.orchestrator._trainer.memory.steps == 2


@pytest.mark.parametrize("then", ["the job", "its restore"])
def test_a_trainer_whose_end_nobody_has_noticed_yet_is_waited_for(run, tmp_path, then):
    """Its connection is gone at once, and every request to it fails at once; a launcher says so
    later, and fifteen seconds later at the latest it is known.
    """
    trainer = run.trainer()
    run.client.save_checkpoint(str(tmp_path / "saved"))
    trainers = [trainer]

    def dies_too(_message) -> None:
        trainers[-1].link.close()
        threading.Timer(1.0, lambda: trainers.append(run.trainer())).start()

    def next_one() -> None:
        node = FakeTrainer(endpoint=run.endpoint, node_id="trainer", token=TOKEN)
        if then == "its restore":
            node.script["LoadCheckpoint"] = dies_too
        run.nodes.append(node.start())
        trainers.append(node)

    trainer.die()
    threading.Timer(1.0, next_one).start()
    run.client.forward_backward(SmallBatch(), timeout_s=30)
    assert len(trainers) == (2 if then == "the job" else 3) and trainers[-1].log == [
        "LoadCheckpoint",
        "ForwardBackward",
    ]


def test_a_trainer_that_is_replaced_as_it_is_asked_to_join_publishes_nothing_of_its_own(
    run, monkeypatch
):
    """Another process, at its base weights, then has a transfer group of the version's replicas."""
    trainer = run.trainer()
    trainers = [trainer]
    replica = run.replica(lambda: trainers[-1])
    run.client.run(InitialSync())
    router, request = run.orchestrator._router, run.orchestrator._router.request

    async def replaced_first(peer_id, message, *args, **kwargs):
        if message.kind == "OpenTransferGroup" and len(trainers) == 1:
            trainers.append(None)
            await asyncio.to_thread(trainer.die)
            trainers[1] = await asyncio.to_thread(run.trainer)
            await router.wait_ready(["trainer"], timeout_s=10)
            while router.peers["trainer"].hello.incarnation == trainer.link._hello.incarnation:
                await asyncio.sleep(0.01)
        return await request(peer_id, message, *args, **kwargs)

    monkeypatch.setattr(router, "request", replaced_first)
    run.orchestrator._publisher._members.joined = {}
    assert run.client.run(JOB, buffers=BUFFERS).version == 1
    assert replica.served == [(0, [10, 20, 30]), (1, [11, 21, 31])]


def test_another_checkpoint_is_loaded_though_the_last_durable_state_is_gone(run, tmp_path):
    trainer = run.trainer()
    gone, other = str(tmp_path / "gone"), str(tmp_path / "other")
    run.client.save_checkpoint(other)
    step(run)
    run.client.save_checkpoint(gone)
    step(run)
    trainer.die()
    shutil.rmtree(gone)
    trainer = run.trainer()

    def load(message):
        trainer.script["LoadCheckpoint"] = load
        if message.checkpoint_dir == gone:
            trainer.refuse(message, code=ErrorCode.CHECKPOINT_FAILED)
        else:
            trainer.on_LoadCheckpoint(message)

    trainer.script["LoadCheckpoint"] = load
    for _ in range(2):
        with pytest.raises(JobFailed, match="told to"):
            run.client.optim_step()
    run.client.load_checkpoint(other)
    step(run)
    assert trainer.weights == [11, 21, 31]


def test_what_a_trainer_says_of_a_load_is_in_the_next_result(run):
    """A new trainer that had to make a step again says so to the orchestrator, not to a job."""
    told = "step 1 was made again from 0"
    trainer = run.trainer()
    trainers = [trainer]
    run.replica(lambda: trainers[-1])
    run.client.run(InitialSync())
    run.client.run(JOB, buffers=BUFFERS)
    trainer.die()

    def load(message) -> None:
        assert message.deadline_s == run.orchestrator._config.train_timeout_s, "it may train"
        second._load(message)
        second.link.complete(message.request_id, result={"warnings": [told]})

    second = FakeTrainer(endpoint=run.endpoint, node_id="trainer", token=TOKEN)
    second.script["LoadCheckpoint"] = load
    run.nodes.append(second.start())
    trainers.append(second)
    result = run.client.run(JOB, buffers=BUFFERS)
    assert result.version == 2 and result.warnings == [told]
    assert run.orchestrator._journal.fact("trainer")["notes"] == [], "forgotten with the outcome"
    assert run.client.run(JOB, buffers=BUFFERS).warnings == []


def test_notes_outlive_a_failed_job_and_are_in_the_status(run):
    run.trainer()
    memory = run.orchestrator._trainer.memory
    memory.heard({"warnings": ["a note"]})
    with pytest.raises(JobFailed, match="submit InitialSync first"):
        run.client.publish()
    (node,) = [n for n in run.client.status().nodes if n.node_id == "trainer"]
    assert node.detail["warnings"] == ["a note"]
    assert run.orchestrator._journal.fact("trainer")["notes"] == ["a note"]
    run.client.forward_backward(SmallBatch())
    assert "warnings" not in run.client.status().nodes[0].detail


def test_the_checkpoint_at_which_a_step_began_outlives_the_step(run):
    """N's moments may still be written while N is served: N - 1 stays until N + 1 is there."""
    from orchestrator.storage.retention import expired

    for new in range(2, 9):  # each job protects what is served and what the trainer last saved
        on_disk = [new - 2, new - 1]
        assert expired(on_disk, new=new, keep=2, protected=[new - 1, new - 1]) == [new - 2]


class Launched:
    """Fake trainers, each replaced by the next one once it has ended, as a launcher does it."""

    def __init__(self, run) -> None:
        self.run, self.count, self.requests = run, 0, []
        self.launcher = FakeLauncher(
            make=run.trainer, endpoint=run.endpoint, node_id="trainer-launcher-0", token=TOKEN
        )
        self.launcher.detail = {"memory": "resident"}
        run.nodes.append(self.launcher.start())
        self.trainer = self.next()

    def next(self, *script) -> FakeTrainer:
        """Start the next one; `script` is what it gets of `dies_in`."""

        def before(trainer) -> None:
            if script:
                kind, *settings = script
                self._dies_in(trainer, kind, **(settings[0] if settings else {}))

        self.count += 1
        self.trainer = self.run.trainer(start_id=f"start-{self.count}", before=before)
        return self.trainer

    def dies_in(self, kind: str, **how) -> None:
        """Have the present trainer end in its next request of a kind, and start the next one."""
        self._dies_in(self.trainer, kind, **how)

    def _dies_in(self, trainer, kind: str, *, code: int = -9, is_silent: bool = False) -> None:
        start_id = f"start-{self.count}"

        def end(message) -> None:
            self.requests.append(message.request_id)
            if not is_silent:
                trainer.link.progress(message.request_id, "training")
                time.sleep(0.2)
            trainer._stop.set()
            trainer.link.close()
            self.launcher.link.send(NodeEnded(node_id="trainer", start_id=start_id, code=code))
            script = self.again.pop() if self.again else ()
            threading.Timer(0.5, self.next, script).start()  # a launcher reports the end first

        trainer.script[kind] = end

    again: list = []  # noqa: RUF012 - replaced, never changed


def killed_twice(run, launched):
    launched.again = [("TrainMerged",)]
    launched.dies_in("TrainMerged")
    with pytest.raises(JobFailed) as failed:
        run.client.run(JOB, buffers=BUFFERS, timeout_s=60)
    return failed.value


def test_a_job_that_ends_the_trainer_twice_fails_for_good(run):
    """By name, with the exit code; the launcher hears that both ends had one cause. The next job
    runs."""
    launched = Launched(run)
    run.replica(lambda: launched.trainer)
    run.client.run(InitialSync())
    error = killed_twice(run, launched)
    assert error.code == ErrorCode.TRAINER_KILLED and "ended with code -9" in error.message
    assert "Leave this batch out" in error.remedy
    assert soon(lambda: len(launched.launcher.causes) == 2)
    assert len(set(launched.launcher.causes)) == 1 and launched.launcher.causes[0]
    assert launched.launcher.counted == [True, True]
    assert run.client.run(JOB, buffers=BUFFERS, timeout_s=60).version == 1
    second = killed_twice(run, launched)
    assert second.code == ErrorCode.TRAINER_KILLED, "each job has its own count"
    assert soon(lambda: len(set(launched.launcher.causes)) == 2)


@pytest.mark.parametrize(
    "how", [{"code": 75}, {"code": 76}, {"is_silent": True}], ids=["link", "afresh", "not begun"]
)
def test_other_ends_of_a_trainer_are_not_the_jobs(run, how):
    """It lost its link, it had to end after the request before, or it had not begun this one."""
    launched = Launched(run)
    run.replica(lambda: launched.trainer)
    run.client.run(InitialSync())
    launched.again = [("TrainMerged", how)]
    launched.dies_in("TrainMerged", **how)
    assert run.client.run(JOB, buffers=BUFFERS, timeout_s=60).version == 1
    assert launched.count == 3


def test_the_count_of_a_job_outlives_the_orchestrator(tmp_path):
    memory = TrainerMemory()
    assert memory.was_killed("a") == 1
    again = TrainerMemory(**memory.as_dict())
    assert again.was_killed("a") == 2 and again.was_killed("b") == 1
