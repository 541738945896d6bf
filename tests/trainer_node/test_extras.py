"""See `extras.py`: one process, because importing Megatron costs seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.errors import ConfigError
from tests.trainer_node.conftest import REPO, child_env


def test_extras(models, torchrun, tmp_path: Path) -> None:
    torchrun(1, "extras", tmp_path, models["dense_tied"], models["moe"])


def test_reference_shares_no_code() -> None:
    """Importing the reference brings in neither Megatron nor another module of splice."""
    code = "import sys, trainer_node.tools.reference; print([m for m in sys.modules if m.split('.')[0] in %r])"  # noqa: E501
    roots = ("megatron", "orchestrator", "weight_transfer", "inference_node", "vllm")
    ran = subprocess.run(
        [sys.executable, "-c", code % (roots,)],
        cwd=REPO,
        env=child_env(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 8}, "num_experts and num_local_experts differ"),
        ({"mlp_only_layers": [0]}, "dense layers among MoE layers"),
    ],
)
def test_configs_that_would_train_wrongly(
    change: dict, message: str, models, tmp_path: Path
) -> None:
    from trainer_node.hf.checkpoint import read_config

    raw = json.loads((models["moe"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "written",
    [
        {"rope_theta": 123456.0, "num_experts": 8},
        {
            "rope_parameters": {"rope_theta": 123456.0, "rope_type": "default"},
            "num_local_experts": 8,
        },
    ],
)
def test_configs_as_transformers_4_and_5_write_them(written: dict, models, tmp_path: Path) -> None:
    from trainer_node.hf.checkpoint import read_config

    raw = json.loads((models["moe"] / "config.json").read_text())
    for key in ("rope_theta", "rope_parameters", "num_experts", "num_local_experts"):
        raw.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(raw | written))
    config = read_config(tmp_path)
    assert (config.rope_parameters["rope_theta"], config.num_experts) == (123456.0, 8)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_config(tmp_path / "nowhere")
    for text, match in (
        ("{", r"cannot read \S*config\.json"),
        ('{"model_type": "nonesuch"}', "'nonesuch'"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=match):
            read_config(tmp_path)
