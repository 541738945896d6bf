"""An announced batch reaches the trainer, and nothing depends on it."""

from __future__ import annotations

import time

import pytest

from orchestrator.errors import ProtocolError
from orchestrator.protocol.messages import InitialSyncJob, NextBatch, OptimParams
from tests.orchestrator.run import BUFFERS, JOB, Run


def test_the_trainer_gets_the_newest_announcement(tmp_path):
    with Run(tmp_path) as run:
        run.client.announce(JOB, buffers=BUFFERS)  # no trainer is there
        trainer = run.trainer()
        run.replica(trainer)
        run.client.run(InitialSyncJob(), timeout_s=30)
        assert trainer.link.next_batch is None
        for rate in (1e-3, 2e-3):
            job = JOB.model_copy(update={"optim": OptimParams(lr=rate)})
            run.client.announce(job, buffers=BUFFERS)
        deadline_s = time.monotonic() + 10
        while (found := trainer.link.next_batch) is None or found.message.optim.lr != 2e-3:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert isinstance(found.message, NextBatch) and found.message.tensors == JOB.tensors
        assert [bytes(buffer) for buffer in found.buffers] == BUFFERS
        assert run.client.run(JOB, buffers=BUFFERS, timeout_s=30)["version"] == 1


def test_buffers_that_do_not_fit_are_refused_before_they_leave(tmp_path):
    with Run(tmp_path) as run, pytest.raises(ProtocolError, match="NextBatch"):
        run.client.announce(JOB, buffers=BUFFERS[:-1])
