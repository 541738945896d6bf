"""Which batches travel ahead of their jobs, and that jobs end the same whatever becomes of those."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from orchestrator.client import SpliceClient
from orchestrator.errors import ConfigError, JobFailed
from orchestrator.protocol.frames import decode, encode
from orchestrator.protocol.messages import ErrorCode, ForwardBackwardJob, ForwardJob, OptimStepJob, forward_specs
from tests.orchestrator.fake_nodes import FakeLauncher, FakeTrainer, soon
from tests.orchestrator.test_orchestrator import BATCH, TOKEN, Run
from tests.orchestrator.test_resume import Killed

SUM = ForwardBackwardJob(tensors=BATCH)
SCORE = ForwardJob(tensors=forward_specs(num_sequences=1, num_tokens=2))


def batch(number: int, job=SUM) -> list[bytes]:
    """Buffers that are told from others'."""
    return [bytes([number]) * s.nbytes for s in job.tensors]


class Submitted:
    """A job of a client of its own, on a thread."""

    def __init__(self, run, job, number: int = 0) -> None:
        self.job_id, self.phases, self.result, self.error = f"job-{number}", [], None, None
        self.client = SpliceClient(endpoint=run.endpoint, run_token=TOKEN)
        buffers = batch(number, job) if hasattr(job, "tensors") else []

        def go() -> None:
            try:
                with self.client:
                    self.result = self.client.run(job, buffers=buffers, job_id=self.job_id, timeout_s=60, on_progress=self.saw)
            except JobFailed as error:
                self.error = error

        self.thread = threading.Thread(target=go, daemon=True)
        self.thread.start()
        assert soon(lambda: bool(self.phases))

    def saw(self, progress) -> None:
        self.phases.append(progress.phase)

    def done(self):
        self.thread.join(60)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.result


def held(trainer, kind: str) -> threading.Event:
    """The next request of this kind is under way until the event is set."""
    go_on, answer = threading.Event(), getattr(trainer, f"on_{kind}")

    def hold(message) -> None:
        trainer.link.progress(message.request_id, "working")
        assert go_on.wait(30)
        answer(message)

    trainer.script[kind] = hold
    return go_on


def test_the_first_waiting_batch_goes_ahead_and_its_job_names_it(run):
    trainer = run.trainer()
    go_on = held(trainer, "ForwardBackward")
    first = Submitted(run, SUM, 1)
    assert soon(lambda: "working" in first.phases)
    step, second, third = Submitted(run, OptimStepJob(), 2), Submitted(run, SUM, 3), Submitted(run, SUM, 4)
    assert soon(lambda: "StageBatch" in trainer.log)
    assert trainer.staged == {"job-3": tuple(batch(3))}, "the first that has a batch, and no other"
    go_on.set()
    assert [j.done()["metrics"] for j in (first, step, second, third)] == [{"loss": 1.0}] * 4
    names, batches = zip(*trainer.batches, strict=True)
    assert batches == tuple(tuple(batch(i)) for i in (1, 3, 4)) and names[:2] == (None, "job-3")
    assert (trainer.weights, trainer.pending) == ([11, 21, 31], 2)


def test_a_batch_that_was_waiting_already_goes_when_the_trainer_is_at_work(run):
    """It never travels in front of the running job's own."""
    jobs = [Submitted(run, SUM, 1), Submitted(run, SUM, 2)]
    trainer = FakeTrainer(endpoint=run.endpoint, node_id="trainer", token=TOKEN)
    go_on = held(trainer, "ForwardBackward")
    run.nodes.append(trainer.start())
    assert soon(lambda: "StageBatch" in trainer.log) and trainer.log == ["ForwardBackward", "StageBatch"]
    go_on.set()
    assert [j.done()["pending_batches"] for j in jobs] == [1, 2]
    assert [name for name, _ in trainer.batches] == [None, "job-2"]


def test_a_trainer_that_has_it_no_more_gets_the_job_with_its_batch(run):
    trainer = run.trainer()
    go_on = held(trainer, "ForwardBackward")
    first = Submitted(run, SUM, 1)
    assert soon(lambda: "working" in first.phases)
    second = Submitted(run, SUM, 2)
    assert soon(lambda: bool(trainer.staged))
    trainer.staged.clear()
    go_on.set()
    assert (first.done()["pending_batches"], second.done()["pending_batches"]) == (1, 2)
    assert trainer.batches[1:] == [("job-2", None), (None, tuple(batch(2)))]
    # What is pending was not taken for lost with the refusal: a resync would still be refused.
    assert run.orchestrator._trainer.memory.pending == 2


def test_a_restarted_trainer_gets_the_batch_anew(run):
    trainer = run.trainer()
    trainer.script["Forward"] = lambda m: trainer.link.progress(m.request_id, "working")
    first = Submitted(run, SCORE, 1)
    assert soon(lambda: "working" in first.phases)
    second = Submitted(run, SCORE, 2)
    assert soon(lambda: bool(trainer.staged))
    trainer.die()
    other = run.trainer()
    assert [j.done()["seconds"]["forward"] for j in (first, second)] == [0.1, 0.1]
    assert [b for _, b in other.batches] == [tuple(batch(1, SCORE)), tuple(batch(2, SCORE))]


def test_a_cancelled_job_s_batch_is_dropped_and_the_next_one_goes(run):
    trainer = run.trainer()
    go_on = held(trainer, "ForwardBackward")
    first = Submitted(run, SUM, 1)
    assert soon(lambda: "working" in first.phases)
    second, third = Submitted(run, SUM, 2), Submitted(run, SUM, 3)
    assert soon(lambda: "job-2" in trainer.staged)
    run.client.cancel("job-2")
    assert soon(lambda: list(trainer.staged) == ["job-3"])
    assert [k for k in trainer.log if k != "ForwardBackward"] == ["StageBatch", "DropBatch", "StageBatch"]
    go_on.set()
    with pytest.raises(JobFailed, match="cancelled before it started"):
        second.done()
    assert (first.done()["pending_batches"], third.done()["pending_batches"]) == (1, 2)
    assert [b for _, b in trainer.batches] == [tuple(batch(1)), tuple(batch(3))]


def test_a_staged_batch_that_is_refused_fails_its_job_as_it_would_have(run):
    """Once, with the trainer's words: it is not sent again with its batch."""
    trainer = run.trainer()
    go_on = held(trainer, "ForwardBackward")
    first = Submitted(run, SUM, 1)
    assert soon(lambda: "working" in first.phases)
    second = Submitted(run, SUM, 2)
    assert soon(lambda: bool(trainer.staged))
    trainer.script["ForwardBackward"] = lambda m: trainer.refuse(m, code=ErrorCode.BAD_INPUT)
    go_on.set()
    first.done()
    with pytest.raises(JobFailed, match="told to") as failure:
        second.done()
    assert failure.value.code == "bad_input" and len(trainer.batches) == 2


@pytest.mark.parametrize("stage_bytes", [0, sum(map(len, batch(0))) - 1])
def test_nothing_goes_ahead_when_it_is_off_or_too_large(tmp_path, stage_bytes: int):
    run = Run(tmp_path)
    run.config = replace(run.config, stage_bytes=stage_bytes)
    with run:
        trainer = run.trainer()
        go_on = held(trainer, "ForwardBackward")
        first = Submitted(run, SUM, 1)
        assert soon(lambda: "working" in first.phases)
        second = Submitted(run, SUM, 2)
        go_on.set()
        assert (first.done()["pending_batches"], second.done()["pending_batches"]) == (1, 2)
        assert trainer.log == ["ForwardBackward"] * 2 and [n for n, _ in trainer.batches] == [None, None]


def test_bad_limit_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="stage_bytes is -1"):
        replace(Run(tmp_path).config, stage_bytes=-1)


def test_nothing_goes_ahead_to_a_trainer_that_ends_with_its_job(run):
    trainers, holds = [], []

    def make():
        trainer = FakeTrainer(endpoint=run.endpoint, node_id="trainer", token=TOKEN)
        holds.append(held(trainer, "Forward"))
        trainers.append(trainer)
        return trainer.start()

    run.nodes.append(FakeLauncher(make=make, endpoint=run.endpoint, node_id="trainer-launcher-0", token=TOKEN).start())
    assert soon(lambda: [n.state for n in run.client.status().nodes] == ["ready"])
    first, second = Submitted(run, SCORE, 1), Submitted(run, SCORE, 2)
    for i, job in enumerate((first, second)):
        assert soon(lambda job=job: "working" in job.phases)
        holds[i].set()
        job.done()
    assert len(trainers) == 2 and not any("StageBatch" in t.log for t in trainers)
    assert [b for t in trainers for _, b in t.batches] == [tuple(batch(1, SCORE)), tuple(batch(2, SCORE))]


def test_offload_keeps_what_is_staged(run):
    class Offloading(FakeTrainer):
        detail = {"memory": "offload"}  # noqa: RUF012

    trainer = Offloading(endpoint=run.endpoint, node_id="trainer", token=TOKEN).start()
    run.nodes.append(trainer)
    go_on = held(trainer, "Forward")
    first = Submitted(run, SCORE, 1)
    assert soon(lambda: "working" in first.phases)
    second = Submitted(run, SCORE, 2)
    assert soon(lambda: bool(trainer.staged))
    go_on.set()
    first.done(), second.done()
    assert trainer.log == ["Forward", "StageBatch", "ReleaseMemory", "Forward", "ReleaseMemory"]
    assert trainer.batches[1] == ("job-2", tuple(batch(2, SCORE)))


@pytest.mark.parametrize("lost", [False, True])
def test_an_orchestrator_that_ends_with_a_batch_ahead(tmp_path, lost: bool):
    """The next one knows nothing of it and sends the job with its batch. Killed while the job that named its batch ran, it asks for the
    outcome; one of the trainer's not having had it counts for the new one too. Nothing runs twice."""
    killed = Killed(tmp_path)
    try:
        trainer = killed.trainer
        go_on = held(trainer, "ForwardBackward")
        first = Submitted(killed, SUM, 1)
        assert soon(lambda: "working" in first.phases)
        second = Submitted(killed, SUM, 2)
        assert soon(lambda: bool(trainer.staged))
        killed.restart()
        go_on.set()
        assert (first.done()["pending_batches"], second.done()["pending_batches"]) == (1, 2)
        assert trainer.batches == [(None, tuple(batch(1))), (None, tuple(batch(2)))]

        go_on = held(trainer, "ForwardBackward")
        third = Submitted(killed, SUM, 3)
        assert soon(lambda: "working" in third.phases)
        fourth = Submitted(killed, SUM, 4)
        assert soon(lambda: "job-4" in trainer.staged)
        if lost:
            trainer.staged.clear()
            take = trainer.take_batch
            trainer.take_batch = lambda e: (e.message.staged is not None and killed.restart()) or take(e)
        else:
            working = trainer.on_ForwardBackward
            trainer.on_ForwardBackward = lambda m: (m.staged is not None and killed.restart()) or working(m)
        go_on.set()
        assert (third.done()["pending_batches"], fourth.done()["pending_batches"]) == (3, 4)
        assert trainer.pending == 4 and killed.starts == 3
        assert [b for _, b in trainer.batches if b is not None] == [tuple(batch(i)) for i in (1, 2, 3, 4)]
    except BaseException:
        print((tmp_path / "log").read_text()[-4000:])
        raise
    finally:
        killed.close()


def test_a_request_that_names_its_batch_carries_none():
    from orchestrator.errors import ProtocolError
    from orchestrator.protocol.messages import ForwardBackward

    named = ForwardBackward(request_id="r", deadline_s=1, tensors=BATCH, staged="job")
    assert decode([bytes(f) for f in encode(named)]).message == named
    with pytest.raises(ProtocolError, match="buffers of"):
        encode(named, batch(1))
