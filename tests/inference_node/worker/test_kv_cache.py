"""A KV cache in FP8: which scales are taken, and versions that a real engine serves with it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inference_node.worker import kv_cache
from orchestrator.errors import VerificationError
from tests.inference_node import fp8_engine, kv_engine, tiny, vllm_models
from tests.inference_node.conftest import ENGINE_S, Run

NEAR = 0.25
"""Nats between the same weights twice on a GPU, as in test_fp8."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[torch.nn.Module]:
    from vllm.distributed.parallel_state import (
        destroy_distributed_environment,
        destroy_model_parallel,
    )

    vllm_models.start_distributed()
    folder = tmp_path_factory.mktemp("dense")
    tiny.write_checkpoint(folder, "dense")
    yield vllm_models.load(folder, dtype="bfloat16")[0]
    destroy_model_parallel()
    destroy_distributed_environment()


def cache(dtype: str, **more: Any) -> Any:
    return SimpleNamespace(cache_dtype=dtype, **more)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"])
def test_constant_scales_are_taken(model: torch.nn.Module, dtype: str) -> None:
    assert kv_cache.refusals(model, cache(dtype)) == []
    kv_cache.check(kv_cache.scaled_layers(model, cache(dtype)))


@pytest.mark.parametrize("dtype", ["nvfp4", "fp8_ds_mla", "int8_per_token_head"])
def test_other_formats_are_refused_by_name(model: torch.nn.Module, dtype: str) -> None:
    (why,) = kv_cache.refusals(model, cache(dtype))
    assert f"kept as {dtype}" in why and "--kv-cache-dtype" in why


def test_calculated_scales_are_refused(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    (why,) = kv_cache.refusals(model, cache("fp8", calculate_kv_scales=True))
    assert "--calculate-kv-scales" in why
    layer = model.get_submodule("model.layers.1.self_attn.attn")
    monkeypatch.setattr(layer, "calculate_kv_scales", True, raising=False)
    (why,) = kv_cache.refusals(model, cache("fp8"))
    assert "--calculate-kv-scales" in why


@pytest.mark.parametrize(
    "name", ["_k_scale", "_v_scale", "_q_scale", "_prob_scale", "_k_scale_float", "_v_scale_cpu"]
)
def test_a_scale_of_its_own_is_refused_and_found(
    model: torch.nn.Module, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer: Any = model.get_submodule("model.layers.1.self_attn.attn")
    if name.endswith("float"):
        monkeypatch.setattr(layer, name, 0.5)
    else:
        monkeypatch.setattr(getattr(layer, name), "data", torch.tensor(0.5))
    (why,) = kv_cache.refusals(model, cache("fp8"))
    assert f"model.layers.1.self_attn.attn.{name} is 0.5" in why
    with pytest.raises(VerificationError, match=f"{name} is 0.5"):
        kv_cache.check(kv_cache.scaled_layers(model, cache("fp8")))
    assert kv_cache.refusals(model, cache("auto")) == [], "a plain cache uses none"


def test_a_checkpoint_that_chooses_the_cache_s_format_is_seen(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = model.get_submodule("model.layers.0.self_attn.attn")
    monkeypatch.setattr(layer, "kv_cache_dtype", "nvfp4")
    (why,) = kv_cache.refusals(model, cache("auto"))
    assert "kept as nvfp4" in why


@pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM's CPU build has an FP8 KV cache only with AVX-512 or AMX",
)
@pytest.mark.timeout(2 * ENGINE_S + 60.0)
def test_a_version_is_served_as_by_a_fresh_engine(forked: Run) -> None:
    check(forked)


@pytest.mark.gpu1
@pytest.mark.timeout(2 * ENGINE_S + 60.0)
def test_a_version_is_served_on_a_gpu(forked: Run) -> None:
    check(forked)


def check(forked: Run) -> None:
    found: kv_engine.Outcome = forked(kv_engine.run, "qwen3", "fp8")
    assert (found.wrong, found.unverified) == ([], {})
    assert "model.layers.1.self_attn.attn._k_scale is 0.5" in found.changed
    near = NEAR if fp8_engine.CUDA else 0.0
    fresh = forked(kv_engine.cold, "qwen3", "fp8")
    assert max(abs(a - b) for a, b in zip(fresh[:39], found.served[:39], strict=True)) <= near
    plain = forked(kv_engine.cold, "qwen3", "auto")
    assert plain != fresh, "the cache is not FP8"
