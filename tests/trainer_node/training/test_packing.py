"""Packing: the pure cut by hand and by hypothesis, and packs on real Megatron against one sequence
at a time. See `packing.py`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from orchestrator.protocol.config import ParallelConfig
from orchestrator.protocol.messages import LossSpec, batch_specs
from tests.trainer_node import bounds
from tests.trainer_node.data import LENGTHS, arrays, make_batch
from trainer_node.layout.context import context_places
from trainer_node.training.batch import Batch, BatchError, decode_batch
from trainer_node.training.packing import micro_batches, move_in_one_copy, pack

LENGTHS_ST = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def batch_of(lengths: list[int]) -> Batch:
    """Token t is t; every token but the first of a sequence carries loss."""
    total = sum(lengths)
    mask_T = torch.ones(total)
    mask_T[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = 0
    rows_T = torch.arange(total)
    return Batch(
        tokens_T=rows_T,
        loss_mask_T=mask_T,
        advantages_T=rows_T + 0.5,
        sampler_logprobs_T=-rows_T * 1.0,
        lengths=tuple(lengths),
    )


def test_by_hand() -> None:
    """Lengths 3, 5, 2 and a budget of 6: [5], [3, 2]; the second is filled up to 5 tokens only
    where all must be of one length.
    """
    batch = batch_of([3, 5, 2])
    assert pack(batch.lengths, budget=6) == [[(0, 2), (1,)]] or pack(batch.lengths, budget=6) == [
        [(1,), (0, 2)]
    ]
    (one,) = [m for m in micro_batches(batch, budget=6) if m.num_sequences == 2]
    assert one.tokens_L.tolist() == [0, 1, 2, 8, 9]
    assert one.positions_L.tolist() == [0, 1, 2, 0, 1]
    assert (one.cu_seqlens.tolist(), one.cu_seqlens.dtype, one.max_seqlen) == (
        [0, 3, 5],
        torch.int32,
        3,
    )
    assert one.rows_N.tolist() == one.targets_N.tolist() == [1, 2, 9]
    assert one.predictors_N.tolist() == [0, 1, 3]
    assert one.sequence_N.tolist() == [0, 0, 1]
    assert one.advantages_N.tolist() == [1.5, 2.5, 9.5]
    padded = micro_batches(batch, budget=6, multiple=4)
    (one,) = [m for m in padded if m.num_sequences == 2]
    assert one.tokens_L.tolist() == [0, 1, 2, 8, 9, 0, 0, 0]
    assert one.cu_seqlens.tolist() == [0, 3, 5, 8]


def test_a_pack_is_laid_out_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer_node.training import packing as module

    made: list[tuple[int, ...]] = []
    lay_out = module._lay_out
    monkeypatch.setattr(
        module, "_lay_out", lambda batch, p, *rest: (made.append(p), lay_out(batch, p, *rest))[1]
    )
    packs = micro_batches(batch_of([3, 5, 2, 6]), budget=6)
    assert (len(packs), packs.lengths, made) == (3, (6, 5, 5), [])
    assert packs[1] is packs[1] and len(made) == 1
    assert [m.num_sequences for m in packs] == [1, 2, 1] or [m.num_sequences for m in packs] == [
        1,
        1,
        2,
    ]
    assert len(made) == 3
    with pytest.raises(IndexError):
        packs[3]


def test_tensors_move_in_one_copy() -> None:
    """One copy, nothing lost: dtypes, shapes, and one without elements."""
    tensors = {
        "tokens": torch.arange(77),
        "bounds": torch.tensor([0, 3], dtype=torch.int32),
        "none": torch.zeros(0),
        "routing": torch.arange(24).view(2, 3, 4),
        "floats": torch.randn(13),
    }
    moved = move_in_one_copy(tensors, torch.device("cpu"), pinned=False)
    assert {n: (t.dtype, t.shape) for n, t in moved.items()} == {
        n: (t.dtype, t.shape) for n, t in tensors.items()
    }
    assert all(torch.equal(moved[n], t) for n, t in tensors.items())
    assert len({t.untyped_storage().data_ptr() for t in moved.values()}) == 1


def test_padding_is_no_longer_than_the_longest_sequence() -> None:
    """Attention over padding is quadratic in it too."""
    empty = micro_batches(
        batch_of([4]), budget=100, dp_rank=1, dp_size=2, same_length=True, multiple=9
    )[0]
    assert (empty.cu_seqlens.tolist(), empty.max_seqlen, len(empty.rows_N)) == ([0, 4, 8, 9], 4, 0)


def test_a_sequence_longer_than_the_budget_goes_alone() -> None:
    """Where packs are padded to one length, the others may fill theirs up to it."""
    assert sorted(pack([3, 50, 20, 6], budget=10)[0], key=len) == [(1,), (2,), (0, 3)]
    padded = pack([3, 50, 20, 20], budget=10, same_length=True)
    assert sorted(padded[0], key=len) == [(1,), (0, 2, 3)]
    assert pack([50], budget=10, dp_size=2) == [[(0,)], [()]]


@settings(deadline=None)
@given(LENGTHS_ST, st.integers(1, 100), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_every_sequence_once_within_the_budget(
    lengths: list[int], budget: int, dp_size: int, least: int, same: bool
) -> None:
    ranks = pack(lengths, budget=budget, dp_size=dp_size, least=least, same_length=same)
    assert ranks == pack(lengths, budget=budget, dp_size=dp_size, least=least, same_length=same)
    assert len(ranks) == dp_size
    assert len({len(packs) for packs in ranks}) == 1
    flat = [p for packs in ranks for p in packs]
    assert sorted(i for p in flat for i in p) == list(range(len(lengths)))
    capacity = max(budget, *lengths) if same else budget
    fills = [sum(lengths[i] for i in p) for p in flat if len(p) > 1]
    assert max(fills, default=0) <= capacity
    # First-fit leaves at most one pack less than half full; ranks and pipeline may ask for more
    # packs.
    enough = 2 * sum(lengths) / capacity + 1
    assert len(flat) < max(enough, least * dp_size) + dp_size
    assert len(ranks[0]) >= min(least, len(lengths) // dp_size)


@settings(deadline=None)
@given(LENGTHS_ST, st.integers(1, 100), st.integers(1, 4), st.booleans(), st.integers(1, 4))
def test_every_token_once_in_its_place(
    lengths: list[int], budget: int, dp_size: int, same: bool, multiple: int
) -> None:
    batch = batch_of(lengths)
    cuts = [
        micro_batches(
            batch, budget=budget, dp_rank=r, dp_size=dp_size, same_length=same, multiple=multiple
        )
        for r in range(dp_size)
    ]
    micro = [m for c in cuts for m in c]
    assert len({len(c) for c in cuts}) == 1
    assert not same or len({len(m.tokens_L) for m in micro}) == 1
    rows = torch.cat([m.rows_N for m in micro]).sort().values
    assert torch.equal(rows, batch.loss_mask_T.nonzero()[:, 0])
    for m in micro:
        assert len(m.tokens_L) % multiple == 0
        assert m.cu_seqlens[0] == 0
        assert m.cu_seqlens[-1] == len(m.tokens_L) == len(m.positions_L)
        assert m.cu_seqlens.diff().min() >= 1
        assert m.cu_seqlens.diff().max() == m.max_seqlen <= max(lengths)
        # Token t is t, so the predictor holds the token before; both lie in one sequence; positions
        # restart with each.
        assert torch.equal(m.targets_N, m.rows_N)
        assert torch.equal(m.tokens_L[m.predictors_N], m.rows_N - 1)
        owner_L = torch.bucketize(
            torch.arange(len(m.tokens_L)), m.cu_seqlens[1:].long(), right=True
        )
        assert torch.equal(owner_L[m.predictors_N], m.sequence_N)
        assert torch.equal(
            m.positions_L, torch.arange(len(m.tokens_L)) - m.cu_seqlens[owner_L].long()
        )
        assert torch.equal(m.advantages_N, m.rows_N + 0.5)


def test_context_ranks_by_hand() -> None:
    """Five tokens and two ranks: padded to eight, chunks of two; rank 0 has the first and the last,
    rank 1 those between.
    """
    values = {n: v[:5] for n, v in arrays().items()} | {
        "sequence_lengths": np.array([5], dtype=np.int32)
    }
    values["loss_mask"] = np.array([0, 1, 1, 0, 1], dtype=np.float32)
    batch = make_batch(values)
    (first,), (second,) = (
        micro_batches(batch, budget=8, context_rank=r, context_size=2) for r in (0, 1)
    )
    ids = batch.tokens_T.tolist()
    assert first.tokens_L.tolist() == [*ids[:2], 0, 0] and second.tokens_L.tolist() == [*ids[2:], 0]
    assert first.positions_L.tolist() == [0, 1, 6, 7] and second.positions_L.tolist() == [
        2,
        3,
        4,
        5,
    ]
    assert first.rows_L.tolist() == [0, 1, -2, -3] and second.rows_L.tolist() == [2, 3, 4, -1]
    for part in (first, second):
        assert part.cu_seqlens.tolist() == [0, 8] and part.max_seqlen == 8
        assert part.targets_N.tolist() == [ids[1], ids[2], ids[4]]
    # Token 2 is rank 1's, and predicted by token 1, which is rank 0's.
    assert first.here_M.tolist() == [0, 1] and first.predictors_N.tolist() == [0, 1, -1]
    assert second.here_M.tolist() == [2] and second.predictors_N.tolist() == [-1, -1, 1]


@pytest.mark.parametrize("size", [2, 3])
def test_context_ranks_share_every_pack(size: int) -> None:
    """Together they have every place once, every position of loss has one predictor, and all parts
    are of one length.
    """
    batch, cut = make_batch(), {"budget": 20, "dp_size": 2, "same_length": True, "multiple": 2}
    for dp_rank in (0, 1):
        parts = [
            micro_batches(batch, **cut, dp_rank=dp_rank, context_rank=r, context_size=size)
            for r in range(size)
        ]
        for pack_parts in zip(*parts, strict=True):
            length = int(pack_parts[0].cu_seqlens[-1])
            assert {len(p.tokens_L) for p in pack_parts} == {
                length // size
            } and length // size % 2 == 0
            places = [
                context_places(p.cu_seqlens.tolist(), rank=r, size=size)
                for r, p in enumerate(pack_parts)
            ]
            assert sorted(np.concatenate(places)) == list(range(length))
            here = torch.cat([p.here_M for p in pack_parts])
            assert sorted(here.tolist()) == list(range(len(pack_parts[0].rows_N)))
            for p in pack_parts:
                assert torch.equal(p.rows_L[p.predictors_N[p.here_M]], p.rows_N[p.here_M] - 1)


def test_packs_are_balanced() -> None:
    """Ten of 21 tokens and a budget of 100 take three packs; not 84, 84 and 42."""
    fills = sorted(len(p) for p in pack([21] * 10, budget=100)[0])
    assert fills == [3, 3, 4]
    ranks = pack(np.random.default_rng(0).integers(1, 500, 200).tolist(), budget=4096, dp_size=4)
    assert len(ranks[0]) == 4


@pytest.mark.parametrize("name", ["dense_untied", "moe"])
def test_packs_equal_one_sequence_at_a_time(name: str, models, torchrun, tmp_path: Path) -> None:
    """On one rank, and for the MoE also on TP2 x EP2 without sequence parallelism
    (`test_operations` has it with), and on CP2. That packs equal transformers is `test_operations`'
    part: its batches are packed.
    """
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir(), other.mkdir()
    torchrun(1, "training.packing", one, models[name], 1, 1, 1, 1)
    if name == "moe":
        from tests.trainer_node.training.packing import same

        for arguments in ((2, 1, 2, 0), (1, 1, 1, 1, "cp2")):
            torchrun(2, "training.packing", other, models[name], *arguments)
            ours, theirs = (torch.load(f / "result.pt", weights_only=True) for f in (other, one))
            same(ours, theirs)
            assert (ours["routed"] - theirs["routed"]).abs().max() <= bounds.scores()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"context": 2, "world_size": 1},
            r"world_size 1 is not a multiple of tensor 1 \* pipeline 1 \* context 2",
        ),
        (
            {"expert_tensor": 2, "world_size": 1},
            r"expert 1 \* expert_tensor 2 does not divide world_size / pipeline = 1",
        ),
        (
            {"expert_tensor": 2, "expert": 2, "world_size": 6},
            r"expert 2 \* expert_tensor 2 does not divide world_size / pipeline = 6",
        ),
    ],
)
def test_sizes_that_do_not_fit_the_world_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ParallelConfig(**sizes)


@pytest.mark.parametrize("field", ["old_logprobs", "reference_logprobs", "temperatures"])
def test_optional_tensors_go_along(field: str) -> None:
    values = arrays() | {field: np.arange(1, sum(LENGTHS) + 1, dtype=np.float32)}
    for m in micro_batches(make_batch(values), budget=16):
        assert torch.equal(getattr(m, f"{field}_N"), m.rows_N + 1.0)


def test_routed_experts_on_the_wire() -> None:
    """[T, layers, top_k] goes with its tokens; padding goes to the first experts."""
    values = arrays()
    total = sum(LENGTHS)
    values["routed_experts"] = np.arange(total * 6, dtype=np.int32).reshape(total, 3, 2)
    specs = batch_specs(
        num_sequences=len(LENGTHS), num_tokens=total, optional=["routed_experts"], routing=(3, 2)
    )
    buffers = [values[s.name].tobytes() for s in specs]
    batch = decode_batch(
        specs=specs, buffers=buffers, vocab_size=300, max_length=64, loss=LossSpec()
    )
    for m in micro_batches(batch, budget=16, multiple=5):
        used = int(m.positions_L.shape[0])
        assert m.routed_experts_L.shape == (used, 3, 2)
        assert torch.equal(m.routed_experts_L[m.predictors_N, 0, 0], (m.rows_N - 1) * 6)
    (padded,) = micro_batches(batch, budget=99, multiple=50)
    assert (padded.routed_experts_L[total:] == torch.tensor([0, 1])).all()
    with pytest.raises(BatchError, match="routed_experts holds"):
        decode_batch(
            specs=[*specs[:-1], specs[-1].model_copy(update={"shape": (total, 6)})],
            buffers=buffers,
            vocab_size=300,
            max_length=64,
            loss=LossSpec(),
        )
