"""Losses that leave out tokens or sequences on which trainer and sampler disagree.

All are the clipped surrogate against the trainer's own old policy, times a weight without gradient:
`-sum_t w_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)`, `r_t = p_t / old_t`. With
`k_t = old_t / mu_t`, and K_i a number of the whole sequence:

    masked_importance_sampling   K_i = prod_t k_t         w = K_i where K_i <= cap, else 0
    icepop                                                w = k_t where low <= k_t <= cap, else 0
    token_rejection                                       w = 1 where low <= k_t <= cap, else 0
    sequence_rejection           K_i = (prod_t k_t)^(1/n) w = 1 where low <= K_i <= cap, else 0

`dppo` bounds how much a token's probability changes, in place of its ratio. What is left out
counts in the divisor (`LossSpec.normalize_by`), so that an update shrinks with its share, and as
clipped. Shapes and symbols: `losses.py`.
"""

from __future__ import annotations

import torch

from trainer_node.training.registry import LossOutput, register_loss
from trainer_node.training.surrogate import clipped, sequence_means


def _weighted(
    weight_N: torch.Tensor,
    log_probs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    old_N: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> LossOutput:
    ratio_N = (log_probs_N - old_N).exp()
    plain_N, surrogate_N = clipped(ratio_N, advantages_N, clip_low, clip_high)
    # A weight of 0 leaves out; 0 times an infinite ratio would be no number.
    kept_N = torch.where(weight_N > 0, weight_N * surrogate_N, 0.0)
    return LossOutput(
        loss=-kept_N.sum(),
        num_clipped=((surrogate_N < plain_N) | (weight_N == 0)).sum(),
    )


def _old(log_probs_N: torch.Tensor, old_logprobs_N: torch.Tensor | None) -> torch.Tensor:
    """The trainer's old policy: without one, the present one."""
    return log_probs_N.detach() if old_logprobs_N is None else old_logprobs_N


@register_loss("masked_importance_sampling")
def masked_importance_sampling(
    log_probs_N: torch.Tensor,
    *,
    sampler_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    sequence_N: torch.Tensor,
    num_sequences: int,
    old_logprobs_N: torch.Tensor | None = None,
    clip_low: float,
    clip_high: float,
    ratio_cap: float,
) -> LossOutput:
    """Every token of a sequence has the sequence's weight, `K_i = prod_t old_t / mu_t`, and a
    sequence whose weight is above `ratio_cap` is left out.

    Sequence-level masked importance sampling: Liu, Li et al. 2025, "When Speed Kills Stability:
    Demystifying RL Collapse from the Training-Inference Mismatch"; sampler and trainer as two old
    policies: Hilton et al. 2021 (arXiv:2110.00641, section 3).
    """
    old_N = _old(log_probs_N, old_logprobs_N)
    zeros_S = log_probs_N.new_zeros(num_sequences)
    weight_S = zeros_S.index_add(0, sequence_N, old_N - sampler_logprobs_N).exp()
    weight_N = torch.where(weight_S <= ratio_cap, weight_S, 0.0)[sequence_N]
    return _weighted(weight_N, log_probs_N, advantages_N, old_N, clip_low, clip_high)


def _bounded(name: str, *, of_sequences: bool, reweights: bool, paper: str) -> None:
    """Register a loss that leaves out what has a ratio outside `[ratio_low, ratio_cap]`.

    Args:
        of_sequences: the ratio is the geometric mean of a sequence's, not a token's own.
        reweights: the ratio is also the weight.
    """

    def loss(
        log_probs_N: torch.Tensor,
        *,
        sampler_logprobs_N: torch.Tensor,
        advantages_N: torch.Tensor,
        sequence_N: torch.Tensor,
        num_sequences: int,
        old_logprobs_N: torch.Tensor | None = None,
        clip_low: float,
        clip_high: float,
        ratio_low: float,
        ratio_cap: float,
    ) -> LossOutput:
        old_N = _old(log_probs_N, old_logprobs_N)
        ratio_N = log_k_N = old_N - sampler_logprobs_N
        if of_sequences:
            ratio_N = sequence_means(log_k_N, sequence_N, num_sequences)[0][sequence_N]
        ratio_N = ratio_N.exp()
        kept_N = (ratio_N >= ratio_low) & (ratio_N <= ratio_cap)
        weight_N = torch.where(kept_N, ratio_N if reweights else 1.0, 0.0).to(ratio_N.dtype)
        return _weighted(weight_N, log_probs_N, advantages_N, old_N, clip_low, clip_high)

    loss.__doc__ = paper
    register_loss(name)(loss)


_bounded(
    "icepop",
    of_sequences=False,
    reweights=True,
    paper='IcePop: Ling Team 2025, "Every Step Evolves" (arXiv:2510.18855; 0.5 and 5).',
)
_bounded(
    "token_rejection",
    of_sequences=False,
    reweights=False,
    paper="IcePop's mask (arXiv:2510.18855) without its weight: verl's `rollout_rs = token`.",
)
_bounded(
    "sequence_rejection",
    of_sequences=True,
    reweights=False,
    paper="The geometric mean as a sequence's ratio: Zheng et al. 2025 (arXiv:2507.18071, eq. 7); "
    "as a mask: verl's `rollout_rs = geometric`, and for negative advantages only DeepSeek-V3.2 "
    "(arXiv:2512.02556).",
)


@register_loss("dppo")
def dppo(
    log_probs_N: torch.Tensor,
    *,
    sampler_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    clip_low: float,
    clip_high: float,
    ratio_cap: float,
) -> LossOutput:
    """`-sum_t M_t stop_gradient(min(p_t / mu_t, ratio_cap)) A_t log p_t`. M_t is 0 where the
    token's probability has moved too far the way that the advantage pushes it: `p_t - mu_t >
    clip_high` with `A_t > 0`, or `mu_t - p_t > clip_low` otherwise.

    DPPO with the binary total variation, "Rethinking the Trust Region in LLM Reinforcement
    Learning" (arXiv:2602.04879; 0.15), as TRL's `DPPOTrainer` computes it, with its cap of 20.
    """
    now_N = log_probs_N.detach()
    moved_N = now_N.exp() - sampler_logprobs_N.exp()
    masked_N = torch.where(advantages_N > 0, moved_N > clip_high, -moved_N > clip_low)
    untruncated_N = (now_N - sampler_logprobs_N).exp()
    weight_N = torch.where(masked_N, 0.0, untruncated_N.clamp(max=ratio_cap))
    return LossOutput(
        loss=-(weight_N * advantages_N * log_probs_N).sum(),
        num_clipped=(masked_N | (untruncated_N > ratio_cap)).sum(),
    )
