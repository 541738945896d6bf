"""A new adapter on a running trainer, and checkpoints of another one; see `readapted.py`."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("name", "ranks", "sizes"),
    [
        ("dense_tied", 1, (1, 1, 1)),
        ("dense_untied", 4, (2, 2, 1)),
        ("moe", 2, (1, 1, 2)),
    ],
)
def test_a_new_adapter_is_one_from_the_start(name, ranks, sizes, models, torchrun, tmp_path: Path):
    for argument in (["from_the_start"], []):
        torchrun(ranks, "state.readapted", tmp_path, models[name], *sizes, *argument)
