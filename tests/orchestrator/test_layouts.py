"""Replicas that want the same layout all get it, one worker or several each; replicas that do not all get manifest order."""

from __future__ import annotations

import pytest

from orchestrator.protocol.messages import InitialSyncJob, Manifest, Ready, WireChunk, WireLayout
from tests.orchestrator.fake_nodes import MANIFEST
from tests.orchestrator.test_orchestrator import BUFFERS, JOB, Run

STAGED = WireLayout(chunks=(WireChunk(kind="staged", tensors=(2, 0)), WireChunk(kind="reload", tensors=(1,))))
"""As replicas of several workers want it."""
LIVE = WireLayout(chunks=(WireChunk(kind="staged", tensors=(2,)), WireChunk(kind="live", tensors=(0, 1))))
PART = WireLayout(chunks=(WireChunk(kind="staged", tensors=(1, 0)),))


def publish_twice(run: Run, *, layouts: tuple[WireLayout, ...], parts: tuple[WireLayout | None, ...], workers: int = 1):
    """@0 whole and @1 with what changes; (trainer, replicas)."""
    trainer = run.trainer()
    trainer.manifest = Manifest(tensors=MANIFEST.tensors, changed=(1,))
    replicas = [run.replica(trainer, index) for index in range(len(layouts))]
    for index, (replica, layout, part) in enumerate(zip(replicas, layouts, parts, strict=True)):
        replica.layout, replica.part = layout.model_dump(), (1, 2)
        replica.part_layout = None if part is None else part.model_dump()
        replica.link.send(Ready(node_id=f"inference-{index}", detail={**replica.detail, "workers": workers}))
    assert run.client.run(InitialSyncJob())["sent"] == "full"
    assert run.client.run(JOB, buffers=BUFFERS)["sent"] == "changed"
    return trainer, replicas


@pytest.mark.parametrize(("layout", "workers"), [(LIVE, 1), (STAGED, 2)])
def test_two_replicas_of_one_shape_both_go_direct(tmp_path, layout, workers):
    with Run(tmp_path, replicas=2) as run:
        trainer, replicas = publish_twice(run, layouts=(layout, layout), parts=(PART, PART), workers=workers)
        assert trainer.layouts == [layout, PART]
        assert [r.direct for r in replicas] == [[True, True], [True, True]]
        assert all(r.served[-1] == (1, [10, 21, 30]) for r in replicas)


def test_replicas_of_two_shapes_take_manifest_order(tmp_path):
    with Run(tmp_path, replicas=2) as run:
        trainer, replicas = publish_twice(run, layouts=(LIVE, STAGED), parts=(PART, None))
        assert trainer.layouts == [None, None]
        assert [r.direct for r in replicas] == [[False, False], [False, False]]
