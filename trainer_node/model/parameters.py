"""Describes the trained parameters and their layout over the ranks, for adapters and whole models.

    TrainedParam    a parameter of this rank: the groups that reduce its gradient, its copies, and
    Piece           which rows of which whole tensor (by its HF name) it has

Gradients (`TrainedParam.grad`) are fp32: those of bf16 weights are added up in `main_grad` after
every backward pass. Checkpoints and whole gradients are made of pieces, so they know neither fused
nor sharded tensors.

Copies and pieces of a gradient over tensor ranks, as in Megatron-Core 0.19's
`_allreduce_non_tensor_model_parallel_grads`: a column- or row-parallel weight is split; the norms
and the router are copied, their gradients complete on each rank, because the inputs' gradients of
the column-parallel linears behind them are summed; the q and k norms see this rank's heads only,
and with sequence parallelism every copy sees this rank's positions only: those gradients are parts,
to be added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from orchestrator.errors import ConfigError
from trainer_node.adapters.merge import strip_wrappers
from trainer_node.export import strides
from trainer_node.export.gather_plan import matrix
from trainer_node.export.layouts import layouts
from trainer_node.export.strides import Layout
from trainer_node.model.hf import HfCheckpoint

VOCAB_PARAMS = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Megatron's parameters with a row for each token. Megatron pads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements of a local tensor that are a box of a whole one."""

    key: str
    """The whole tensor's name, unique in the model."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    """First index of the box in the whole tensor."""
    rows: int
    """First rows of the local tensor that the box is, unless `place` says otherwise."""
    place: strides.Piece | None = None
    """Strides of the box in the local tensor."""

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The box in a local tensor, sharing its memory; [row runs, rows, column runs, columns]
        where it has strides."""
        tensor = tensor.detach()
        return tensor.narrow(0, 0, self.rows) if self.place is None else self.place.view(tensor)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The box; a view where it is one run."""
        return self.view(tensor).reshape(self.box_shape(tensor))

    def write(self, tensor: torch.Tensor, box: torch.Tensor) -> None:
        """Put a box where `read` finds it."""
        view = self.view(tensor)
        view.copy_(box.view(view.shape))

    def box_shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of `read`'s result."""
        if self.place is None:
            return (self.rows, *tensor.shape[1:])
        box = self.place.box
        return (box.rows, box.columns)[: len(self.shape)]


@dataclass(slots=True, kw_only=True, eq=False)
class TrainedParam:
    """A trainable parameter of this rank."""

    param: nn.Parameter
    pieces: tuple[Piece, ...]
    split: bool
    """Pieces on tensor-parallel ranks (True) or copies (False); of experts: on
    expert-tensor-parallel ranks."""
    expert: bool
    """Belongs to experts: summed over expert-data-parallel ranks."""
    partial: bool = False
    """A copy whose gradient is this tensor rank's part, without sequence parallelism too."""
    tied: bool = False
    """Embedding and head in one, with a copy on the first and one on the last pipeline stage."""

    def __post_init__(self) -> None:
        if self.param.dtype is not torch.float32:
            self.param.register_post_accumulate_grad_hook(self._accumulate)

    def _accumulate(self, param: torch.Tensor) -> None:
        """Add a backward pass's gradient, of the weights' precision, to the fp32 sum."""
        assert param.grad is not None
        if self.main_grad is None:
            self.main_grad = param.grad.float()
        else:
            self.main_grad.add_(param.grad)
        param.grad = None

    @property
    def main_grad(self) -> torch.Tensor | None:
        """fp32 gradient of a bf16 parameter; an attribute of it, as in Megatron."""
        return getattr(self.param, "main_grad", None)

    @main_grad.setter
    def main_grad(self, grad: torch.Tensor | None) -> None:
        self.param.main_grad = grad  # type: ignore[attr-defined]

    @property
    def grad(self) -> torch.Tensor:
        """The fp32 gradient so far; zeros, kept, where there is none."""
        if self.param.dtype is torch.float32:
            if self.param.grad is None:
                self.param.grad = torch.zeros_like(self.param)
            return self.param.grad
        if self.main_grad is None:
            self.main_grad = torch.zeros_like(self.param, dtype=torch.float32)
        return self.main_grad

    def drop_grad(self) -> None:
        """Forget the gradient."""
        self.param.grad = None
        if self.param.dtype is not torch.float32:
            self.main_grad = None

    @property
    def counted(self) -> bool:
        """Whether of all copies over tensor ranks and pipeline stages this is the one that counts
        (data-parallel ranks aside)."""
        if self.tied and not parallel_state.is_pipeline_first_stage():
            return False
        return self.split or tensor_group(expert=self.expert).rank() == 0

    @property
    def group(self) -> Any:
        """The ranks that have the same parameter and see other data."""
        if self.expert:
            return parallel_state.get_expert_data_parallel_group()
        return parallel_state.get_data_parallel_group(with_context_parallel=True)


def tensor_group(*, expert: bool) -> Any:
    """The ranks that a linear is split over; experts have a group of their own."""
    return (
        parallel_state.get_expert_tensor_parallel_group()
        if expert
        else parallel_state.get_tensor_model_parallel_group()
    )


# ---------------------------------------------------------------- the whole model's


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


BUCKET_ELEMENTS = 1 << 26
"""Elements to reduce or broadcast in one message: 256 MiB of scratch in fp32."""


def buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield consecutive tensors of at most `BUCKET_ELEMENTS`, unless one alone is larger."""
    bucket: list[torch.Tensor] = []
    filled = 0
    for tensor in tensors:
        if bucket and filled + tensor.numel() > BUCKET_ELEMENTS:
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += tensor.numel()
    if bucket:
        yield bucket


def all_reduce_flat(grads: Sequence[torch.Tensor], group: Any, factor: float) -> None:
    """Sum over the group and scale, in few messages."""
    for bucket in buckets(grads) if group.size() > 1 else ():
        flat = torch.cat([g.reshape(-1) for g in bucket])
        dist.all_reduce(flat, group=group)
        for grad, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            grad.copy_(piece.view_as(grad))
    if factor != 1.0 and grads:
        torch._foreach_mul_(list(grads), factor)


@torch.no_grad()
def finalize_gradients(
    params: Sequence[TrainedParam], *, denominator: float, sequence_parallel: bool
) -> None:
    """Sum gradients over data-parallel ranks, tied embeddings and partial copies; divide once.

    Experts see every token of their expert-data-parallel group; without sequence parallelism each
    token is there once per tensor rank, hence the division by the tensor size. What expert-tensor
    ranks have copies of saw their part of the expert's features only.
    """
    group = tensor_group(expert=False)
    copies_of_tokens = 1 if sequence_parallel else group.size()
    dense = [p.grad for p in params if not p.expert]
    experts = [p.grad for p in params if p.expert]
    all_reduce_flat(
        dense, parallel_state.get_data_parallel_group(with_context_parallel=True), 1 / denominator
    )
    all_reduce_flat(
        experts,
        parallel_state.get_expert_data_parallel_group(),
        1 / (denominator * copies_of_tokens),
    )
    all_reduce_flat(
        [p.grad for p in params if p.expert and not p.split], tensor_group(expert=True), 1.0
    )
    tied = [p.grad for p in params if p.tied]
    if tied:
        all_reduce_flat(tied, parallel_state.get_embedding_group(), 1.0)
    if group.size() > 1:
        copies = [p for p in params if not (p.expert or p.split)]
        parts = [p.grad for p in copies if p.partial or sequence_parallel]
        all_reduce_flat(parts, group, 1.0)
        # Complete already on every tensor rank; averaging keeps the copies equal to the bit where a
        # kernel's order is not deterministic.
        complete = [p.grad for p in copies if not (p.partial or sequence_parallel)]
        all_reduce_flat(complete, group, 1 / group.size())


@torch.no_grad()
def global_norm(params: Sequence[TrainedParam], device: torch.device) -> torch.Tensor:
    """L2 norm of the finalised gradient over all ranks, each element counted once."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for p in params:
        if p.counted and p.group.rank() == 0:
            total += torch.linalg.vector_norm(p.grad, dtype=torch.float64).square()
    dist.all_reduce(total)
    return total.sqrt()


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
