"""Losses as pure functions of log-probs. Sums over tokens, never means: the caller divides once by the global token count.

Shapes: N = positions with loss, V = vocabulary rows on this tensor-parallel rank, K = allowed token ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


class _SumOverRanks(torch.autograd.Function):
    """All-reduce forward, identity backward: every rank then computes the same loss, which counts once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        """Sum over the group."""
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Identity."""
        return grads[0], None


def vocab_parallel_log_probs(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    vocab_start: int,
    vocab_size: int,
    allowed_K: torch.Tensor | None = None,
    group: Any = None,
) -> torch.Tensor:
    """log p(target) in fp32 from logits whose vocabulary is split over `group`; the full logits are never gathered.

    Rows at or beyond `vocab_size` (Megatron's padding) do not count. With `allowed_K`, probabilities are normalised over
    those ids only, as a sampler restricted to them does; a target outside them has -inf.

    Args:
        vocab_start: id of this rank's first row.
        vocab_size: the HF vocabulary's size, without padding.
        group: tensor-parallel group; None or of size 1: this rank holds all rows.
    """
    split = group is not None and group.size() > 1
    num_rows = logits_NV.shape[1]
    logits = logits_NV.float().masked_fill(
        ~_valid_rows(num_rows, vocab_start, vocab_size, allowed_K, logits_NV.device), -torch.inf
    )
    with torch.no_grad():
        top_N = logits.max(dim=-1).values
        if split:
            dist.all_reduce(top_N, op=dist.ReduceOp.MAX, group=group)
    logits = logits - top_N[:, None]
    local_N = targets_N - vocab_start
    here_N = (local_N >= 0) & (local_N < num_rows)
    picked_N = logits.gather(-1, local_N.clamp(0, num_rows - 1)[:, None])[:, 0]
    target_N = torch.where(here_N, picked_N, torch.zeros_like(picked_N))
    denominator_N = logits.exp().sum(dim=-1)
    if split:
        both = _SumOverRanks.apply(torch.stack([target_N, denominator_N]), group)
        target_N, denominator_N = both[0], both[1]
    return target_N - denominator_N.log()


def _valid_rows(
    num_rows: int, vocab_start: int, vocab_size: int, allowed_K: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    ids_V = torch.arange(vocab_start, vocab_start + num_rows, device=device)
    valid_V = ids_V < vocab_size
    return valid_V if allowed_K is None else valid_V & torch.isin(ids_V, allowed_K)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """A loss summed over tokens, and the number of tokens whose ratio was clipped."""

    loss: torch.Tensor
    num_clipped: torch.Tensor


def cross_entropy(log_probs_N: torch.Tensor) -> LossOutput:
    """Negative log-likelihood, summed: `-sum_t log p_t`."""
    return LossOutput(loss=-log_probs_N.sum(), num_clipped=log_probs_N.new_zeros(()))


def grpo(
    log_probs_N: torch.Tensor,
    *,
    sampler_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> LossOutput:
    """Clipped policy gradient, summed: `-sum_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)`, `r_t = p_t / p_t(sampler)`.

    PPO's surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7) with GRPO's group-relative advantages (Shao et al. 2024,
    arXiv:2402.03300), which the caller computes; no KL term. Different clip bounds are DAPO's clip-higher (arXiv:2503.14476).
    """
    ratio_N = (log_probs_N - sampler_logprobs_N).exp()
    plain_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    return LossOutput(loss=-torch.minimum(plain_N, clipped_N).sum(), num_clipped=(clipped_N < plain_N).sum())
