"""How a merged model is cut into files."""

from __future__ import annotations

from orchestrator.protocol.messages import Manifest, TensorSpec
from trainer_node.export.hf_export import plan_files


def spec(name: str, numel: int) -> TensorSpec:
    return TensorSpec(name=name, dtype="float32", shape=(numel,))


def test_files() -> None:
    manifest = Manifest(tensors=(*(spec(n, 10) for n in "abcd"), spec("big", 100)))
    assert plan_files(manifest, shard_bytes=80) == {
        "model-00001-of-00003.safetensors": ("a", "b"),
        "model-00002-of-00003.safetensors": ("c", "d"),
        "model-00003-of-00003.safetensors": ("big",),
    }
    assert plan_files(manifest, shard_bytes=10**9) == {
        "model.safetensors": ("a", "b", "c", "d", "big")
    }
