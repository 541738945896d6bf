"""Jobs that end or spoil the trainer's process: real ranks under `splice trainer` with its default
of two restarts, a real orchestrator, and a replica that receives. Ordinary jobs follow.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from orchestrator.errors import JobFailed
from orchestrator.protocol.messages import (
    ErrorCode,
    InitialSync,
    TrainMerged,
    TrainMergedResult,
)
from tests.orchestrator.run import TOKEN, Run
from tests.trainer_node.data import arrays, training
from tests.trainer_node.launched import Replica, ranks, trainer


def run_job(run: Run, loss: str, seed: int = 1) -> TrainMergedResult:
    fields, buffers = training(arrays(seed), name=loss)
    return run.client.run(TrainMerged(**fields), buffers=buffers, timeout_s=150)


def test_no_batch_ends_the_trainer_for_good(models, tmp_path: Path) -> None:
    """Neither poison batches nor spoilt steps count, however many there are in a row. The weights
    are those of the ordinary jobs alone."""
    options = {"loss_modules": ("tests.trainer_node.launcher.poison",)}
    with (
        Run(tmp_path, transfer_timeout_s=60.0) as run,
        trainer(run, models["dense_tied"], tmp_path, **options) as launcher,
    ):
        run.orchestrator._trainer._ready_timeout_s = 90.0
        run.orchestrator._versions._config = run.config.model_copy(update={"ready_timeout_s": 90.0})
        replica = Replica(endpoint=run.endpoint, node_id="inference-0", token=TOKEN).start()
        run.nodes.append(replica)
        run.client.run(InitialSync(), timeout_s=120)
        run.client.save_checkpoint(str(tmp_path / "start"))
        for seed in (1, 2):
            run_job(run, "cross_entropy", seed=seed)
        ordinary = list(replica.tensors.values())
        run.client.load_checkpoint(str(tmp_path / "start"))
        run_job(run, "cross_entropy")
        assert not all(map(torch.equal, replica.tensors.values(), ordinary))
        for _ in range(2):  # each ends two processes, and the launcher restarts two at most
            with pytest.raises(JobFailed, match="2 processes of the trainer") as failed:
                run_job(run, "ends_the_process")
            assert failed.value.code == ErrorCode.TRAINER_KILLED
        before = ranks(launcher)
        for _ in range(3):
            with pytest.raises(JobFailed, match="a test said so") as failed:
                run_job(run, "spoils_the_step")
            assert "starts again from its last durable state" in failed.value.remedy
        result = run_job(run, "cross_entropy", seed=2)
        assert result.version == 4 and len(ranks(launcher)) == 1
        assert not {p.pid for p in before} & {p.pid for p in ranks(launcher)}
        assert launcher.poll() is None
        assert all(map(torch.equal, replica.tensors.values(), ordinary))
        replica.on_LeaveTransferGroup(None)
    log = (tmp_path / "trainer.log").read_text()
    assert log.count("it is started again") >= 3 and "given up" not in log
