"""The loop on a real orchestrator with fake nodes: no step is made twice, none is lost unsaid."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time

import pytest

from orchestrator.errors import ConfigError, ErrorCode, JobFailed
from orchestrator.protocol import frames
from orchestrator.protocol.messages import InitialSync
from splice.rl import Loop, LoopConfig, SamplingConfig, checker, decisions
from tests.orchestrator.fake_nodes import FakeReplica, soon
from tests.orchestrator.run import TOKEN, Run, SmallBatch
from tests.rl.stand_in import Server, StandIn

pytestmark = pytest.mark.timeout(120)
ROWS = [{"prompt": [k, 1, 2]} for k in range(5)]


class Serving(StandIn):
    """Answers with the version that the replica serves."""

    replica: FakeReplica | None = None

    @property
    def version(self) -> int:
        return self.replica.served[-1][0] if self.replica and self.replica.served else 0

    @version.setter
    def version(self, _: int) -> None:
        pass


class Cluster:
    """A run whose trainer adds 1 to its weights with each step, and one replica."""

    def __init__(self, run: Run, folder) -> None:
        self.run, self.folder = run, folder
        self.facade = Serving(seed=1)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        serving = Server(self.facade).start()
        self.server = asyncio.run_coroutine_threadsafe(serving, self.loop).result(5)
        self.server.name = "m"
        self.join()

    def join(self) -> None:
        """A trainer, and the replica that serves its weights."""
        self.trainer = self.run.trainer()
        self.replica = FakeReplica(
            source=lambda: self.trainer.weights,
            endpoint=self.run.endpoint,
            node_id="inference-0",
            token=TOKEN,
        )
        self.replica.detail = {"workers": 1, "base_url": self.server.url}
        self.run.nodes.append(self.replica.start())
        self.facade.replica = self.replica

    def restart_trainer(self) -> None:
        self.trainer.die()
        self.trainer = self.run.trainer()
        soon(lambda: self.run.states().get("trainer") == "ready")

    def start(self, *, on_step=None, **config) -> None:
        """One start of the loop, to its end."""

        async def go() -> None:
            async with Loop(
                self.run.client,
                self.folder,
                prompts=ROWS,
                reward=lambda row, completion: float(len(completion.answer_ids)),
                config=LoopConfig(
                    group_size=2,
                    groups_per_step=2,
                    sampling=SamplingConfig(max_tokens=3, seed=1),
                    sinks=(),
                    max_staleness=0,
                    **config,
                ),
            ) as loop:
                async for step in loop:
                    if on_step is not None:
                        await asyncio.to_thread(on_step, step)

        asyncio.run(asyncio.wait_for(go(), 60))

    def violations(self) -> list[str]:
        return checker.check(decisions.read(self.folder / decisions.LOG)).violations


@pytest.fixture
def cluster(tmp_path):
    with Run(tmp_path) as run:
        cluster = Cluster(run, tmp_path / "loop")
        run.client.run(InitialSync(), timeout_s=30)
        assert cluster.trainer.weights == [10, 20, 30]
        yield cluster


def test_a_trainer_that_was_only_out_of_reach_does_not_train_twice(cluster):
    gate, real = threading.Event(), cluster.trainer.on_TrainMerged

    def slow(message) -> None:
        gate.wait(60)
        real(message)

    def flap() -> None:
        """Three losses of the connection during one step: the job is given up."""
        run = cluster.run
        soon(lambda: "TrainMerged" in cluster.trainer.log)
        for _ in range(3):
            soon(lambda: run.states().get("trainer") == "ready", 20)
            time.sleep(0.5)
            run.lose("trainer")
            time.sleep(2.5)
        soon(lambda: '"failed"' in (cluster.folder / decisions.LOG).read_text(), 20)
        gate.set()

    cluster.trainer.script["TrainMerged"] = slow
    threading.Thread(target=flap, daemon=True).start()
    cluster.start(steps=1)
    assert cluster.trainer.log.count("TrainMerged") == 2, "it was asked twice"
    assert cluster.trainer.weights == [11, 21, 31] == cluster.replica.live, "and stepped once"
    assert cluster.violations() == []


def test_a_step_whose_save_failed_and_was_lost_is_made_again(cluster):
    def full(message) -> None:
        cluster.trainer._step(1)
        why = {"message": "disk full", "remedy": "free it", "steps_taken": 1}
        cluster.trainer.link.fail(
            message.request_id, code=ErrorCode.CHECKPOINT_FAILED, phase="saving", **why
        )

    cluster.trainer.script["TrainMerged"] = full
    with pytest.raises(JobFailed, match="disk full"):
        cluster.start(steps=1)
    cluster.restart_trainer()
    assert cluster.trainer.weights == [10, 20, 30]
    cluster.start(steps=1)
    assert cluster.trainer.weights == [11, 21, 31] == cluster.replica.live
    lines = [line["event"] for line in decisions.read(cluster.folder / decisions.LOG)]
    assert lines.count("reopened") == 1 and lines[-1] == "trained"
    assert cluster.violations() == []


def test_a_users_own_step_that_is_lost_is_not_retried_away(cluster):
    def own_step(_) -> None:
        cluster.run.client.forward_backward(SmallBatch())
        cluster.run.client.optim_step()
        cluster.restart_trainer()

    with pytest.raises(JobFailed, match="1 optimizer steps") as lost:
        cluster.start(steps=2, on_step=lambda step: own_step(step) if step.number == 1 else None)
    assert lost.value.code is ErrorCode.WORK_LOST
    cluster.start(steps=2)
    assert cluster.trainer.weights == [12, 22, 32] and cluster.violations() == []


def test_a_run_that_is_stopped_in_a_publication_makes_no_step_twice(tmp_path):
    gate = threading.Event()
    with Run(tmp_path) as run:
        cluster = Cluster(run, tmp_path / "loop")
        run.client.run(InitialSync(), timeout_s=30)
        cluster.replica.script["ReceiveWeights"] = lambda _: gate.wait(20)

        def stop() -> None:
            soon(lambda: cluster.trainer.weights == [11, 21, 31])
            time.sleep(1.0)
            threading.Timer(3.0, gate.set).start()
            run.client.stop_run()

        threading.Thread(target=stop, daemon=True).start()
        with pytest.raises(JobFailed, match="stopped"):
            cluster.start(steps=1)
        run.thread.join(40)
    (tmp_path / "run" / "endpoint").unlink(missing_ok=True)
    again = Run(tmp_path)
    again.config = again.config.model_copy(update={"resume": True})
    with again:
        cluster.run = again
        cluster.join()
        soon(lambda: cluster.replica.served, 20)
        cluster.start(steps=1)
        assert cluster.trainer.weights == [11, 21, 31] and cluster.violations() == []


def test_a_loop_starts_after_a_publication_that_failed_for_good(cluster):
    cluster.replica.fail_transfers()
    with pytest.raises(JobFailed):
        cluster.start(steps=2)
    assert cluster.run.client.status().version is None
    with pytest.raises(JobFailed, match="submit Resync to serve it again"):
        cluster.run.client.run(InitialSync(), timeout_s=30)
    cluster.replica.script.clear()
    cluster.start(steps=2)
    assert cluster.trainer.weights == [12, 22, 32] == cluster.replica.live
    assert cluster.violations() == []


def test_a_batch_that_cannot_be_sent_stops_no_later_loop(cluster, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(frames, "MAX_BUFFERS_BYTES", 200)  # stands for 450 MB
        with pytest.raises(ConfigError, match="the batch of step 1 cannot be sent"):
            cluster.start(steps=1)
    cluster.start(steps=1)
    assert cluster.trainer.weights == [11, 21, 31]


def test_a_kept_batch_keeps_the_bound_of_a_later_config(cluster):
    with contextlib.suppress(JobFailed):
        cluster.trainer.script["TrainMerged"] = lambda m: cluster.trainer.refuse(
            m, code=ErrorCode.NODE_LOST
        )
        cluster.start(steps=1, train_attempts=1)
    path = cluster.folder / decisions.LOG
    lines = list(decisions.read(path))
    for line in lines:
        if line["event"] == "train":
            line["metrics"]["staleness_max"] = 2.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError, match="tokens 2 versions old"):
        cluster.start(steps=1)
