"""What a node, a disk or another process does wrong is its own problem: nothing wrong is served,
nobody is left paused, and it is said.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import threading

import pytest
from pydantic import ValidationError

from orchestrator.config import OrchestratorConfig
from orchestrator.errors import ConfigError, JobFailed
from orchestrator.protocol.messages import (
    ErrorCode,
    InitialSync,
    Manifest,
    OptimStep,
    Resync,
    TensorSpec,
)
from orchestrator.publication.config import PublicationConfig
from orchestrator.publication.publication import Publication
from orchestrator.storage.journal import Journal
from orchestrator.storage.run_folder import RunFolder
from tests.orchestrator import changing
from tests.orchestrator.fake_nodes import MANIFEST, FakeTrainer, digests, soon
from tests.orchestrator.run import BUFFERS, JOB, TOKEN, Run
from tests.orchestrator.serving import endpoint_in, start_serve


def synced(run, replicas=1):
    trainer = run.trainer()
    nodes = [run.replica(trainer, i) for i in range(replicas)]
    run.client.run(InitialSync())
    return trainer, nodes


# ---------------------------------------------------------------- nodes that answer nonsense


@pytest.mark.parametrize(
    "detail", [{}, {"rendezvous": 5}, {"rendezvous": {"inference-0": {"transport": "tcp"}}}]
)
def test_a_progress_without_its_rendezvous_fails_the_publication_alone(run, detail):
    trainer, replica = run.trainer(), run.replica(lambda: trainer)

    def nonsense(message) -> None:
        trainer.link.progress(message.request_id, "listening", **detail)
        trainer._done(message)

    trainer.script["OpenTransferGroup"] = nonsense
    assert run.client.run(InitialSync(), timeout_s=30).attempts == 2
    assert replica.served == [(0, [10, 20, 30])]


@pytest.mark.parametrize("answer", [{}, digests([1]), {"result": {"seconds": "many"}}])
def test_a_trainer_that_sends_no_digests_leaves_no_replica_paused(run, answer):
    trainer, (replica,) = synced(run)
    trainer.script["SendWeights"] = lambda m: trainer.link.complete(m.request_id, **answer)
    result = run.client.run(JOB, buffers=BUFFERS, timeout_s=30)
    assert result.attempts == 2 and "AbortUpdate" in replica.log
    assert replica.served[-1] == (1, [11, 21, 31])


@pytest.mark.parametrize(
    "answer", [{}, digests([1]), {"result": {"unverified": 5}, **digests([11, 21, 31])}]
)
def test_a_replica_that_answers_nonsense_is_left_out_and_the_others_go_on(run, answer):
    _, (bad, good) = synced(run, replicas=2)
    bad.script["ReceiveWeights"] = lambda m: (
        bad.stand_still(m),
        bad.link.complete(m.request_id, **answer),
    )
    result = run.client.run(JOB, buffers=BUFFERS, timeout_s=30)
    assert list(result.left_out) == ["inference-0"] and result.attempts == 1
    assert good.served[-1] == (1, [11, 21, 31]) and soon(
        lambda: bad.served[-1] == (1, [11, 21, 31])
    )


def test_a_plan_that_is_none_is_that_replicas_problem(run):
    _, (bad, good) = synced(run, replicas=2)
    bad.restarted()

    def nonsense(message) -> None:
        bad.script["PrepareUpdate"] = nonsense
        bad.link.complete(message.request_id, result={"layout": {"chunks": "none"}})

    bad.script["PrepareUpdate"] = nonsense
    result = run.client.run(JOB, buffers=BUFFERS, timeout_s=30)
    assert list(result.left_out) == ["inference-0"] and good.served[-1] == (1, [11, 21, 31])


def test_a_defect_in_a_publication_leaves_no_replica_paused(run, monkeypatch):
    _, (replica,) = synced(run)
    calls, verify = [], Publication._verify_live

    async def broken_once(publication, received):
        calls.append(1)
        if len(calls) == 1:
            raise KeyError("digests")
        await verify(publication, received)

    monkeypatch.setattr(Publication, "_verify_live", broken_once)
    assert run.client.run(JOB, buffers=BUFFERS, timeout_s=30).attempts == 2
    assert "AbortUpdate" in replica.log and replica.served[-1] == (1, [11, 21, 31])


def test_a_second_fault_during_the_recovery_is_another_attempt(run):
    trainer, (replica,) = synced(run)
    trainer.script["SendWeights"] = lambda m: trainer.refuse(m, code=ErrorCode.TRANSFER_FAILED)
    trainer.script["LoadCheckpoint"] = lambda m: trainer.refuse(m, code=ErrorCode.CHECKPOINT_FAILED)
    result = run.client.run(JOB, buffers=BUFFERS, timeout_s=30)
    assert result.attempts == 3 and replica.served[-1] == (1, [11, 21, 31])


def test_a_trainer_that_never_says_where_it_listens_is_named(tmp_path):
    with Run(tmp_path, join_timeout_s=0.5, attempts=1) as run:
        trainer = run.trainer()
        run.replica(trainer)
        trainer.script["OpenTransferGroup"] = lambda _: None
        with pytest.raises(JobFailed, match="did not say where it listens within") as silent:
            run.client.run(InitialSync(), timeout_s=60)
        assert (silent.value.code, silent.value.node) == ("transfer_timeout", "trainer")


def test_seconds_that_are_none_and_an_answer_that_is_too_long_end_nothing(run):
    trainer = run.trainer()
    trainer.script["OptimStep"] = lambda m: trainer.link.complete(
        m.request_id, result={"seconds": 5}
    )
    assert "total" in run.client.run(OptimStep(), timeout_s=20).seconds
    trainer.script["OptimStep"] = lambda m: trainer.link.fail(
        m.request_id, code=ErrorCode.INTERNAL, phase="test", message="m", remedy="x" * 60_000
    )
    with pytest.raises(JobFailed, match="xxx"):
        run.client.run(OptimStep(), timeout_s=20)
    assert run.client.run(OptimStep(), timeout_s=20).metrics == {"loss": 1.0}


# ---------------------------------------------------------------- a name is one content for ever


def rotten(run) -> str:
    """What a resync would make of @1 is no longer what it was."""
    run.client.run(JOB, buffers=BUFFERS)
    folder = run.client.run(Resync(), timeout_s=30).checkpoint_dir
    with open(f"{folder}/weights", "w") as file:
        file.write("11 21 99")
    return folder


def test_a_version_that_rotted_is_not_served_again(run):
    _, (replica,) = synced(run)
    rotten(run)
    run.client.run(OptimStep())  # the resync has to load the served version
    served = list(replica.served)
    with pytest.raises(
        JobFailed, match="version 1 is not what it was when it was first sent"
    ) as changed:
        run.client.run(Resync(), timeout_s=30)
    assert changed.value.code == "verification_failed" and replica.served == served
    # What the trainer held before the resync is put back, and a new name is free for it.
    assert run.client.publish().version == 2 and replica.served[-1] == (2, [11, 21, 31])


def test_a_version_that_rots_before_it_is_committed_is_not_served(run):
    """What the trainer sent first is what the version is, whatever its checkpoint holds by the next
    attempt.
    """
    trainer, (replica,) = synced(run)
    replica.flip = True

    def send_and_rot(message) -> None:
        (run.dir / "versions" / "1" / "weights").write_text("11 21 99")
        trainer.on_SendWeights(message)

    trainer.script["SendWeights"] = send_and_rot
    with pytest.raises(JobFailed, match="version 1 is not what it was when it was first sent"):
        run.client.run(JOB, buffers=BUFFERS, timeout_s=30)
    assert replica.served == [(0, [10, 20, 30])]
    assert run.client.run(JOB, buffers=BUFFERS, timeout_s=30).version == 2


def test_a_first_version_that_nobody_was_served_may_be_made_anew(tmp_path):
    with Run(tmp_path, attempts=1) as run:
        trainer = run.trainer()
        replica = run.replica(trainer)
        replica.flip = True
        with pytest.raises(JobFailed, match="not what the trainer sent"):
            run.client.run(InitialSync(), timeout_s=30)
        trainer.weights = [11, 21, 31]  # another adapter was loaded
        assert run.client.run(InitialSync(), timeout_s=30).version == 0
        assert replica.served == [(0, [11, 21, 31])]


@pytest.mark.parametrize("rank", [2, 3])
def test_a_part_for_a_new_adapter_leaves_the_rest_of_the_content_as_it_was(run, rank):
    """Other tensors of the manifest change, in shape or only by training. What did not travel is
    part of the version, so the same version may be sent whole."""
    trainer, (replica,) = changing.start(run)
    trainer.weights = [10, 21, 31]
    run.client.new_adapter(rank=rank)
    adapter = (TensorSpec(name=f"w{i}", dtype="float32", shape=(4, rank)) for i in (1, 2))
    trainer.manifest = Manifest(tensors=(MANIFEST.tensors[0], *adapter), changed=(1, 2))
    assert run.client.publish().sent == "changed"
    assert run.client.run(Resync(), timeout_s=30).sent == "full"
    assert replica.served[-1] == (1, [10, 21, 31])


def test_a_replica_that_joins_late_gets_no_other_content(run):
    trainer, (replica, late) = synced(run, replicas=2)
    rotten(run)
    run.client.run(OptimStep())
    late.live = [0, 0, 0]
    late.restarted()
    assert soon(lambda: "failed:verified" in steps(run, 1) or "failed:finished" in steps(run, 1))
    assert soon(lambda: "AbortUpdate" in late.log)  # sent after the step is written down
    assert late.served[-1] == (1, [11, 21, 31]) and "AbortUpdate" not in replica.log
    assert run.client.status().version == 1
    trainer.weights = [11, 21, 31]


def steps(run, version):
    """States of the version's publications so far."""
    journal = Journal(run.dir / "journal.sqlite", run_token=TOKEN, name="m")
    try:
        return [state for v, state in journal.publication_steps() if v == version]
    finally:
        journal.close()


# ---------------------------------------------------------------- files


def test_the_run_folder_is_private_and_locked(run):
    assert run.dir.stat().st_mode & 0o777 == 0o700
    modes = {
        f.name: f.stat().st_mode & 0o777
        for f in run.dir.iterdir()
        if f.name.startswith(("journal", "lock"))
    }
    assert {"journal.sqlite", "journal.sqlite-wal", "lock"} <= modes.keys() and set(
        modes.values()
    ) == {0o600}
    with pytest.raises(ConfigError, match=rf"pid {os.getpid()} lives in the run folder"):
        RunFolder(run.dir)


def test_a_look_at_the_lock_refuses_no_start(tmp_path):
    """`splice status` holds it for a moment."""
    RunFolder(tmp_path / "run").close()
    looking = os.open(tmp_path / "run" / "lock", os.O_RDWR)
    fcntl.flock(looking, fcntl.LOCK_EX)
    threading.Timer(0.1, os.close, (looking,)).start()
    RunFolder(tmp_path / "run").close()


def test_a_folder_that_others_use_is_not_closed(tmp_path):
    for name in ("shared", "empty", "run"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o1777)
    (tmp_path / "shared" / "somebodys").touch()
    (tmp_path / "run" / "journal.sqlite").touch()
    with pytest.raises(ConfigError, match="choose a new or an empty folder"):
        RunFolder(tmp_path / "shared")
    assert (tmp_path / "shared").stat().st_mode & 0o7777 == 0o1777
    assert [f.name for f in (tmp_path / "shared").iterdir()] == ["somebodys"]
    for name in ("empty", "run"):
        RunFolder(tmp_path / name).close()
        assert (tmp_path / name).stat().st_mode & 0o7777 == 0o700


def test_no_path_of_a_job_leads_into_the_runs_own_folders(run, tmp_path):
    synced(run)
    (run.dir / "x").mkdir()
    (tmp_path / "link").symlink_to(run.dir / "versions")
    for folder in (
        run.dir / "versions" / "0",
        run.dir / "x" / ".." / "versions" / "0",
        tmp_path / "link" / "7",
        run.dir,
    ):
        for job in (run.client.save_checkpoint, run.client.export_hf):
            with pytest.raises(JobFailed, match="belongs to the run itself") as refused:
                job(str(folder), timeout_s=20)
            assert refused.value.code == "bad_input"
    run.client.save_checkpoint(str(tmp_path / "mine"), timeout_s=20)


def test_a_relative_path_of_a_job_is_relative_to_the_runs_folder(run):
    """The result names the whole path and the host, and what was saved is found again."""
    trainer, _ = synced(run)
    client, host = run.client, socket.gethostname()
    saved = client.save_checkpoint("saves/./mine", timeout_s=20)
    mine = str(run.dir / "saves" / "mine")
    assert saved.checkpoint_dir == mine and saved.host == host
    assert trainer.saved.keys() == {str(run.dir / "versions" / "0"), mine}
    assert client.load_checkpoint("saves/mine", timeout_s=20).checkpoint_dir == mine
    exported = client.export_hf("hf", timeout_s=20)
    assert exported.output_dir == str(run.dir / "hf") and exported.host == host
    for folder in ("versions/7", "x/../versions", "~/mine"):
        with pytest.raises(JobFailed, match=r"belongs to the run itself|`~` is not") as refused:
            client.save_checkpoint(folder, timeout_s=20)
        assert refused.value.code == "bad_input"


@pytest.mark.parametrize("name", ["q@1", "", "a/b", "a b"])
def test_a_name_that_cannot_be_served_is_refused(name, tmp_path):
    with pytest.raises(ValidationError, match="cannot be the served name"):
        OrchestratorConfig(
            run_dir=tmp_path,
            run_token=TOKEN,
            name=name,
            publication=PublicationConfig(transport="tcp"),
        )


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize("ends_the_run", [False, True])
def test_sigterm_ends_the_run_only_if_asked(ends_the_run, tmp_path):
    folder = tmp_path / "run"
    process = start_serve(folder, *(["--stop-on-term"] if ends_the_run else []))
    endpoint = endpoint_in(folder)
    trainer = FakeTrainer(endpoint=endpoint, node_id="trainer", token=TOKEN).start()
    try:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)  # of the group and of the process, say
        assert process.wait(20) == 0
        assert (
            soon(lambda: "Shutdown" in trainer.log, timeout_s=5 if ends_the_run else 1)
            is ends_the_run
        )
        if not ends_the_run:
            process = start_serve(folder)
            assert soon(lambda: trainer.times_forgotten > 0), "the trainer was not taken back"
    finally:
        trainer.die()
        process.kill()
        process.wait(10)
