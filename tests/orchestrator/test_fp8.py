"""What travels as FP8: the manifest that all sides derive, and replicas that disagree."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from orchestrator.errors import PublicationError
from orchestrator.protocol.messages import (
    Fp8Group,
    Fp8Weights,
    Manifest,
    TensorSpec,
    WireChunk,
    WireLayout,
    fp8_manifest,
    fp8_places,
)
from orchestrator.publication.answers import PrepareAnswer
from orchestrator.publication.planner import _shared_fp8

SHAPES = {"norm": (8,), "q.weight": (256, 8), "k.weight": (130, 200), "gate.weight": (4, 8)}
BASE = Manifest(
    tensors=tuple(TensorSpec(name=n, dtype="bfloat16", shape=s) for n, s in SHAPES.items()),
    changed=(0, 2),
)


def weights(*groups: tuple[str, tuple[int, ...]]) -> Fp8Weights:
    return Fp8Weights(groups=tuple(Fp8Group(kind=k, tensors=t) for k, t in groups))  # type: ignore[arg-type]


def test_each_matrix_becomes_a_weight_and_its_scale() -> None:
    fp8 = weights(("per_tensor", (1,)), ("per_block", (2,)), ("per_channel", (3,)))
    sent = fp8_manifest(BASE, fp8)
    assert [(t.name, t.dtype, t.shape) for t in sent.tensors] == [
        ("norm", "bfloat16", (8,)),
        ("q.weight", "float8_e4m3fn", (256, 8)),
        ("q.weight_scale", "float32", (1,)),
        ("k.weight", "float8_e4m3fn", (130, 200)),
        ("k.weight_scale_inv", "float32", (2, 2)),
        ("gate.weight", "float8_e4m3fn", (4, 8)),
        ("gate.weight_scale", "float32", (4, 1)),
    ]
    assert sent.changed == (0, 3, 4)
    assert fp8_places(BASE, fp8) == [(0,), (1, 2), (3, 4), (5, 6)]
    assert fp8_manifest(BASE, None) is BASE


def test_groups_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="only matrices"):
        fp8_manifest(BASE, weights(("per_tensor", (0,))))
    with pytest.raises(ValueError, match="the manifest lacks"):
        fp8_manifest(BASE, weights(("per_tensor", (9,))))
    with pytest.raises(ValidationError, match="one group"):
        weights(("per_tensor", (1, 2)), ("per_tensor", (2,)))


def test_replicas_with_other_weights_in_fp8_are_refused() -> None:
    layout = WireLayout(chunks=(WireChunk(kind="staged", tensors=(0, 1, 2, 3)),))
    bf16 = PrepareAnswer(layout=layout)
    one = PrepareAnswer(layout=layout, fp8=weights(("per_tensor", (1, 2))))
    assert _shared_fp8({"a": one, "b": one}) == one.fp8 and _shared_fp8({"a": bf16}) is None
    for other in (bf16, PrepareAnswer(layout=layout, fp8=weights(("per_tensor", (1,))))):
        with pytest.raises(PublicationError, match="a and b hold different weights in FP8"):
            _shared_fp8({"a": one, "b": other})
