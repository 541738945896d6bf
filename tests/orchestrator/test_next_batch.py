"""An announced batch reaches the trainer, and nothing depends on it."""

from __future__ import annotations

import pytest

from orchestrator.errors import ConfigError, ProtocolError
from orchestrator.protocol.messages import (
    InitialSync,
    NextBatch,
    OptimParams,
    Publish,
    TrainMerged,
)
from tests.orchestrator.run import BUFFERS, JOB, Run


def rated(rate: float) -> TrainMerged:
    return JOB.model_copy(update={"optim": OptimParams(lr=rate)})


def test_the_trainer_gets_one_announcement_while_it_trains(tmp_path):
    """The newest of those before the job."""
    with Run(tmp_path) as run:
        run.client.announce(rated(1.0), buffers=BUFFERS)  # no trainer is there
        trainer = run.trainer()
        run.replica(trainer)
        run.client.run(InitialSync(), timeout_s=30)
        run.client.announce(rated(2.0), buffers=BUFFERS)
        run.client.status()  # has the announcement handled
        assert trainer.link.next_batch is None, "it would be in a publication's way"
        assert run.client.run(JOB, buffers=BUFFERS, timeout_s=30).version == 1
        found = trainer.link.next_batch
        assert isinstance(found.message, NextBatch) and found.message.job.optim.lr == 2.0
        assert found.message.job.tensors == JOB.tensors
        assert [bytes(buffer) for buffer in found.buffers] == BUFFERS
        trainer.link.next_batch = None
        assert run.client.run(JOB, buffers=BUFFERS, timeout_s=30).version == 2
        assert trainer.link.next_batch is None


def test_a_whole_vocabulary_may_be_announced(tmp_path):
    """As it may be submitted."""
    allowed = JOB.loss.model_copy(update={"allowed_token_ids": tuple(range(100_000))})
    with Run(tmp_path) as run:
        run.client.announce(JOB.model_copy(update={"loss": allowed}), buffers=BUFFERS)


def test_only_a_training_job_may_be_announced(tmp_path):
    with Run(tmp_path) as run, pytest.raises(ConfigError, match="TrainMerged, not Publish"):
        run.client.announce(Publish(), buffers=[])


def test_buffers_that_do_not_fit_are_refused_before_they_leave(tmp_path):
    with Run(tmp_path) as run, pytest.raises(ProtocolError, match="NextBatch"):
        run.client.announce(JOB, buffers=BUFFERS[:-1])
