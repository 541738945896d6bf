"""See `kernels`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer_node import families
from tests.trainer_node.conftest import Ranks


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "deepseek_v3"])
def test_attention_kernels_are_checked(torchrun: Ranks, tmp_path: Path, family: str) -> None:
    torchrun(1, "model.kernels", families.make(family, tmp_path / family))


@pytest.mark.whole
def test_attention_kernels_of_real_sizes(torchrun: Ranks, tmp_path: Path) -> None:
    torchrun(1, "model.kernel_kinds", tmp_path, "cpu")
