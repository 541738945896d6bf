"""`splice trainer` as a user starts it, its ranks, and a replica that receives for real."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import psutil
import torch

from orchestrator.protocol.config import LoraConfig
from orchestrator.protocol.messages import TensorSpec
from splice.client.run_file import RunFile
from tests.orchestrator.fake_nodes import FakeReplica, whole_layout
from tests.orchestrator.run import TOKEN, Run
from tests.trainer_node.conftest import REPO, child_env
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
        where = message.rendezvous
        self.group = join_tcp(where, rank=where.senders, deadline_s=30)
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
    """`splice trainer` as a user starts it, but without the check of a model's first start."""
    small = {"lora": LoraConfig(rank=4, alpha=8), "micro_batch_tokens": 16, "admission": "skip"}
    file = RunFile(name="m", model=model, run_dir=run.dir, trainer={**small, **options})
    path = folder / "run.json"
    path.write_text(file.model_dump_json())
    argv = [sys.executable, "-m", "splice", "trainer", str(path), *arguments]
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
