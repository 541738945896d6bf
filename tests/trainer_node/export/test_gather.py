"""Several ranks send in the receiver's order: the pure plan by hand, bytes and failures on real
Megatron over gloo; bytes over NCCL, marked gpu2.
"""

from __future__ import annotations

import pytest

from orchestrator.errors import ManifestError
from orchestrator.protocol.messages import TensorSpec
from tests.trainer_node.conftest import run_on_gpus
from trainer_node.export.gather_plan import ALIGN, Held, PartitionError, assign, lay_out
from weight_transfer.boxes import Box

TOPOLOGIES = {
    "dp2": ("dense_tied", 2, (1, 1, 1)),
    "cp2": ("dense_untied", 2, (1, 1, 1), "cp2"),
    "tp2": ("dense_tied", 2, (2, 1, 1)),
    "tp2-no-sequence": ("dense_untied", 2, (2, 1, 1), "bfloat16", "no-sequence"),
    "pp2": ("dense_tied", 2, (1, 2, 1), "bfloat16"),
    "tp2pp2": ("dense_tied", 4, (2, 2, 1)),
    "moe-tp2": ("moe", 2, (2, 1, 1)),
    "moe-ep2": ("moe", 2, (1, 1, 2), "bfloat16"),
    "moe-tp2ep2": ("moe", 2, (2, 1, 2), "bfloat16"),
    "moe-tp2pp2": ("moe", 4, (2, 2, 1)),
    "moe-dp2ep2": ("moe", 4, (1, 1, 2)),
    "moe-tp2etp2": ("moe", 2, (2, 1, 1), "etp2", "bfloat16"),
}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_bytes_equal_the_export(topology: str, models, torchrun) -> None:
    name, ranks, sizes, *flags = TOPOLOGIES[topology]
    torchrun(ranks, "export.gather", models[name], *sizes, *flags)


@pytest.mark.gpu2
@pytest.mark.parametrize("topology", ["tp2", "pp2", "moe-ep2"])
def test_on_gpus(topology: str, models) -> None:
    name, ranks, sizes, *_ = TOPOLOGIES[topology]
    run_on_gpus(ranks, "export.gather", models[name], *sizes, "bfloat16", "cuda")


# ------------------------------------------------------------ the plan


def spec(name: str, *shape: int, dtype: str = "bfloat16") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)  # type: ignore[arg-type]


def held(of: TensorSpec, *box: int) -> Held:
    return Held(of.name, of.dtype, of.shape, Box(*box))


COLUMN, ROW, NORM = spec("column", 4, 6), spec("row", 4, 6), spec("norm", 5, dtype="float32")
TENSOR_RANKS = [
    [held(COLUMN, 0, 2, 0, 6), held(ROW, 0, 4, 0, 3), held(NORM, 0, 5, 0, 1)],
    [held(COLUMN, 2, 2, 0, 6), held(ROW, 0, 4, 3, 3), held(NORM, 0, 5, 0, 1)],
]


def test_copies_are_sent_by_the_lowest_rank() -> None:
    ranks = [TENSOR_RANKS[0][1:], *TENSOR_RANKS, *TENSOR_RANKS]  # the first has no rows of `column`
    assert assign(ranks, [NORM, COLUMN, ROW]) == [
        [(0, Box(0, 5, 0, 1))],
        [(1, Box(0, 2, 0, 6)), (2, Box(2, 2, 0, 6))],
        [(0, Box(0, 4, 0, 3)), (2, Box(0, 4, 3, 3))],
    ]


def test_where_pieces_lie() -> None:
    """By hand: 2-byte elements; `norm` (20 bytes) comes first in its chunk, then `row` and
    `column` of 48 bytes each.
    """
    specs = [COLUMN, NORM, ROW]
    whole, empty = lay_out(specs, [[1, 2, 0], []], assign(TENSOR_RANKS, specs), ranks=2)
    assert whole.nbytes == 20 + 48 + 48 and empty.nbytes == 0 and empty.messages == (0, 0)
    assert whole.messages == (0, 24 + 8 + 24 + 8)  # each piece begins at a multiple of ALIGN
    assert ALIGN == 16
    zero, one = whole.placements
    assert [(s.index, s.offset, s.row_stride) for s in zero] == [(1, 0, 1), (2, 20, 6), (0, 68, 6)]
    assert [(s.index, s.offset, s.row_stride, s.packed) for s in one] == [
        (2, 20 + 3 * 2, 6, 0),
        (0, 68 + 2 * 6 * 2, 6, 32),
    ]


def test_a_rank_with_padding_alone_sends_nothing() -> None:
    embedding = spec("embedding", 4, 2)
    owners = assign([[held(embedding, 0, 4, 0, 2)], [held(embedding, 4, 0, 0, 2)]], [embedding])
    assert lay_out([embedding], [[0]], owners, ranks=2)[0].messages == (0, 0)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (
            [[held(COLUMN, 0, 3, 0, 6)], [held(COLUMN, 2, 2, 0, 6)]],
            "column: elements of .* in .* as well",
        ),
        (
            [[held(COLUMN, 0, 2, 0, 6), held(COLUMN, 2, 2, 0, 6)], [held(COLUMN, 0, 4, 0, 6)]],
            "column: elements of",
        ),
        (
            [[held(COLUMN, 0, 2, 0, 6)], [held(COLUMN, 1, 2, 0, 6)]],
            "column: elements of",
        ),  # as many elements as there are
        ([[held(COLUMN, 0, 4, 0, 3)], []], "column: no rank has 12 of its 24"),
        ([[held(COLUMN, 2, 4, 0, 6)], []], "column: a rank has .* ends at"),
    ],
)
def test_pieces_that_are_not_the_tensor(ranks, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        assign(ranks, [COLUMN])


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (spec("other", 2), "other, which the model has not"),
        (spec("column", 6, 4), r"column is .*\[6, 4\]"),
    ],
)
def test_another_manifest(wanted: TensorSpec, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        assign(TENSOR_RANKS, [wanted])
