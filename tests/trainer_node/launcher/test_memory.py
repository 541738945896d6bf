"""Memory modes with real trainer processes under `splice trainer`, a real orchestrator, and a
replica that really receives over TCP.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from orchestrator.errors import JobFailed
from orchestrator.protocol.messages import (
    ForwardBackward,
    InitialSync,
    TrainLora,
    TrainMerged,
)
from tests.orchestrator.run import TOKEN, Run
from tests.trainer_node.data import arrays, training
from tests.trainer_node.launched import Replica, ranks, trainer
from tests.trainer_node.references import peft_merged
from tests.trainer_node.tiny import make_peft_adapter


@dataclasses.dataclass
class Seen:
    """What three jobs in one memory mode did."""

    loss: float
    grad_norm: float
    tensors: dict[str, torch.Tensor]
    alive: list[int]
    mapped: list[str]


def three_jobs(
    model: Path, adapter: Path, first: dict[str, torch.Tensor], folder: Path, memory: str
) -> Seen:
    """InitialSync, TrainLora, TrainMerged; looks at the processes the moment the client has each
    `Completed`.
    """
    folder.mkdir()
    fields, buffers = training(arrays(1), name="cross_entropy")
    alive, mapped = [], []
    with (
        Run(folder, transfer_timeout_s=60.0) as run,
        trainer(run, model, folder, memory=memory, adapter=adapter) as launcher,
    ):
        run.orchestrator._trainer._ready_timeout_s = 90.0
        run.orchestrator._versions._config = run.config.model_copy(update={"ready_timeout_s": 90.0})
        replica = Replica(endpoint=run.endpoint, node_id="inference-0", token=TOKEN).start()
        run.nodes.append(replica)
        lora = TrainLora(output_dir=str(folder / "lora"), **fields)
        for job in (InitialSync(), lora, TrainMerged(**fields)):
            if job is lora:  # what was published first came from PEFT's adapter
                assert all(torch.equal(t, first[n]) for n, t in replica.tensors.items())
            result = run.client.run(
                job, buffers=buffers if job.kind != "InitialSync" else (), timeout_s=150
            )
            now = ranks(launcher)
            alive.append(len(now))
            for process in now:
                mapped += [
                    m.path
                    for m in process.memory_maps()
                    if m.path.endswith((".safetensors", ".pt"))
                ]
        if memory == "exit":
            with pytest.raises(
                JobFailed, match=r"memory mode is 'exit'.*Submit TrainMerged"
            ) as refused:
                run.client.run(
                    ForwardBackward(loss=fields["loss"], tensors=fields["tensors"]),
                    buffers=buffers,
                    timeout_s=60,
                )
            assert refused.value.code == "bad_input"
            assert replica.log.count("JoinTransferGroup") == 2
            assert replica.log.count("LeaveTransferGroup") == 2
        replica.on_LeaveTransferGroup(None)
    assert not launcher.poll(), (folder / "trainer.log").read_text()[-3000:]
    metrics = result.metrics
    return Seen(
        loss=metrics["loss"],
        grad_norm=metrics["grad_norm"],
        tensors=replica.tensors,
        alive=alive,
        mapped=mapped,
    )


def test_exit_after_each_job_is_as_if_it_had_stayed(models, tmp_path: Path) -> None:
    """No process of the trainer is alive when the client has `Completed`; the third job's loss and
    weights are the same to the bit.
    """
    model = models["dense_tied"]
    adapter = make_peft_adapter(model, tmp_path / "peft")
    first = peft_merged(model, adapter)
    with ThreadPoolExecutor() as pool:  # side by side, because starting the trainer takes seconds
        runs = [
            pool.submit(three_jobs, model, adapter, first, tmp_path / mode, mode)
            for mode in ("resident", "exit")
        ]
        stayed, ended = (run.result(timeout=250) for run in runs)
    assert all(stayed.alive)
    assert ended.alive == [0, 0, 0]
    assert stayed.mapped == []
    assert (ended.loss, ended.grad_norm) == (stayed.loss, stayed.grad_norm)
    assert list(ended.tensors) == list(stayed.tensors)
    assert all(torch.equal(t, stayed.tensors[n]) for n, t in ended.tensors.items())
