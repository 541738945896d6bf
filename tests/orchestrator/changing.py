"""A run whose training changes one tensor of three."""

from __future__ import annotations

from orchestrator.protocol.messages import InitialSync, Manifest
from tests.orchestrator.fake_nodes import MANIFEST
from tests.orchestrator.run import BUFFERS, JOB

CHANGING = Manifest(tensors=MANIFEST.tensors, changed=(1,))
PART = (1, 2)  # w1 is trained, w2 shares a layer with it


def start(run, *, replicas=1):
    """A trainer that changes w1 only, replicas that take it with w2, and @0."""
    trainer = run.trainer()
    trainer.manifest = CHANGING
    nodes = [run.replica(trainer, index) for index in range(replicas)]
    for node in nodes:
        node.part = PART
    first = run.client.run(InitialSync())
    assert (first.sent, first.num_tensors, first.num_verified, first.bytes_sent) == (
        "full",
        3,
        3,
        96,
    )
    return trainer, nodes


def train(run):
    return run.client.run(JOB, buffers=BUFFERS)
