"""What trains in a model: adapters on its frozen modules, or the modules themselves.

trainable(module) -> adapters and parameters
plan(model, lora) -> others, checked; adapt(model, planned) -> in their place
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import LoraConfig, TrainerConfig
from trainer_node.adapters.lora import AdapterSet
from trainer_node.adapters.rounding import Rounding
from trainer_node.hf.checkpoint import HfCheckpoint
from trainer_node.layout.pieces import TrainedParam
from trainer_node.model.experts import StackedExperts, obstacle
from trainer_node.model.model import Model
from trainer_node.model.parameters import count, model_parameters


def trainable(
    module: Any,
    tasks: Sequence[Any],
    *,
    config: TrainerConfig,
    provider: Any,
    bridge: Any,
    checkpoint: HfCheckpoint,
    device: torch.device,
) -> tuple[AdapterSet, list[TrainedParam], list[StackedExperts]]:
    """Hook adapters on the frozen module; with finetuning_type "full" let the module itself train.
    Returns what trains, and the layers whose experts are stacked.

    Raises:
        ConfigError: the experts have no exact form.
    """
    trains_all = config.finetuning_type == "full"
    adapters = AdapterSet(
        tasks=() if trains_all else tasks,
        bridge=bridge,
        state=checkpoint.state,
        layers=[m for m in module.modules() if isinstance(m, TransformerLayer)],
        config=provider,
        lora=config.lora,
        seed=config.seed,
        rounding=Rounding(mode=config.rounding, seed=config.seed),
        device=device,
    )
    adapters.attach()
    if not trains_all:
        experts, is_exact = [], config.numerics == "exact"
        why = experts_obstacle(config, provider, device, module, adapters)
        if why is None:
            layers = moe_layers(module)
            experts = [StackedExperts(layer, adapters, is_exact=is_exact) for layer in layers]
        elif is_exact:
            raise ConfigError(f"numerics = 'exact' does not go with these experts: {why}")
        return adapters, adapters.params(), experts
    module.requires_grad_(True)
    params = model_parameters(module, tasks, config=provider, bridge=bridge, checkpoint=checkpoint)
    return adapters, params, []


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Fresh adapters that fit the model, which does not have them yet."""

    lora: LoraConfig
    adapters: AdapterSet
    params: list[TrainedParam]
    num_parameters: int


def plan(model: Model, lora: LoraConfig, *, seed: int) -> Planned:
    """Make fresh adapters for the model, and check them. Nothing changes. A collective.

    Raises:
        ConfigError: the adapters do not fit, or cannot be changed.
    """
    model.need_adapters("a new adapter")
    module, provider = model.modules[0], model.provider
    if model.config.compile:
        raise ConfigError(
            "a new adapter: compiled layers keep the adapter that they began with; start the "
            "trainer with the adapter that you want (trainer.lora), or without compile"
        )
    adapters = AdapterSet(
        tasks=model.conversion_tasks,
        bridge=model.bridge,
        state=model.checkpoint.state,
        layers=[m for m in module.modules() if isinstance(m, TransformerLayer)],
        config=provider,
        lora=lora,
        seed=seed,
        rounding=model.rounding,
        device=model.device,
    )
    params = adapters.params()
    if count(params, model.device) == 0:
        raise ConfigError(f"no linear of the model is among the lora targets {lora.targets}")
    why = experts_obstacle(model.config, provider, model.device, module, adapters)
    if model.experts and why is not None:
        raise ConfigError(
            f"a new adapter: the experts are stacked, and with it could not be, because {why}; "
            "start the trainer with it (trainer.lora)"
        )
    params += (p for p in model.params if p.is_value)
    return Planned(
        lora=lora, adapters=adapters, params=params, num_parameters=count(params, model.device)
    )


def adapt(model: Model, planned: Planned) -> None:
    """Put planned adapters in the place of the model's own."""
    adapters = planned.adapters
    model.adapters.close()
    adapters.attach()
    for experts in model.experts:
        experts.use(adapters)
    model.adapters, model.params = adapters, planned.params
    model.num_parameters = planned.num_parameters
    model.config = model.config.model_copy(update={"lora": planned.lora})


def moe_layers(module: Any) -> list[Any]:
    """Each layer with experts."""
    return [layer for layer in module.modules() if isinstance(layer, MoELayer)]


def experts_obstacle(
    config: TrainerConfig, provider: Any, device: torch.device, module: Any, adapters: AdapterSet
) -> str | None:
    """Why the experts stay Megatron's; None: `StackedExperts` takes them, or there are none."""
    layers = moe_layers(module)
    if not layers:
        return None
    if config.finetuning_type == "full":
        return "all parameters train"
    if config.lora.dropout:
        return "lora.dropout is not 0"
    fc1s = [adapters.by_module.get(layer.experts.linear_fc1) for layer in layers]
    if any(fc1 is not None and len(fc1.names) != 2 for fc1 in fc1s):
        return "one adapter spans gate and up"
    return obstacle(provider, device)
