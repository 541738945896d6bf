"""Samples answers to yes/no/maybe prompts over the OpenAI API and makes them a training batch.

The sampler draws only the answers' tokens (`allowed_token_ids`). So a model with random weights
answers too, and the rewards of every batch vary. vLLM returns log-probs of that restricted
distribution at the request's temperature. The loss normalises over the same tokens, and the batch
holds the temperature. Shapes: S = sequences, T = tokens of all sequences end to end.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import httpx

from orchestrator.errors import SpliceError
from orchestrator.protocol.messages import TensorSpec
from splice.batches import ASK, Completion, completions_of, grpo_batch

REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}
"""Reward of each answer. The task is the usual yes-no-maybe toy: learn to answer maybe."""
TEMPERATURE = 0.8
"""Differs from 1, so that the proof notices a lost temperature."""
_VERBS = ("Respond", "Answer", "Reply", "React")
_ORDERS = tuple(" or ".join(p) for p in itertools.permutations(REWARDS))
PROMPTS = tuple(f"{verb} with {order}:" for verb in _VERBS for order in _ORDERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sampled answer. `answer_ids` and `logprobs` have the same length."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    reward: float
    version: int
    temperature: float

    @property
    def completion(self) -> Completion:
        """As `splice.batches` has it."""
        return Completion(
            prompt_ids=self.prompt_ids,
            answer_ids=self.answer_ids,
            logprobs=self.logprobs,
            temperature=self.temperature,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch for the protocol, and its figures for the report."""

    specs: tuple[TensorSpec, ...]
    buffers: tuple[bytes, ...]
    reward_mean: float
    num_tokens: int
    num_sequences: int


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
) -> list[list[Rollout]]:
    """Sample `group_size` answers to each prompt from the alias `model`.

    The reward is the mean over the answer's tokens. A token that is no answer earns 0.

    Args:
        restrict: draw only the answers' tokens. The log-probs are then those of the restricted
            distribution.
    """
    return list(
        await asyncio.gather(
            *(
                _sample_group(
                    http,
                    model=model,
                    prompt=p,
                    rewards=rewards,
                    group_size=group_size,
                    max_tokens=max_tokens,
                    # vLLM seeds answer k with seed + k, so the seeds of prompts must not overlap.
                    seed=(seed * 1000 + i) * group_size,
                    restrict=restrict,
                    temperature=temperature,
                )
                for i, p in enumerate(prompts)
            )
        )
    )


def choose_prompts(*, count: int, seed: int) -> list[str]:
    """`count` different prompts, or all of them."""
    return random.Random(seed).sample(PROMPTS, k=min(count, len(PROMPTS)))


async def _sample_group(
    http: httpx.AsyncClient,
    *,
    model: str,
    prompt: str,
    rewards: dict[int, float],
    group_size: int,
    max_tokens: int,
    seed: int,
    restrict: bool,
    temperature: float,
) -> list[Rollout]:
    body = {
        "model": model,
        "prompt": prompt,
        "n": group_size,
        "max_tokens": max_tokens,
        "min_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "ignore_eos": True,
        **ASK,
    }
    if restrict:
        body["allowed_token_ids"] = sorted(rewards)
    response = await http.post("/v1/completions", json=body)
    if response.status_code != 200:
        raise RolloutError(f"{model} answered {response.status_code}: {response.text[:500]}")
    version = int(response.headers["x-splice-version"])
    return [
        Rollout(
            prompt_ids=completion.prompt_ids,
            answer_ids=completion.answer_ids,
            logprobs=completion.logprobs,
            reward=fmean(rewards.get(t, 0.0) for t in completion.answer_ids),
            version=version,
            temperature=temperature,
        )
        for completion in completions_of(response.json())
    ]


def build_batch(groups: Sequence[Sequence[Rollout]]) -> Batch:
    """Lay out groups of rollouts as a batch, with temperatures."""
    flat = [r for g in groups for r in g]
    batch = grpo_batch([[(r.completion, r.reward) for r in group] for group in groups])
    return Batch(
        specs=batch.specs,
        buffers=batch.buffers,
        reward_mean=fmean(r.reward for r in flat),
        num_tokens=sum(len(r.prompt_ids) + len(r.answer_ids) for r in flat),
        num_sequences=len(flat),
    )
