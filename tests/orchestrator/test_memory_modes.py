"""What the orchestrator asks of trainer and launchers between jobs, and that the client hears of a
job's end only after it.
"""

from __future__ import annotations

import socket

import pytest

from orchestrator import between_jobs
from orchestrator.errors import ConfigError, JobFailed
from orchestrator.protocol.messages import (
    ErrorCode,
    Forward,
    ForwardBackward,
    InitialSync,
    OptimStep,
    TrainLora,
    forward_specs,
)
from tests.orchestrator.fake_nodes import FakeLauncher, FakeTrainer, soon
from tests.orchestrator.run import BATCH, BUFFERS, JOB, TOKEN
from trainer_node.launcher.host import TrainerLaunch, ranks_command

FORWARD = Forward(tensors=forward_specs(num_sequences=1, num_tokens=2))


class Offloading(FakeTrainer):
    """A trainer in memory mode offload."""

    detail = {"memory": "offload"}  # noqa: RUF012


def test_offload_comes_before_the_outcome(run):
    trainer = Offloading(endpoint=run.endpoint, node_id="trainer", token=TOKEN).start()
    run.nodes.append(trainer)
    run.replica(trainer)
    for job, buffers in ((InitialSync(), ()), (JOB, BUFFERS), (FORWARD, BUFFERS[:2])):
        run.client.run(job, buffers=buffers)
        assert trainer.log[-1] == "ReleaseMemory"
    assert trainer.log.count("ReleaseMemory") == 3
    trainer.script["ForwardBackward"] = trainer.refuse
    with pytest.raises(JobFailed, match="told to"):
        run.client.run(ForwardBackward(tensors=BATCH), buffers=BUFFERS)
    assert trainer.log[-1] == "ReleaseMemory"
    trainer.script["ReleaseMemory"] = lambda m: trainer.refuse(m, code=ErrorCode.INTERNAL)
    with pytest.raises(
        JobFailed, match='The job succeeded, but the trainer could not enter memory mode "offload"'
    ):
        run.client.run(JOB, buffers=BUFFERS)
    assert run.client.status().version == 2


@pytest.fixture
def exiting(run):
    """A run in memory mode exit: every trainer that was started, in order."""
    trainers: list[FakeTrainer] = []

    def make():
        trainers.append(FakeTrainer(endpoint=run.endpoint, node_id="trainer", token=TOKEN).start())
        return trainers[-1]

    launcher = FakeLauncher(
        make=make, endpoint=run.endpoint, node_id="trainer-launcher-0", token=TOKEN
    )
    run.nodes.append(launcher.start())
    assert soon(lambda: [n.state for n in run.client.status().nodes] == ["ready"])
    yield run, launcher, trainers
    for trainer in trainers:
        trainer.die()


def test_exit_ends_the_trainer_and_the_next_job_has_the_state(exiting):
    run, launcher, trainers = exiting
    replica = run.replica(lambda: trainers[-1])
    run.client.run(InitialSync())
    assert launcher.trainer is None and trainers[0].log[-1] == "Shutdown"
    assert "trainer" not in {n.node_id for n in run.client.status().nodes}
    run.client.run(TrainLora(tensors=BATCH, output_dir="/nowhere"), buffers=BUFFERS)
    assert trainers[1].log == ["LoadCheckpoint", "TrainLora", "SaveCheckpoint", "Shutdown"]
    run.client.run(OptimStep())
    saved = str(run.dir.absolute() / "trainer_state")
    assert [list(t.saved) for t in trainers[1:3]] == [[saved], [f"{saved}-2"]], (
        "the last durable state was written over"
    )
    assert trainers[2].log[0] == "LoadCheckpoint"
    run.client.run(FORWARD, buffers=BUFFERS[:2])
    assert trainers[3].log == [
        "LoadCheckpoint",
        "Forward",
        "Shutdown",
    ]  # nothing new, so nothing saved
    run.client.load_adapter("/theirs")
    assert trainers[4].log == ["LoadCheckpoint", "LoadAdapter", "SaveCheckpoint", "Shutdown"]
    run.client.run(JOB, buffers=BUFFERS)
    assert replica.log.count("JoinTransferGroup") == replica.log.count("LeaveTransferGroup") == 2
    assert (
        launcher.log.count("StartTrainer")
        == launcher.log.count("StopTrainer")
        == len(trainers)
        == 6
    )
    with pytest.raises(JobFailed, match="Submit TrainMerged or TrainLora with the whole batch"):
        run.client.run(ForwardBackward(tensors=BATCH), buffers=BUFFERS)
    assert len(trainers) == 6, "a job that is refused starts nothing"


def test_exit_a_replica_started_anew_gets_the_version_between_jobs(exiting):
    run, launcher, trainers = exiting
    replica = run.replica(lambda: trainers[-1])
    run.client.run(InitialSync())
    replica.live = [0, 0, 0]
    replica.restarted()
    assert soon(lambda: len(replica.served) >= 2 and launcher.trainer is None)
    assert replica.served == [(0, [10, 20, 30])] * 2 and launcher.trainer is None


def test_exit_needs_somebody_who_starts_it_again(run, monkeypatch):
    monkeypatch.setattr(between_jobs, "LAUNCHERS_BACK_S", 0.3)

    class Exiting(FakeTrainer):
        detail = {"memory": "exit"}  # noqa: RUF012

    run.nodes.append(Exiting(endpoint=run.endpoint, node_id="trainer", token=TOKEN).start())
    assert soon(lambda: bool(run.client.status().nodes))
    why = r"trainer-launcher-0 \(not connected\).* Start it by `splice trainer`"
    with pytest.raises(JobFailed, match=why):
        run.client.run(FORWARD, buffers=BUFFERS[:2])


def test_ranks_command(tmp_path, monkeypatch):
    launch = {"endpoint": "tcp://h:1", "config": tmp_path / "t.json", "python": "py"}
    rest = {"world_size": 4, "tier": "cpu", "template": True}
    alone = ranks_command(TrainerLaunch(**launch, prefix=("docker", "run", "-i", "img")), **rest)
    ranks = ["py", "-P", "-m", "trainer_node.launcher.ranks"]
    assert alone[:8] == ["docker", "run", "-i", "img", *ranks]
    assert alone[8:] == [
        *("--ranks", "4", "--world", "4", "--first", "0", "--template", "cpu", "trainer_node"),
        *("--endpoint", "tcp://h:1", "--node-id", "trainer", "--config", str(tmp_path / "t.json")),
    ]
    several = TrainerLaunch(**launch, nodes=2, node_rank=1, rendezvous="[::1]:29400")
    second = " ".join(ranks_command(several, **rest | {"template": False}))
    assert "--ranks 2 --world 4 --first 2 --master ::1:29400 trainer_node" in second
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("127.0.1.1", 9))])
    assert ranks_command(
        TrainerLaunch(**launch, nodes=2, node_rank=1, rendezvous="host0:1"), **rest
    )
    for bad, says in (
        (
            {"nodes": 2, "rendezvous": "host0:1"},
            "--rendezvous host0 is 127.0.1.1 on this host.* give the host's address",
        ),
        ({"nodes": 3, "rendezvous": "h:1"}, "4 ranks do not divide over --nodes 3"),
        ({"nodes": 2}, "needs --rendezvous HOST:PORT"),
        ({"nodes": 2, "node_rank": 2, "rendezvous": "h:1"}, "--node-rank 2 is not one of 0 to 1"),
    ):
        with pytest.raises(ConfigError, match=says):
            ranks_command(TrainerLaunch(**launch, **bad), **rest)
