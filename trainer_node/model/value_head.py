"""The value head: a linear function of the last hidden state, after the final norm.

V_t = sum_h hidden_(t-1),h weight_h estimates the return from token t on, before token t is drawn.

Only the last pipeline stage has it, in fp32. Tensor ranks share its features, so that their parts
of a hidden state's gradient add up. It is no part of Megatron's model: no export sees it.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from torch import nn

from orchestrator.errors import ConfigError
from trainer_node.layout.pieces import Piece, TrainedParam

KEY = "value_head.weight"
"""Its name in checkpoints."""


def parameters(provider: Any, device: torch.device) -> list[TrainedParam]:
    """Make this rank's part of a head that predicts 0. Empty on earlier pipeline stages.

    Raises:
        ConfigError: the tensor ranks cannot share the features.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    if provider.hidden_size % size:
        raise ConfigError(
            f"trainer.value_head: {size} tensor ranks cannot share {provider.hidden_size} hidden "
            "features; choose a parallel.tensor that divides them"
        )
    if not parallel_state.is_pipeline_last_stage():
        return []
    own = provider.hidden_size // size
    weight = nn.Parameter(torch.zeros(own, device=device))
    piece = Piece(key=KEY, shape=(provider.hidden_size,), offsets=(rank * own,), rows=own)
    return [TrainedParam(param=weight, pieces=(piece,), split=True, expert=False, is_value=True)]
