"""Splits the gap between the trainer's and the sampler's log-probs: what the merged weights cause,
and what arithmetic does.

    |adapters - sampler| <= |adapters - merged weights| + |merged weights - sampler|

All three score the same sampled tokens: the sampler with a version's weights, the trainer with the
same bits, and the trainer with base and adapters as it learns. The middle term is 0 where a merge
loses nothing and nothing is rounded. In bf16 both terms have the noise of rounded activations.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, takewhile

from megatron.core import parallel_state

from orchestrator.protocol.messages import LossSpec
from trainer_node.training.batch import Batch
from trainer_node.training.gap import EXPLAINED_NATS
from trainer_node.training.losses import registered
from trainer_node.training.steps import part
from trainer_node.training.trainer import Trainer


def is_due(trainer: Trainer, loss: LossSpec) -> bool:
    """Whether a job is to be split: its batch was sampled with the present weights."""
    config = trainer.model.config
    return (
        trainer.steps_since_sent == 0
        and config.gap_split_steps > 0
        and trainer.num_steps % config.gap_split_steps == 0
        and not (trainer.model.trains_all or config.compile or config.lora.dropout)
        and registered(loss.name).takes_sampler
        and not loss.off_policy
    )


def metrics(trainer: Trainer, batch: Batch, loss: LossSpec) -> dict[str, float]:
    """Means over the loss tokens of the first sequences, about a pack of each data-parallel rank.
    None if they have no such token. A collective; gradients and weights stay as they are."""
    rows = trainer.micro_batch_tokens * parallel_state.get_data_parallel_world_size()
    count = max(1, len(list(takewhile(lambda end: end <= rows, accumulate(batch.lengths)))))
    first = replace(
        part(batch, batch.lengths[:count], slice(0, sum(batch.lengths[:count]))), scored_T=None
    )
    mask_T = first.loss_mask_T != 0
    if not mask_T.any():
        return {}
    allowed = loss.allowed_token_ids
    learns_T, _ = trainer.forward(first, allowed_token_ids=allowed)
    served_T, _ = trainer.forward(first, allowed_token_ids=allowed, mode="served")
    sampler_T = first.sampler_logprobs_T
    return {
        "gap_weights_mean": float((learns_T - served_T)[mask_T].abs().mean()),
        "gap_arithmetic_mean": float((served_T - sampler_T)[mask_T].abs().mean()),
    }


def warnings(found: dict[str, float], *, dtype: str) -> list[str]:
    """Return a warning if the merged weights move the log-probs by more than rounding explains."""
    weights = found.get("gap_weights_mean", 0.0)
    if weights <= EXPLAINED_NATS[dtype]:
        return []
    return [
        f"The merged weights move the log-probs of sampled tokens by {weights:.2e} nats in the "
        f"mean, and {dtype} explains {EXPLAINED_NATS[dtype]:.2g}: the served policy is not the "
        'trained one. With publication.rounding = "nearest", set "stochastic"; else set '
        'trainer.numerics = "served".'
    ]
