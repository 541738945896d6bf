"""Whether the trainer's parallel sizes fit a model.

The launcher checks before it starts anything, each rank before it allocates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import ALL_LINEAR, ParallelConfig, TrainerConfig

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERT_TARGETS = {ALL_LINEAR, "gate_proj", "up_proj", "down_proj"}


def language_part(model: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config.json that describes the language model."""
    return dict(model.get("text_config") or model)


def experts_of(model: Mapping[str, Any]) -> int:
    """Experts of each layer, by the config of the language part; 0: it is dense."""
    return int(next((model[k] for k in _EXPERTS if model.get(k)), 0))


def check_topology(trainer: TrainerConfig, model: Mapping[str, Any]) -> None:
    """Refuse parallel sizes that do not divide the model, and options that exclude each other.

    Args:
        model: the contents of the model's config.json. What it does not name is left to Megatron.

    Raises:
        ConfigError: names the size, the model's number and the fix.
    """
    parallel = trainer.parallel
    model = language_part(model)
    heads = int(model["num_attention_heads"])
    experts = experts_of(model)
    for field, value, what in (
        ("tensor", heads, "attention heads"),
        ("tensor", model.get("num_key_value_heads") or heads, "key/value heads"),
        ("tensor", parallel.tensor if experts else model["intermediate_size"], "intermediate_size"),
        ("pipeline", model["num_hidden_layers"], "layers"),
        ("expert", experts, "experts"),
        (
            "expert_tensor",
            model.get("moe_intermediate_size") if experts else 0,
            "moe_intermediate_size",
        ),
    ):
        size = getattr(parallel, field)
        if size > 1 and (not value or int(value) % size):
            raise ConfigError(
                f"parallel.{field} = {size} does not divide the model's {value or 0} {what}; "
                "choose a divisor"
            )
    lora = trainer.lora
    ends = {target.rpartition(".")[2] for target in lora.targets}
    if experts and not trainer.serves_merged and _EXPERT_TARGETS & ends:
        raise ConfigError(
            "publication.rollout_weights = 'lora' serves no adapters of experts: set "
            "trainer.lora.targets to linears of attention, such as "
            '["q_proj", "k_proj", "v_proj", "o_proj"], or take rollout_weights = "merged"'
        )
    if (
        experts
        and trainer.finetuning_type == "lora"
        and lora.dropout
        and _EXPERT_TARGETS & set(lora.targets)
    ):
        _check_expert_dropout(parallel)


def _check_expert_dropout(parallel: ParallelConfig) -> None:
    """Refuse topologies in which copies of a token at an expert would drop different elements."""
    if parallel.tensor > 1 and parallel.expert > 1 and not parallel.sequence:
        raise ConfigError(
            "lora.dropout on experts with parallel.tensor > 1 and parallel.expert > 1 needs "
            "parallel.sequence = True: "
            "without it an expert gets every token once from each tensor rank "
            "and would drop other elements of each copy"
        )
    if parallel.expert_tensor > 1:
        raise ConfigError(
            "lora.dropout on experts needs parallel.expert_tensor = 1: the ranks that share an "
            "expert would drop "
            "other elements of the same token"
        )
