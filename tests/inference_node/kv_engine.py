"""A vLLM of this process whose KV cache is FP8, and a publication to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference_node.worker.engine import SpliceEngine
from tests.inference_node.family_engine import Engine, checkpoint, moved, write_like


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a publication."""

    wrong: list[str]
    unverified: dict[str, str]
    served: list[float]
    """Log-probs of the published weights."""
    changed: str
    """How an update fails after a scale has changed."""


def engine(name: str, folder: Path, dtype: str) -> Engine:
    base = checkpoint(name, folder, "bfloat16")
    return Engine(name, folder, base, dtype="bfloat16", kv_cache_dtype=dtype)


def run(name: str, folder: Path, dtype: str) -> Outcome:
    """Publish, then publish while a scale changes."""
    live = engine(name, folder, dtype)
    assert live.call("splice_info")["refusals"] == []
    tensors = moved(checkpoint(name, folder, "bfloat16"), 1)
    live.plan()
    live.join()
    live.logprobs()
    wrong, unverified = live.publish(1, tensors)
    served, changed = live.logprobs()[1].tolist(), ""
    finish = SpliceEngine.finish_weight_update

    def finish_with_another_scale(self: SpliceEngine) -> None:
        finish(self)
        self.model.get_buffer("model.layers.1.self_attn.attn._k_scale").fill_(0.5)

    patched: Any = SpliceEngine
    patched.finish_weight_update = finish_with_another_scale  # only in this process
    try:
        live.publish(2, tensors)
    except AssertionError as error:
        changed = str(error)
    return Outcome(wrong=wrong, unverified=unverified, served=served, changed=changed)


def cold(name: str, folder: Path, dtype: str) -> list[float]:
    """Log-probs of an engine that loads the published weights as its checkpoint."""
    tensors = moved(checkpoint(name, folder, "bfloat16"), 1)
    last = write_like(folder, tensors, folder.with_suffix(".cold"))
    fresh = Engine(name, last, tensors, dtype="bfloat16", kv_cache_dtype=dtype)
    return fresh.logprobs()[1].tolist()
