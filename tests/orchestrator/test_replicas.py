"""Several replicas of one alias: all healthy ones show a version or none does, and one that fails
is left out and brought back.
"""

from __future__ import annotations

import time

import pytest

from orchestrator.control import router
from orchestrator.errors import JobFailed
from orchestrator.protocol.messages import ErrorCode, InitialSync, Ready, Resync, Unready
from tests.orchestrator.fake_nodes import FakeReplica, FakeTrainer, soon
from tests.orchestrator.run import BUFFERS, JOB, Run

V0, V1, V2 = (0, [10, 20, 30]), (1, [11, 21, 31]), (2, [12, 22, 32])
LOST_AFTER_S = 5.0


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Two replicas at @0; a silent node is lost after five seconds."""
    monkeypatch.setattr(router, "LOST_AFTER_S", LOST_AFTER_S)
    with Run(tmp_path, replicas=2) as r:
        r.t = r.trainer()
        r.a, r.b = r.replica(r.t, 0), r.replica(r.t, 1)
        r.client.run(InitialSync())
        yield r


def test_two_versions_of_nccl_are_refused_before_a_group_is_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(FakeTrainer, "packages", {"nccl": "2.28.9"})
    monkeypatch.setattr(
        FakeReplica, "detail", FakeReplica.detail | {"packages": {"nccl": "2.29.7"}}
    )
    with Run(tmp_path, transport="nccl") as run:
        trainer = run.trainer()
        replica = run.replica(trainer)
        with pytest.raises(JobFailed, match=r"NCCL 2\.28\.9 and vLLM has NCCL 2\.29\.7") as failed:
            run.client.run(InitialSync())
        assert "nvidia-nccl-cu13==2.29.7" in str(failed.value)
        asked = {*trainer.log, *replica.log}
        assert not asked & {"OpenTransferGroup", "JoinTransferGroup", "LoadCheckpoint"}


@pytest.mark.parametrize(("ours", "theirs"), [("2.29.7", "2.29.7"), ("", "2.29.7"), ("2.28.9", "")])
def test_one_version_of_nccl_or_an_unknown_one_is_not_refused(tmp_path, monkeypatch, ours, theirs):
    monkeypatch.setattr(FakeTrainer, "packages", {"nccl": ours})
    monkeypatch.setattr(FakeReplica, "detail", FakeReplica.detail | {"packages": {"nccl": theirs}})
    with Run(tmp_path, transport="nccl") as run:
        run.replica(run.trainer())
        assert run.client.run(InitialSync()).version == 0


def test_one_that_fails_its_verification_is_left_out_and_brought_back_alone(run):
    run.b.flip = True
    result = run.client.run(JOB, buffers=BUFFERS)
    assert result.attempts == 1 and result.replicas == ["inference-0"]
    assert "w1" in result.left_out["inference-1"]
    assert run.a.served == [V0, V1]
    assert soon(lambda: run.b.aborted.is_set() and "LeaveAlias" in run.b.log)
    assert soon(lambda: run.b.served == [V0, V1])
    assert run.a.log.count("ReceiveWeights") == 2, "it had to pause for the other's resync"
    result = run.client.run(JOB, buffers=BUFFERS)
    assert result.left_out == {} and run.a.served[-1] == run.b.served[-1] == V2


def test_if_none_verifies_none_is_left_out(run):
    run.a.flip = run.b.flip = True
    result = run.client.run(JOB, buffers=BUFFERS)
    assert result.attempts == 2 and result.left_out == {}
    assert run.a.served == run.b.served == [V0, V1]


def test_one_that_dies_in_the_transfer_is_left_out_and_its_successor_brought_back(run):
    run.b.script["ReceiveWeights"] = lambda _: run.b.link.close()
    result = run.client.run(JOB, buffers=BUFFERS)
    assert result.attempts == 2 and set(result.left_out) == {"inference-1"}
    assert run.a.served == [V0, V1] and run.client.status().version == 1
    result = run.client.run(JOB, buffers=BUFFERS)
    assert result.version == 2 and result.replicas == ["inference-0"] and run.a.served[-1] == V2
    run.b = run.replica(run.t, 1)
    assert soon(lambda: run.b.served == [V2])
    assert run.a.log.count("CommitUpdate") == 3
    assert run.client.run(JOB, buffers=BUFFERS).replicas == ["inference-0", "inference-1"]


def test_one_that_dies_before_its_commit_is_left_out(run):
    run.b.script["CommitUpdate"] = lambda _: run.b.link.close()
    result = run.client.run(JOB, buffers=BUFFERS)
    assert result.attempts == 1 and set(result.left_out) == {"inference-1"}
    assert run.a.served == [V0, V1]
    assert result.seconds["pause"] < LOST_AFTER_S, "what is healthy continues at once"


def test_one_whose_vllm_is_starting_again_is_not_waited_for(run):
    def vllm_ends(message):
        run.b.link.send(Unready(node_id="inference-1", reason="vLLM has ended"))
        run.b.refuse(message, code=ErrorCode.NODE_LOST)

    run.b.script["ReceiveWeights"] = vllm_ends
    result = run.client.run(JOB, buffers=BUFFERS)
    assert result.attempts == 2 and result.replicas == ["inference-0"] and run.a.served[-1] == V1
    assert run.states()["inference-1"] == "connected"
    run.b.link.send(Ready(node_id="inference-1", detail={**run.b.detail, "restarted": True}))
    assert soon(lambda: run.b.served == [V0, V1])
    assert run.a.log.count("ReceiveWeights") == 3  # @0, the broken and the repeated @1


def test_one_that_was_silent_while_its_vllm_starts_is_not_taken_for_ready(run):
    run.b.link.send(Unready(node_id="inference-1", reason="vLLM has ended"))
    assert soon(lambda: run.states()["inference-1"] == "connected")
    run.lose("inference-1")
    assert (
        soon(lambda: run.states()["inference-1"] != "lost")
        and run.states()["inference-1"] == "connected"
    )
    result = run.client.run(JOB, buffers=BUFFERS)
    assert result.attempts == 1 and result.replicas == ["inference-0"]


def test_that_its_vllm_has_ended_is_heard_of_one_that_was_silent(run):
    """What it said first, unknown as it was, was dropped."""
    run.lose("inference-1")
    run.b.link.send(Unready(node_id="inference-1", reason="vLLM has ended"))
    assert soon(lambda: run.b.times_forgotten > 0 and run.states()["inference-1"] == "connected")
    time.sleep(0.2)
    assert run.states()["inference-1"] == "connected"


def test_one_that_was_silent_is_not_taken_for_restarted_again(run):
    run.b.restarted()
    assert soon(lambda: run.b.served == [V0, V0])
    assert soon(lambda: not run.orchestrator._publisher.bare_replicas())
    run.lose("inference-1")
    assert soon(lambda: run.states()["inference-1"] == "ready" and run.b.times_forgotten > 0)
    time.sleep(1.5)
    assert run.b.served == [V0, V0]


def test_one_that_gave_up_what_it_received_is_left_out_at_the_commit(run):
    """It was silent after it had verified, and asked who it is when it came back."""
    run.b.script["CommitUpdate"] = lambda m: run.b.refuse(m, code=ErrorCode.NOT_READY)
    result = run.client.run(JOB, buffers=BUFFERS)
    assert (
        result.attempts == 1
        and result.replicas == ["inference-0"]
        and set(result.left_out) == {"inference-1"}
    )
    assert soon(lambda: run.b.served == [V0, V1]) and run.a.served == [V0, V1]


def test_the_last_one_is_waited_for(run):
    def vllm_ends(message):
        run.a.link.send(Unready(node_id="inference-0", reason="vLLM has ended"))
        run.a.refuse(message, code=ErrorCode.NODE_LOST)
        time.sleep(0.5)
        run.a.link.send(Ready(node_id="inference-0", detail={**run.a.detail, "restarted": True}))

    run.b.link.close()
    run.a.script["ReceiveWeights"] = vllm_ends
    result = run.client.run(JOB, buffers=BUFFERS)
    assert (
        run.a.served == [V0, V1]
        and result.replicas == ["inference-0"]
        and set(result.left_out) == {"inference-1"}
    )


def test_one_that_never_recovers_does_not_stop_the_others(run):
    """After the second failure at it; then its resyncs come less and less often, and the version of
    the others stands through all of them.
    """
    run.b.on_ReceiveWeights = lambda message: run.b.refuse(message, code=ErrorCode.TRANSFER_FAILED)
    result = run.client.run(JOB, buffers=BUFFERS)
    assert (
        result.attempts == 3
        and set(result.left_out) == {"inference-1"}
        and run.a.served == [V0, V1]
    )
    received = run.a.log.count("ReceiveWeights")
    assert soon(
        lambda: run.b.log.count("ReceiveWeights") >= 2 + 6
    )  # the job's two, and two resyncs of three attempts
    assert run.client.status().version == 1 and run.b.left_alias and run.b.served == [V0]
    assert run.a.log.count("ReceiveWeights") == received and run.a.log[-1] == "CommitUpdate"


def test_in_a_chain_the_trainer_sends_to_the_first_and_a_failure_is_followed_by_none(tmp_path):
    """The replica after the one that failed may be blamed first, so nobody is left out for it."""
    with Run(tmp_path, replicas=3, chain=True) as run:
        trainer = run.trainer()
        a, b, c = (run.replica(trainer, n) for n in range(3))
        opened = []

        def open_group(message):
            opened.append(sorted(message.replicas))
            trainer.on_OpenTransferGroup(message)
            trainer.script["OpenTransferGroup"] = open_group

        trainer.script["OpenTransferGroup"] = open_group
        assert run.client.run(InitialSync()).replicas == [f"inference-{n}" for n in range(3)]
        assert opened == [["inference-0"]]
        assert a.joins == [(1, [], True)]
        assert b.joins == [(1, [10], True)] and c.joins == [(1, [11], False)]
        fails = [2]

        def fail(message):
            fails[0] -= 1
            if fails[0]:
                c.script["ReceiveWeights"] = fail
            c.stand_still(message)
            c.refuse(message, code=ErrorCode.TRANSFER_FAILED)

        c.script["ReceiveWeights"] = fail
        result = run.client.run(JOB, buffers=BUFFERS, timeout_s=30)
        assert (result.version, result.attempts, result.left_out) == (1, 3, {})
        assert opened[1:] == [[f"inference-{n}" for n in range(3)]] * 2
        assert b.joins[-1] == (1, [], False)
        assert a.served[-1] == b.served[-1] == c.served[-1] == V1
        assert run.client.run(Resync()).attempts == 1
        assert opened[3:] == [["inference-0"]] and b.joins[-1] == (1, [10], True)


def test_a_chain_that_fails_again_and_again_rests(tmp_path):
    """One failure may be chance. After more, publications begin without a chain."""
    with Run(tmp_path, replicas=2, chain=True) as run:
        trainer = run.trainer()
        a, b = (run.replica(trainer, n) for n in range(2))

        def join(message):
            b.script["JoinTransferGroup"] = join
            if message.before:
                b.refuse(message, code=ErrorCode.TRANSFER_FAILED)
            else:
                b.on_JoinTransferGroup(message)

        b.script["JoinTransferGroup"] = join
        run.client.run(InitialSync())
        attempts = [run.client.run(Resync()).attempts for _ in range(8)]
        assert attempts == [2, 1, 1, 2, 1, 1, 1, 1]
        assert a.joins[-1] == (1, [], False)


def test_replicas_with_different_numbers_of_workers_form_no_chain(tmp_path, monkeypatch):
    with Run(tmp_path, replicas=2, chain=True) as run:
        trainer = run.trainer()
        a = run.replica(trainer, 0)
        monkeypatch.setattr(FakeReplica, "detail", FakeReplica.detail | {"workers": 2})
        b = run.replica(trainer, 1)
        run.client.run(InitialSync())
        assert a.joins == b.joins == [(1, [], False)]
