"""`numerics = "exact"` on a real cluster: Megatron, vLLM, LoRA, live swaps, fp32 on the CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import httpx
import numpy as np
import pytest

from splice import ASK, LossSpec, OptimParams, completions_of
from splice.client.batches import batch_of
from splice.cluster import Cluster
from splice.rl import Loop, LoopConfig, SamplingConfig
from tests.rl.conftest import NAME, tiny_cluster

pytestmark = pytest.mark.timeout(900)
ROWS = [{"prompt": [5 + k, 17, 33, 101, 7] * (1 + 3 * k)} for k in range(4)]
"""Prompts of 5 to 50 tokens."""
LOSS, OPTIM = LossSpec(name="truncated_importance_sampling"), OptimParams(lr=5e-3)


@pytest.fixture(scope="module", params=[("qwen3", 1)], ids=str)
def exact(request, models, tmp_path_factory) -> Iterator[Cluster]:
    name, ranks = request.param
    folder = tmp_path_factory.mktemp("exact") / "run"
    with tiny_cluster(
        models[name],
        folder,
        inference={"tensor_parallel": ranks},
        trainer={"numerics": "exact", "lora": {"rank": 4, "alpha": 8}},
        publication={"pause_mode": "keep_kv"},
    ) as cluster:
        yield cluster


def even(row, completion) -> float:
    return sum(t % 2 == 0 for t in completion.answer_ids) / len(completion.answer_ids)


def looped(client, folder, *, staleness: int, steps: int, tokens: int, temperature: float) -> list:
    async def steps_of() -> list:
        config = LoopConfig(
            max_staleness=staleness,
            groups_per_step=2,
            group_size=3,
            steps=steps,
            sampling=SamplingConfig(
                max_tokens=tokens, temperature=temperature, extra={"ignore_eos": True}
            ),
        )
        options = {"prompts": ROWS, "reward": even, "config": config, "loss": LOSS}
        async with Loop(client, folder, optim=OPTIM, **options) as loop:
            return [step async for step in loop]

    return asyncio.run(steps_of())


def test_the_log_probs_are_equal_over_live_swaps(exact, tmp_path) -> None:
    check_live_swaps(exact, tmp_path)


@pytest.mark.parametrize(
    "exact",
    [("qwen3_moe", 1), pytest.param(("qwen3", 2), marks=pytest.mark.whole)],
    indirect=True,
    ids=str,
)
def test_the_same_of_experts_and_of_a_tensor_parallel_sampler(exact, tmp_path) -> None:
    check_live_swaps(exact, tmp_path)


def check_live_swaps(exact, tmp_path) -> None:
    steps = looped(exact.client, tmp_path, staleness=0, steps=3, tokens=70, temperature=0.7)
    for step in steps:
        found = step.result.metrics
        assert found["logprob_gap_max"] == found["exact_gap_max"] == 0.0
        assert (found["exact_share"], found["mixed_share"]) == (1.0, 0.0)
        assert found["tokens"] == 2 * 3 * 70 and found["update_norm"] > 0
        assert not [text for text in step.result.warnings if "exact" in text]


def test_tokens_on_old_keys_and_values_are_counted_and_left_out(exact, tmp_path) -> None:
    steps = looped(exact.client, tmp_path, staleness=1, steps=3, tokens=90, temperature=1.0)
    mixed = 0.0
    for step in steps:
        found = step.result.metrics
        assert found.get("exact_gap_max", 0.0) == 0.0
        spans = [r.spans for group in step.groups for r in group]
        later = sum(count for own in spans for _, count in own[1:])
        # More, if an update came within a prompt.
        assert later / found["tokens"] <= found["mixed_share"] < 1
        assert not [text for text in step.result.warnings if "exact" in text]
        mixed += found["mixed_share"]
    assert mixed > 0, "no answer spans a swap"


def sampled(cluster) -> list:
    with httpx.Client(base_url=cluster.base_urls[0], timeout=120, trust_env=False) as http:
        body = {"model": NAME, "max_tokens": 40, "n": 2, "ignore_eos": True, **ROWS[1], **ASK}
        return completions_of(http.post("/v1/completions", json=body).raise_for_status().json())


def test_a_different_bit_is_reported_with_token_version_and_command(exact) -> None:
    answers = sampled(exact)
    (version,) = answers[1].versions
    logprobs = np.array(answers[1].logprobs, dtype=np.float32)
    logprobs[7] = np.nextafter(logprobs[7], np.float32(0))
    wrong = replace(answers[1], logprobs=tuple(map(float, logprobs)))
    client = exact.client
    for second, number in ((answers[1], 0), (wrong, 1)):
        batch = batch_of([(answers[0], 1.0), (second, -1.0)])
        result = client.forward_backward(batch, LOSS)
        said = [text for text in result.warnings if "exact" in text]
        assert len(said) == number, result.warnings
    place = len(ROWS[1]["prompt"]) + 7
    token = answers[1].answer_ids[7]
    for words in (
        f"1 of the 80 tokens that version {version} sampled",
        f"token {place} of sequence 1 (id {token})",
        "splice check",
        "--bits",
    ):
        assert words in said[0], said
    assert 0 < result.metrics["exact_gap_max"] < 1e-6
    client.optim_step(OptimParams(lr=1e-6))


def test_greedy_answers_have_the_trainers_log_probs(exact) -> None:
    exact.client.publish()
    with httpx.Client(base_url=exact.base_urls[0], timeout=120, trust_env=False) as http:
        body = {"model": NAME, "max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
        reply = http.post("/v1/completions", json={**body, **ROWS[2], **ASK})
    (answer,) = completions_of(reply.raise_for_status().json())
    scored = exact.client.forward(batch_of([(answer, 0.0)]))
    assert list(scored.logprobs[len(answer.prompt_ids) :]) == list(answer.logprobs)
