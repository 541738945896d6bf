"""What `publication.rollout_weights = "lora"` sends, to the bit; see `rollout_lora`."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("name", "ranks", "sizes"),
    [
        pytest.param("dense_tied", 1, (1, 1, 1), id="1"),
        pytest.param("dense_untied", 4, (2, 2, 1), id="tp2pp2"),
        pytest.param("moe", 2, (1, 1, 2), id="ep2"),
    ],
)
def test_base_and_adapter_are_sent(
    name: str, ranks: int, sizes: tuple[int, ...], models, torchrun, tmp_path: Path
) -> None:
    torchrun(ranks, "export.rollout_lora", models[name], tmp_path, *sizes)
