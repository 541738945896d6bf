"""Replicas that want the same layout all get it, one worker or several each. Otherwise they share
one without `live` chunks; manifest order is what every trainer can send.
"""

from __future__ import annotations

import pytest

from orchestrator.protocol.messages import InitialSync, Manifest, Ready, WireChunk, WireLayout
from tests.orchestrator.fake_nodes import MANIFEST, whole_layout
from tests.orchestrator.run import BUFFERS, JOB, Run

STAGED = WireLayout(
    chunks=(WireChunk(kind="staged", tensors=(2, 0)), WireChunk(kind="reload", tensors=(1,)))
)
"""As replicas of several workers want it."""
LIVE = WireLayout(
    chunks=(WireChunk(kind="staged", tensors=(2,)), WireChunk(kind="live", tensors=(0, 1)))
)
PART = WireLayout(chunks=(WireChunk(kind="staged", tensors=(1, 0)),))
MANIFEST_ORDER = [
    WireLayout.model_validate(whole_layout(3)),
    WireLayout.model_validate(whole_layout(2)),
]
"""Whole and part."""


def publish_twice(
    run: Run,
    *,
    layouts: tuple[WireLayout, ...],
    parts: tuple[WireLayout, ...],
    workers: int = 1,
    why_not: str | None = None,
    shared: WireLayout | None = None,
    keeps: list[list[str]] | None = None,
    why_no_edges: str | None = None,
):
    """@0 whole and @1 with what changes; (trainer, replicas).

    Args:
        shared: what every replica plans in order "shared". None: as in its own.
        keeps: what each replica's workers keep.
        why_no_edges: why the trainer cannot send it to them.
    """
    trainer = run.trainer()
    trainer.why_not, trainer.why_no_edges = why_not, why_no_edges
    trainer.manifest = Manifest(tensors=MANIFEST.tensors, changed=(1,))
    replicas = [run.replica(trainer, index) for index in range(len(layouts))]
    for index, (replica, layout, part) in enumerate(zip(replicas, layouts, parts, strict=True)):
        replica.layout, replica.part, replica.part_layout = (
            layout.model_dump(),
            (1, 2),
            part.model_dump(),
        )
        replica.shared = None if shared is None else shared.model_dump()
        replica.keeps = None if keeps is None else keeps[index]
        replica.link.send(
            Ready(node_id=f"inference-{index}", detail={**replica.detail, "workers": workers})
        )
    assert run.client.run(InitialSync()).sent == "full"
    assert run.client.run(JOB, buffers=BUFFERS).sent == "changed"
    return trainer, replicas


@pytest.mark.parametrize(("layout", "workers"), [(LIVE, 1), (STAGED, 2)])
def test_two_replicas_of_one_shape_get_their_layout(tmp_path, layout, workers):
    with Run(tmp_path, replicas=2) as run:
        trainer, replicas = publish_twice(
            run, layouts=(layout, layout), parts=(PART, PART), workers=workers
        )
        assert trainer.layouts == [layout, PART]
        assert [r.orders for r in replicas] == [["own"] if workers == 1 else ["edges", "own"]] * 2
        assert all(r.tables == [] for r in replicas), "they said not what they keep"
        assert all(r.served[-1] == (1, [10, 21, 30]) for r in replicas)


def test_workers_learn_what_each_rank_sends_them(tmp_path):
    """Whole and part; all replicas get the trainer's tables."""
    with Run(tmp_path, replicas=2) as run:
        trainer, replicas = publish_twice(
            run,
            layouts=(STAGED, STAGED),
            parts=(PART, PART),
            workers=2,
            keeps=[["left", "right"]] * 2,
        )
        assert trainer.layouts == [STAGED, PART]
        tables = ("to left", "to right")
        assert [r.tables for r in replicas] == [[(False, tables), (True, tables)]] * 2
        assert [r.orders for r in replicas] == [["edges"], ["edges"]]


@pytest.mark.parametrize("reason", ["the trainer cannot", "the replicas differ"])
def test_without_edges_the_replicas_plan_again(tmp_path, reason):
    with Run(tmp_path, replicas=2) as run:
        differ = reason == "the replicas differ"
        trainer, replicas = publish_twice(
            run,
            layouts=(STAGED, STAGED),
            parts=(PART, PART),
            workers=2,
            keeps=[["left", "right"], ["right", "left"] if differ else ["left", "right"]],
            why_no_edges=None if differ else "its weights are FP8",
        )
        assert [r.orders for r in replicas] == [["edges", "own"]] * 2
        assert trainer.layouts[-2:] == [STAGED, PART]
        assert all(r.tables == [] for r in replicas)


@pytest.mark.parametrize(
    ("layouts", "parts"),
    [((LIVE, STAGED), (PART, PART)), ((LIVE, LIVE), (PART, MANIFEST_ORDER[1]))],
    ids=["whole", "part"],
)
def test_replicas_of_two_shapes_share_a_staged_layout(tmp_path, layouts, parts):
    with Run(tmp_path, replicas=2) as run:
        trainer, replicas = publish_twice(run, layouts=layouts, parts=parts, shared=STAGED)
        assert trainer.layouts == [STAGED, MANIFEST_ORDER[1]]
        assert [r.orders for r in replicas] == [["own", "shared"]] * 2
        assert all(r.served[-1] == (1, [10, 21, 30]) for r in replicas)


def test_replicas_that_share_no_layout_take_manifest_order(tmp_path):
    with Run(tmp_path, replicas=2) as run:
        trainer, replicas = publish_twice(run, layouts=(LIVE, STAGED), parts=(PART, PART))
        assert trainer.layouts == MANIFEST_ORDER
        assert [r.orders for r in replicas] == [["own", "shared", "manifest"]] * 2
        assert all(r.served[-1] == (1, [10, 21, 30]) for r in replicas)


def test_a_trainer_that_cannot_send_in_the_layout_sends_in_manifest_order(tmp_path):
    with Run(tmp_path) as run:
        trainer, (replica,) = publish_twice(
            run, layouts=(LIVE,), parts=(PART,), why_not="an unknown mapping"
        )
        assert trainer.layouts == [LIVE, *MANIFEST_ORDER]
        assert replica.orders == ["own", "manifest"] and replica.served[-1] == (
            1,
            [10, 21, 30],
        )
