"""The trainer's operations as jobs, over real sockets: what arrives, what comes back, and what a
lost trainer takes with it.
"""

from __future__ import annotations

import array
import asyncio
import threading
import time

import pytest
from pydantic import ValidationError

from orchestrator.config import OrchestratorConfig
from orchestrator.control import open_requests
from orchestrator.errors import JobFailed
from orchestrator.jobs import BUFFERS_KEPT
from orchestrator.protocol.messages import (
    BATCH_TENSORS,
    ErrorCode,
    Forward,
    Hello,
    InitialSync,
    LossSpec,
    OptimParams,
    OptimStep,
    Publish,
    SubmitJob,
    TrainMerged,
    batch_specs,
    forward_specs,
)
from orchestrator.protocol.node_link import NodeLink
from orchestrator.storage import retention
from orchestrator.trainer_memory import TrainerMemory
from splice.client.clients import AsyncSpliceClient
from tests.orchestrator.fake_nodes import FakeTrainer, soon
from tests.orchestrator.run import BATCH, BUFFERS, JOB, TOKEN, Run, SmallBatch


def test_every_operation_reaches_the_trainer_with_its_fields(run, tmp_path):
    trainer = run.trainer()
    client, loss = run.client, LossSpec(name="ppo", entropy_bonus=0.1)
    client.forward_backward(SmallBatch(), loss, loss_weight=0.5, grad_accumulation_sequences=4)
    second = client.forward_backward(SmallBatch(), loss)
    assert (
        second.pending_batches == 2
        and second.metrics == {"loss": 1.0}
        and second.seconds["total"] > 0
    )
    client.optim_step(OptimParams(lr=0.25))
    assert trainer.weights == [12, 22, 32]
    client.save_checkpoint(str(tmp_path / "saved"), client_state={"row": 7})
    client.export_hf(str(tmp_path / "hf"))
    client.forward_backward(SmallBatch())
    assert client.load_checkpoint(str(tmp_path / "saved")).dropped_batches == 1
    first, _, step, save, export, _ = trainer.messages
    assert (first.loss, first.loss_weight, first.grad_accumulation_sequences, first.tensors) == (
        loss,
        0.5,
        4,
        BATCH,
    )
    assert step.optim.lr == 0.25 and export.output_dir == str(tmp_path / "hf")
    assert (save.client_state, save.version, save.checkpoint_dir) == (
        {"row": 7},
        0,
        str(tmp_path / "saved"),
    )


def test_forward_brings_its_buffers_back(run):
    trainer = run.trainer()
    result = run.client.forward(SmallBatch(), adapters=False, allowed_token_ids=[3, 4])
    assert result.logprobs == array.array("f", [0, 1]) and result.entropy == array.array(
        "f", [0, 0]
    )
    (asked,) = trainer.messages
    assert [t.name for t in asked.tensors] == ["tokens", "sequence_lengths"]
    assert asked.adapters is False and asked.allowed_token_ids == (3, 4)


def test_forward_backward_brings_its_log_probs_back_where_asked(run):
    trainer = run.trainer()
    assert "logprobs" not in run.client.forward_backward(SmallBatch())
    result = run.client.forward_backward(SmallBatch(), returns_logprobs=True)
    assert result.logprobs == array.array("f", [0, 1]) and result.pending_batches == 2
    assert [asked.returns_logprobs for asked in trainer.messages] == [False, True]


def test_forward_takes_the_batch_s_temperatures_along(run):
    trainer = run.trainer()
    spec = batch_specs(num_sequences=1, num_tokens=2, optional=["temperatures"])[-1]
    run.client.forward(
        SmallBatch(specs=(*BATCH, spec), buffers=(*BUFFERS, array.array("f", [0.5]).tobytes()))
    )
    (asked,) = trainer.messages
    assert [(t.name, t.shape) for t in asked.tensors] == [
        ("tokens", (2,)),
        ("sequence_lengths", (1,)),
        ("temperatures", (1,)),
    ]


def test_the_same_forward_id_runs_once_and_old_results_go(run):
    trainer = run.trainer()
    a = run.client.forward(SmallBatch(), job_id="one")
    b = run.client.forward(SmallBatch(), job_id="one")
    assert a == b and trainer.log.count("Forward") == 1
    for _ in range(BUFFERS_KEPT):
        run.client.forward(SmallBatch())
    with pytest.raises(JobFailed, match="newest 16 results") as failure:
        run.client.forward(SmallBatch(), job_id="one")
    assert failure.value.code == "not_ready" and trainer.log.count("Forward") == 1 + BUFFERS_KEPT


def test_asynchronous_client(run, tmp_path):
    trainer = run.trainer()

    async def go():
        async with AsyncSpliceClient(endpoint=run.endpoint, run_token=TOKEN) as client:
            await client.forward_backward(SmallBatch(), loss_weight=2.0)
            await client.optim_step(OptimParams(lr=0.5))
            await client.save_checkpoint(str(tmp_path / "a"))
            await client.load_checkpoint(str(tmp_path / "a"))
            await client.export_hf(str(tmp_path / "b"))
            return await client.forward(SmallBatch())

    assert list(asyncio.run(go()).logprobs) == [0, 1]
    assert trainer.log == [
        "ForwardBackward",
        "OptimStep",
        "SaveCheckpoint",
        "LoadCheckpoint",
        "ExportHf",
        "Forward",
    ]


def test_steps_of_ones_own_are_published(run):
    trainer = run.trainer()
    replica = run.replica(trainer)
    with pytest.raises(JobFailed, match="InitialSync first"):
        run.client.publish()
    run.client.run(InitialSync())
    run.client.forward_backward(SmallBatch())
    run.client.forward_backward(SmallBatch())
    with pytest.raises(JobFailed, match="gradients of 2 batches are pending"):
        run.client.publish(refuses_pending=True)
    run.client.optim_step()
    assert replica.served == [(0, [10, 20, 30])]
    assert run.client.publish().alias == "m@1"
    assert replica.served[-1] == (1, [12, 22, 32])
    run.client.forward_backward(SmallBatch())
    assert run.client.run(JOB, buffers=BUFFERS).version == 2  # what was pending is part of the step
    assert replica.served[-1] == (2, [14, 24, 34])


def test_a_publication_keeps_pending_gradients_in_every_attempt(run):
    """The version is the state without them; a failed attempt does not reload the trainer."""
    trainer = run.trainer()
    replica = run.replica(trainer)
    run.client.run(InitialSync())
    run.client.forward_backward(SmallBatch())

    def fail_late(message):
        replica.stand_still(message)
        replica.refuse(message, code=ErrorCode.TRANSFER_FAILED)

    replica.script["ReceiveWeights"] = fail_late
    assert run.client.publish().attempts == 2
    assert replica.served[-1] == (1, [10, 20, 30]) and "LoadCheckpoint" not in trainer.log
    run.client.optim_step()
    assert trainer.weights == [11, 21, 31]


def test_a_new_adapter_is_planned_and_published_anew(run):
    trainer = run.trainer()
    replica = run.replica(trainer)
    run.client.run(InitialSync())
    run.client.publish()
    assert trainer.log.count("PlanPublication") == 1, "the plan is kept"
    run.client.forward_backward(SmallBatch())
    made = run.client.new_adapter(rank=3, targets=["q_proj"], seed=5)
    assert (made.dropped_batches, made.rank) == (1, 3)
    asked = trainer.messages[-1]
    assert (asked.rank, asked.alpha, asked.targets, asked.seed) == (3, None, ("q_proj",), 5)
    run.client.publish()
    assert trainer.log.count("PlanPublication") == 2 and replica.log.count("PrepareUpdate") == 2


def test_a_new_adapter_is_lost_with_its_trainer_and_named(run):
    first = run.trainer()
    run.client.new_adapter(rank=3)
    first.die()
    run.trainer()
    with pytest.raises(JobFailed, match=r"the adapter of rank 3, 0 optimizer steps .* are lost"):
        run.client.forward_backward(SmallBatch())


def test_gradients_lost_in_a_publication_are_named_by_the_next_job(run):
    """The version comes from its checkpoint; what was pending went with the process."""
    current = [run.trainer()]
    replica = run.replica(lambda: current[0])
    run.client.run(InitialSync())
    run.client.forward_backward(SmallBatch())
    current[0].script["SendWeights"] = lambda _: None  # silence: it will be dead

    def peer_gone(message):
        replica.stand_still(message)
        threading.Thread(target=replace).start()
        replica.refuse(message, code=ErrorCode.TRANSFER_FAILED)

    def replace():
        current[0].die()
        current[0] = run.trainer()

    replica.script["ReceiveWeights"] = peer_gone
    assert run.client.publish().attempts == 2
    assert replica.served[-1] == (1, [10, 20, 30])
    with pytest.raises(JobFailed, match=r"gradients of 1 batches since .* are lost"):
        run.client.optim_step()
    assert run.client.forward_backward(SmallBatch()).pending_batches == 1


def replace(run, first, then):
    """The trainer dies and another comes."""
    first.die()
    then.append(run.trainer())


def test_a_trainer_lost_with_gradients_pending_is_not_asked_again(run):
    current = [run.trainer()]
    first = current[0]
    run.client.forward_backward(SmallBatch())
    first.script["ForwardBackward"] = lambda _: threading.Thread(
        target=replace, args=(run, first, current)
    ).start()
    with pytest.raises(
        JobFailed,
        match="0 optimizer steps and the gradients of 1 batches since the base weights are lost",
    ) as lost:
        run.client.forward_backward(SmallBatch())
    assert lost.value.code == "work_lost"
    while len(current) == 1:
        time.sleep(0.01)
    assert (
        run.client.forward_backward(SmallBatch()).pending_batches == 1
    )  # said once; the next job runs
    assert "ForwardBackward" not in first.log[2:] and current[1].log == ["ForwardBackward"]


def test_a_trainer_lost_between_jobs_is_put_back_and_the_loss_is_said(run, tmp_path):
    current = [run.trainer()]
    saved = str(tmp_path / "saved")
    for _ in range(2):
        run.client.forward_backward(SmallBatch())
        run.client.optim_step()
        if current[0].log.count("SaveCheckpoint") == 0:
            run.client.save_checkpoint(saved)
    replace(run, current[0], current)
    with pytest.raises(
        JobFailed,
        match=f"1 optimizer steps and the gradients of 0 batches since {saved} are lost.*the new process has loaded that state",  # noqa: E501
    ):
        run.client.optim_step()
    assert current[1].weights == [11, 21, 31]
    replace(run, current[1], current)
    run.client.forward_backward(SmallBatch())  # nothing was lost this time: put back without a word
    assert current[2].log == ["LoadCheckpoint", "ForwardBackward"] and current[2].weights == [
        11,
        21,
        31,
    ]


def test_a_loss_is_still_to_be_said_where_it_could_not_be_put_back(run, tmp_path):
    first = run.trainer()
    run.client.save_checkpoint(str(tmp_path / "saved"))
    run.client.forward_backward(SmallBatch())
    run.client.optim_step()
    first.die()
    second = FakeTrainer(endpoint=run.endpoint, node_id="trainer", token=TOKEN)
    second.script["LoadCheckpoint"] = second.refuse
    run.nodes.append(second.start())
    with pytest.raises(JobFailed, match="told to"):
        run.client.optim_step()
    with pytest.raises(
        JobFailed,
        match=r"1 optimizer steps .* are lost with it; the new process has loaded that state",
    ):
        run.client.optim_step()


def test_a_request_that_is_never_answered_is_given_up(run, monkeypatch):
    monkeypatch.setattr(open_requests, "STALL_AFTER_S", 0.2)
    run.orchestrator._trainer._job_timeout_s = 0.2
    trainer = run.trainer()
    trainer.script["OptimStep"] = lambda _: None
    with pytest.raises(JobFailed, match="no progress for") as stuck:
        run.client.optim_step(timeout_s=10)
    assert (stuck.value.code, stuck.value.node) == ("transfer_timeout", "trainer")
    assert run.client.optim_step().metrics == {"loss": 1.0}


def test_progress_is_sent_to_who_asks_for_it(run):
    run.trainer()
    hello = Hello(role="client", node_id="raw", incarnation="1", run_token=TOKEN)
    with NodeLink(endpoint=run.endpoint, hello=hello) as link:

        def kinds(*, progress: bool) -> list[str]:
            link.send(SubmitJob(job_id=f"job-{progress}", job=OptimStep(), progress=progress))
            came: list[str] = []
            while "Completed" not in came:
                came.append(link.recv(timeout_s=10).message.kind)
            return came

        link.send(SubmitJob(job_id="refused at once", job=Publish()))
        came = [link.recv(timeout_s=10).message.kind for _ in range(3)]
        assert came == ["Progress", "Progress", "Failed"], (
            "the outcome came before what it is the end of"
        )
        assert kinds(progress=False) == ["Completed"]
        assert kinds(progress=True) == ["Progress", "Progress", "Completed"]


def test_a_trainer_restarted_between_step_and_publication_never_sends_its_base(run):
    current = [run.trainer()]
    replica = run.replica(lambda: current[-1])
    run.client.run(InitialSync())
    publish = run.orchestrator._versions._publish

    async def restarted_first(*args, **kwargs):
        run.orchestrator._versions._publish = publish
        await asyncio.to_thread(replace, run, current[0], current)
        return await publish(*args, **kwargs)

    run.orchestrator._versions._publish = restarted_first
    assert run.client.run(JOB, buffers=BUFFERS).attempts == 2
    assert replica.served == [(0, [10, 20, 30]), (1, [11, 21, 31])]


def test_a_forward_backward_without_anything_pending_is_repeated(run):
    current = [run.trainer()]
    first = current[0]
    first.script["ForwardBackward"] = lambda _: threading.Thread(
        target=replace, args=(run, first, current)
    ).start()
    assert run.client.forward_backward(SmallBatch()).pending_batches == 1
    assert soon(lambda: len(current) == 2) and current[1].log == ["ForwardBackward"]


def test_several_steps_in_one_job(run):
    """The job's numbers reach the trainer, each step's metrics the client; what stands after a
    failure is lost with the process, and that is said.
    """
    trainer = run.trainer()
    taken, skipped = {"loss": 1.0}, {"skipped": 1.0, "skipped_steps": 1.0}
    asked = []

    def three(message):
        asked.append(message)
        trainer.link.complete(
            message.request_id, result={"metrics": taken, "steps": [taken, skipped, taken]}
        )

    trainer.script["TrainLora"] = three
    result = run.client.train_lora(SmallBatch(), "/out", mini_batch_sequences=2, epochs=3)
    assert result.steps == [taken, skipped, taken]
    assert (asked[0].mini_batch_sequences, asked[0].epochs, asked[0].output_dir) == (2, 3, "/out")
    trainer.script["TrainLora"] = lambda m: trainer.link.fail(
        m.request_id,
        code=ErrorCode.TRAINING_FAILED,
        phase="training",
        message="told to",
        remedy="none",
        steps_taken=3,
    )
    with pytest.raises(JobFailed, match="told to") as failure:
        run.client.train_lora(SmallBatch(), "/out", epochs=4)
    assert failure.value.steps_taken == 3
    trainer.die()
    run.trainer()
    with pytest.raises(
        JobFailed,
        match="5 optimizer steps and the gradients of 0 batches since the base weights are lost",
    ):
        run.client.optim_step()


def test_published_steps(run):
    trainer = run.trainer()
    run.replica(trainer)
    run.client.run(InitialSync())
    trainer.script["TrainMerged"] = lambda m: (
        trainer._write(m),
        trainer.link.complete(
            m.request_id,
            result={
                "metrics": {"loss": 2.0},
                "steps": [{"loss": 1.0}, {"loss": 3.0}],
                "warnings": ["the gap is large"],
            },
        ),
    )
    result = run.client.train_merged(SmallBatch(), mini_batch_sequences=1)
    assert result.warnings == ["the gap is large"]
    assert (result.version, result.metrics, result.steps) == (
        1,
        {"loss": 2.0},
        [{"loss": 1.0}, {"loss": 3.0}],
    )


@pytest.mark.parametrize("bad", [{"mini_batch_sequences": 0}, {"epochs": 0}, {"epochs": 1.5}])
def test_bad_numbers_of_steps_are_refused(bad):
    with pytest.raises(ValidationError, match=next(iter(bad))):
        TrainMerged(tensors=BATCH, **bad)


def test_memory_after_failures():
    memory = TrainerMemory(pending=2, steps=1)
    memory.failed(ErrorCode.BAD_INPUT, steps_taken=0)
    memory.failed(
        ErrorCode.CHECKPOINT_FAILED, steps_taken=0
    )  # a save or load that was refused changes nothing
    assert (memory.pending, memory.steps) == (2, 1)
    memory.failed(ErrorCode.NON_FINITE_GRADIENT, steps_taken=0)
    assert (memory.pending, memory.steps) == (0, 1)
    memory.failed(
        ErrorCode.CHECKPOINT_FAILED, steps_taken=1
    )  # the step was taken, and no checkpoint has it
    assert memory.steps == 2
    memory.pending = 1
    memory.failed(ErrorCode.LOGPROB_GAP, steps_taken=0)
    assert (memory.pending, memory.steps) == (0, 2)
    memory.pending = 1
    memory.failed(ErrorCode.TRAINING_FAILED, steps_taken=3)  # in the fourth of a job
    assert (memory.pending, memory.steps) == (0, 5)
    memory.saved("x")
    assert memory.take_loss() is None


def test_versions_that_are_not_kept_go_but_never_the_one_served(tmp_path):
    with Run(tmp_path) as run:
        object.__setattr__(run.config, "keep_versions", 2)
        trainer = run.trainer()
        replica = run.replica(trainer)
        run.client.run(InitialSync())
        run.client.run(JOB, buffers=BUFFERS)
        run.client.run(JOB, buffers=BUFFERS)
        # as after a change of processes: the manifest is checked again
        run.orchestrator._publisher._planner.planned = {}
        replica.script["PrepareUpdate"] = replica.refuse
        with pytest.raises(JobFailed):
            run.client.run(JOB, buffers=BUFFERS)  # version 3 is durable, 2 is still served
        run.client.publish()
        saves = [m for m in trainer.messages if hasattr(m, "delete_after")]
        gone = [[d.rpartition("/")[2] for d in m.delete_after] for m in saves]
        # each twice: a trainer that ended at once has deleted nothing
        assert gone == [[], [], ["0"], ["0", "1"], ["1"]]
        run.client.publish()
        last = [m for m in trainer.messages if hasattr(m, "delete_after")][-1]
        assert [d.rpartition("/")[2] for d in last.delete_after] == ["2", "3"]


def test_a_version_that_a_client_keeps_stays(tmp_path):
    with Run(tmp_path) as run:
        object.__setattr__(run.config, "keep_versions", 2)
        trainer = run.trainer()
        run.replica(trainer)
        run.client.run(InitialSync())
        retention.keep(run.config.run_dir, [0])
        for _ in range(3):
            run.client.run(JOB, buffers=BUFFERS)
        retention.keep(run.config.run_dir, [])
        run.client.publish()
        saves = [m for m in trainer.messages if hasattr(m, "delete_after")]
        gone = [[d.rpartition("/")[2] for d in m.delete_after] for m in saves]
        assert gone == [[], [], [], ["1"], ["0", "1", "2"]]


def test_configurations_that_lose_what_is_served(tmp_path):
    with pytest.raises(ValidationError, match="1 is too few"):
        OrchestratorConfig(**dict(Run(tmp_path).config) | {"keep_versions": 1})


def test_a_clients_checkpoint_is_not_put_among_the_versions(run):
    run.trainer()
    with pytest.raises(JobFailed, match="choose another folder"):
        run.client.save_checkpoint(str(run.dir / "versions" / "7"))


def test_specs():
    specs = batch_specs(num_sequences=2, num_tokens=5, optional=["reference_logprobs"])
    assert [s.name for s in specs] == [*BATCH_TENSORS, "reference_logprobs"] and specs[
        -1
    ].shape == (5,)
    assert [s.shape for s in forward_specs(num_sequences=2, num_tokens=5)] == [(5,), (2,)]
    assert Forward(tensors=specs[:2]).adapters
    for weight in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite"):
            TrainMerged(tensors=specs, optim={"lr": weight})


def test_versions_have_the_numbers_of_another_run_that_is_followed(run):
    trainer = run.trainer(before=lambda node: setattr(node, "detail", {"version": 41}))
    run.replica(trainer)
    client = run.client
    assert client.run(InitialSync()).alias == "m@41"
    assert client.run(Publish(version=45)).alias == "m@45"
    assert client.run(Publish()).alias == "m@46"
    with pytest.raises(JobFailed, match="version 46 cannot be published: this run has made 46"):
        client.run(Publish(version=46))
    assert client.status().version == 46


@pytest.mark.parametrize("follows", [True, False])
def test_a_version_of_a_followed_run_is_published_again_after_a_failure(follows, tmp_path):
    """Its number is always the same weights. Elsewhere they may have changed since."""
    with Run(tmp_path, attempts=1) as run:
        detail = {"version": 41, **({"follows": "s3://bucket"} if follows else {})}
        trainer = run.trainer(before=lambda node: setattr(node, "detail", detail))
        replica = run.replica(trainer)
        run.client.run(InitialSync())
        replica.flip = True
        with pytest.raises(JobFailed, match="nothing is served"):
            run.client.run(Publish(version=45))
        replica.flip = False
        assert run.client.status().version is None
        if follows:
            assert run.client.run(Publish(version=45)).alias == "m@45"
        with pytest.raises(JobFailed, match="version 45 cannot be published"):
            run.client.run(Publish(version=45))
