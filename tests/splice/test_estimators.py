"""Advantages, preferences and distillation, each against a second implementation in fp64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from orchestrator.errors import ConfigError
from splice import (
    Batch,
    Completion,
    distillation_batch,
    dpo_batch,
    dpo_margins,
    gae_batch,
    grpo_batch,
    kl_of,
    sft_batch,
)
from splice.client import preferences
from splice.client.advantages import AdvantageName, advantages_of

RANDOM = random.Random(5)
GROUPS = [[RANDOM.gauss(0, 1) for _ in range(size)] for size in (4, 2, 5)]


def completion(prompt: int, answer: Sequence[int], **more) -> Completion:
    logprobs = tuple(-0.5 - 0.1 * i for i in range(len(answer)))
    more = {"logprobs": logprobs, **more}
    return Completion(prompt_ids=tuple(range(prompt)), answer_ids=tuple(answer), **more)


# ---------------------------------------------------------------- advantages


def second(name: str) -> list[np.ndarray]:
    """The papers' formulas once more, with NumPy."""
    groups = [np.array(group) for group in GROUPS]
    every = np.concatenate(groups)
    if name == "grpo":
        return [(g - g.mean()) / (g.std() + 1e-6) for g in groups]
    if name == "dr_grpo":
        return [g - g.mean() for g in groups]
    if name == "rloo":
        return [np.array([r - np.delete(g, i).mean() for i, r in enumerate(g)]) for g in groups]
    if name == "reinforce_pp":
        return [(g - every.mean()) / (every.std() + 1e-6) for g in groups]
    centred = [g - g.mean() for g in groups]
    return [a / (np.concatenate(centred).std() + 1e-6) for a in centred]


NAMES: list[AdvantageName] = ["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"]


@pytest.mark.parametrize("name", NAMES)
def test_advantages_are_the_papers(name):
    for ours, theirs in zip(advantages_of(GROUPS, name), second(name), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)


def test_by_hand():
    assert advantages_of([[1.0, 0.0, 0.0]], "rloo") == [pytest.approx([1.0, -0.5, -0.5])]
    assert advantages_of([[1.0], [3.0]], "reinforce_pp") == [
        [pytest.approx(-1.0, abs=1e-5)],
        [pytest.approx(1.0, abs=1e-5)],
    ]
    assert advantages_of([[2.0]], "rloo") == [[0.0]]


def test_a_batch_has_them_and_leaves_out_what_has_no_token():
    answers = [[(completion(1, [7, 8]), r) for r in group] for group in GROUPS]
    buffer = grpo_batch([*answers, []], advantages="rloo").buffers[3]
    found = np.frombuffer(buffer, np.float32).reshape(-1, 3)
    assert found[:, 0].tolist() == [0.0] * 11
    assert found[:, 1] == pytest.approx(np.concatenate(second("rloo")), rel=1e-6)
    assert (found[:, 1] == found[:, 2]).all()


def column(batch: Batch, name: str) -> list[float]:
    place = [spec.name for spec in batch.specs].index(name)
    return np.frombuffer(batch.buffers[place], np.float32).tolist()


def test_rewards_for_a_value_head():
    """At the last sampled token of each sequence, or at each token; what has no token is left
    out.
    """
    tool = completion(1, [7, 8, 9], sampled=(True, True, False))
    several = (completion(1, [3]), completion(2, [4, 5]))
    batch = gae_batch(
        [(tool, 2.0), (several, -1), (completion(2, []), 9.0), (completion(1, [1, 2]), [0.25, 0.5])]
    )
    assert column(batch, "rewards") == [0, 0, 2, 0, 0, -1, 0, 0, 0, -1, 0, 0.25, 0.5]
    assert column(batch, "loss_mask") == [0, 1, 1, 0, 0, 1, 0, 0, 1, 1, 0, 1, 1]
    assert column(batch, "advantages") == [0.0] * 13
    assert [spec.name for spec in batch.specs][-2:] == ["temperatures", "rewards"]
    same = grpo_batch([[(tool, 2.0)], [(several, -1)]], advantages="gae")
    assert column(same, "rewards") == column(batch, "rewards")[:10]


def test_a_reward_of_no_sampled_token():
    """There is none to give it to."""
    given = completion(1, [7, 8], sampled=(False, False))
    assert column(gae_batch([(given, 2.0)]), "rewards") == [0, 0, 0]


# ---------------------------------------------------------------- DPO

PAIRS = [
    (completion(2, [1, 2, 3]), completion(2, [4, 5])),
    (completion(1, [6]), completion(1, [7, 8, 9, 9], sampled=(True, False, True, True))),
]
ROWS = [[2, 3, 4], [7, 8], [10], [12, 14, 15]]
"""The rows of each answer's sampled tokens, counted by hand."""


def dpo_gradient(policy: np.ndarray, reference: np.ndarray, beta: float) -> np.ndarray:
    """By central differences of the paper's equation 7, in fp64."""

    def loss(values: np.ndarray) -> float:
        gains = [(values[rows] - reference[rows]).sum() for rows in ROWS]
        margins = beta * np.array([gains[0] - gains[1], gains[2] - gains[3]])
        return float(-np.log(1 / (1 + np.exp(-margins))).sum())

    found, h = np.zeros_like(policy), 1e-6
    for t in range(len(policy)):
        step = np.zeros_like(policy)
        step[t] = h
        found[t] = (loss(policy + step) - loss(policy - step)) / (2 * h)
    return found


def test_the_linear_loss_of_a_dpo_batch_has_dpos_gradient():
    generator = np.random.default_rng(3)
    policy, reference = generator.normal(-2, 1, (2, 16))
    batch = dpo_batch(PAIRS, policy, reference, beta=0.7)
    weights = np.frombuffer(batch.buffers[3], np.float32)  # loss = - sum_t weight_t log p_t
    assert -weights == pytest.approx(dpo_gradient(policy, reference, 0.7), abs=2e-7)
    asked = sft_batch([answer for pair in PAIRS for answer in pair])
    assert batch.buffers[:2] == asked.buffers[:2], "the rows are those of the forward passes"


def test_a_dpo_batch_without_the_length_of_a_margin_is_wrong(monkeypatch):
    """The mutant: a constant weight, as plain likelihood and unlikelihood have."""
    generator = np.random.default_rng(3)
    policy, reference = generator.normal(-2, 1, (2, 16))
    monkeypatch.setattr(preferences, "_sigmoid", lambda x: 0.5)
    weights = np.frombuffer(dpo_batch(PAIRS, policy, reference, beta=0.7).buffers[3], np.float32)
    assert np.abs(-weights - dpo_gradient(policy, reference, 0.7)).max() > 1e-2


def test_margins():
    policy = np.zeros(16)
    reference = np.zeros(16)
    policy[ROWS[0]] = 1.0
    policy[13] = 100.0  # not sampled
    assert dpo_margins(PAIRS, policy, reference, beta=0.5) == [1.5, 0.0]
    with pytest.raises(ConfigError, match="16 tokens, and there are 15 log-probs"):
        dpo_margins(PAIRS, policy[1:], reference)
    with pytest.raises(ConfigError, match="pair 1 has no token"):
        dpo_margins([PAIRS[0], (PAIRS[0][0], completion(1, []))], policy, reference)


# ---------------------------------------------------------------- distillation


def test_the_expected_gradient_is_that_of_the_reverse_kl():
    """Every sequence of two tokens out of three, weighted by its probability: the gradient of
    `importance_sampling`, - sum_t A_t grad log p_t, against differences of KL(p || teacher)."""
    generator = np.random.default_rng(1)
    first, theirs = generator.normal(0, 1, (2, 3)), generator.normal(0, 1, (2, 3))

    def log_softmax(x: np.ndarray) -> np.ndarray:
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    teacher = log_softmax(theirs)

    def divergence(logits: np.ndarray) -> float:
        p = log_softmax(logits)
        return float((np.exp(p) * (p - teacher)).sum())  # two independent positions

    student, expected, h = log_softmax(first), np.zeros_like(first), 1e-6
    for place in itertools.product(range(2), range(3)):
        step = np.zeros_like(first)
        step[place] = h
        expected[place] = (divergence(first + step) - divergence(first - step)) / (2 * h)

    found = np.zeros_like(first)
    for tokens in itertools.product(range(3), repeat=2):
        own = [float(student[t, token]) for t, token in enumerate(tokens)]
        of_teacher = [float(teacher[t, token]) for t, token in enumerate(tokens)]
        answer = completion(1, tokens, logprobs=tuple(own))
        batch = distillation_batch([answer], [of_teacher])
        advantages = np.frombuffer(batch.buffers[3], np.float32)[1:]
        for t, token in enumerate(tokens):
            score = np.eye(3)[token] - np.exp(student[t])  # of log p_t by the logits
            found[t] -= np.exp(sum(own)) * float(advantages[t]) * score
    assert found == pytest.approx(expected, abs=1e-6)


# ---------------------------------------------------------------- KL in the reward


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_of_answers(estimator):
    """Once more with NumPy, over prompts, another's tokens and an empty answer."""
    answers = [
        completion(2, [7, 8, 9], sampled=(True, False, True)),
        completion(3, []),
        completion(1, [4, 5]),
    ]
    reference = np.random.default_rng(7).normal(-1, 1, 8)
    policy = np.array([0, 0, -0.5, -0.6, -0.7, 0, -0.5, -0.6])
    r = np.exp(reference - policy)
    each = {"k1": -np.log(r), "k2": np.log(r) ** 2 / 2, "k3": r - 1 - np.log(r)}[estimator]
    wanted = [each[[2, 4]].sum(), 0.0, each[[6, 7]].sum()]
    assert kl_of(answers, list(reference), estimator=estimator) == pytest.approx(wanted, rel=1e-12)
    with pytest.raises(ConfigError, match="8 tokens, and there are 7 log-probs of the reference"):
        kl_of(answers, list(reference[1:]))
    answers[2] = completion(1, [4, 5], logprobs=())
    with pytest.raises(ConfigError, match="answer 2 has 2 tokens and 0 log-probs"):
        kl_of(answers, list(reference))


@pytest.mark.parametrize("penalty", [0.3, -0.3])
def test_the_expected_gradient_is_that_of_the_reward_less_the_kl(penalty):
    """Every sequence of two tokens out of three, weighted by its probability: the gradient of
    REINFORCE with these rewards, against differences of E r - 0.3 KL(p || reference). The mutant
    adds the KL."""
    generator = np.random.default_rng(2)
    first, theirs = generator.normal(0, 1, (2, 3)), generator.normal(0, 1, (2, 3))
    rewards = generator.normal(0, 1, (3, 3))

    def log_softmax(x: np.ndarray) -> np.ndarray:
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    reference = log_softmax(theirs)

    def goal(logits: np.ndarray) -> float:
        p = np.exp(log_softmax(logits))
        kl = (p * (log_softmax(logits) - reference)).sum()
        return float(p[0] @ rewards @ p[1] - 0.3 * kl)

    student, expected, found = log_softmax(first), np.zeros((2, 3)), np.zeros((2, 3))
    for place in itertools.product(range(2), range(3)):
        step = np.zeros_like(first)
        step[place] = 1e-6
        expected[place] = (goal(first + step) - goal(first - step)) / 2e-6
    for tokens in itertools.product(range(3), repeat=2):
        own = tuple(float(student[t, token]) for t, token in enumerate(tokens))
        answer = completion(1, tokens, logprobs=own)
        said = [0.0, *(float(reference[t, token]) for t, token in enumerate(tokens))]
        reward = rewards[tokens] - penalty * kl_of([answer], said)[0]
        for t, token in enumerate(tokens):
            found[t] += np.exp(sum(own)) * reward * (np.eye(3)[token] - np.exp(student[t]))
    assert (found == pytest.approx(expected, abs=1e-6)) is (penalty > 0)


def test_a_teacher_that_says_too_little_is_refused():
    with pytest.raises(ConfigError, match="answer 0 has 2 tokens, 2 log-probs"):
        distillation_batch([completion(1, [7, 8])], [[-1.0]])
    scaled = distillation_batch([completion(1, [7, 8])], [[-1.0, -1.0]], coefficient=2.0)
    advantages = np.frombuffer(scaled.buffers[3], np.float32)
    assert advantages == pytest.approx([0.0, -1.0, -0.8])
