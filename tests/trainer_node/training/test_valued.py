"""The value head on real Megatron: one rank, and others that load its checkpoint. See `valued.py`;
the parity matrix has its gradients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trainer_node.metrics_page import SAMPLER, documented


@pytest.fixture(scope="session")
def lora_alone(models, torchrun, tmp_path_factory) -> Path:
    """What one rank did with adapters."""
    out = tmp_path_factory.mktemp("valued")
    torchrun(1, "training.valued", out, models["dense_tied"], 1, 1, 1, "lora")
    return out


def test_one_rank(lora_alone: Path) -> None:
    """And its metrics are those that the page has."""
    metrics = json.loads((lora_alone / "facts.json").read_text())
    assert set(metrics) == documented("all", SAMPLER, "steps", "all, with a value head")


def test_tensor_ranks(lora_alone: Path, models, torchrun, tmp_path: Path) -> None:
    torchrun(2, "training.valued", tmp_path, models["dense_tied"], 2, 1, 1, "lora", lora_alone)


def test_all_parameters(models, torchrun, tmp_path: Path) -> None:
    """Two stages of two data-parallel ranks, and one rank that loads their checkpoint."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    torchrun(4, "training.valued", first, models["dense_untied"], 1, 2, 1, "full")
    torchrun(1, "training.valued", second, models["dense_untied"], 1, 1, 1, "full", first)
