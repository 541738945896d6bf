"""How ranks start, end and come back: `splice trainer` on real Megatron, and the process below it by itself."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil

from orchestrator.protocol.messages import InitialSyncJob, TrainMergedJob
from tests.orchestrator.fake_nodes import soon
from tests.orchestrator.test_orchestrator import TOKEN, Run
from tests.trainer_node.data import arrays
from tests.trainer_node.test_memory import Replica, ranks, trainer
from tests.trainer_node.test_node import training

BACK_S = 5.0


def test_a_killed_rank_is_back_within_seconds(models, tmp_path: Path) -> None:
    """From SIGKILL to the end of the next TrainMerged job, published; then the same after the template was killed."""
    fields, buffers = training(arrays(1), name="cross_entropy")
    job = TrainMergedJob(**fields)
    with Run(tmp_path, transfer_timeout_s=60.0) as run, trainer(run, models["dense_tied"], tmp_path) as launcher:
        run.orchestrator._config = run.config
        replica = Replica(endpoint=run.endpoint, node_id="inference-0", token=TOKEN).start()
        run.nodes.append(replica)
        assert soon(lambda: run.states().get("trainer") == "ready", 120)
        run.client.run(InitialSyncJob(), timeout_s=60)
        run.client.run(job, buffers=buffers, timeout_s=60)
        (rank,) = ranks(launcher)
        started = time.monotonic()
        rank.kill()
        result = run.client.run(job, buffers=buffers, timeout_s=60)
        back_s = time.monotonic() - started
        print("BACK", back_s, result["version"])
        print((tmp_path / "trainer.log").read_text()[-6000:])
        (template,) = psutil.Process(launcher.pid).children()
        print(template.memory_full_info(), ranks(launcher)[0].memory_full_info())
        replica.on_LeaveTransferGroup(None)
    assert back_s < BACK_S
