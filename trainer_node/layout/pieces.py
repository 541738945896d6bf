"""Describes one rank's trained parameters and where their elements belong.

    TrainedParam    a parameter of this rank: the groups that reduce its gradient, its copies, and
    Piece           which rows of which whole tensor (by its HF name) it has

Gradients (`TrainedParam.grad`) are fp32: those of bf16 weights are added up in `main_grad` after
every backward pass. Checkpoints and whole gradients are made of pieces, so they know neither fused
nor sharded tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from torch import nn

from trainer_node.layout import strides
from trainer_node.ranks.topology import tensor_group


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
    is_value: bool = False
    """The value head, which trains next to adapters too, and is no part of the served model."""
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
        """Whether this copy is the one to count among those on tensor ranks and pipeline stages.
        Copies on data-parallel ranks are not told apart."""
        if self.tied and not parallel_state.is_pipeline_first_stage():
            return False
        return self.split or tensor_group(expert=self.expert).rank() == 0

    @property
    def group(self) -> Any:
        """The ranks that have the same parameter and see other data."""
        if self.expert:
            return parallel_state.get_expert_data_parallel_group()
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
