"""This process's random generators: seeded, saved and put back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def seed(value: int, device: torch.device) -> None:
    """Seed the generators."""
    torch.manual_seed(value)
    if device.type == "cuda":
        from megatron.core import tensor_parallel

        tensor_parallel.model_parallel_cuda_manual_seed(value)


def state(device: torch.device) -> dict[str, Any]:
    """Return the generators' states, for `restore`."""
    found: dict[str, Any] = {"rng": torch.get_rng_state()}
    if device.type == "cuda":
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        found["cuda_rng"] = torch.cuda.get_rng_state(device)
        found["cuda_rng_tracker"] = get_cuda_rng_tracker().get_states()
    return found


def restore(found: Mapping[str, Any], device: torch.device) -> None:
    """Set the generators to the states that `state` returned."""
    torch.set_rng_state(found["rng"])
    if device.type == "cuda":
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        torch.cuda.set_rng_state(found["cuda_rng"], device)
        get_cuda_rng_tracker().set_states(found["cuda_rng_tracker"])
