"""Where an HF linear is in Megatron's, and which linears a target means. No model."""

from __future__ import annotations

import pytest
import torch

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import LoraConfig
from trainer_node.adapters.linears import Place, Targets, expert_name
from trainer_node.layout.strides import NotStridedError, derive

NAMES = [
    "model.layers.0.self_attn.q_a_proj.weight",
    "model.layers.0.self_attn.q_a_layernorm.weight",
    "model.layers.0.mlp.gate.weight",
    "model.layers.0.mlp.experts.0.down_proj.weight",
    "model.layers.0.mlp.shared_experts.down_proj.weight",
    "model.layers.1.mlp.experts.gate_up_proj",
    "model.layers.1.mlp.experts.gate_up_proj_bias",
]


def ranks(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Indices of each rank's parameter, as `layouts` has them."""
    numel = parameters[0].numel()
    return [torch.arange(numel).view(p.shape) + n * numel for n, p in enumerate(parameters)]


class TestPlace:
    def test_gate_and_up_over_two_ranks(self) -> None:
        fused = ranks([torch.empty(4, 3)] * 2)
        up = derive(torch.cat([one[2:] for one in fused]), 12)
        place = Place.of(up, part=1, columns=3)
        assert (place.shape, place.split, place.transposed) == ((4, 3), "rows", False)
        assert (place.runs, place.columns) == (((2, 2),), (0, 3))
        assert place.rows_N.tolist() == [2, 3]

    def test_rows_in_several_runs(self) -> None:
        """Queries, keys and values in one HF matrix: each rank has a run of each."""
        fused = ranks([torch.empty(6, 3)] * 2)
        whole = torch.cat([one[at : at + 2] for at in (0, 2, 4) for one in fused])
        place = Place.of(derive(whole, 18), part=1, columns=3)
        assert place.runs == ((2, 2), (6, 2), (10, 2))
        assert place.rows_N.tolist() == [0, 1, 2, 3, 4, 5]

    def test_columns_over_two_ranks(self) -> None:
        place = Place.of(
            derive(torch.cat(ranks([torch.empty(4, 3)] * 2), 1), 12), part=1, columns=3
        )
        assert (place.shape, place.split) == ((4, 6), "columns")
        assert (place.runs, place.columns) == (((0, 4),), (3, 3))

    def test_a_copy(self) -> None:
        for part in (0, 1):
            place = Place.of(derive(ranks([torch.empty(4, 3)] * 2)[0], 12), part=part, columns=3)
            assert (place.split, place.runs, place.columns) == (None, ((0, 4),), (0, 3))

    def test_an_expert_of_a_transposed_stack(self) -> None:
        """HF takes gate and up in turns, in [in, out]; square, so the shape says nothing."""
        parameter = torch.arange(16).view(4, 4)
        turns = torch.stack([parameter[:2], parameter[2:]], dim=1).flatten(0, 1).t()
        place = Place.of(derive(turns, 16).stacked(5, 8), part=0, columns=4)
        assert (place.shape, place.transposed) == ((4, 4), True)
        assert place.rows_N.tolist() == [0, 2, 1, 3]
        plain = Place.of(derive(parameter, 16).stacked(5, 8), part=0, columns=4)
        assert (plain.transposed, plain.rows_N.tolist()) == (False, [0, 1, 2, 3])

    def test_what_ranks_share_otherwise(self) -> None:
        one, other = ranks([torch.empty(4, 3)] * 2)
        for index in (torch.cat([one, other[:2]]), one.t().contiguous()):
            with pytest.raises(NotStridedError):
                Place.of(derive(index, 12), part=0, columns=3)


class TestTargets:
    def test_ends_of_names(self) -> None:
        def wanted(*targets: str) -> list[str]:
            chosen = Targets(targets, NAMES)
            return [n for n in NAMES if chosen.wants(n)]

        assert wanted("down_proj") == [NAMES[3], NAMES[4]]
        assert wanted("shared_experts.down_proj") == [NAMES[4]]
        assert wanted("experts.gate_up_proj") == [NAMES[5]]
        assert NAMES[5] not in wanted("all-linear")
        assert NAMES[0] in wanted("all-linear")

    @pytest.mark.parametrize(
        ("target", "says"),
        [
            ("q_proj", r"'q_proj' matches nothing.*q_a_proj"),
            ("own_proj", r"'own_proj' matches nothing.*down_proj"),
            ("gate_up_proj", r"'gate_up_proj' is a stacked tensor.*'experts.gate_up_proj'"),
        ],
    )
    def test_one_that_matches_nothing(self, target: str, says: str) -> None:
        with pytest.raises(ConfigError, match=says):
            Targets(("down_proj", target), NAMES)

    @pytest.mark.parametrize(
        "targets", [(), ("",), ("model.embed_tokens",), ("all-linear", "q_proj")]
    )
    def test_what_no_model_has(self, targets: tuple[str, ...]) -> None:
        with pytest.raises(ValueError, match="lora targets"):
            LoraConfig(targets=targets)


def test_an_experts_name() -> None:
    assert expert_name("a.experts.gate_up_proj", 3) == "a.experts.3.gate_up_proj"
