"""Training on the weights that are served: `served_numerics` on real Megatron."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from orchestrator.protocol.config import LoraConfig, TrainerConfig
from tests.trainer_node.conftest import Ranks, run_on_gpus
from trainer_node.training import gap_split


@pytest.mark.parametrize(
    ("ranks", "model", "flags"),
    [
        (1, "dense_untied", ["1", "1", "head"]),
        (1, "moe", ["1", "1"]),
        (2, "moe", ["2", "2"]),
    ],
    ids=["dense", "moe", "tp2_ep2"],
)
def test_the_trainer_computes_with_what_is_served(
    models, torchrun: Ranks, ranks: int, model: str, flags: list[str]
) -> None:
    torchrun(ranks, "training.served_numerics", models[model], *flags)


@pytest.mark.gpu1
@pytest.mark.parametrize(("model", "flags"), [("dense_untied", ["head"]), ("moe", [])])
def test_a_gpu_computes_with_what_is_served(models, model: str, flags: list[str]) -> None:
    run_on_gpus(1, "training.served_numerics", models[model], "1", "1", "cuda", *flags)


@pytest.mark.parametrize(
    "options",
    [
        {"finetuning_type": "full"},
        {"lora": LoraConfig(dropout=0.1)},
        {"compile": True},
    ],
    ids=["full", "dropout", "compile"],
)
def test_what_does_not_go_with_served_weights_is_refused(options: dict[str, object]) -> None:
    name = next(iter(options))
    with pytest.raises(ValidationError, match=name):
        TrainerConfig(model=Path("org/name"), numerics="served", **options)


@pytest.mark.parametrize(
    ("weights", "arithmetic", "warns"),
    [(0.018, 0.007, True), (0.007, 0.007, False), (5e-4, 1e-4, False), (0.0, 0.0, False)],
    ids=["nearest at 1e-5", "stochastic", "small", "none"],
)
def test_weights_that_cause_most_of_the_gap_are_warned_of(weights, arithmetic, warns) -> None:
    found = {"gap_weights_mean": weights, "gap_arithmetic_mean": arithmetic}
    said = gap_split.warnings(found, dtype="bfloat16")
    assert len(said) == warns
    assert not warns or "1.80e-02" in said[0]
    assert not gap_split.warnings({}, dtype="bfloat16")
