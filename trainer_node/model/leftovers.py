"""Drops what a pass that failed has left in the model.

Megatron's layers keep tensors from one part of a pass to the next: the input of a layer's second
half, an expert layer's probabilities. If the pass fails in between, such a tensor holds the graph
of the whole pass, until a later pass replaces it. That pass may run out of memory before it gets
there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_DEPTH = 2
"""Objects within a module's objects that are searched."""


def drop(modules: Iterable[nn.Module]) -> None:
    """Empty every tensor with a graph that a module or an object of Megatron's in it keeps, and
    torch's queue. Only between two passes."""
    found: list[Any] = [module for whole in modules for module in whole.modules()]
    for module in found:
        if getattr(module, "mlp_norm_manager", None) is not None:
            module.mlp_norm_manager = None  # it keeps a tensor without a graph too
        _empty(module, _DEPTH)
    with torch.enable_grad():
        # torch (2.13) keeps the nodes that a failed backward pass did not reach until the next one.
        torch.zeros(1, requires_grad=True).clone().backward()


def _empty(owner: Any, depth: int) -> None:
    for name, value in list(vars(owner).items()):
        if isinstance(value, torch.Tensor):
            if value.grad_fn is not None:
                setattr(owner, name, value.detach().new_empty(0))
        elif depth and _is_megatrons(value):
            _empty(value, depth - 1)


def _is_megatrons(value: Any) -> bool:
    is_ours = type(value).__module__.partition(".")[0] == "megatron"
    return is_ours and hasattr(value, "__dict__") and not isinstance(value, nn.Module | type)
