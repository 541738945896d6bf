"""Samples answers to yes/no/maybe prompts over the OpenAI API and gives them rewards.

The sampler draws only the answers' tokens (`allowed_token_ids`). So a model with random weights
answers too, and the rewards of every batch vary. vLLM returns log-probs of that restricted
distribution at the request's temperature. The loss normalises over the same tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from statistics import fmean

import httpx

from orchestrator.errors import SpliceError
from splice.client.batches import ASK, Completion, completions_of

Scored = tuple[Completion, float]
"""An answer and its reward."""
REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}
"""Reward of each answer. The task is the usual yes-no-maybe toy: learn to answer maybe."""
TEMPERATURE = 0.8
"""Differs from 1, so that the proof notices a lost temperature."""
_VERBS = ("Respond", "Answer", "Reply", "React")
_ORDERS = tuple(" or ".join(p) for p in itertools.permutations(REWARDS))
PROMPTS = tuple(f"{verb} with {order}:" for verb in _VERBS for order in _ORDERS)


class RolloutError(SpliceError, RuntimeError):
    """The served model broke the OpenAI API, or answered under another version."""


async def answer_token_ids(http: httpx.AsyncClient, *, model: str) -> dict[int, float]:
    """First token of each answer -> its reward, from the server's own tokenizer."""
    rewards: dict[int, float] = {}
    for answer, reward in REWARDS.items():
        response = await http.post(
            "/tokenize", json={"model": model, "prompt": f" {answer}", "add_special_tokens": False}
        )
        response.raise_for_status()
        rewards.setdefault(int(response.json()["tokens"][0]), reward)
    if len(rewards) < 2:
        raise RolloutError(
            f"the tokenizer gives {', '.join(REWARDS)} the same first token; "
            "all rewards would be equal"
        )
    return rewards


async def sample(
    http: httpx.AsyncClient,
    *,
    model: str,
    prompts: Sequence[str],
    rewards: dict[int, float],
    group_size: int,
    max_tokens: int,
    seed: int,
    restrict: bool = True,
    temperature: float = TEMPERATURE,
) -> list[list[Scored]]:
    """Sample `group_size` answers to each prompt from the alias `model`, each with its reward.

    The reward is the mean over the answer's tokens. A token that is not an answer earns 0.

    Args:
        restrict: draw only the answers' tokens. The log-probs are then those of the restricted
            distribution.
    """
    body = {
        "model": model,
        "n": group_size,
        "max_tokens": max_tokens,
        "min_tokens": max_tokens,
        "temperature": temperature,
        "ignore_eos": True,
        **({"allowed_token_ids": sorted(rewards)} if restrict else {}),
        **ASK,
    }

    async def group(index: int, prompt: str) -> list[Scored]:
        # vLLM seeds answer k with seed + k, so the seeds of prompts must not overlap.
        own = {"prompt": prompt, "seed": (seed * 1000 + index) * group_size}
        response = await http.post("/v1/completions", json=body | own)
        if response.status_code != 200:
            raise RolloutError(f"{model} answered {response.status_code}: {response.text[:500]}")
        return [
            (answer, fmean(rewards.get(t, 0.0) for t in answer.answer_ids))
            for answer in completions_of(response.json(), temperature=temperature)
        ]

    return list(await asyncio.gather(*(group(i, p) for i, p in enumerate(prompts))))


def choose_prompts(*, count: int, seed: int) -> list[str]:
    """`count` different prompts, or all of them."""
    return random.Random(seed).sample(PROMPTS, k=min(count, len(PROMPTS)))


def mean_reward(groups: Sequence[Sequence[Scored]]) -> float:
    """Mean over all answers."""
    return fmean(reward for group in groups for _, reward in group)


def versions_of(groups: Sequence[Sequence[Scored]]) -> set[int]:
    """Return the versions that sampled the answers."""
    return {version for group in groups for answer, _ in group for version in answer.versions}
