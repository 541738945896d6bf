"""Several jobs of one client: submitted ahead, awaited in any order and from several threads."""

from __future__ import annotations

import asyncio
import threading

import pytest
from pydantic import ValidationError

from orchestrator.errors import ConfigError, JobFailed, ProtocolError
from orchestrator.protocol.messages import InitialSync, OptimStep, SaveCheckpoint
from splice.client.clients import AsyncSpliceClient, SpliceClient
from tests.orchestrator.fake_nodes import soon
from tests.orchestrator.run import BUFFERS, JOB, TOKEN, Run


@pytest.fixture
def run(tmp_path):
    with Run(tmp_path) as r:
        r.t = r.trainer()
        r.r = r.replica(r.t)
        r.client.run(InitialSync())
        yield r


def slow(run):
    """The trainer's next step takes until the event."""
    go = threading.Event()

    def wait_then_train(message):
        assert go.wait(10)
        run.t.on_TrainMerged(message)

    run.t.script["TrainMerged"] = wait_then_train
    return go


def test_jobs_submitted_ahead_are_waited_for_in_any_order(run):
    go, progress = slow(run), []
    first = run.client.submit(
        JOB, buffers=BUFFERS, on_progress=lambda p: progress.append(p.sequence)
    )
    second = run.client.submit(JOB, buffers=BUFFERS)
    with pytest.raises(TimeoutError, match=second):
        run.client.wait(second, timeout_s=0.5)
    assert soon(lambda: run.client.status().queued_jobs == 1)
    go.set()
    assert run.client.wait(second).version == 2 and run.client.wait(first).version == 1
    assert progress == list(range(len(progress))) and len(progress) > 3
    with pytest.raises(KeyError):
        run.client.wait(first)


def test_a_failed_job_does_not_disturb_its_neighbours(run):
    ids = [
        run.client.submit(OptimStep()),
        run.client.submit(JOB, buffers=BUFFERS),
        run.client.submit(InitialSync()),
    ]
    with pytest.raises(JobFailed, match="InitialSync comes once"):
        run.client.wait(ids[2])
    assert run.client.wait(ids[1]).version == 1 and run.client.wait(ids[0]).metrics


def test_what_cannot_be_sent_is_said_at_once_and_harms_nothing(run):
    with pytest.raises(ProtocolError, match="but its tensors say"):
        run.client.run(JOB, buffers=BUFFERS[:-1])
    with pytest.raises(ProtocolError, match="cannot be sent"):
        run.client.save_checkpoint("/c", client_state={"row": 2**70})
    for state, where in (
        ({"rng": b"x"}, "client_state.rng is bytes"),
        ({"at": {3: 1}}, r"client_state.at has the key 3"),
    ):
        with pytest.raises(ValidationError, match=where):
            run.client.save_checkpoint("/c", client_state=state)
    assert SaveCheckpoint(checkpoint_dir="/c", client_state={"at": (1, 2.5)}).client_state == {
        "at": [1, 2.5]
    }
    assert run.client.run(JOB, buffers=BUFFERS).version == 1


def test_a_client_id_that_is_none_is_said_at_once():
    with pytest.raises(ConfigError, match=r"'me@host:17' is no id; take letters"):
        SpliceClient(endpoint="tcp://127.0.0.1:1", run_token=TOKEN, client_id="me@host:17")


def test_awaited_at_once(run):
    async def all_at_once():
        async with AsyncSpliceClient(endpoint=run.endpoint, run_token=TOKEN) as client:
            jobs = [client.run(JOB, buffers=BUFFERS) for _ in range(4)]
            *results, status = await asyncio.wait_for(asyncio.gather(*jobs, client.status()), 60)
            last = await client.wait(await client.submit(JOB, buffers=BUFFERS))
            return sorted(r.version for r in results), status.name, last.version

    assert asyncio.run(all_at_once()) == ([1, 2, 3, 4], "m", 5)


def test_asyncio_has_all_that_there_is():
    assert {name for name in vars(SpliceClient) if not name.startswith("_")} <= vars(
        AsyncSpliceClient
    ).keys()


def test_a_run_is_stopped_from_asyncio(run):
    async def stop():
        async with AsyncSpliceClient(endpoint=run.endpoint, run_token=TOKEN) as client:
            await client.stop_run()

    asyncio.run(stop())
    run.thread.join(20)
    assert not run.thread.is_alive() and not (run.dir / "endpoint").exists()
    with pytest.raises(TimeoutError, match="no status within"):
        run.client.stop_run(timeout_s=0.5)
    assert not run.client._is_stopping, "it would end a run that is resumed later"
