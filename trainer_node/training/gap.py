"""Judges the gap between the trainer's and the sampler's log-probs of sampled tokens. Pure.

On policy the two differ by rounding only, whatever the loss. A larger gap means that trainer and
sampler use different distributions.
"""

from __future__ import annotations

import torch

from orchestrator.errors import ErrorCode, SpliceError
from orchestrator.protocol.messages import LossSpec
from trainer_node.training.sums import StepSums

EXPLAINED_NATS = {"float32": 1e-3, "bfloat16": 0.1}
"""Mean |trainer - sampler| of a token that the trainer's dtype explains, at temperatures of 1 and
above.

Two implementations round a logit differently by about `u / sqrt(3) * sqrt(2 * layers) * spread of
the logits`. Each layer adds twice to the residual stream. Each addition has an independent rounding
error, uniform within the unit roundoff u. For 36 layers and a spread of 2 that is 0.038 nats in
bf16 (u = 2^-8) and 6e-7 in fp32 (u = 2^-24). An 8B model in bf16 measured 0.031 in the mean and
0.27 at most, fp32 models 1e-6. The bound for bf16 is three times its mean, because another choice
of experts moves single tokens by whole nats. The bound for fp32 is the canary's: real errors move
tokens by 0.01 and more.
"""

OFF_POLICY_NATS = 0.3
"""Mean gap of tokens that are some versions old. A step moves the policy by 0.001 to 0.05; top_p =
0.5 gives 0.7."""
CAUSES = (
    "Usual causes: a temperature that the batch's temperatures do not say; top_p, top_k, min_p, "
    "penalties or another setting that changes the distribution; rollouts from another version or "
    "with FP8 weights; another tokenizer or chat template; a step with a much larger learning rate"
)


class LogprobGapError(SpliceError, ValueError):
    """The trainer and the sampler are further apart than the job allows."""

    code = ErrorCode.LOGPROB_GAP


def described(sums: StepSums) -> str:
    """The gap in words."""
    found = sums.metrics("tokens")
    return (
        "the trainer's log-probs of the sampled tokens differ from the sampler's by "
        f"{found['logprob_gap_mean']:.2e} nats in the mean and "
        f"{found['logprob_gap_max']:.2e} at most, {found['clip_fraction']:.1%} of the tokens are "
        "clipped"
    )


def check(sums: StepSums, loss: LossSpec) -> None:
    """Check a batch against the job's own bound.

    Raises:
        LogprobGapError: the mean is above it, or not a number.
    """
    if loss.max_logprob_gap is not None and not sums.logprob_gap_mean <= loss.max_logprob_gap:
        raise LogprobGapError(
            f"{described(sums)}; loss.max_logprob_gap is {loss.max_logprob_gap}. {CAUSES}."
        )


def warnings(
    sums: StepSums, loss: LossSpec, *, dtype: str, temperatures_T: torch.Tensor | None
) -> list[str]:
    """Return warnings about an on-policy step without a bound, if rounding does not explain its
    gap.

    Args:
        dtype: the trainer's.
        temperatures_T: the batch's. A lower one enlarges the same difference of two logits.
    """
    coldest = 1.0 if temperatures_T is None else min(1.0, temperatures_T.min().item())
    explained = EXPLAINED_NATS[dtype] / coldest
    if loss.off_policy:
        explained = max(explained, OFF_POLICY_NATS)
    if loss.max_logprob_gap is not None or sums.logprob_gap_mean <= explained:
        return []
    where = (
        f"On the first step after a publication or load {described(sums)}; "
        f"{'samples of an older version explain' if loss.off_policy else f'{dtype} explains'} "
        f"{explained:.2g}"
    )
    return [f"{where}. {CAUSES}. If this is meant, set loss.max_logprob_gap."]
