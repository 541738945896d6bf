"""Which cuDNN a model's attention needs on GPUs. TransformerEngine is not installed here, so its
answer to the one question that is asked is put in its place."""

from __future__ import annotations

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


def test_torchs_cudnn_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia", "nvidia.cudnn"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(os, "environ", {})
    cudnn.prefer_torchs()
    assert os.environ == {}, "torch came without one"
    (tmp_path / "nvidia" / "cudnn").mkdir(parents=True)
    importlib.invalidate_caches()
    cudnn.prefer_torchs()
    assert os.environ == {"CUDNN_HOME": str(tmp_path / "nvidia" / "cudnn")}
    for name in ("CUDNN_HOME", "CUDNN_PATH"):  # the user's
        monkeypatch.setattr(os, "environ", {name: "mine"})
        cudnn.prefer_torchs()
        assert os.environ == {name: "mine"}


def test_sinks_run_unfused_with_an_older_cudnn(engine: types.ModuleType) -> None:
    engine.get_cudnn_version = lambda: (9, 17, 1)
    assert "CUDNN_HOME" in (cudnn.sinks_obstacle() or "")
    engine.get_cudnn_version = lambda: (9, 18, 0)
    assert cudnn.sinks_obstacle() is None
