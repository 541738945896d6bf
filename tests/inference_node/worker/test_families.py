"""Families of models on a real vLLM: publications to tiny checkpoints of transformers' classes.

Each engine loads a checkpoint, takes two other versions and then the first again, all of it through
vLLM's reload. After each, its log-probs of a prompt and of decoded tokens must be transformers' of
the same weights.
"""

from __future__ import annotations

import pytest
import torch

from tests.inference_node import family_engine
from tests.inference_node.conftest import ENGINE_S, Run
from tests.inference_node.family_engine import DECODED_TOKENS, PROMPT_TOKENS, Served
from tests.numerics import chain_error_bound, decoder_roundings
from tests.serving import BFLOAT16, UNLISTED, UNSERVED
from tests.trainer_node.families import FAMILIES, VOCAB

NEAR = 0.05
"""Nats between the same weights twice on a GPU, which adds in any order."""
VISIBLE = 0.5
"""Nats by which versions must differ at least, so that a stale tensor shows."""


def bound(served: Served) -> float:
    """How far rounding may move a log-prob from transformers'."""
    roundings = decoder_roundings(
        torch.float32,
        layers=2,
        hidden=64,
        inner=128,
        head_dim=96,
        attention=4 * 96,
        length=PROMPT_TOKENS + DECODED_TOKENS,
        vocab=VOCAB,
    )
    largest = max(abs(x) for row in served.logprobs for x in row)
    return chain_error_bound(torch.float32, roundings=roundings, magnitude=largest)


@pytest.mark.timeout(2 * ENGINE_S + 60.0)
@pytest.mark.parametrize("name", FAMILIES)
def test_published_versions_are_served_and_verified(forked: Run, name: str) -> None:
    served = forked(family_engine.run, name)
    assert served.refused == ""
    assert served.unverified == {} and served.wrong == []
    assert served.direct > 0
    assert served.unserved == UNSERVED.get(name, "")
    if served.unserved:
        return
    assert served.moved > VISIBLE
    first, *_, again = served.logprobs
    assert again == first
    if name in BFLOAT16:  # transformers rounds elsewhere: a fresh engine's must be the same
        last = family_engine.VERSIONS - 1
        assert forked(family_engine.loaded, name, last) == served.logprobs[last + 1]
    else:
        assert max(served.differences) < bound(served), served.differences


@pytest.mark.timeout(ENGINE_S + 60.0)
def test_a_model_that_sees_is_published_with_its_tower(forked: Run) -> None:
    served = forked(family_engine.run_with_tower, "gemma3")
    assert (served.refused, served.unserved) == ("", "")
    assert served.unverified == {} and served.wrong == []
    assert served.direct > 0 and served.moved > VISIBLE
    assert max(served.differences) < bound(served), served.differences


@pytest.mark.gpu1
@pytest.mark.timeout(3 * ENGINE_S)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in UNLISTED])
def test_published_versions_are_what_a_gpu_loads(forked: Run, name: str) -> None:
    served = forked(family_engine.run, name)
    assert (served.refused, served.unserved) == ("", "")
    assert served.unverified == {} and served.wrong == []
    assert served.direct > 0 and served.moved > VISIBLE
    first, *_, again = served.logprobs
    last = family_engine.VERSIONS - 1
    loaded = forked(family_engine.loaded, name, last)
    for ours, theirs in ((again, first), (served.logprobs[last + 1], loaded)):
        # A token that is decoded otherwise is another token.
        pairs = list(zip(ours, theirs, strict=True))[: family_engine.PROMPT_TOKENS - 1]
        assert max(abs(a - b) for a, b in pairs) < NEAR


def test_the_layout_that_replicas_of_any_shape_share_has_no_live_chunk(forked: Run) -> None:
    own, shared = forked(family_engine.kinds, "llama")
    assert "live" in own and shared == own - {"live"}
