"""Adapters merged into weights: the plan, and values by hand."""

from __future__ import annotations

import pytest
import torch

from orchestrator.errors import MergePlanError
from orchestrator.protocol.messages import TensorSpec
from trainer_node.adapters.merge import LoraDelta, MergeOp, merge_tensor, plan_merge
from trainer_node.adapters.rounding import NEAREST
from trainer_node.hf.names import decoder_name, strip_wrappers


def delta(rank: int = 1, rows: int = 2, columns: int = 3) -> LoraDelta:
    return LoraDelta(lora_A_RI=torch.ones(rank, columns), lora_B_OR=torch.ones(rows, rank))


def merged(weight: torch.Tensor, d: LoraDelta, scale: float) -> torch.Tensor:
    return merge_tensor(weight, d, scale=scale, rounding=NEAREST, name="w")


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, dtype="float32", shape=shape)


class TestMerge:
    def test_by_hand(self) -> None:
        weight = torch.tensor([[1.0, 2, 3], [4, 5, 6]])
        kept = weight.clone()
        d = LoraDelta(
            lora_A_RI=torch.tensor([[1.0, 0, 2]]), lora_B_OR=torch.tensor([[10.0], [100]])
        )
        assert merged(weight, d, 0.5).tolist() == [[6, 2, 13], [54, 5, 106]]
        assert torch.equal(weight, kept)

    def test_a_square_matrix_is_not_transposed(self) -> None:
        d = LoraDelta(lora_A_RI=torch.tensor([[0.0, 1]]), lora_B_OR=torch.tensor([[1.0], [0]]))
        assert merged(torch.zeros(2, 2), d, 1.0).tolist() == [[0, 1], [0, 0]]

    def test_rounds_once(self) -> None:
        """1 + 2^-9 + 2^-9 is representable in bf16 only if the sum is rounded at the end: 2^-9
        alone would vanish next to 1.
        """
        weight = torch.ones(1, 1, dtype=torch.bfloat16)
        d = LoraDelta(lora_A_RI=torch.full((2, 1), 2.0**-9), lora_B_OR=torch.ones(1, 2) * 2)
        found = merged(weight, d, 1.0)
        assert found.dtype is torch.bfloat16
        assert found.item() == 1 + 2.0**-7

    def test_plan_in_target_order(self) -> None:
        targets = {n: spec(n, 2, 3) for n in ("b.weight", "norm.weight", "a.weight")}
        ops = plan_merge(deltas={"a": delta(), "b": delta()}, targets=targets)
        assert ops == [
            MergeOp(target="b.weight", adapter="b"),
            MergeOp(target="a.weight", adapter="a"),
        ]

    def test_every_adapter_needs_a_target(self) -> None:
        with pytest.raises(MergePlanError, match=r"adapter a has no target.*a\.weight"):
            plan_merge(deltas={"a": delta()}, targets={"b.weight": spec("b.weight", 2, 3)})

    def test_no_target_is_hit_twice(self) -> None:
        deltas = {"m.a": delta(), "module.m.a": delta()}
        with pytest.raises(
            MergePlanError, match=r"m\.a\.weight is hit by two adapters: m\.a and module\.m\.a"
        ):
            plan_merge(deltas=deltas, targets={"m.a.weight": spec("m.a.weight", 2, 3)})

    def test_shapes_must_fit(self) -> None:
        with pytest.raises(
            MergePlanError, match=r"adapter a has A \(1, 3\) and B \(2, 1\).*\(3, 2\)"
        ):
            plan_merge(deltas={"a": delta()}, targets={"a.weight": spec("a.weight", 3, 2)})

    @pytest.mark.parametrize(
        "name",
        [
            "decoder.layers.0.mlp.linear_fc1.weight",
            "module.module.decoder.layers.0.mlp.linear_fc1.weight",
            "_orig_mod.module.decoder.layers.0._orig_mod.mlp.linear_fc1.weight",
            "module.language_model.decoder.layers.0.mlp.linear_fc1.weight",
        ],
    )
    def test_wrappers_and_prefixes(self, name: str) -> None:
        assert decoder_name(name) == "decoder.layers.0.mlp.linear_fc1.weight"

    def test_names_that_only_look_wrapped(self) -> None:
        assert strip_wrappers("decoder.submodule.weight") == "decoder.submodule.weight"
        assert decoder_name("vision_model.decoder.layers.0.weight") is None
        assert decoder_name("embedding.word_embeddings.weight") is None
