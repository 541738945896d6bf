"""See `behind.py`."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "what", ["crashes", "again", "lost", "full_disk", "stays_full", "mixtures", "waits", "no_base"]
)
def test_one_rank(what: str, models, torchrun, tmp_path: Path) -> None:
    torchrun(1, "behind", tmp_path, models["moe"], 1, 1, 1, what)


@pytest.mark.parametrize("what", ["lost", "full_disk"])
@pytest.mark.parametrize(("ranks", "expert"), [(2, 1), (2, 2)], ids=["dp2", "ep2"])
def test_two_ranks(what: str, ranks: int, expert: int, models, torchrun, tmp_path: Path) -> None:
    torchrun(ranks, "behind", tmp_path, models["moe"], 1, 1, expert, what)


@pytest.mark.parametrize("what", ["lost", "full_disk"])
def test_all_parameters(what: str, models, torchrun, tmp_path: Path) -> None:
    torchrun(2, "behind", tmp_path, models["dense_tied"], 1, 1, 1, what, "full")
