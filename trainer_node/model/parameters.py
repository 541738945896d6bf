"""The parameters of a whole model, for full-parameter training: which HF tensors each one holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from orchestrator.errors import ConfigError
from trainer_node.hf.checkpoint import HfCheckpoint
from trainer_node.hf.names import strip_wrappers
from trainer_node.layout.layouts import layouts
from trainer_node.layout.pieces import Piece, TrainedParam
from trainer_node.layout.strides import Layout
from weight_transfer.boxes import matrix

VOCAB_PARAMS = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Megatron's parameters with a row for each token. Megatron pads them."""


def model_parameters(
    model: nn.Module, tasks: Sequence[Any], *, config: Any, bridge: Any, checkpoint: HfCheckpoint
) -> list[TrainedParam]:
    """Every parameter of this rank's part of the model, for full-parameter training. Padding rows
    of the vocabulary are set to 0.

    Args:
        tasks: Bridge's conversion tasks for the model.
        config: Megatron's transformer config.

    Raises:
        ConfigError: a parameter that no HF tensor is made of; names it.
    """
    by_param = {
        id(task.param_weight): task
        for task in tasks
        if task is not None and task.param_weight is not None
    }
    tied = config.share_embeddings_and_output_weights
    head_apart = tied and parallel_state.get_pipeline_model_parallel_world_size() > 1
    params = []
    for name, param in model.named_parameters():
        bare, task = strip_wrappers(name), by_param.get(id(param))
        is_vocab = bare in VOCAB_PARAMS
        if task is None and not (tied and is_vocab):
            raise ConfigError(
                f"{bare} belongs to no tensor of the HF checkpoint: it cannot be trained with "
                "finetuning_type='full'"
            )
        found = {} if task is None else layouts(task, bridge, checkpoint.state)
        split = task is None or is_split(found)
        if is_vocab:
            key = checkpoint.vocab_tensors[0] if task is None else task.mapping.hf_param
            pieces = [_vocab_piece(param, key, config.vocab_size)]
        else:
            pieces = _pieces(param, task, found, split=split)
        params.append(
            TrainedParam(
                param=param,
                pieces=tuple(pieces),
                split=split,
                expert=bool(task is not None and task.mapping.is_expert),
                partial=not split and _sees_own_heads(bare, config),
                tied=head_apart and is_vocab,
            )
        )
    return params


def is_split(found: Mapping[str, Layout | str]) -> bool:
    """Whether tensor ranks have pieces of a parameter (True) or copies, by its `layouts`."""
    return any(p.part > 0 for a in found.values() if isinstance(a, Layout) for p in a.pieces)


def _sees_own_heads(name: str, config: Any) -> bool:
    """Whether a norm of each head is a copy that only the rank's own heads go through. Multi-latent
    attention has norms of that name before the heads."""
    norms = ("q_layernorm.weight", "k_layernorm.weight")
    return name.endswith("out_norm.weight") or (
        not config.multi_latent_attention and name.endswith(norms)
    )


def _pieces(
    param: nn.Parameter, task: Any, found: Mapping[str, Layout | str], *, split: bool
) -> list[Piece]:
    """The HF tensors in a parameter. One that Bridge computes from it is the parameter itself, if
    every rank has a copy."""
    pieces = []
    for name, layout in found.items():
        if isinstance(layout, str):
            shards = task.mapping.tp_size > 1 and getattr(param, "tensor_model_parallel", False)
            if param.dim() > 1 or len(found) > 1 or shards:
                raise ConfigError(
                    f"{name} is no arrangement of {task.global_param_name} ({layout}): it cannot "
                    "be trained with finetuning_type='full', use 'lora'"
                )
            shape = tuple(param.shape)
            return [Piece(key=name, shape=shape, offsets=(0,), rows=shape[0])]
        shape = layout.shape if len(layout.shape) < 3 else matrix(layout.shape)
        for place in layout.of_part(task.mapping.tp_rank if split else 0):
            first = (place.box.first_row, place.box.first_column)[: len(shape)]
            rows = place.box.rows
            pieces.append(Piece(key=name, shape=shape, offsets=first, rows=rows, place=place))
    if sum(math.prod(piece.box_shape(param)) for piece in pieces) != param.numel():
        raise ConfigError(
            f"{task.global_param_name} has elements that belong to no tensor of the HF checkpoint: "
            "it cannot be trained with finetuning_type='full', use 'lora'"
        )
    return pieces


@torch.no_grad()
def _vocab_piece(param: nn.Parameter, key: str, vocab_size: int) -> Piece:
    """Rows of real tokens. Megatron's padding depends on the tensor-parallel size."""
    start = parallel_state.get_tensor_model_parallel_rank() * param.shape[0]
    rows = min(max(vocab_size - start, 0), param.shape[0])
    # Their gradient is 0, so they stay 0.
    param[rows:].zero_()
    return Piece(
        key=key,
        shape=(vocab_size, *param.shape[1:]),
        offsets=(min(start, vocab_size), *[0] * (param.dim() - 1)),
        rows=rows,
    )


# ---------------------------------------------------------------- gradients


def count(params: Sequence[TrainedParam], device: torch.device) -> int:
    """Trainable elements of the whole model, each counted once, padding not. A collective."""
    mine = [
        math.prod(piece.box_shape(p.param))
        for p in params
        if p.counted and p.group.rank() == 0
        for piece in p.pieces
    ]
    total = torch.tensor(sum(mine), dtype=torch.int64, device=device)
    dist.all_reduce(total)
    return int(total)
