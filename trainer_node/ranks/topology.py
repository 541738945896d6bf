"""Checks that the model's sizes divide by the topology, and makes this rank's process groups."""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import TrainerConfig
from orchestrator.protocol.topology import check_topology
from trainer_node.ranks import rendezvous

CONTROL_TIMEOUT_S = 3600.0
"""Deadline of the control group's collectives; rank 0 sends a keepalive much more often."""


def check(config: TrainerConfig, hf_config: Any) -> None:
    """Check the sizes before any memory is allocated and any process group is made.

    Raises:
        ConfigError: a size does not divide, or two settings exclude each other; names the field.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != config.parallel.world_size:
        raise ConfigError(
            f"parallel.world_size is {config.parallel.world_size} but {world} ranks were started"
        )
    check_topology(config, hf_config.to_dict())


def join(config: TrainerConfig) -> torch.device:
    """Make Megatron's process groups and seed the generators. Returns this rank's device."""
    from megatron.core import parallel_state, tensor_parallel

    device = torch.device("cpu")
    if config.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    rendezvous.join(config)
    parallel = config.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        context_parallel_size=parallel.context,
        distributed_timeout_minutes=config.collective_timeout_s / 60,  # type: ignore[arg-type]
        create_gloo_process_groups=False,
    )
    if config.device == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(config.seed)
    torch.manual_seed(config.seed)
    return device


def tensor_group(*, expert: bool) -> Any:
    """The ranks that a linear is split over; experts have their own group."""
    from megatron.core import parallel_state

    return (
        parallel_state.get_expert_tensor_parallel_group()
        if expert
        else parallel_state.get_tensor_model_parallel_group()
    )


def group_of_all(backend: str | None = None) -> Any:
    """A further process group of all ranks, of the default group's backend unless one is given."""
    return dist.new_group(backend=backend, timeout=datetime.timedelta(seconds=CONTROL_TIMEOUT_S))


def leave() -> None:
    """Leave the process groups. Safe to call twice."""
    if dist.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
