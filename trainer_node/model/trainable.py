"""What trains in a model: adapters on its frozen modules, or the modules themselves.

trainable(module) -> adapters and parameters; adapt(model, lora) -> others in their place
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import LoraConfig, TrainerConfig
from trainer_node.adapters.lora import AdapterSet
from trainer_node.adapters.rounding import Rounding
from trainer_node.model.experts import StackedExperts, obstacle
from trainer_node.model.hf import HfCheckpoint
from trainer_node.model.model import Model
from trainer_node.model.parameters import TrainedParam, count, model_parameters


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
    Returns what trains, and the layers whose experts are stacked."""
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
        experts = []
        if experts_obstacle(config, provider, device, module, adapters) is None:
            experts = [StackedExperts(layer, adapters) for layer in moe_layers(module)]
        return adapters, adapters.params(), experts
    module.requires_grad_(True)
    params = model_parameters(module, tasks, config=provider, bridge=bridge, checkpoint=checkpoint)
    return adapters, params, []


def adapt(model: Model, lora: LoraConfig, *, seed: int) -> None:
    """Give the model fresh adapters in the place of its own. A collective.

    Raises:
        ConfigError: the adapters do not fit, or cannot be changed; nothing changed.
    """
    model.need_adapters("a new adapter")
    module, config, provider = model.modules[0], model.config, model.provider
    if config.compile:
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
    num_parameters = count(params, model.device)
    if num_parameters == 0:
        raise ConfigError(f"no linear of the model is among the lora targets {lora.targets}")
    why = experts_obstacle(config, provider, model.device, module, adapters)
    if model.experts and why is not None:
        raise ConfigError(
            f"a new adapter: the experts are stacked, and with it could not be, because {why}; "
            "start the trainer with it (trainer.lora)"
        )
    model.adapters.close()
    adapters.attach()
    for experts in model.experts:
        experts.use(adapters)
    model.adapters, model.params, model.num_parameters = adapters, params, num_parameters
    model.config = config.model_copy(update={"lora": lora})


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
