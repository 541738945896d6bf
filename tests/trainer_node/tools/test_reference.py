"""The perturbations of the reference: what is perturbed shows, whatever the model, if its log-probs
depend on it at all.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.numerics import chain_error_bound, decoder_roundings
from trainer_node.tools.make_checkpoint import chosen_shape, write_checkpoint
from trainer_node.tools.reference import (
    NOISES,
    answer,
    classes,
    max_difference,
    score,
    with_single_experts,
)

TAU = 1e-4
SEQUENCES = [[(7 * n * n + 13 * s) % 300 for n in range(24)] for s in range(4)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Three layers of eight experts, of which the first adds a thousandth of what the
    others add.
    """
    folder = tmp_path / "model"
    write_checkpoint(
        folder, replace(chosen_shape(name="tiny", arch="qwen3_moe", tied=False), layers=3)
    )
    tensors = load_file(folder / "model.safetensors")
    weak = {n: t * 0.001 if ".experts.0.down_proj." in n else t for n, t in tensors.items()}
    save_file(weak, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_an_expert_that_adds_little_is_perturbed_until_it_shows(model: Path) -> None:
    request = {
        "model": str(model),
        "dtype": "float32",
        "sequences": SEQUENCES,
        "perturb": True,
        "trained": {"0": None},
    }
    found = answer(request | {"tau": TAU}, "cpu")
    assert TAU <= found["tau"] < 10 * TAU, "100 times what three layers round in fp32"
    assert min(found["perturbed"].values()) > 2 * found["tau"], found["perturbed"]
    noise = found["perturbed_noise"]
    assert noise["first_expert"] > NOISES[0] and {
        n for k, n in noise.items() if k != "first_expert"
    } == {NOISES[0]}


def test_single_experts_are_the_stacked_ones(model: Path) -> None:
    stacked = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    single = with_single_experts(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    )
    found, written = dict(single.named_parameters()), load_file(model / "model.safetensors")
    assert found.keys() == written.keys()
    assert all(torch.equal(found[n], t) for n, t in written.items())
    ours, theirs = score(single, SEQUENCES), score(stacked, SEQUENCES)
    roundings = decoder_roundings(
        torch.float32,
        layers=3,
        hidden=64,
        inner=32,
        head_dim=32,
        attention=128,
        length=len(SEQUENCES[0]),
        vocab=400,
    )
    largest = max(-one for row in theirs for one in row if one is not None)
    bound = chain_error_bound(torch.float32, roundings=roundings, magnitude=largest)
    assert max_difference(ours, theirs) <= bound


def test_an_expert_without_tokens_is_not_perturbed() -> None:
    """Of eight experts in three layers only 2 and 5 get tokens; each is taken where it gets the
    most.
    """
    at = "model.layers.{}.mlp.experts.{}".format
    names = [
        f"{at(layer, e)}.{k}_proj.weight"
        for layer in range(3)
        for e in range(8)
        for k in ("gate", "up", "down")
    ]
    tokens = {at(layer, e): 0 for layer in range(3) for e in range(8)} | {
        at(1, 2): 4,
        at(2, 2): 9,
        at(0, 5): 7,
        at(1, 5): 6,
    }
    found = classes(names, tokens)
    assert (found["first_expert"], found["last_expert"]) == (
        f"{at(2, 2)}.down_proj.weight",
        f"{at(0, 5)}.down_proj.weight",
    )
    assert found["gate"] == f"{at(0, 5)}.gate_proj.weight"


def test_the_tolerance_is_what_the_model_rounds_where_that_is_more(model: Path) -> None:
    request = {"model": str(model), "dtype": "float32", "sequences": SEQUENCES, "tau": 1e-12}
    found = answer(request | {"trained": {"0": None}}, "cpu")
    assert 1e-12 < found["tau"] < 10 * TAU
    assert answer(request | {"trained": {}}, "cpu")["tau"] == 1e-12, "nothing was scored"
