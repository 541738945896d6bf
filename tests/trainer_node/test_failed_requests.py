"""A failed request gives its memory back and leaves a known state; see `failed_requests.py`."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["dense_tied", "moe"])
def test_the_tensors_of_a_failed_request_are_free_at_its_end(
    name: str, models, torchrun, tmp_path: Path
) -> None:
    torchrun(1, "failed_requests", tmp_path, models[name], "handlers")


def test_a_first_step_that_fails_leaves_a_known_state(models, torchrun, tmp_path: Path) -> None:
    torchrun(1, "failed_requests", tmp_path, models["dense_tied"], "step")


def test_a_refused_checkpoint_changes_nothing(models, torchrun, tmp_path: Path) -> None:
    torchrun(1, "failed_requests", tmp_path, models["dense_tied"], "checkpoints")


def test_a_sequence_that_does_not_fit_is_refused_by_name(models, torchrun, tmp_path: Path) -> None:
    torchrun(1, "failed_requests", tmp_path, models["dense_tied"], "too_long")


def test_the_peak_of_memory_is_that_of_the_request(models, torchrun, tmp_path: Path) -> None:
    torchrun(1, "failed_requests", tmp_path, models["dense_tied"], "peaks")


def test_what_one_rank_has_lost_ends_all_of_them(models, torchrun, tmp_path: Path) -> None:
    torchrun(2, "failed_requests", tmp_path, models["dense_tied"], "ranks")
