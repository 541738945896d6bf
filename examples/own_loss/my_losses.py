"""A loss of your own. The trainer imports this module (`trainer.loss_modules`)."""

import torch

from splice.losses import LossOutput, register_loss


@register_loss("careful")
def careful(
    log_probs_N: torch.Tensor,
    *,
    sampler_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    ratio_cap: float = 2.0,
    negative_weight: float = 0.5,
) -> LossOutput:
    """Truncated importance sampling in which bad answers weigh less than good ones.

    `-sum_t w_t A_t log p_t`, with `w_t = min(p_t / mu_t, ratio_cap)`, without a gradient, and
    `negative_weight` times that where the advantage is negative.
    """
    ratio_N = torch.exp(log_probs_N.detach() - sampler_logprobs_N)
    weight_N = ratio_N.clamp(max=ratio_cap)
    weight_N = torch.where(advantages_N < 0, weight_N * negative_weight, weight_N)
    loss = -(weight_N * advantages_N * log_probs_N).sum()
    return LossOutput(loss=loss, num_clipped=(ratio_N > ratio_cap).sum())
