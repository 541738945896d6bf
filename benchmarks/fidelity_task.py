"""The task of `benchmarks.fidelity`: small sums, what is held out, and a step of GRPO on the rest.

A problem is `User: What is x + y?` after one solved example, as in `examples/arithmetic`. J is the
mean probability of the right answer on the held-out sums: a number without sampling noise.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.fidelity_policy import Forward, Policy, Rows
from splice.client.advantages import group_advantages

LARGEST, ANSWER_TOKENS = 20, 6
PROBLEMS, SAMPLES = 5, 6
"""Of a step."""
CLIP, MAX_GRAD_NORM = 0.2, 1.0
ASKED = (
    "What is the capital of Peru and what is it known for?",
    "Write a short poem about the sea.",
    "Explain photosynthesis to a child.",
    "How do I boil an egg?",
    "Give me three tips for sleeping better.",
    "Write a Python function that reverses a string.",
    "Why is the sky blue?",
    "Tell me a short story about a fox.",
    "What are prime numbers?",
    "How does a refrigerator work?",
)
"""Prompts of the held-out text, which the base continues."""
Problem = tuple[int, int]


class Sums:
    """Texts, ids and rewards of the sums.

    Args:
        by_parity: reward even first tokens instead; a random model has no right answers.
    """

    def __init__(self, tokenizer: Any, *, held_out: int, by_parity: bool = False) -> None:
        self.tokenizer, self.by_parity = tokenizer, by_parity
        self.solved = self._encode("User: What is 4 + 5?\n\nAssistant: 9\n\n")
        words = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
        self.stops = {i for i, word in enumerate(words) if "\n" in word}
        self.stops |= set(tokenizer.all_special_ids)
        numbers, found = random.Random(5), dict[Problem, None]()
        while len(found) < held_out:
            found[numbers.randint(0, LARGEST), numbers.randint(0, LARGEST)] = None
        self.held_out = list(found)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def prompt(self, problem: Problem) -> list[int]:
        """Ids up to the answer."""
        x, y = problem
        return [*self.solved, *self._encode(f"User: What is {x} + {y}?\n\nAssistant:")]

    def right(self, problem: Problem) -> list[int]:
        """Ids of the right answer."""
        return self._encode(f" {sum(problem)}\n\n")

    def until_stop(self, ids: list[int]) -> int:
        """Length of an answer with the token that ends it."""
        return next((i + 1 for i, token in enumerate(ids) if token in self.stops), len(ids))

    def reward(self, problem: Problem, ids: list[int]) -> float:
        """1 for the right sum, and 0.2 for any number with an end."""
        if self.by_parity:
            return float(ids[0] % 2 == 0)
        text = self.tokenizer.decode(ids)
        is_right = "\n" in text and text.split("\n")[0].strip() == str(sum(problem))
        return is_right + 0.2 * ("\n" in text and text.strip().isdigit())


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """What versions are compared on; the base has sampled it."""

    right: Rows
    """Right answers to the held-out sums."""
    sampled: tuple[Rows, ...]
    """The base's answers to the same sums, and its continuations of other prompts."""

    @classmethod
    def of(cls, policy: Policy, sums: Sums, *, text_tokens: int) -> HeldOut:
        """Sample with the base, always the same on one device."""
        policy.adapt(rank=1, alpha=1.0, seed=0)
        policy.use("native")
        generator = torch.Generator(policy.device).manual_seed(7)
        prompts = [sums.prompt(p) for p in sums.held_out]
        answers = policy.sample(prompts, tokens=ANSWER_TOKENS, generator=generator)
        answered = [
            (p, ids[: sums.until_stop(ids)]) for p, (ids, _) in zip(prompts, answers, strict=True)
        ]
        asked = [
            sums.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            for text in ASKED
        ]
        texts = policy.sample(asked, tokens=text_tokens, generator=generator)
        continued = [(p, ids) for p, (ids, _) in zip(asked, texts, strict=True)]
        return cls(
            right=right_rows(sums, policy.device),
            sampled=tuple(Rows.of(pairs, policy.device) for pairs in (answered, continued)),
        )


def right_rows(sums: Sums, device: str) -> Rows:
    """Right answers to the held-out sums."""
    return Rows.of([(sums.prompt(p), sums.right(p)) for p in sums.held_out], device)


def probabilities(logp_T: torch.Tensor, rows: Rows) -> torch.Tensor:
    """fp64 [N]: each answer's probability; J is their mean."""
    sums_N = torch.zeros(len(rows.ids_NL), dtype=torch.float64, device=logp_T.device)
    return sums_N.index_add(0, rows.row_T, logp_T.double()).exp()


class Training:
    """Steps of GRPO, with the policy's adapter, on sums that are not held out.

    Args:
        forward: of the trainer.
    """

    def __init__(
        self, policy: Policy, sums: Sums, *, lr: float, seed: int, forward: Forward
    ) -> None:
        self.policy, self.sums, self.forward = policy, sums, forward
        self.parameters = policy.parameters()
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=lr, betas=(0.9, 0.999), weight_decay=0.0
        )
        self.numbers = random.Random(100 + seed)
        self.generator = torch.Generator(policy.device).manual_seed(300 + seed)

    def _problems(self) -> list[Problem]:
        found: list[Problem] = []
        while len(found) < PROBLEMS:
            problem = self.numbers.randint(0, LARGEST), self.numbers.randint(0, LARGEST)
            if problem not in self.sums.held_out:
                found.append(problem)
        return found

    def step(self, sampler: Forward) -> dict[str, float]:
        """Sample, score, and take a step; mean and largest log-prob gap, and the mean reward."""
        problems = [p for p in self._problems() for _ in range(SAMPLES)]
        prompts = [self.sums.prompt(p) for p in problems]
        self.policy.use(sampler)
        answers = [
            (ids[: self.sums.until_stop(ids)], logps[: self.sums.until_stop(ids)])
            for ids, logps in self.policy.sample(
                prompts, tokens=ANSWER_TOKENS, generator=self.generator
            )
        ]
        rewards = [self.sums.reward(p, ids) for p, (ids, _) in zip(problems, answers, strict=True)]
        groups = [rewards[i : i + SAMPLES] for i in range(0, len(rewards), SAMPLES)]
        device = self.policy.device
        advantages = [a for group in groups for a in group_advantages(group)]
        pairs = [(p, ids) for p, (ids, _) in zip(prompts, answers, strict=True)]
        rows = Rows.of(pairs, device)
        advantages_T = torch.tensor(advantages, device=device)[rows.row_T]
        old_T = torch.tensor([logp for _, logps in answers for logp in logps], device=device)
        self.policy.use(self.forward)
        logp_T = self.policy.logprobs(rows)
        ratio_T = (logp_T - old_T).exp()
        clipped_T = ratio_T.clamp(1 - CLIP, 1 + CLIP)
        loss = -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T).mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
        self.optimizer.step()
        gap_T = (logp_T.detach() - old_T).abs()
        mean, largest = torch.stack([gap_T.mean(), gap_T.max()]).tolist()
        return {"gap": mean, "gap_max": largest, "reward": sum(rewards) / len(rewards)}
