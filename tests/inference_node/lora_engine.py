"""A vLLM of this process with room for an adapter, and publications of base and adapter to it.

By hand: python -m tests.inference_node.lora_engine FAMILY
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.lora.request import LoRARequest

from inference_node.shared import names
from inference_node.worker import lora
from orchestrator.errors import ManifestError
from tests.inference_node import tiny
from tests.inference_node.adapters import LINEARS, PREFIX, adapter, merged
from tests.inference_node.family_engine import DECODED_TOKENS, Engine, checkpoint

MOST_RANK = 8


@dataclass(kw_only=True)
class Outcome:
    """What came of the versions."""

    refused: str = ""
    wrong: list[str] = field(default_factory=list)
    unverified: dict[str, str] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)
    """How the adapter's tensors travel."""
    differences: list[float] = field(default_factory=list)
    """Largest log-prob difference from transformers with that version's base and adapter."""
    moved: list[float] = field(default_factory=list)
    """Largest log-prob difference from the version before it."""
    broken: list[str] = field(default_factory=list)
    """Wrong digests after a bit of the adapter in vLLM was changed."""


class LoraEngine(Engine):
    """Every request names the adapter, as `Entrance` has it, and others run at the same time."""

    def logprobs(self) -> tuple[list[int], torch.Tensor]:
        generate = self._llm.generate
        request = LoRARequest(names.ADAPTER_NAME, names.ADAPTER_ID, names.ADAPTER_NAME)

        def with_adapter(prompts: list[Any], *args: Any, **more: Any) -> Any:
            others = [{"prompt_token_ids": self._prompt[:count]} for count in (7, 30)]
            return generate([*prompts, *others], *args, **more, lora_request=request)

        try:
            self._llm.generate = with_adapter  # type: ignore[method-assign]
            return super().logprobs()
        finally:
            self._llm.generate = generate  # type: ignore[method-assign]


def run(
    name: str,
    folder: Path,
    linears: Sequence[str] = LINEARS,
    wrapped: Sequence[str] | None = None,
) -> Outcome:
    """Publish base and adapters of different linears and ranks to one engine.

    Last, a bit of the adapter changes in vLLM between the update and its digests.

    Args:
        wrapped: the linears that vLLM has room for. None: all.
    """
    base = checkpoint(name, folder)
    room: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_lora_rank": MOST_RANK}
    if wrapped is not None:
        room["lora_target_modules"] = list(wrapped)
    engine, outcome = LoraEngine(name, folder, base, **room), Outcome()
    engine.join()
    tokens, before = engine.logprobs()
    outcome.differences.append(float((before - engine.expected(tokens, base)).abs().max()))
    for version, (which, rank) in enumerate([(linears, 8), (linears, 4), (linears[:1], 2)]):
        matrices = adapter(base, which, rank=rank, seed=version)
        engine.manifest = tiny.manifest_of(base | matrices)
        try:
            engine.plan()
        except ManifestError as error:
            outcome.refused = str(error)
            return outcome
        specs = engine.manifest.tensors
        outcome.kinds |= {k for k, ids in engine.chunks for i in ids if PREFIX in specs[i].name}
        wrong, unverified = engine.publish(version, base | matrices)
        outcome.wrong += wrong
        outcome.unverified |= unverified
        tokens, served = engine.logprobs()
        expected = engine.expected(tokens, merged(base, matrices))
        outcome.differences.append(float((served - expected).abs().max()))
        count = len(tokens) - DECODED_TOKENS - 1
        outcome.moved.append(float((served - before)[:count].abs().max()))
        before = served
    lora.Slots.clear = _flips  # type: ignore[method-assign]
    engine.manifest = tiny.manifest_of(base | adapter(base, linears, rank=8, seed=0))
    engine.plan()
    outcome.broken, _ = engine.publish(9, base | adapter(base, linears, rank=8, seed=9))
    return outcome


def _flips(slots: lora.Slots, _: Any) -> None:
    """In place of `clear`: negate one element of an A."""
    first = next(m for n, m in slots._tree.named_parameters() if n.endswith("A0"))
    first[0, 0].neg_()


if __name__ == "__main__":
    print(run(sys.argv[1], Path(tempfile.mkdtemp()) / "model", tuple(sys.argv[2:]) or LINEARS))
