"""Long sequences on real Megatron, on a CPU. See `long.py`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.readme import ROOT


def extended(model: Path, folder: Path, length: int, *, yarn: bool) -> Path:
    """The model with `length` positions, by the page's own lines where it is YaRN."""
    shutil.copytree(model, folder / "Qwen3-8B")
    if not yarn:
        file = folder / "Qwen3-8B" / "config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps({**config, "max_position_embeddings": length}))
        return folder / "Qwen3-8B"
    page = (ROOT / "docs/long-sequences.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(import json, os\n.*?)```", page, re.DOTALL)
    code = code.replace('Path("', f'Path("{folder}/').replace("32_768", str(length // 4))
    exec(code)
    return folder / "Qwen3-8B-131k"


@pytest.mark.parametrize(
    ("length", "loss_tokens", "yarn"),
    [
        (4_000, 500, False),
        (4_000, 500, True),
        pytest.param(20_000, 20_000 - 1, False, marks=pytest.mark.whole),
        pytest.param(70_000, 1_000, False, marks=pytest.mark.whole),
    ],
)
def test_a_long_sequence_is_scored_and_trained_as_by_transformers(
    length: int, loss_tokens: int, yarn: bool, models, torchrun, tmp_path: Path
) -> None:
    model = extended(models["dense_untied"], tmp_path, length, yarn=yarn)
    torchrun(1, "training.long", tmp_path, model, length, loss_tokens, timeout_s=880)
