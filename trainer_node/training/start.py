"""Starts one rank's trainer: a config in, a `Trainer` that can take its first batch out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from orchestrator.protocol.config import TrainerConfig
from trainer_node.backends import loading
from trainer_node.hf.checkpoint import read_config
from trainer_node.ranks import gpu, topology
from trainer_node.training.registry import import_losses

if TYPE_CHECKING:
    from trainer_node.training.trainer import Trainer


def start(config: TrainerConfig) -> Trainer:
    """Check the config, build the model, load its adapter, and find the pack size. A collective.

    Raises:
        ConfigError: the config, the checkpoint and the topology do not fit together.
    """
    hf_config = read_config(config.model)
    import_losses(config.loss_modules)
    topology.check(config, hf_config)
    if config.device == "cuda":
        gpu.use_expandable_segments()
    loading.load(config.tier)
    # Late, because Megatron can be imported only after the stand-ins.
    from trainer_node.model import kernel_check
    from trainer_node.model.build import build
    from trainer_node.training import pack_size
    from trainer_node.training.trainer import Trainer

    trainer = Trainer(build(config, hf_config))
    if config.adapter is not None:
        trainer.load_adapter(config.adapter)
    if trainer.model.device.type == "cuda":
        kernel_check.check(trainer.model)
        if trainer.model.sharing_obstacle is None:
            trainer.model.sharing_obstacle = kernel_check.paths_obstacle(trainer.model)
        torch.cuda.empty_cache()  # building needs scratch memory: experts are copied into stacks
    trainer.micro_batch_tokens = pack_size.tokens_for(trainer)
    return trainer
