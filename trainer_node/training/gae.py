"""Generalised advantage estimation. Pure, in fp64, over a whole batch on the CPU.

Schulman et al. 2016 (arXiv:1506.02438, eq. 16), over the sampled tokens of a sequence only. With r
= reward, V = value, t' = the next sampled token after t, and 0 after the last one:

    delta_t = r_t + gamma V_t' - V_t        A_t = delta_t + gamma lambda A_t'        R_t = A_t + V_t

Tokens that a tool or a user wrote are part of the state. They have no advantage and take no time:
gamma and lambda do not count them, and the value before the next turn's first token is the
bootstrap.

With `KlSpec.in_reward`, r is the batch's reward less `coefficient` times the token's distance to
the reference, as in Ouyang et al. 2022 (arXiv:2203.02155, eq. 2, token by token).
"""

from __future__ import annotations

from typing import Any

import torch

from orchestrator.protocol.messages import KlSpec, ValueSpec
from trainer_node.training.batch import Batch
from trainer_node.training.losses import kl_to_reference

_TINY = 1e-8


def rewards_of(batch: Batch, kl: KlSpec | None) -> torch.Tensor:
    """Return the rewards, less a KL term that belongs to them, [T]; 0 where the mask is 0."""
    assert batch.rewards_T is not None
    rewards_T = batch.rewards_T.double()
    if kl is None or not kl.in_reward:
        return rewards_T
    assert batch.reference_logprobs_T is not None
    old_T = batch.sampler_logprobs_T if batch.old_logprobs_T is None else batch.old_logprobs_T
    reference_T = batch.reference_logprobs_T.double()
    kl_T = kl_to_reference(old_T.double(), reference_T, estimator=kl.estimator)
    return rewards_T - kl.coefficient * kl_T * batch.loss_mask_T


def advantages(
    batch: Batch, values_T: torch.Tensor, spec: ValueSpec, kl: KlSpec | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the advantages, whitened if the spec says so, and the returns: [T] in fp32, 0 where
    the mask is 0."""
    mask_T = batch.loss_mask_T != 0
    rewards, values = rewards_of(batch, kl).tolist(), values_T.double().tolist()
    found = [0.0] * len(rewards)
    decay, end = spec.gamma * spec.lam, 0
    is_sampled = mask_T.tolist()
    for length in batch.lengths:
        start, end = end, end + length
        advantage = next_value = 0.0
        for t in range(end - 1, start - 1, -1):
            if is_sampled[t]:
                delta = rewards[t] + spec.gamma * next_value - values[t]
                found[t] = advantage = delta + decay * advantage
                next_value = values[t]
    advantages_T = torch.tensor(found, dtype=torch.float64)
    returns_T = (advantages_T + values_T.double()) * mask_T
    if spec.whiten and mask_T.any():
        sampled = advantages_T[mask_T]
        std = sampled.std(correction=0) + _TINY
        advantages_T = (advantages_T - sampled.mean()) / std * mask_T
    return advantages_T.float(), returns_T.float()


def value_sums(batch: Batch) -> dict[str, Any]:
    """Sums over the loss tokens that the value head's metrics are made of: fields of `StepSums`."""
    assert batch.values_T is not None
    assert batch.returns_T is not None
    mask_T = batch.loss_mask_T != 0
    values, returns = (t.double()[mask_T] for t in (batch.values_T, batch.returns_T))
    errors = returns - values
    return {
        "value_tokens": batch.num_loss_tokens,
        "value": float(values.sum()),
        "returns": float(returns.sum()),
        "returns_squared": float(returns.square().sum()),
        "value_error": float(errors.sum()),
        "value_error_squared": float(errors.square().sum()),
    }
