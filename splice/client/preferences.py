"""What needs another model's log-probs: preferences (DPO), a teacher (distillation), and the KL of
answers to a reference, for their rewards.

All train with losses that exist, so they work at every topology and packing.

    asked = sft_batch([answer for pair in pairs for answer in pair])
    policy = client.forward(asked).logprobs
    reference = client.forward(asked, adapters=False).logprobs
    batch = dpo_batch(pairs, policy, reference, beta=0.1)
    loss = LossSpec(name="linear", normalize_by=len(pairs))
    client.train_merged(batch, loss, OptimParams(lr=1e-6))
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

from orchestrator.errors import ConfigError
from splice.client.batches import Batch, Completion, batch_of

Pair = tuple[Completion, Completion]
"""The answer that was chosen, and the one that was rejected."""


def dpo_margins(
    pairs: Sequence[Pair], policy: Sequence[float], reference: Sequence[float], *, beta: float = 0.1
) -> list[float]:
    """The implicit reward of each chosen answer less that of the rejected one,
    `beta * (log p(chosen) / ref(chosen) - log p(rejected) / ref(rejected))`.

    The loss is the mean of `-log sigmoid(margin)`; the accuracy is the share above 0.

    Raises:
        ConfigError: the log-probs are not those of the pairs' tokens, or an answer is empty.
    """
    gains = [sum(policy[t] - reference[t] for t in own) for own in _rows(pairs, policy, reference)]
    return [beta * (gains[i] - gains[i + 1]) for i in range(0, len(gains), 2)]


def dpo_batch(
    pairs: Sequence[Pair], policy: Sequence[float], reference: Sequence[float], *, beta: float = 0.1
) -> Batch:
    """Return a batch whose gradient with the loss `linear` is DPO's at the present policy.

    `-log sigmoid(m)` has the derivative `-beta sigmoid(-m)` by each log-prob of the chosen answer,
    and the opposite by the rejected one's: Rafailov et al. 2023 (arXiv:2305.18290, eq. 7, section
    4). Make the batch again for each step. Divide by the pairs: `normalize_by=len(pairs)`.

    Args:
        policy: log-probs of every token of `sft_batch` of all answers, each pair's chosen first.
        reference: the same of the reference.

    Raises:
        ConfigError: as `dpo_margins`.
    """
    margins = dpo_margins(pairs, policy, reference, beta=beta)
    rows: list[tuple[Completion, float]] = []
    for (chosen, rejected), margin in zip(pairs, margins, strict=True):
        weight = beta * _sigmoid(-margin)
        rows += [(chosen, weight), (rejected, -weight)]
    return batch_of(rows)


def distillation_batch(
    answers: Sequence[Completion],
    teacher_logprobs: Sequence[Sequence[float]],
    *,
    coefficient: float = 1.0,
) -> Batch:
    """Return a batch of the student's own answers, each token with the advantage `coefficient *
    (log teacher - log sampler)`: on-policy distillation, the policy gradient of the reverse KL.

    Agarwal et al. 2024 (arXiv:2306.13649), Gu et al. 2024 (arXiv:2306.08543). Train with
    `importance_sampling` or `truncated_importance_sampling`.

    Args:
        teacher_logprobs: of each answer's tokens, at the temperature of the samples.

    Raises:
        ConfigError: an answer has another number of log-probs than tokens.
    """
    rows: list[tuple[Completion, Sequence[float]]] = []
    for i, (answer, teacher) in enumerate(zip(answers, teacher_logprobs, strict=True)):
        if not len(teacher) == len(answer.answer_ids) == len(answer.logprobs):
            raise ConfigError(
                f"answer {i} has {len(answer.answer_ids)} tokens, {len(answer.logprobs)} log-probs "
                f"of the sampler and {len(teacher)} of the teacher; give one for each token"
            )
        gaps = zip(teacher, answer.logprobs, strict=True)
        rows.append((answer, [coefficient * (theirs - ours) for theirs, ours in gaps]))
    return batch_of([row for row in rows if row[0].answer_ids])


def kl_of(
    answers: Sequence[Completion],
    reference: Sequence[float],
    *,
    estimator: Literal["k1", "k2", "k3"] = "k1",
) -> list[float]:
    """Return each answer's KL to a reference, the sum of `KlSpec`'s estimator over its sampled
    tokens, with the sampler's log-probs as the policy's.

    Take `coefficient` times it from the answer's reward: `use_kl_in_reward` of verl, `kl_coef` of
    TRL's RLOO. Ouyang et al. 2022 (arXiv:2203.02155, eq. 2); estimators: Schulman 2020,
    "Approximating KL divergence".

    Args:
        reference: log-probs of every token of `sft_batch(answers)`, as of
            `client.forward(batch, adapters=False)`.

    Raises:
        ConfigError: there is another number of log-probs than tokens.
    """
    for number, answer in enumerate(answers):
        if len(answer.logprobs) != len(answer.answer_ids):
            raise ConfigError(
                f"answer {number} has {len(answer.answer_ids)} tokens and {len(answer.logprobs)} "
                "log-probs; the KL needs the sampler's log-prob of each token"
            )
    kept = [answer for answer in answers if answer.answer_ids]
    tokens = sum(len(answer.prompt_ids) + len(answer.answer_ids) for answer in kept)
    if len(reference) != tokens:
        raise ConfigError(
            f"the answers have {tokens} tokens, and there are {len(reference)} log-probs of the "
            "reference; take those of one `sft_batch` of all answers"
        )
    found, start = [], 0
    for answer in answers:
        start += len(answer.prompt_ids) * bool(answer.answer_ids)
        sampled = answer.sampled or (True,) * len(answer.answer_ids)
        theirs = reference[start : start + len(answer.answer_ids)]
        logs = zip(theirs, answer.logprobs, sampled, strict=True)
        found.append(sum(_kl(r - p, estimator) for r, p, is_sampled in logs if is_sampled))
        start += len(answer.answer_ids)
    return found


def _kl(d: float, estimator: str) -> float:
    """An estimate of a token's KL, with d = log reference - log policy."""
    if estimator == "k1":
        return -d
    return d * d / 2 if estimator == "k2" else math.expm1(d) - d


def _rows(
    pairs: Sequence[Pair], policy: Sequence[float], reference: Sequence[float]
) -> Iterator[list[int]]:
    """The rows of each answer's sampled tokens."""
    answers = [answer for pair in pairs for answer in pair]
    if empty := [i for i, answer in enumerate(answers) if not answer.answer_ids]:
        raise ConfigError(f"an answer of pair {empty[0] // 2} has no token; leave the pair out")
    tokens = sum(len(answer.prompt_ids) + len(answer.answer_ids) for answer in answers)
    if not len(policy) == len(reference) == tokens:
        raise ConfigError(
            f"the pairs have {tokens} tokens, and there are {len(policy)} log-probs of the policy "
            f"and {len(reference)} of the reference; take those of one `sft_batch` of all answers"
        )
    start = 0
    for answer in answers:
        start += len(answer.prompt_ids)
        sampled = answer.sampled or (True,) * len(answer.answer_ids)
        yield [start + i for i, is_sampled in enumerate(sampled) if is_sampled]
        start += len(answer.answer_ids)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
