"""An inference node without vLLM: it receives and digests a real trainer's weights, and has the
address of the run's first replica.

    python -m tests.e2e.stand_in_replica ... --endpoint E --node-id inference-3 --config RUN/x.json
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from orchestrator.processes.restarts import EXIT_LINK_LOST
from orchestrator.protocol.messages import Manifest, WireChunk, WireLayout
from splice import SpliceClient
from tests.e2e.conftest import INFERENCE_PYTHON, ROOT, TRAINER_PYTHON
from tests.orchestrator.fake_nodes import FakeNode, digests
from weight_transfer.digest import tensor_digest
from weight_transfer.groups import TransferGroup, join_tcp
from weight_transfer.layout import in_vectors, views_of

_WRAPPER = """#!/bin/sh
case "$*" in
*"--node-id inference-0"*) ;;
*"-m inference_node"*) PYTHONPATH={root} exec {trainer} -m tests.e2e.stand_in_replica "$@" ;;
esac
exec {inference} "$@"
"""
FIRST_S = 500.0


def wrapper(path: Path) -> Path:
    """Write an interpreter for `inference.python`: the first node is real, the others stand-ins."""
    names = {"root": ROOT, "trainer": TRAINER_PYTHON, "inference": INFERENCE_PYTHON}
    path.write_text(_WRAPPER.format(**names))
    path.chmod(0o755)
    return path


class Replica(FakeNode):
    """Has no model, and keeps nothing of what arrives."""

    role = "inference"
    manifest: Manifest
    order: tuple[int, ...]
    group: TransferGroup | None = None

    def on_PrepareUpdate(self, message: Any) -> None:
        self.manifest = message.manifest
        everything = [(i,) for i in range(len(self.manifest.tensors))]
        self.order = in_vectors(everything, self.manifest)
        # As vLLM's node answers in manifest order, the last that is tried: both are then alike.
        layout = WireLayout(
            chunks=(WireChunk(kind="reload", tensors=self.order),),
            why_not_live={"manifest order was asked for": self.manifest.tensors[0].name},
        )
        self.link.complete(message.request_id, result={"layout": layout.model_dump()})

    def on_JoinTransferGroup(self, message: Any) -> None:
        self.leave()
        meeting = message.rendezvous
        self.group = join_tcp(meeting, rank=meeting.senders, deadline_s=message.deadline_s)
        self._done(message)

    def on_LeaveTransferGroup(self, message: Any) -> None:
        self.leave()
        self._done(message)

    def leave(self) -> None:
        if self.group is not None:
            self.group.close()
        self.group = None

    def on_ReceiveWeights(self, message: Any) -> None:
        assert self.group is not None
        for phase in ("pausing", "paused", "applying"):
            self.link.progress(message.request_id, phase)
        specs = [self.manifest.tensors[i] for i in self.order]
        buffer_B = torch.empty(sum(spec.nbytes for spec in specs), dtype=torch.uint8)
        self.group.broadcast(buffer_B, deadline_s=message.deadline_s)
        found = dict(zip(self.order, map(tensor_digest, views_of(buffer_B, specs)), strict=True))
        live = digests([int(found[i]) for i in sorted(found)])
        self.link.complete(message.request_id, result={"seconds": {}}, **live)

    def on_CheckCanary(self, message: Any) -> None:
        self.link.complete(message.request_id, result={"skipped": "it has no model"})

    def on_CommitUpdate(self, message: Any) -> None:
        print(f"serves {message.version}", flush=True)
        self._done(message)


def first_url(run_dir: Path) -> str:
    """The first replica's address, once it is ready."""
    own = os.environ.pop("SPLICE_CURVE_DIR")  # a client has other keys
    until_s = time.monotonic() + FIRST_S
    with SpliceClient.of_run(run_dir) as client:
        while time.monotonic() < until_s:
            for node in client.status(timeout_s=60).nodes:
                if node.node_id == "inference-0" and node.state == "ready":
                    os.environ["SPLICE_CURVE_DIR"] = own
                    return str(node.detail["base_url"])
            time.sleep(0.5)
    raise TimeoutError(f"inference-0 was not ready within {FIRST_S:.0f} s")


def main() -> int:
    """Until Shutdown, or until the orchestrator is lost."""
    parser = argparse.ArgumentParser()
    for name in ("--endpoint", "--node-id", "--config"):
        parser.add_argument(name, required=True)
    given, _ = parser.parse_known_args()
    url = first_url(Path(given.config).parent)
    token = os.environ["SPLICE_RUN_TOKEN"]
    node = Replica(endpoint=given.endpoint, node_id=given.node_id, token=token)
    node.detail = {"workers": 1, "base_url": url}
    node.start()
    node._thread.join()
    node.leave()
    node.link.close(flush_s=1.0)
    return 0 if node.log[-1:] == ["Shutdown"] else EXIT_LINK_LOST


if __name__ == "__main__":
    sys.exit(main())
