"""Splits the gap between the trainer's and the sampler's log-probs into two parts: one from merging
the weights, one from different arithmetic.

    |adapters - sampler| <= |adapters - merged weights| + |merged weights - sampler|

All three score the same sampled tokens: the sampler with a version's weights, the trainer with the
same bits, and the trainer with base and adapters, as in training. In bf16 both terms have the noise
of rounded activations. If vLLM quantises the weights, the second term has that rounding too.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, takewhile

from megatron.core import parallel_state

from orchestrator.protocol.messages import LossSpec
from trainer_node.ranks import objects
from trainer_node.training import served_weights
from trainer_node.training.batch import Batch
from trainer_node.training.registry import registered
from trainer_node.training.steps import part
from trainer_node.training.trainer import Trainer

LEAST_NATS = {"float32": 1e-4, "bfloat16": 1e-3}
"""Part of the gap that merged weights cause from which a job may warn, by the trainer's dtype."""
TIMES = 2.0
"""How many times the rest of the gap this part may be. Stochastic rounding had 1.0 to 1.1, rounding
to nearest 2.6 and 3.4 at a learning rate of 1e-5 (docs/merging.md)."""


def is_due(trainer: Trainer, loss: LossSpec) -> bool:
    """Whether to split this job's gap. Its batch must have been sampled with the present weights.
    All ranks take the same path, and some paths are collectives."""
    config, every = trainer.model.config, trainer.model.config.gap_split_steps
    last = trainer.split_at
    can = (
        trainer.steps_since_sent == 0
        and every > 0
        and (last is None or trainer.num_steps - last >= every)
        and not (trainer.model.trains_all or config.compile or config.lora.dropout)
        and config.serves_merged
        and registered(loss.name).takes_sampler
        and not loss.off_policy
    )
    if not can:
        return False
    obstacles = objects.all_gather(
        served_weights.obstacle(trainer.model), group=trainer.model.control_group
    )
    return not any(obstacles)


def metrics(trainer: Trainer, batch: Batch, loss: LossSpec) -> dict[str, float]:
    """Means over the loss tokens of the first sequences, about a pack of each data-parallel rank.
    Empty if they have no such token. A collective; gradients and weights stay as they are."""
    trainer.split_at = trainer.num_steps
    rows = trainer.micro_batch_tokens * parallel_state.get_data_parallel_world_size()
    count = max(1, len(list(takewhile(lambda end: end <= rows, accumulate(batch.lengths)))))
    first = replace(
        part(batch, batch.lengths[:count], slice(0, sum(batch.lengths[:count]))), scored_T=None
    )
    mask_T = first.loss_mask_T != 0
    if not mask_T.any():
        return {}
    allowed = loss.allowed_token_ids
    served_T, _ = trainer.forward(first, allowed_token_ids=allowed, mode="served")
    learns_T = served_T
    if trainer.model.config.numerics == "adapters":
        learns_T, _ = trainer.forward(first, allowed_token_ids=allowed)
    return {
        "gap_weights_mean": float((learns_T - served_T)[mask_T].abs().mean()),
        "gap_arithmetic_mean": float((served_T - first.sampler_logprobs_T)[mask_T].abs().mean()),
    }


def warnings(found: dict[str, float], *, dtype: str) -> list[str]:
    """Return a warning if the merged weights cause most of the gap."""
    weights, rest = (found.get(f"gap_{part}_mean", 0.0) for part in ("weights", "arithmetic"))
    if weights < LEAST_NATS[dtype] or weights <= TIMES * rest:
        return []
    return [
        f"The merged weights move the log-probs of sampled tokens by {weights:.2e} nats in the "
        f"mean, and arithmetic by {rest:.2e}: the served policy is not quite the trained one. With "
        'publication.rounding = "nearest", set "stochastic"; with "stochastic", set '
        'trainer.numerics = "served".'
    ]
