"""See `begun.py`."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["dense_tied", "moe"])
def test_one_rank(name: str, models, torchrun, tmp_path: Path) -> None:
    torchrun(1, "training.begun", tmp_path, models[name], 1, 1, 1)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "expert"),
    [(1, 1, 1), (2, 1, 1), (1, 1, 2), (1, 2, 1)],
    ids=["dp2", "tp2", "ep2", "pp2"],
)
def test_two_ranks(
    tensor: int, pipeline: int, expert: int, models, torchrun, tmp_path: Path
) -> None:
    torchrun(2, "training.begun", tmp_path, models["moe"], tensor, pipeline, expert)


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_parameters(ranks: int, models, torchrun, tmp_path: Path) -> None:
    torchrun(ranks, "training.begun", tmp_path, models["dense_tied"], 1, 1, 1, "full")
