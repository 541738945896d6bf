"""Packing: the pure cut by hand and by hypothesis, and packs on real Megatron against one sequence at a time. See `packing.py`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from orchestrator.protocol.config import ParallelConfig
from orchestrator.protocol.messages import LossSpec, batch_specs
from tests.trainer_node.data import LENGTHS, arrays, make_batch
from trainer_node.batch import Batch, BatchError, decode_batch, micro_batches, pack

LENGTHS_ST = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def batch_of(lengths: list[int]) -> Batch:
    """Token t is t; every token but the first of a sequence carries loss."""
    total = sum(lengths)
    mask_T = torch.ones(total)
    mask_T[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = 0
    rows_T = torch.arange(total)
    return Batch(
        tokens_T=rows_T, loss_mask_T=mask_T, advantages_T=rows_T + 0.5, sampler_logprobs_T=-rows_T * 1.0, lengths=tuple(lengths)
    )


def test_by_hand() -> None:
    """Lengths 3, 5, 2 and a budget of 6: [5], [3, 2]; the second is filled up to 5 tokens only where all must be of one length."""
    batch = batch_of([3, 5, 2])
    assert pack(batch.lengths, budget=6) == [[(0, 2), (1,)]] or pack(batch.lengths, budget=6) == [[(1,), (0, 2)]]
    (one,) = [m for m in micro_batches(batch, budget=6) if m.num_sequences == 2]
    assert one.tokens_L.tolist() == [0, 1, 2, 8, 9]
    assert one.positions_L.tolist() == [0, 1, 2, 0, 1]
    assert (one.cu_seqlens.tolist(), one.cu_seqlens.dtype, one.max_seqlen) == ([0, 3, 5], torch.int32, 3)
    assert one.rows_N.tolist() == one.targets_N.tolist() == [1, 2, 9]
    assert one.predictors_N.tolist() == [0, 1, 3]
    assert one.sequence_N.tolist() == [0, 0, 1]
    assert one.advantages_N.tolist() == [1.5, 2.5, 9.5]
    padded = micro_batches(batch, budget=6, multiple=4)
    (one,) = [m for m in padded if m.num_sequences == 2]
    assert one.tokens_L.tolist() == [0, 1, 2, 8, 9, 0, 0, 0]
    assert one.cu_seqlens.tolist() == [0, 3, 5, 8]


def test_padding_is_no_longer_than_the_longest_sequence() -> None:
    """Attention over padding is quadratic in it too."""
    empty = micro_batches(batch_of([4]), budget=100, dp_rank=1, dp_size=2, same_length=True, multiple=9)[0]
    assert (empty.cu_seqlens.tolist(), empty.max_seqlen, len(empty.rows_N)) == ([0, 4, 8, 9], 4, 0)


def test_a_sequence_longer_than_the_budget_goes_alone() -> None:
    assert sorted(pack([3, 50, 20, 20], budget=10)[0], key=len) == [(1,), (0, 2, 3)]
    assert pack([50], budget=10, dp_size=2) == [[(0,)], [()]]


@given(LENGTHS_ST, st.integers(1, 100), st.integers(1, 5), st.integers(1, 4))
def test_every_sequence_once_within_the_budget(lengths: list[int], budget: int, dp_size: int, least: int) -> None:
    ranks = pack(lengths, budget=budget, dp_size=dp_size, least=least)
    assert ranks == pack(lengths, budget=budget, dp_size=dp_size, least=least)
    assert len(ranks) == dp_size
    assert len({len(packs) for packs in ranks}) == 1
    flat = [p for packs in ranks for p in packs]
    assert sorted(i for p in flat for i in p) == list(range(len(lengths)))
    fills = [sum(lengths[i] for i in p) for p in flat]
    assert max(fills) <= max(budget, *lengths)
    # First-fit leaves at most one pack less than half full; ranks and pipeline may ask for more packs.
    enough = 2 * sum(lengths) / max(budget, *lengths) + 1
    assert len(flat) < max(enough, least * dp_size) + dp_size
    assert len(ranks[0]) >= min(least, len(lengths) // dp_size)


@given(LENGTHS_ST, st.integers(1, 100), st.integers(1, 4), st.booleans(), st.integers(1, 4))
def test_every_token_once_in_its_place(lengths: list[int], budget: int, dp_size: int, same: bool, multiple: int) -> None:
    batch = batch_of(lengths)
    cuts = [
        micro_batches(batch, budget=budget, dp_rank=r, dp_size=dp_size, same_length=same, multiple=multiple)
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
        # Token t is t, so the predictor holds the token before; both lie in one sequence; positions restart with each.
        assert torch.equal(m.targets_N, m.rows_N)
        assert torch.equal(m.tokens_L[m.predictors_N], m.rows_N - 1)
        owner_L = torch.bucketize(torch.arange(len(m.tokens_L)), m.cu_seqlens[1:].long(), right=True)
        assert torch.equal(owner_L[m.predictors_N], m.sequence_N)
        assert torch.equal(m.positions_L, torch.arange(len(m.tokens_L)) - m.cu_seqlens[owner_L].long())
        assert torch.equal(m.advantages_N, m.rows_N + 0.5)


def test_packs_are_balanced() -> None:
    """Ten of 21 tokens and a budget of 100 take three packs; not 84, 84 and 42."""
    fills = sorted(len(p) for p in pack([21] * 10, budget=100)[0])
    assert fills == [3, 3, 4]
    ranks = pack(np.random.default_rng(0).integers(1, 500, 200).tolist(), budget=4096, dp_size=4)
    assert len(ranks[0]) == 4


@pytest.mark.parametrize("name", ["dense_untied", "moe"])
def test_packs_equal_one_sequence_at_a_time(name: str, models, torchrun, tmp_path: Path) -> None:
    """On one rank, and for the MoE also on TP2 x EP2 without sequence parallelism (`test_operations` has it with): there within 5e-6
    (vocabulary, hidden units and experts summed in another order). That packs equal transformers is `test_operations`' part: its batches are packed."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir(), other.mkdir()
    torchrun(1, "packing", one, models[name], 1, 1, 1, 1)
    if name == "moe":
        from tests.trainer_node.packing import same

        torchrun(2, "packing", other, models[name], 2, 1, 2, 0)
        ours, theirs = (torch.load(f / "result.pt", weights_only=True) for f in (other, one))
        same(ours, theirs, tolerance=5e-6)


@pytest.mark.parametrize(
    ("field", "message"), [("context", "context parallelism"), ("expert_tensor", "expert tensor parallelism")]
)
def test_what_is_not_there_is_refused(field: str, message: str) -> None:
    assert getattr(ParallelConfig(**{field: 1}), field) == 1
    with pytest.raises(ValidationError, match=f"parallel.{field} = 2: {message}"):
        ParallelConfig(**{field: 2})


@pytest.mark.parametrize("field", ["old_logprobs", "reference_logprobs"])
def test_optional_tensors_go_along(field: str) -> None:
    values = arrays() | {field: np.arange(sum(LENGTHS), dtype=np.float32)}
    for m in micro_batches(make_batch(values), budget=16):
        assert torch.equal(getattr(m, f"{field}_N"), m.rows_N.float())


def test_routed_experts_on_the_wire() -> None:
    """[T, layers, top_k] goes with its tokens; padding goes to the first experts."""
    values = arrays()
    total = sum(LENGTHS)
    values["routed_experts"] = np.arange(total * 6, dtype=np.int32).reshape(total, 3, 2)
    specs = batch_specs(num_sequences=len(LENGTHS), num_tokens=total, optional=["routed_experts"], routing=(3, 2))
    buffers = [values[s.name].tobytes() for s in specs]
    batch = decode_batch(specs=specs, buffers=buffers, vocab_size=300, max_length=64, loss=LossSpec())
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
