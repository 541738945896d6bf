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
from trainer_node.model import cudnn


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


def test_torchs_cudnn_is_loaded_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia", "nvidia.cudnn"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    loaded: list[Path] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda file, mode: loaded.append(Path(file)))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(os, "environ", {})
    cudnn.load()
    assert os.environ == {} and not loaded, "torch came without one"

    parts = [f"libcudnn{part}.so.9" for part in ("_graph", "_ops", "", "_adv", "_heuristic")]
    for folder in (torchs := tmp_path / "nvidia" / "cudnn", mine := tmp_path / "mine"):
        (folder / "lib").mkdir(parents=True)
        for part in parts:
            (folder / "lib" / part).touch()
    importlib.invalidate_caches()
    cudnn.load()
    assert os.environ == {"CUDNN_HOME": str(torchs)}
    assert loaded == [torchs / "lib" / part for part in parts], "what others need comes first"
    for name in ("CUDNN_HOME", "CUDNN_PATH"):
        loaded.clear()
        monkeypatch.setattr(os, "environ", {name: str(mine)})
        cudnn.load()
        assert os.environ["CUDNN_HOME"] == str(mine)
        assert loaded == [mine / "lib" / part for part in parts]


def test_sinks_run_unfused_with_an_older_cudnn(engine: types.ModuleType) -> None:
    engine.get_cudnn_version = lambda: (9, 17, 1)
    assert "CUDNN_HOME" in (cudnn.sinks_obstacle() or "")
    engine.get_cudnn_version = lambda: (9, 18, 0)
    assert cudnn.sinks_obstacle() is None
