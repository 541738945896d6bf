"""Every recipe's file passes the check, with stand-ins for models, datasets and GPUs."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import datasets
import pytest
import yaml
from typer.testing import CliRunner

from splice import run_cli
from splice.cli import app
from splice.client.run_file import load_as
from splice.cluster import up
from splice.cluster.doctor import Gpu
from splice.train import recipes
from splice.train.sections import SftFile, TrainFile
from tests.e2e.conftest import INFERENCE_PYTHON, ROOT, models
from tests.hub_cache import make_cache

__all__ = ["models"]


@pytest.fixture
def hub(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipes' models, as the Hub's cache would have them, but tiny; and GSM8K."""
    model = tmp_path / "model"
    shutil.copytree(models["qwen3"], model)
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 40960}
    (model / "config.json").write_text(json.dumps(config))
    for name in {recipes.read(name).model for name in recipes.names()}:
        make_cache(model, tmp_path / "hub", repo=f"models--{name.replace('/', '--')}")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for module in ("arithmetic", "gsm8k"):  # of another test's folder
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = [{"question": "2 + 2?", "answer": "#### 4"}]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    gpus = [Gpu(index=i, name="H200", memory_mib=143771, driver="d") for i in range(2)]
    monkeypatch.setattr(up, "list_gpus", lambda: gpus)
    monkeypatch.setattr(run_cli, "list_gpus", lambda: gpus)
    monkeypatch.setattr(up, "check_environments", lambda run: None)


def splice(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == code, done.output
    return done.output


@pytest.mark.parametrize("gpus", ["0,1", ""])
@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_is_a_run(name: str, gpus: str, hub: None, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    options = ["--gpus", gpus, "--inference-python", INFERENCE_PYTHON]
    recipe = recipes.read(name)
    said = splice("init", folder, "--recipe", name, *options)
    assert f"next: splice {recipe.command} {folder / 'run.toml'}\n" in said
    step, *estimate, ok = splice("config", "check", folder).splitlines()
    assert "rows each" in step if recipe.command == "sft" else "answers each" in step
    assert len(estimate) == 1 and "estimate: a trainer's rank holds" in estimate[0] and ok == "ok"
    run = load_as(SftFile if recipe.command == "sft" else TrainFile, folder / "run.toml")
    assert run.device == ("cuda" if gpus else "cpu") and run.trainer.lora.rank == recipe.lora_rank
    text = (folder / "run.toml").read_text()
    assert f"# Recipe {name}: " in text and recipe.ran in text
    for result in re.findall(r"[\w.-]+\.json", recipe.ran):
        assert (ROOT / "benchmarks/results" / result).is_file()
    for place in re.findall(r"[\w/-]+\.(?:md|py)\b", recipe.ran):
        assert (ROOT / place).is_file()


def test_the_page_has_every_recipe() -> None:
    page = (ROOT / "docs/train.md").read_text()
    for name in recipes.names():
        recipe = recipes.read(name)
        assert f"| `{name}` | {recipe.about} | {recipe.model} | {recipe.ran} |" in page


def test_the_skypilot_file_names_a_recipe() -> None:
    task = yaml.safe_load((ROOT / "examples/skypilot.yaml").read_text())
    assert task["envs"]["RECIPE"] in recipes.names()
    assert "envs-cuda:" in (ROOT / "Makefile").read_text() and "make envs-cuda" in task["setup"]
    assert '--recipe "$RECIPE"' in task["run"] and "splice train" in task["run"]


def test_an_unknown_recipe_and_no_model(tmp_path: Path) -> None:
    options = ["--gpus", "", "--inference-python", INFERENCE_PYTHON]
    said = splice("init", tmp_path / "mine", "--recipe", "arithmetics", *options, code=2)
    assert "there is no recipe 'arithmetics'" in said and "gsm8k-8b" in said
    said = splice("init", tmp_path / "mine", *options, code=2)
    assert "name --model, or a --recipe" in said
