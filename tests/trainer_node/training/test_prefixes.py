"""Shared prefixes: bundles and paths by hand and by hypothesis, and on real Megatron against each
sequence by itself. See `sharing.py`.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.protocol.config import TrainerConfig
from tests.trainer_node import bounds
from tests.trainer_node.families import make
from trainer_node.training.batch import Batch
from trainer_node.training.packing import MicroBatch, Sharing, micro_batches
from trainer_node.training.prefixes import Bundle, bundles

SHARING = Sharing(most=10_000, copy_load=0.25)


def batch_of(sequences: list[list[int]], routed: np.ndarray | None = None) -> Batch:
    """Every token but the first of a sequence carries loss."""
    lengths = [len(s) for s in sequences]
    total = sum(lengths)
    mask_T = torch.ones(total)
    mask_T[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = 0
    rows_T = torch.arange(total)
    return Batch(
        tokens_T=torch.tensor([t for s in sequences for t in s]),
        loss_mask_T=mask_T,
        advantages_T=rows_T + 0.5,
        sampler_logprobs_T=-rows_T * 1.0,
        lengths=tuple(lengths),
        routed_experts_T=None if routed is None else torch.from_numpy(routed),
    )


def test_a_group_by_hand() -> None:
    """Two answers to one prompt, a stranger, and a longer second answer: of the six tokens of the
    third sequence only the last two are computed.
    """
    batch = batch_of([[7, 8, 9, 1], [5, 6], [7, 8, 9, 2, 3, 4], [7, 8, 9, 2, 3]])
    found = bundles(batch, budget=20, most=20, copy_load=0.25)
    # In order: 7891, 78923, 789234.
    group = Bundle(sequences=(0, 3, 2), shared=(0, 3, 5), tokens=4 + 2 + 1, load=7 + 1 + 2)
    assert found == [group, Bundle.of_one(1, 2)]
    (pack,) = micro_batches(batch, budget=20, sharing=SHARING)
    assert pack.tokens_L.tolist() == [7, 8, 9, 1, 2, 3, 4, 5, 6]
    assert pack.positions_L.tolist() == [0, 1, 2, 3, 3, 4, 5, 0, 1]
    assert pack.cu_seqlens.tolist() == [0, 4, 6, 7, 9] and pack.max_seqlen == 4
    assert pack.paths == ((0, 4), (0, 3), (4, 2), (0, 3), (4, 5)), "what follows is one copy"
    assert pack.cu_paths is not None and pack.cu_paths.tolist() == [0, 4, 9, 15, 17]
    assert (pack.max_path, pack.load, len(pack.tokens_L)) == (6, 12, 9)
    # Of the answers' first tokens, 1, 2 and 2, the last token of the prompt predicts each.
    places = dict(zip(pack.rows_N.tolist(), pack.predictors_N.tolist(), strict=True))
    assert (places[3], places[9], places[15]) == (2, 2, 2)
    assert (places[10], places[11], places[16]) == (4, 5, 4)
    assert len(places) == 13 and pack.sequence_N.tolist() == [0] * 3 + [1] * 4 + [2] * 5 + [3]


def test_little_is_not_shared() -> None:
    """Two tokens are a sixteenth of 32, and less of 33."""
    first, second = [1, 2, *range(50, 88)], [1, 2, *range(90, 121)]
    for length, shared in ((32, [(0, 2)]), (33, [(0,), (0,)])):
        found = bundles(batch_of([second[:length], first]), budget=99, most=99, copy_load=0.25)
        assert [b.shared for b in found] == shared


def test_bundles_keep_to_the_budget() -> None:
    """Four answers of 4 tokens to a prompt of 8: 12 tokens, then 4 and a quarter of 8 for each."""
    batch = batch_of([[*range(8), 100 + i, 0, 0, 0] for i in range(4)])

    def cut(budget: int, most: int, parts: int = 1) -> list[int]:
        found = bundles(batch, budget=budget, most=most, copy_load=0.25, parts=parts)
        assert sorted(i for b in found for i in b.sequences) == [0, 1, 2, 3]
        return [len(b.sequences) for b in found]

    assert cut(30, 30) == [4] and cut(29, 29) == [3, 1] and cut(17, 17) == [1] * 4
    assert cut(12, 999) == [1] * 4, "each fits by itself"
    assert cut(11, 999) == [4] and cut(11, 24) == [3, 1], "none does"
    assert cut(99, 99, parts=2) == [1] * 4 and cut(99, 99, parts=1) == [4]


def test_experts_that_differ_are_not_shared() -> None:
    """[T, layers, top_k]: the second sequence's third token goes elsewhere."""
    routed = np.zeros((10, 2, 1), dtype=np.int32)
    routed[7, 1, 0] = 3
    batch = batch_of([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], routed)
    (found,) = bundles(batch, budget=99, most=99, copy_load=0.0)
    assert found.shared == (0, 2)
    (pack,) = micro_batches(batch, budget=99, sharing=SHARING)
    assert pack.routed_experts_L is not None
    assert pack.routed_experts_L[:, 1, 0].tolist() == [0] * 5 + [3, 0, 0]


def test_ranks_that_gather_tokens_recompute_the_same_layers() -> None:
    """Their packs have one length, and one load: experts' ranks exchange tokens once more where a
    layer runs again, so all of them must run it.
    """
    group = [[*range(8), 100 + i, 0, 0, 0] for i in range(2)]
    strangers = [[50 + i] * 9 for i in range(2)]
    packs = [
        micro_batches(
            batch_of(group + strangers),
            budget=18,
            dp_rank=rank,
            dp_size=2,
            same_length=True,
            sharing=SHARING,
        )
        for rank in range(2)
    ]
    assert [len(p) for p in packs] == [1, 1] and packs[0].num_shared == 8
    assert packs[0].lengths == packs[1].lengths == (18,)
    assert packs[0].loads == packs[1].loads == (18 + 2,)
    assert packs[1].rest(0).loads == packs[1].loads and packs[1][0].load == 20


TREE = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)


def read(pack: MicroBatch) -> list[list[int]]:
    """The tokens of each path of a pack."""
    if pack.paths is None:
        return [pack.tokens_L[a:b].tolist() for a, b in pairwise(pack.cu_seqlens.tolist())]
    keys = torch.cat([torch.arange(place, place + n) for place, n in pack.paths])
    assert pack.cu_paths is not None and pack.cu_paths[-1] == len(keys)
    return [pack.tokens_L[keys[a:b]].tolist() for a, b in pairwise(pack.cu_paths.tolist())]


@settings(deadline=None)
@given(TREE, st.integers(1, 60), st.integers(1, 3), st.booleans(), st.integers(1, 3))
def test_every_path_is_its_sequence(
    sequences: list[list[int]], budget: int, dp_size: int, same: bool, multiple: int
) -> None:
    batch = batch_of(sequences)
    cuts = [
        micro_batches(
            batch,
            budget=budget,
            dp_rank=r,
            dp_size=dp_size,
            same_length=same,
            multiple=multiple,
            sharing=SHARING,
        )
        for r in range(dp_size)
    ]
    packs = [m for cut in cuts for m in cut]
    assert len({len(c) for c in cuts}) == 1
    rows = torch.cat([m.rows_N for m in packs]).sort().values
    assert torch.equal(rows, batch.loss_mask_T.nonzero()[:, 0])
    computed = sum(int((m.rows_L >= 0).sum()) for m in packs)
    assert computed == len(batch.tokens_T) - cuts[0].num_shared
    starts = np.cumsum([0, *batch.lengths])
    for m in packs:
        assert m.cu_seqlens[0] == 0 and m.cu_seqlens[-1] == len(m.tokens_L) == len(m.positions_L)
        assert m.cu_seqlens.diff().min() >= 1 and m.cu_seqlens.diff().max() == m.max_seqlen
        assert torch.equal(m.targets_N, batch.tokens_T[m.rows_N])
        assert torch.equal(m.tokens_L[m.predictors_N], batch.tokens_T[m.rows_N - 1])
        for row, place in zip(m.rows_N.tolist(), m.predictors_N.tolist(), strict=True):
            sequence = int(np.searchsorted(starts, row, side="right")) - 1
            assert m.positions_L[place] == row - 1 - starts[sequence]
        for path, own in zip(read(m), m.cu_seqlens.diff().tolist(), strict=True):
            is_padding = not any(path == s for s in sequences)
            assert is_padding <= (not any(path)) and own <= len(path) <= max(
                1, m.max_path, len(path)
            )
        if m.paths is not None:
            lengths = m.cu_paths.diff() if m.cu_paths is not None else m.cu_seqlens
            assert m.max_path == lengths.max() >= m.max_seqlen


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("dense_tied", (1, 1, 1)),
        ("moe", (1, 1, 1)),
        pytest.param("dense_tied", (2, 2, 1), marks=pytest.mark.whole),
        ("moe", (2, 1, 2)),
    ],
)
def test_shared_prefixes_change_nothing(
    name: str, sizes: tuple[int, int, int], models, torchrun, tmp_path: Path
) -> None:
    torchrun(max(1, sizes[0] * sizes[1]), "training.sharing", tmp_path, models[name], *sizes)


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3", "deepseek_v3", "deepseek_v3_yarn"])
def test_a_family_shares_prefixes(family: str, torchrun, tmp_path: Path) -> None:
    """Sinks, windows that begin within a prefix, biases, YaRN's tables; two tables; multi-latent
    attention, whose layers each have one.
    """
    torchrun(1, "training.sharing", tmp_path, make(family, tmp_path / family), 1, 1, 1)


def test_a_layers_own_table_stays_its_packs(torchrun, tmp_path: Path) -> None:
    """Pipeline stages run another pack forward before one runs its layers again."""
    model = make("deepseek_v3", tmp_path / "model")
    torchrun(2, "training.sharing", tmp_path, model, 1, 2, 1)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_family_that_cannot_share_says_so(stages: int, torchrun, tmp_path: Path) -> None:
    """On every rank, also of a stage whose own layers could."""
    why = "GatedDeltaNet attends in its own way"
    model = make("qwen3_next", tmp_path / "model")
    torchrun(stages, "training.sharing", tmp_path, model, 1, stages, 1, why)


@pytest.mark.gpu1
@pytest.mark.parametrize("name", ["dense_tied", "moe"])
def test_prefixes_are_shared_on_a_gpu(name: str, models) -> None:
    """The start's check of the kernels passes, and log-probs differ only by rounding."""
    from tests.trainer_node.training.sharing import tree_batch
    from trainer_node.training.start import start

    config = {"device": "cuda", "dtype": "bfloat16", "micro_batch_tokens": 4096}
    trainer = start(TrainerConfig(model=models[name], recompute="none", **config))
    try:
        assert trainer.model.sharing_obstacle is None
        batch = tree_batch()
        assert trainer._cut(batch).num_shared > 0
        shared, _ = trainer.forward(batch)
        trainer.model.sharing_obstacle = "a test"
        apart, _ = trainer.forward(batch)
        assert (shared - apart).abs().max() <= bounds.scores(torch.bfloat16)
    finally:
        trainer.model.close()
