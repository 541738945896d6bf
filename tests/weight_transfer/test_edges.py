"""The plan of edges: every element that a worker keeps arrives there once, and nothing else."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch

from orchestrator.errors import ManifestError
from orchestrator.protocol.messages import TensorSpec
from weight_transfer import edges
from weight_transfer.boxes import Box, Strided, boxes_of, cut, matrix
from weight_transfer.digest import row_major_strides


def grid(shape: tuple[int, ...], rows: int, columns: int) -> list[Box]:
    """A tensor cut into rows x columns boxes."""
    height, width = matrix(shape)
    return [
        Box(height * r // rows, height * (r + 1) // rows - height * r // rows,
            width * c // columns, width * (c + 1) // columns - width * c // columns)
        for r in range(rows)
        for c in range(columns)
    ]  # fmt: skip


def random_case(seed: int):
    """Tensors, holders and keeps of a random trainer and a random replica."""
    draw = random.Random(seed)
    ranks, workers = draw.randint(1, 5), draw.randint(1, 5)
    specs, holders, keeps = [], [], [dict[int, list[Box]]() for _ in range(workers)]
    for n in range(draw.randint(1, 12)):
        shape = draw.choice([(), (7,), (12, 8), (5, 6, 4), (33, 3)])
        spec = TensorSpec(name=f"t{n}", dtype=draw.choice(["bfloat16", "float32"]), shape=shape)
        specs.append(spec)
        height, width = matrix(shape)
        boxes = [b for b in grid(shape, draw.randint(1, 3), draw.randint(1, 2)) if b.numel]
        holders.append(
            [(tuple(sorted(draw.sample(range(ranks), draw.randint(1, ranks)))), b) for b in boxes]
        )
        kept = [b for b in grid(shape, draw.randint(1, 4), draw.randint(1, 2)) if b.numel]
        for box in kept:
            for worker in draw.sample(range(workers), draw.randint(1, workers)):
                keeps[worker].setdefault(n, []).append(box)
        if draw.random() < 0.3:  # one worker keeps all of it, as for a reload
            keeps[draw.randrange(workers)][n] = [Box(0, height, 0, width)]
    return specs, holders, keeps, ranks


def elements(box: Box, width: int) -> list[int]:
    """Row-major indices of a box's elements."""
    return [
        r * width + c
        for r in range(box.first_row, box.first_row + box.rows)
        for c in range(box.first_column, box.first_column + box.columns)
    ]


@pytest.mark.parametrize("seed", range(60))
def test_every_kept_element_arrives_once_and_each_is_sent_by_one_holder(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edges, "PIECE_BYTES", 40)
    specs, holders, keeps, ranks = random_case(seed)
    order = list(range(len(specs)))
    random.Random(seed).shuffle(order)
    planned = edges.plan(specs, holders, keeps, order=order, ranks=ranks, step_bytes=200)
    sent = Counter[tuple[int, int]]()
    arrived = [Counter[tuple[int, int]]() for _ in keeps]
    for parcels in planned:
        for rank, mine in enumerate(parcels):
            for parcel in mine:
                for piece in parcel.pieces:
                    held = [b for by, b in holders[piece.index] if rank in by]
                    assert any(b.contains(piece.box) for b in held), "a rank sends what it has not"
                    width = matrix(specs[piece.index].shape)[1]
                    some = [(piece.index, i) for i in elements(piece.box, width)]
                    sent.update(some)
                    for worker in parcel.workers:
                        arrived[worker].update(some)
    whole = {(n, i): 1 for n, spec in enumerate(specs) for i in range(spec.numel)}
    assert sent == whole, "an element is sent by no rank, or by two"
    for kept, got in zip(keeps, arrived, strict=True):
        wanted = {
            (n, i)
            for n, boxes in kept.items()
            for box in boxes
            for i in elements(box, matrix(specs[n].shape)[1])
        }
        assert got == dict.fromkeys(wanted, 1)


@pytest.mark.parametrize("seed", range(60))
def test_both_ends_lay_out_the_same_messages(seed: int) -> None:
    specs, holders, keeps, ranks = random_case(seed)
    planned = edges.plan(
        specs, holders, keeps, order=range(len(specs)), ranks=ranks, step_bytes=200
    )
    sending = [edges.steps_of_rank(planned, rank, specs) for rank in range(ranks)]
    for worker, kept in enumerate(keeps):
        text = edges.to_text(edges.table_of(planned, worker))
        table = edges.from_text(text, columns=edges.TABLE_COLUMNS)
        steps = edges.steps_of_worker(table, specs)
        edges.check_coverage(steps, kept, str)
        assert len(steps) == len(planned)
        for k, step in enumerate(steps):
            there = [(d.peers[0], d.end - d.begin) for d in step.deliveries]
            here = [
                (rank, d.end - d.begin)
                for rank in range(ranks)
                for d in sending[rank][k].deliveries
                if worker in d.peers
            ]
            assert there == here


def test_a_worker_refuses_a_plan_that_is_not_its_own() -> None:
    specs = [TensorSpec(name="w", dtype="float32", shape=(8, 4))]
    halves = grid((8, 4), 2, 1)
    planned = edges.plan(
        specs, [[((0,), Box(0, 8, 0, 4))]], [{0: halves[:1]}, {0: halves[1:]}], order=[0], ranks=1
    )
    steps = edges.steps_of_worker(edges.table_of(planned, 1), specs)
    with pytest.raises(ManifestError, match=r"^w: this worker keeps 16 elements and would recei"):
        edges.check_coverage(steps, {0: halves[:1]}, lambda i: specs[i].name)
    with pytest.raises(ManifestError, match="cannot be read"):
        edges.from_text("nonsense", columns=edges.TABLE_COLUMNS)


def test_a_worker_refuses_an_element_that_comes_twice_in_place_of_another() -> None:
    """As many elements as it keeps, all of them its own."""
    specs = [TensorSpec(name="w", dtype="float32", shape=(8, 4))]
    twice = [(0, 0, 0, 0, first, 2, 0, 4) for first in (0, 1)]
    steps = edges.steps_of_worker(np.array([(1, 0, 0, 0, 0, 0, 0, 0), *twice], np.int64), specs)
    with pytest.raises(ManifestError, match=r"^w: .* again, and lack others"):
        edges.check_coverage(steps, {0: [Box(0, 4, 0, 4)]}, lambda i: specs[i].name)


def test_an_element_that_no_worker_keeps_is_refused_by_name() -> None:
    specs = [TensorSpec(name="w", dtype="float32", shape=(8, 4))]
    with pytest.raises(ManifestError, match=r"^w: no worker keeps 16 of its 32 elements"):
        edges.plan(
            specs, [[((0,), Box(0, 8, 0, 4))]], [{0: grid((8, 4), 2, 1)[:1]}], order=[0], ranks=1
        )


def test_equal_copies_share_the_sending_and_steps_are_even() -> None:
    """4 data-parallel ranks, 2 workers with halves of rows: each rank sends a quarter, in steps of
    equal size."""
    shape = (64, 32)
    specs = [TensorSpec(name=f"t{n}", dtype="bfloat16", shape=shape) for n in range(64)]
    copies = [((0, 1, 2, 3), Box(0, 64, 0, 32))]
    top, bottom = grid(shape, 2, 1)
    keeps = [{n: [box] for n in range(64)} for box in (top, bottom)]
    planned = edges.plan(specs, [copies] * 64, keeps, order=range(64), ranks=4, step_bytes=1 << 15)
    sizes = np.array(
        [[step.nbytes for step in edges.steps_of_rank(planned, r, specs)] for r in range(4)]
    )
    assert sizes.sum() == sum(s.nbytes for s in specs)
    assert set(sizes.sum(1).tolist()) == {sizes.sum() // 4}
    assert sizes.min() > 0
    assert sizes.max() <= 2 * sizes.mean()


def test_a_rank_whose_tensor_many_workers_keep_sends_less_of_the_rest() -> None:
    specs = [TensorSpec(name=f"t{n}", dtype="bfloat16", shape=(64, 32)) for n in range(9)]
    whole = Box(0, 64, 0, 32)
    keeps = [{n: [whole] for n in (range(9) if w == 0 else [0])} for w in range(8)]
    holders = [[((0,), whole)], *[[((0, 1), whole)]] * 8]
    planned = edges.plan(specs, holders, keeps, order=range(9), ranks=2)
    rest = {p.index for s in planned for parcel in s[1] for p in parcel.pieces}
    assert rest == set(range(1, 9)), "rank 0 has the bytes of eight tensors to send already"


@pytest.mark.parametrize("seed", range(200))
def test_the_parts_of_a_region_in_a_box(seed: int) -> None:
    """`cut` and `boxes_of` against a tensor of indices."""
    draw = random.Random(seed)
    shape = draw.choice([(24,), (6, 8), (4, 6, 8), (8, 12)])
    height, width = matrix(shape)
    index = torch.arange(height * width).view(shape)
    view = index
    for dim in range(view.dim()):
        step = draw.choice([1, 1, 2])
        begin = draw.randrange(0, max(1, view.shape[dim] // 2))
        view = view[(slice(None),) * dim + (slice(begin, None, step),)]
    if draw.random() < 0.4:
        view = view.transpose(0, -1)
    if draw.random() < 0.3 and view.is_contiguous():
        view = view.reshape(-1)
    live = torch.full(view.shape, -1)
    region = Strided(
        first_index=int(view.reshape(-1)[0]),
        offset=0,
        size=tuple(view.shape),
        index_strides=tuple(view.stride()),
        strides=row_major_strides(view.shape),
    )
    boxes = boxes_of(region.first_index, region.size, region.index_strides, shape)
    if boxes is None:
        return
    kept = sorted(i for box in boxes for i in elements(box, width))
    assert kept == sorted(view.reshape(-1).tolist())
    tiles = grid(shape, draw.randint(1, 4), 1 if width == 1 else draw.randint(1, 3))
    for tile in tiles:
        for some in cut(region, tile, shape):
            source = index.reshape(-1).as_strided(some.size, some.index_strides, some.first_index)
            assert set(source.reshape(-1).tolist()) <= set(elements(tile, width))
            target = live.reshape(-1).as_strided(some.size, some.strides, some.offset)
            assert (target == -1).all(), "an element is in two parts"
            target.copy_(source)
    assert torch.equal(live, view)
