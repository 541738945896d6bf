"""Memory modes with real trainer processes under `splice trainer`, a real orchestrator, and a
replica that really receives over TCP.
"""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from orchestrator.errors import JobFailed
from orchestrator.protocol.config import LoraConfig, TrainerConfig
from orchestrator.protocol.messages import (
    ForwardBackwardJob,
    InitialSyncJob,
    TensorSpec,
    TrainLoraJob,
    TrainMergedJob,
)
from tests.orchestrator.fake_nodes import FakeReplica, whole_layout
from tests.orchestrator.test_orchestrator import TOKEN, Run
from tests.trainer_node.conftest import REPO, child_env
from tests.trainer_node.data import arrays
from tests.trainer_node.test_node import training
from tests.trainer_node.test_topologies import peft_merged
from tests.trainer_node.tiny import make_peft_adapter
from tests.weight_transfer.peer import receive_chunks
from weight_transfer.digest import tensor_digest
from weight_transfer.groups import join_tcp


class Replica(FakeReplica):
    """Joins and receives for real; digests what came."""

    def __init__(self, **kwargs) -> None:
        super().__init__(source=list, **kwargs)
        self.group = self.manifest = None
        self.tensors: dict[str, torch.Tensor] = {}

    def on_JoinTransferGroup(self, message) -> None:
        self.on_LeaveTransferGroup(None)
        self.group = join_tcp(message.rendezvous, rank=1, deadline_s=30)
        self._done(message)

    def on_LeaveTransferGroup(self, message) -> None:
        if self.group is not None:
            self.group.close()
        self.group = None
        if message is not None:
            self._done(message)

    def on_PrepareUpdate(self, message) -> None:
        self.manifest = message.manifest
        self.layout = whole_layout(len(message.manifest.tensors))
        super().on_PrepareUpdate(message)

    def on_ReceiveWeights(self, message) -> None:
        for phase in ("pausing", "paused", "applying"):
            self.link.progress(message.request_id, phase)
        self.tensors = {}
        order = [range(len(self.manifest.tensors))]
        receive_chunks(self.group, self.manifest, order, deadline_s=60, load=self.tensors.update)
        digests_N = torch.stack([tensor_digest(t) for t in self.tensors.values()])
        spec = TensorSpec(name="digests", dtype="int64", shape=tuple(digests_N.shape))
        self.link.complete(
            message.request_id, tensors=(spec,), buffers=[digests_N.numpy().tobytes()]
        )


@contextlib.contextmanager
def trainer(run: Run, model: Path, folder: Path, *arguments: str, **options):
    """`splice trainer` as a user starts it."""
    config = TrainerConfig(
        model=model, lora=LoraConfig(rank=4, alpha=8), micro_batch_tokens=16, **options
    )
    path = folder / "trainer.json"
    path.write_text(config.model_dump_json())
    argv = [
        sys.executable,
        "-m",
        "splice",
        "trainer",
        "--endpoint",
        run.endpoint,
        "--config",
        str(path),
        *arguments,
    ]
    with (folder / "trainer.log").open("w") as log:
        process = subprocess.Popen(
            argv, cwd=REPO, env={**child_env(), "SPLICE_RUN_TOKEN": TOKEN}, stdout=log, stderr=log
        )
    try:
        yield process
    except BaseException:
        print((folder / "trainer.log").read_text()[-6000:])
        raise
    finally:
        process.terminate()
        process.wait(40)


def ranks(launcher: subprocess.Popen) -> list[psutil.Process]:
    """The trainer's ranks, without the process that starts them."""
    found = []
    for process in psutil.Process(launcher.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.ppid() != launcher.pid:
                found.append(process)
    return found


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
        run.orchestrator._versions._config = dataclasses.replace(run.config, ready_timeout_s=90.0)
        replica = Replica(endpoint=run.endpoint, node_id="inference-0", token=TOKEN).start()
        run.nodes.append(replica)
        lora = TrainLoraJob(output_dir=str(folder / "lora"), **fields)
        for job in (InitialSyncJob(), lora, TrainMergedJob(**fields)):
            if job is lora:  # what was published first came from PEFT's adapter
                assert all(torch.equal(t, first[n]) for n, t in replica.tensors.items())
            result = run.client.run(
                job, buffers=buffers if job.kind != "InitialSyncJob" else (), timeout_s=150
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
                    ForwardBackwardJob(loss=fields["loss"], tensors=fields["tensors"]),
                    buffers=buffers,
                    timeout_s=60,
                )
            assert refused.value.code == "bad_input"
            assert replica.log.count("JoinTransferGroup") == 2
            assert replica.log.count("LeaveTransferGroup") == 2
        replica.on_LeaveTransferGroup(None)
    assert not launcher.poll(), (folder / "trainer.log").read_text()[-3000:]
    metrics = result["metrics"]
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
