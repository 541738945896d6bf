"""Families of models on a real vLLM: publications to tiny checkpoints of transformers' classes.

Each engine loads a checkpoint, takes two other versions and then the first again, all of it through
vLLM's reload. After each, its log-probs of a prompt and of decoded tokens must be transformers' of
the same weights.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.inference_node import family_engine
from tests.inference_node.family_engine import DECODED_TOKENS, PROMPT_TOKENS, Served
from tests.numerics import chain_error_bound, decoder_roundings
from tests.serving import BFLOAT16, UNLISTED, UNSERVED
from tests.trainer_node.families import FAMILIES, VOCAB

NEAR = 0.05
"""Nats between the same weights twice on a GPU, which adds in any order."""
VISIBLE = 0.5
"""Nats by which versions must differ at least, so that a stale tensor shows."""
ENGINE_S = 250.0

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Calls a function of `family_engine` in a process that has imported vLLM and nothing else."""
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    with pytest.MonkeyPatch.context() as patch:
        for key, value in settings.items():
            patch.setenv(key, value)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([family_engine.__name__])

        def run(function: Callable[..., Any], name: str, *args: Any) -> Any:
            ours, theirs = context.Pipe(duplex=False)
            folder = tmp_path_factory.mktemp(name) / "model"
            process = context.Process(
                target=family_engine.answer, args=(theirs, function, name, folder, *args)
            )
            process.start()
            theirs.close()
            try:
                assert ours.poll(ENGINE_S), f"no answer of {name} within {ENGINE_S} s"
                return ours.recv()
            finally:
                process.kill()
                process.join()

        yield run


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
