"""Losses as pure functions of log-probs: sums over tokens, which the caller divides once.

`trainer_node/training/registry.py` says what a loss is and how a user registers one.

Shapes: N = positions with loss, S = sequences of the micro-batch. Symbols: p = the policy that is
trained, mu = the sampler, old = the trainer before the first step on the batch, A = advantage.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import LOSS_PARAMETERS, LossSpec, ParamValue
from trainer_node.training import losses_masked  # noqa: F401  - registers its losses
from trainer_node.training.registry import (
    LossOutput,
    RegisteredLoss,
    register_loss,
    registered,
)
from trainer_node.training.surrogate import clipped, sequence_means

# ---------------------------------------------------------------- a loss is called


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Inputs of a loss, for the positions with loss of one micro-batch. Only `log_probs_N`
    has a gradient."""

    log_probs_N: torch.Tensor
    sampler_logprobs_N: torch.Tensor
    advantages_N: torch.Tensor
    old_logprobs_N: torch.Tensor | None
    """None: the batch has none."""
    sequence_N: torch.Tensor
    """int64: which sequence of the micro-batch a position belongs to, below `num_sequences`. Whole
    sequences, never parts."""
    num_sequences: int
    """Sequences of the micro-batch; some may have no positions here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueInputs:
    """Inputs of the value loss, for the same positions. Only `values_N` has a gradient."""

    values_N: torch.Tensor
    old_values_N: torch.Tensor
    """Those before the job's first step."""
    returns_N: torch.Tensor


def bind_loss(spec: LossSpec) -> Callable[[LossInputs], LossOutput]:
    """The spec's loss with its parameters filled in.

    Raises:
        ConfigError: no such loss, or a parameter that it does not have, or lacks; names them.
    """
    loss = registered(spec.name)
    given: dict[str, ParamValue | None] = dict(spec.params)
    if spec.name in LOSS_PARAMETERS:
        given = {p: getattr(spec, p) for p in LOSS_PARAMETERS[spec.name]}
    unknown = sorted(set(given) - set(loss.parameters))
    if unknown:
        raise ConfigError(
            f"loss.params: {unknown} are no parameters of {spec.name}, which takes "
            f"{sorted(loss.parameters)}"
        )
    if spec.max_logprob_gap is not None and not loss.takes_sampler:
        raise ConfigError(
            f"loss.max_logprob_gap: {spec.name} takes no sampler_logprobs, so there is no gap to "
            "bound; leave it out"
        )
    if spec.value is not None and "advantages_N" not in loss.inputs:
        raise ConfigError(
            f"loss.value: {spec.name} takes no advantages, which a value head is for; leave one of "
            "them out"
        )
    if spec.kl is not None and spec.kl.in_reward and spec.value is None:
        raise ConfigError(
            "loss.kl.in_reward: this batch has advantages, and no rewards to take the KL from. "
            "Take it from the rewards before you make the batch (splice.kl_of) and leave loss.kl "
            "out, or train with a value head (loss.value)"
        )
    missing = [
        p
        for p, default in loss.parameters.items()
        if default is inspect.Parameter.empty and p not in given
    ]
    if missing:
        raise ConfigError(f"loss.params: {spec.name} needs {missing}")
    return partial(_call, loss, given)


def _call(loss: RegisteredLoss, parameters: Mapping[str, Any], inputs: LossInputs) -> LossOutput:
    out = loss.function(
        inputs.log_probs_N, **{n: getattr(inputs, n) for n in loss.inputs}, **parameters
    )
    if out.loss.dim() != 0:
        raise ConfigError(
            f"the loss {loss.name} returned shape {tuple(out.loss.shape)}; it must be the sum "
            "over tokens, a scalar"
        )
    return out


# ---------------------------------------------------------------- the losses


def _ratio(
    log_probs_N: torch.Tensor, sampler_logprobs_N: torch.Tensor, old_logprobs_N: torch.Tensor | None
) -> torch.Tensor:
    """p / old, or p / mu where the batch has no `old_logprobs`."""
    return (log_probs_N - (sampler_logprobs_N if old_logprobs_N is None else old_logprobs_N)).exp()


@register_loss("cross_entropy")
def cross_entropy(log_probs_N: torch.Tensor) -> LossOutput:
    """Negative log-likelihood, summed: `-sum_t log p_t`. Supervised fine-tuning (Ouyang et al.
    2022, arXiv:2203.02155, section 3.5)."""
    return LossOutput(loss=-log_probs_N.sum(), num_clipped=log_probs_N.new_zeros(()))


@register_loss("linear")
def linear(log_probs_N: torch.Tensor, *, advantages_N: torch.Tensor) -> LossOutput:
    """`-sum_t A_t log p_t`, with weights of any sign: weighted likelihood, REINFORCE (Williams
    1992; for language models Ahmadian et al. 2024, arXiv:2402.14740), or any loss whose derivatives
    the caller knows, as `A_t = -dL / d log p_t`.
    """
    return LossOutput(
        loss=-(advantages_N * log_probs_N).sum(), num_clipped=log_probs_N.new_zeros(())
    )


@register_loss("importance_sampling")
def importance_sampling(
    log_probs_N: torch.Tensor,
    *,
    sampler_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    old_logprobs_N: torch.Tensor | None = None,
) -> LossOutput:
    """The unclipped surrogate: `-sum_t r_t A_t`, `r_t = p_t / mu_t`; on policy its gradient is
    REINFORCE's.

    Off-policy policy gradient (Degris et al. 2012, arXiv:1205.4839); as a surrogate Schulman et al.
    2017 (arXiv:1707.06347, eq. 6).
    """
    ratio_N = _ratio(log_probs_N, sampler_logprobs_N, old_logprobs_N)
    return LossOutput(loss=-(ratio_N * advantages_N).sum(), num_clipped=log_probs_N.new_zeros(()))


@register_loss("ppo")
def ppo(
    log_probs_N: torch.Tensor,
    *,
    sampler_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    old_logprobs_N: torch.Tensor | None = None,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> LossOutput:
    """Clipped surrogate with dual clip, summed: `-sum_t s_t`, `s_t = min(r_t A_t, clip(r_t, 1 -
    clip_low, 1 + clip_high) A_t)`, and where `A_t < 0`: `max(s_t, dual_clip * A_t)`.

    Schulman et al. 2017 (arXiv:1707.06347, eq. 7); the lower bound for negative advantages is the
    dual clip of Ye et al. 2020 (arXiv:1912.09729, section "Dual-clip PPO", there with 3).
    """
    ratio_N = _ratio(log_probs_N, sampler_logprobs_N, old_logprobs_N)
    plain_N, surrogate_N = clipped(ratio_N, advantages_N, clip_low, clip_high)
    if dual_clip is not None:
        bounded_N = torch.maximum(surrogate_N, dual_clip * advantages_N)
        surrogate_N = torch.where(advantages_N < 0, bounded_N, surrogate_N)
    return LossOutput(loss=-surrogate_N.sum(), num_clipped=(surrogate_N != plain_N).sum())


@register_loss("grpo")
def grpo(
    log_probs_N: torch.Tensor,
    *,
    sampler_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    old_logprobs_N: torch.Tensor | None = None,
    clip_low: float,
    clip_high: float,
) -> LossOutput:
    """Clipped policy gradient, summed: `-sum_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high)
    A_t)`, `r_t = p_t / p_t(sampler)`.

    PPO's surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7) with GRPO's group-relative
    advantages (Shao et al. 2024, arXiv:2402.03300, eq. 3), which the caller computes. The paper's
    KL term is `LossSpec.kl`; its `1 / |o_i|` can be put into the advantages, because the surrogate
    is linear in their size.
    """
    ratio_N = _ratio(log_probs_N, sampler_logprobs_N, old_logprobs_N)
    plain_N, surrogate_N = clipped(ratio_N, advantages_N, clip_low, clip_high)
    return LossOutput(loss=-surrogate_N.sum(), num_clipped=(surrogate_N < plain_N).sum())


# GRPO's surrogate with a separate upper bound ("clip-higher", 0.2 and 0.28), divided by the tokens
# of all sequences: Yu et al. 2025 (arXiv:2503.14476, eq. 8, section 3.1). The caller does the
# paper's dynamic sampling and overlong shaping.
register_loss("dapo")(grpo)


@register_loss("truncated_importance_sampling")
def truncated_importance_sampling(
    log_probs_N: torch.Tensor,
    *,
    sampler_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    old_logprobs_N: torch.Tensor | None = None,
    clip_low: float,
    clip_high: float,
    ratio_cap: float,
) -> LossOutput:
    """The clipped surrogate against the trainer's own old policy, each token weighted by old
    against sampler, truncated: `-sum_t min(old_t / mu_t, ratio_cap) * min(r_t A_t, clip(r_t) A_t)`,
    `r_t = p_t / old_t`; the weight has no gradient.

    Without `old_logprobs` the trainer's present policy is the old one: then r is 1 and the gradient
    is `-sum_t min(p_t / mu_t, ratio_cap) A_t grad log p_t`. Truncated weights: Espeholt et al. 2018
    (arXiv:1802.01561, section 4); sampler and trainer as two old policies: Hilton et al. 2021
    (arXiv:2110.00641, section 3); for an inference engine whose log-probs differ from the
    trainer's: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training".
    """
    old_N = log_probs_N.detach() if old_logprobs_N is None else old_logprobs_N
    untruncated_N = (old_N - sampler_logprobs_N).exp()
    weight_N = untruncated_N.clamp(max=ratio_cap)
    ratio_N = (log_probs_N - old_N).exp()
    plain_N, surrogate_N = clipped(ratio_N, advantages_N, clip_low, clip_high)
    clipped_N = (surrogate_N < plain_N) | (untruncated_N > ratio_cap)
    return LossOutput(loss=-(weight_N * surrogate_N).sum(), num_clipped=clipped_N.sum())


@register_loss("cispo")
def cispo(
    log_probs_N: torch.Tensor,
    *,
    sampler_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    old_logprobs_N: torch.Tensor | None = None,
    clip_low: float,
    clip_high: float,
) -> LossOutput:
    """The weight is clipped, not the update, so that every token keeps a gradient:
    `-sum_t stop_gradient(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t log p_t`.

    MiniMax-M1 (2025, arXiv:2506.13585, eq. 4 and 5). The default has no lower bound (clip_low 1),
    as there, and caps the weight at 5 as Khatri et al. 2025 (arXiv:2510.13786) do.
    """
    ratio_N = _ratio(log_probs_N.detach(), sampler_logprobs_N, old_logprobs_N)
    weight_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    return LossOutput(
        loss=-(weight_N * advantages_N * log_probs_N).sum(), num_clipped=(weight_N != ratio_N).sum()
    )


@register_loss("gspo")
def gspo(
    log_probs_N: torch.Tensor,
    *,
    sampler_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    sequence_N: torch.Tensor,
    num_sequences: int,
    old_logprobs_N: torch.Tensor | None = None,
    clip_low: float,
    clip_high: float,
) -> LossOutput:
    """One ratio and one surrogate for a sequence, summed over sequences: `-sum_i min(s_i A_i,
    clip(s_i, 1 - clip_low, 1 + clip_high) A_i)`, `s_i = (p(y_i) / old(y_i))^(1 / |y_i|)`; A_i is
    the mean of the sequence's advantages.

    Zheng et al. 2025 (arXiv:2507.18071, eq. 5 and 7; clip ranges 3e-4 and 4e-4). Divided by
    sequences unless asked otherwise. Every token of a clipped sequence counts as clipped.
    """
    old_N = sampler_logprobs_N if old_logprobs_N is None else old_logprobs_N
    log_S, lengths_S = sequence_means(log_probs_N - old_N, sequence_N, num_sequences)
    given_N = advantages_N.to(log_probs_N.dtype)
    advantage_S, _ = sequence_means(given_N, sequence_N, num_sequences)
    plain_S, surrogate_S = clipped(log_S.exp(), advantage_S, clip_low, clip_high)
    return LossOutput(
        loss=-surrogate_S.sum(), num_clipped=(lengths_S * (surrogate_S < plain_S)).sum()
    )


# ---------------------------------------------------------------- what is added to a loss


def kl_to_reference(
    log_probs_N: torch.Tensor, reference_logprobs_N: torch.Tensor, *, estimator: str
) -> torch.Tensor:
    """An estimate of KL(p || reference) for each sampled token, [N], with `d = log reference - log
    p`.

    k1: `-d`, unbiased; k2: `d^2 / 2`; k3: `exp(d) - 1 - d`, unbiased and never negative. Schulman
    2020, "Approximating KL divergence"; k3 as a loss term: GRPO (arXiv:2402.03300, eq. 4).
    Differentiated through the sample, k1's expected gradient is 0 and k2's is that of the
    divergence (Tang and Munos 2025, arXiv:2506.09477).
    """
    d_N = reference_logprobs_N - log_probs_N
    if estimator == "k1":
        return -d_N
    if estimator == "k2":
        return d_N.square() / 2
    if estimator == "k3":
        return d_N.expm1() - d_N
    raise ConfigError(f"loss.kl.estimator: {estimator!r} is not k1, k2 or k3")


def value_loss(inputs: ValueInputs, *, clip: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared error of the values, summed, and the number of tokens whose value was clipped:
    `1/2 sum_t max((V_t - R_t)^2, (V'_t - R_t)^2)`, `V'_t = clip(V_t, old_t - clip, old_t + clip)`.

    The value function's part of Schulman et al. 2017 (arXiv:1707.06347, eq. 9). The paper does not
    clip it; its code does (openai/baselines, `ppo2/model.py`), as does TRL's `PPOTrainer`.
    """
    error_N = (inputs.values_N - inputs.returns_N).square()
    if clip is None:
        return error_N.sum() / 2, error_N.new_zeros(())
    moved_N = (inputs.values_N - inputs.old_values_N).clamp(-clip, clip)
    clipped_N = (inputs.old_values_N + moved_N - inputs.returns_N).square()
    return torch.maximum(error_N, clipped_N).sum() / 2, (clipped_N > error_N).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """A loss with everything added, and the sums that are reported. All scalars; only `total` has a
    gradient."""

    total: torch.Tensor
    num_clipped: torch.Tensor
    kl: torch.Tensor
    entropy: torch.Tensor
    kl_sampler: torch.Tensor
    logprob_gap: torch.Tensor
    logprob_gap_max: torch.Tensor
    value_loss: torch.Tensor
    num_values_clipped: torch.Tensor


def total_loss(
    inputs: LossInputs,
    spec: LossSpec,
    *,
    entropy_N: torch.Tensor,
    reference_logprobs_N: torch.Tensor | None,
    values: ValueInputs | None = None,
) -> LossTerms:
    """`loss + kl.coefficient * sum_t kl_t - entropy_bonus * sum_t entropy_t + value.coefficient *
    value_loss`; N must be at least 1. A KL term that is in the reward is only measured.

    Args:
        entropy_N: its gradient is used where the spec has an entropy bonus.
        reference_logprobs_N: needed where the spec has a KL term.
        values: needed where the spec has a value head.
    """
    out = bind_loss(spec)(inputs)
    log_probs_N = inputs.log_probs_N
    total, kl, entropy = out.loss, log_probs_N.new_zeros(()), entropy_N.sum()
    if spec.kl is not None:
        assert reference_logprobs_N is not None
        kl = kl_to_reference(log_probs_N, reference_logprobs_N, estimator=spec.kl.estimator).sum()
        if spec.kl.coefficient and not spec.kl.in_reward:  # 0 times an infinite k3 is NaN
            total = total + spec.kl.coefficient * kl
    if spec.entropy_bonus != 0.0:
        total = total - spec.entropy_bonus * entropy
    of_values = values_clipped = log_probs_N.new_zeros(())
    if spec.value is not None:
        assert values is not None
        of_values, values_clipped = value_loss(values, clip=spec.value.clip)
        total = total + spec.value.coefficient * of_values
    gap_N, kl_sampler = torch.zeros_like(log_probs_N), log_probs_N.new_zeros(())
    if registered(spec.name).takes_sampler:
        sampler_N, trainer_N = inputs.sampler_logprobs_N, log_probs_N.detach()
        gap_N = (trainer_N - sampler_N).abs()
        kl_sampler = kl_to_reference(sampler_N, trainer_N, estimator="k3").sum()
    return LossTerms(
        total=total,
        num_clipped=out.num_clipped.detach(),
        kl=kl.detach(),
        entropy=entropy.detach(),
        kl_sampler=kl_sampler,
        logprob_gap=gap_N.sum(),
        logprob_gap_max=gap_N.max(),
        value_loss=of_values.detach(),
        num_values_clipped=values_clipped.detach(),
    )
