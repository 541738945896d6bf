"""What is said of a step before anything starts, against sizes that are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.protocol.config import LoraConfig, ParallelConfig, TrainerConfig
from splice.train import estimate

ROOT = Path(__file__).parents[2]
QWEN3_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
}
QWEN3_30B_A3B = QWEN3_8B | {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
}
SMOLLM2 = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def trainer(folder: Path, **more: Any) -> TrainerConfig:
    return TrainerConfig(
        **{"model": folder, "device": "cuda", "dtype": "bfloat16", "lora": LoraConfig(rank=16)}
        | more
    )


def of(model: dict[str, Any]) -> list[estimate.Linear]:
    found = estimate.linears_of(model)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("model", "parameters"),
    [(QWEN3_8B, 8.19e9), (QWEN3_30B_A3B, 30.53e9), (SMOLLM2, 134.5e6)],
)
def test_weights_are_those_of_the_checkpoints(model: dict[str, Any], parameters: float) -> None:
    weights, _ = estimate.trainer_bytes(of(model), trainer(Path("model")))
    assert weights / 2 == pytest.approx(parameters, rel=2e-3), "norms are left out"


def test_adapters_by_hand(tmp_path: Path) -> None:
    rows = {"q": 4096 + 4096, "kv": 2 * (1024 + 4096), "o": 4096 + 4096, "mlp": 3 * (12288 + 4096)}
    _, trained = estimate.trainer_bytes(of(QWEN3_8B), trainer(tmp_path))
    assert trained == 16 * 36 * sum(rows.values()) * 16
    only = trainer(tmp_path, lora=LoraConfig(rank=16, targets=("q_proj", "v_proj")))
    _, trained = estimate.trainer_bytes(of(QWEN3_8B), only)
    assert trained == 16 * 36 * (8192 + 1024 + 4096) * 16


def test_ranks_share_the_model(tmp_path: Path) -> None:
    one, _ = estimate.trainer_bytes(of(QWEN3_30B_A3B), trainer(tmp_path))
    split = trainer(tmp_path, parallel=ParallelConfig(tensor=2, expert=2, world_size=2))
    assert estimate.trainer_bytes(of(QWEN3_30B_A3B), split)[0] == pytest.approx(one / 2, rel=0.01)
    whole = trainer(tmp_path, finetuning_type="full")
    weights, trained = estimate.trainer_bytes(of(QWEN3_8B), whole)
    assert trained == 8 * weights, "fp32 gradients, masters and two moments, 2 bytes of weight"
    for model in (QWEN3_8B, QWEN3_30B_A3B):
        weights, _ = estimate.trainer_bytes(of(model), whole)
        several = whole.model_copy(update={"parallel": ParallelConfig(world_size=4)})
        assert estimate.trainer_bytes(of(model), several) == (
            weights,
            (4 + 12 / 4) / 2 * weights,
        ), "masters and moments are spread over data-parallel ranks"


@pytest.mark.parametrize(
    "more",
    [
        {"kv_lora_rank": 512},
        {"layer_types": ["linear_attention", "full_attention"]},
        {"n_shared_experts": 1},
        {"intermediate_size": None},
    ],
)
def test_nothing_is_said_of_an_unusual_model(tmp_path: Path, more: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B | more))
    assert estimate.text_of(trainer(tmp_path), step_tokens=10, steps=1) == []


def test_nothing_is_said_of_a_model_that_is_not_here(tmp_path: Path) -> None:
    assert estimate.text_of(trainer(Path("org/name")), step_tokens=10, steps=1) == []


def test_what_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    memory, time = estimate.text_of(trainer(tmp_path), step_tokens=31_062, steps=90)
    assert memory == (
        "estimate: a trainer's rank holds 16.4 GB of weights and 0.7 GB of adapters, gradients "
        "and moments; activations take more"
    )
    assert time == (
        "estimate: 2 s of training for 31,062 answer tokens, 3 min for all steps, if each GPU "
        "trains 15,531 tokens a second as one H200 did (train-8b-again-1xh200.json); prompts add "
        "to it"
    )
    for unknown in (trainer(tmp_path, device="cpu"), trainer(tmp_path, finetuning_type="full")):
        assert len(estimate.text_of(unknown, step_tokens=31_062, steps=90)) == 1


@pytest.mark.parametrize(("speed", "file"), estimate.MEASURED.values())
def test_speeds_are_those_of_the_files(speed: int, file: str) -> None:
    cases = json.loads((ROOT / "benchmarks" / "results" / file).read_text())["cases"]
    measured = {round(case["value"]) for case in cases if case["metric"] == "tokens_per_s"}
    assert speed in measured and all(
        case["settings"]["rank"] == 16 and case["settings"]["world_size"] == 1
        for case in cases
        if case["metric"] == "tokens_per_s"
    )
