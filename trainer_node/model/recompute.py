"""Switches how many layers the backward pass runs again, between two passes.

Megatron-Core (0.19.2) reads these fields of its config in each forward pass of a block of layers.
The first layers of a block are recomputed: they keep their activations for longest.
"""

from __future__ import annotations

import math
from typing import Any

from megatron.core.utils import get_attr_wrapped_model

from trainer_node.model.model import Model


def use(model: Model, share: float) -> None:
    """Recompute this share of the layers of the next forward pass, rounded up to a layer.

    `recompute = "selective"` is built into the model, and stays.
    """
    if model.config.recompute == "selective":
        return
    block = get_attr_wrapped_model(model.modules[0], "decoder")
    layers = math.ceil(share * len(block.layers))
    config = block.config
    config.recompute_granularity = "full" if layers else None
    config.recompute_method = "block" if layers else None
    config.recompute_num_layers = layers or None


def follow(module: Any) -> None:
    """Make recomputation work in a model's first stage. Megatron's recomputation is reentrant:
    adapters get gradients only if an input of the layers requires a gradient."""

    def require(_module: Any, _args: Any, output: Any) -> Any:
        is_on = module.decoder.config.recompute_granularity == "full"
        return output.requires_grad_() if is_on else output

    module.embedding.register_forward_hook(require)
