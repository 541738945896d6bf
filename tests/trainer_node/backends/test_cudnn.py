"""Which cuDNN a model's attention needs on GPUs. TransformerEngine is not installed here, so its
answer to the one question that is asked is put in its place."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import types
from pathlib import Path

import pytest

from orchestrator.errors import ConfigError
from trainer_node.backends import cudnn


def grouped(width: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(kv_channels=width, multi_latent_attention=False)


def latent(nope: int, rope: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        kv_channels=64, multi_latent_attention=True, qk_head_dim=nope, qk_pos_emb_head_dim=rope
    )


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    utils = types.ModuleType("transformer_engine.pytorch.utils")
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    return utils


def test_wide_heads_are_refused_with_an_older_cudnn(engine: types.ModuleType) -> None:
    engine.get_cudnn_version = lambda: (9, 14, 0)
    for wide in (grouped(256), latent(192, 64)):
        with pytest.raises(ConfigError, match=r"heads of 256 .* cuDNN 9\.14\.0 and needs 9\.19\.0"):
            cudnn.refuse_wide_heads(wide)
    for narrow in (grouped(128), latent(64, 64)):
        cudnn.refuse_wide_heads(narrow)
    engine.get_cudnn_version = lambda: (9, 19, 0)
    cudnn.refuse_wide_heads(grouped(256))


PARTS = [f"libcudnn{part}.so.9" for part in ("_graph", "_ops", "_adv", "_heuristic", "")]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """What is loaded; there is no package of torch's cuDNN, and no variable."""
    for name in ("nvidia", "nvidia.cudnn"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    files: list[Path] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda file, mode: files.append(Path(file)))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("CUDNN_HOME", "CUDNN_PATH"):
        monkeypatch.setenv(name, "")  # taken back after the test
        monkeypatch.delenv(name)
    return files


def install(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).touch()
    importlib.invalidate_caches()
    return folder


def test_torchs_cudnn_is_loaded_whole(loaded: list[Path], tmp_path: Path) -> None:
    cudnn.load()
    assert "CUDNN_HOME" not in os.environ and not loaded, "torch came without one"
    folder = install(tmp_path / "nvidia" / "cudnn" / "lib", *PARTS)
    cudnn.load()
    assert os.environ["CUDNN_HOME"] == str(folder.parent)
    assert loaded == [folder / part for part in PARTS], "what others need comes first"
    assert "newer one's folder" in cudnn.advice()


@pytest.mark.parametrize("name", ["CUDNN_HOME", "CUDNN_PATH"])
def test_the_users_cudnn_is_loaded_whole(loaded: list[Path], tmp_path: Path, name: str) -> None:
    """Below /usr there may be several: the one that TransformerEngine takes, and no part of
    another."""
    install(tmp_path / "nvidia" / "cudnn" / "lib", *PARTS)
    os.environ[name] = str(tmp_path / "usr")
    install(tmp_path / "usr" / "dist-packages" / "cudnn", *PARTS)
    system = install(tmp_path / "usr" / "lib", "libcudnn_ops_infer.so.8", "libcudnn.so.8")
    for part in PARTS:
        (system / f"{part}.14.0").touch()
        (system / part).symlink_to(f"{part}.14.0")
    cudnn.load()
    assert os.environ["CUDNN_HOME"] == str(tmp_path / "usr")
    assert loaded == [*(system / part for part in PARTS[:-1]), system / f"{PARTS[-1]}.14.0"]
    assert "unset CUDNN_HOME and CUDNN_PATH" in cudnn.advice()


def test_a_folder_without_a_cudnn_is_refused(loaded: list[Path], tmp_path: Path) -> None:
    os.environ["CUDNN_PATH"] = str(install(tmp_path / "empty"))
    with pytest.raises(
        ConfigError, match=r"no libcudnn\.so below .*empty; correct or unset CUDNN_PATH"
    ):
        cudnn.load()


def test_sinks_run_unfused_with_an_older_cudnn(engine: types.ModuleType) -> None:
    engine.get_cudnn_version = lambda: (9, 17, 1)
    assert "CUDNN_HOME" in (cudnn.sinks_obstacle() or "")
    engine.get_cudnn_version = lambda: (9, 18, 0)
    assert cudnn.sinks_obstacle() is None
