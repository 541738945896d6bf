"""Adapters with PEFT's semantics on one Megatron linear: of all HF linears in it.

Parameters are fp32. The product runs in the activations' dtype and is added to the linear's output
without a bias (`products`).

Shapes: O = out features, I = in features, R = rank, Q = parts with an adapter * R; s = sequence,
b = batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import nn
from torch.nn import functional

from orchestrator.protocol.config import LoraConfig
from trainer_node.adapters import products
from trainer_node.adapters.dropout import Dropout, key_of
from trainer_node.adapters.linears import Linear, Place, initial_lora_a
from trainer_node.adapters.merge import merged
from trainer_node.adapters.rounding import Corner, Rounding
from trainer_node.layout import strides
from trainer_node.layout.pieces import Piece, TrainedParam
from weight_transfer.boxes import Box


class _Adapter(nn.Module):
    """A and B of each HF linear in a Megatron parameter, cut as the parameter is."""

    has_partial_a = False
    """A tensor rank's gradient of a whole A is only of its rows of B."""

    def __init__(
        self, *, linears: Sequence[Linear], lora: LoraConfig, seed: int, device: torch.device
    ) -> None:
        super().__init__()
        self.names = [linear.name for linear in linears]
        self.places = [linear.place for linear in linears]
        self.scale = lora.alpha / lora.rank
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        for i, place in enumerate(self.places):
            whole_RI = initial_lora_a(
                self.names[i], rank=lora.rank, in_features=place.shape[1], seed=seed
            )
            lora_A_RI = whole_RI.narrow(1, *place.columns)
            self.lora_A[str(i)] = nn.Parameter(lora_A_RI.contiguous().to(device))
            self.lora_B[str(i)] = nn.Parameter(
                torch.zeros(len(place.rows_N), lora.rank, device=device)
            )

    def trained_params(self) -> Iterable[TrainedParam]:
        """The parameters and their layout."""
        for i, (name, place) in enumerate(zip(self.names, self.places, strict=True)):
            lora_A, lora_B = self.lora_A[str(i)], self.lora_B[str(i)]
            a = Piece(
                key=f"{name}.lora_A",
                shape=(lora_A.shape[0], place.shape[1]),
                offsets=(0, place.columns[0]),
                rows=lora_A.shape[0],
            )
            b = tuple(_row_pieces(f"{name}.lora_B", place, lora_B.shape[1]))
            for param, pieces, dim in ((lora_A, (a,), "columns"), (lora_B, b, "rows")):
                yield TrainedParam(
                    param=param,
                    pieces=pieces,
                    split=place.split == dim,
                    expert=False,
                    partial=param is lora_A and self.has_partial_a,
                )


def _row_pieces(key: str, place: Place, rank: int) -> Iterator[Piece]:
    """Each run of rows that this rank has of B."""
    first = 0
    for row, count in place.runs:
        rows, columns = strides.Axis(1, count, 0, rank), strides.Axis(1, rank, 0, 1)
        here = strides.Piece(0, Box(row, count, 0, rank), first * rank, rows, columns)
        shape, offsets = (place.shape[0], rank), (row, 0)
        yield Piece(key=key, shape=shape, offsets=offsets, rows=count, place=here)
        first += count


class WeightAdapter(_Adapter):
    """The adapter of a matrix that other modules multiply by: W + scale * B A replaces it.

    Shared experts multiply by their gate inside their own forward pass. The chunked head multiplies
    by the output layer's weight.

    Args:
        module: owner of the parameter.
        name: the parameter's name in the module.
        rounding: returns the present rounding of the sum.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        name: str,
        linear: Linear,
        rounding: Callable[[], Rounding],
        **settings: Any,
    ) -> None:
        super().__init__(linears=[linear], **settings)
        self._module, self._name = [module], name  # a list: the module is not part of this one
        self._rounding = rounding
        rows_N = self.places[0].rows_N
        self._rows_N = rows_N.to(self.lora_B["0"].device)
        self._is_in_order = torch.equal(rows_N, torch.arange(len(rows_N)))
        self.has_partial_a = linear.place.split == "rows"

    @property
    def weight(self) -> torch.Tensor:
        """W, the parameter."""
        weight = self._module[0]._parameters[self._name]
        assert weight is not None
        return weight

    def sum(self) -> torch.Tensor:
        """W + scale * B A, of the parameter's shape and dtype: the bits of a publication. The
        gradients of A and B are those of the sum before its rounding."""
        summed: torch.Tensor = _Sum.apply(
            self.weight, self.lora_A["0"], self.lora_B["0"], self._merged, self.scale, self._rows_N
        )
        return summed

    @torch.no_grad()
    def _merged(self) -> torch.Tensor:
        weight, place, first = self.weight.detach(), self.places[0], 0
        found = []
        for row, count in place.runs:
            own = slice(first, first + count)
            corner = Corner(f"{self.names[0]}.weight", row, place.columns[0])
            lora_A, lora_B = self.lora_A["0"].detach(), self.lora_B["0"].detach()[own]
            rows_OI = weight[own if self._is_in_order else self._rows_N[own]]
            rounding = self._rounding()
            found.append(
                merged(rows_OI, lora_B, lora_A, scale=self.scale, rounding=rounding, corner=corner)
            )
            first += count
        if self._is_in_order:
            rest = [weight[first:]] if first < len(weight) else []
            return found[0] if len(found) == 1 and not rest else torch.cat([*found, *rest])
        return weight.index_copy(0, self._rows_N, torch.cat(found))

    def put(self) -> None:
        """Let the module see the sum: what is in its `__dict__` hides its parameter."""
        self._module[0].__dict__[self._name] = self.sum()

    def take(self) -> None:
        """Let the module see its parameter again."""
        self._module[0].__dict__.pop(self._name, None)


class DenseAdapter(_Adapter):
    """Adapters of the HF linears in one dense Megatron linear.

    Args:
        linears: the HF linears with an adapter, all split alike, in the fused order.
        out_features: of the Megatron linear on this rank.
        dropout: the set's dropout.
        sequence_parallel: outside the linears this rank has its part of the sequence. Copies then
            get gradients of this part only.
    """

    def __init__(
        self,
        *,
        linears: Sequence[Linear],
        out_features: int,
        sequence_parallel: bool,
        lora: LoraConfig,
        dropout: Dropout,
        seed: int,
        device: torch.device,
    ) -> None:
        super().__init__(linears=linears, lora=lora, seed=seed, device=device)
        self._dropout = dropout
        self._group = parallel_state.get_tensor_model_parallel_group()
        self._is_copy = self.places[0].split is None
        self.row_parallel = self.places[0].split == "columns"
        # Column: h is the same on all ranks but each rank's gradient of it is partial. Row: h
        # itself is partial. Under sequence parallelism h is gathered and scattered, because the
        # rank is less than the hidden size. A copied linear takes each rank's input unchanged.
        if sequence_parallel:
            self._exchange = (
                reduce_scatter_to_sequence_parallel_region
                if self.row_parallel
                else gather_from_sequence_parallel_region
            )
        else:
            self._exchange = (
                reduce_from_tensor_model_parallel_region
                if self.row_parallel
                else copy_to_tensor_model_parallel_region
            )
        self._keys = [key_of(name) for name in self.names]
        self.out_features = out_features
        rows = [place.rows_N for place in self.places]
        self._groups = _num_groups(rows, out_features)
        self.register_buffer("rows_N", torch.cat(rows).to(device), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute scale * A x of all parts: [s, b, I local] -> [s, b, parts with an adapter * R].

        Under sequence parallelism s is this rank's part before a column-parallel linear, also
        after its fused norm, and after a row-parallel one.
        """
        if self._dropout.is_on:
            h = torch.cat(
                [
                    functional.linear(
                        self._dropout.dense(x, name_key=key, sharded=self.row_parallel),
                        self.lora_A[k].to(x.dtype),
                    )
                    for k, key in zip(self.lora_A, self._keys, strict=True)
                ],
                dim=-1,
            )
        else:
            lora_A = torch.cat([self.lora_A[k] for k in self.lora_A]).to(x.dtype)
            # torch multiplies a transposed [s, 1, I] row by row, with a copy of A for each.
            h = functional.linear(x.flatten(0, -2), lora_A).unflatten(0, x.shape[:-1])
        h = h if self._is_copy else self._exchange(h, group=self._group)
        return h * self.scale

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The linear's output with the adapters' added, [s, b, sum of O local]; written over `out`
        where nothing is compiled."""
        h, lora_B_OQ = self(x), self._packed_b(out.dtype)
        if torch.compiler.is_compiling():
            # The compiler cannot trace writing over a custom function's input, and plans the memory
            # itself.
            return products.added(out, functional.linear(h, lora_B_OQ))
        added: torch.Tensor = _AddProduct.apply(out, h, lora_B_OQ)
        return added

    def learn_from(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`out`, of a linear that has the adapters in its weight. A and B get the gradients of
        `add_to`; x gets them from the linear."""
        learnt: torch.Tensor = _Learn.apply(out, self(x.detach()), self._packed_b(out.dtype))
        return learnt

    def _packed_b(self, dtype: torch.dtype) -> torch.Tensor:
        """B of all parts, each in its columns, rows in the fused linear's order. [O local, Q]"""
        num = len(self.lora_B)
        parts = []
        for i, param in enumerate(self.lora_B.values()):
            lora_B_OR = param.to(dtype)
            rank = lora_B_OR.shape[1]
            parts.append(functional.pad(lora_B_OR, (i * rank, (num - 1 - i) * rank)))
        if self._groups is not None:
            groups = [t.unflatten(0, (self._groups, -1)) for t in parts]
            return torch.cat(groups, dim=1).flatten(0, 1)
        packed = torch.cat(parts)
        empty = packed.new_zeros(self.out_features, packed.shape[1])
        return empty.index_copy(0, self.rows_N, packed)  # type: ignore[arg-type]


def _num_groups(rows: Sequence[torch.Tensor], out_features: int) -> int | None:
    """Number of equal groups in which the parts alternate to fill the output: 1 if they follow each
    other, the number of query groups for q, k and v. None: they do neither."""
    breaks = int((rows[-1].diff() != 1).sum())
    groups = breaks + 1
    if any(len(r) % groups for r in rows):
        return None
    order = torch.cat([r.view(groups, -1) for r in rows], dim=1).flatten()
    return groups if torch.equal(order, torch.arange(out_features)) else None


class _Sum(torch.autograd.Function):
    """A merged weight, with the gradients of A and B."""

    @staticmethod
    def forward(
        ctx: Any,
        weight_OI: torch.Tensor,
        lora_A_RI: torch.Tensor,
        lora_B_NR: torch.Tensor,
        merge: Callable[[], torch.Tensor],
        scale: float,
        rows_N: torch.Tensor,
    ) -> torch.Tensor:
        """W [O, I]; B has rows `rows_N` of it."""
        ctx.save_for_backward(lora_A_RI, lora_B_NR, rows_N)
        ctx.scale = scale
        return merge()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of A and B."""
        lora_A_RI, lora_B_NR, rows_N = ctx.saved_tensors
        grad_NI = grads[0].index_select(0, rows_N) * ctx.scale
        grad_A = lora_B_NR.t().to(grad_NI.dtype) @ grad_NI
        grad_B = grad_NI @ lora_A_RI.t().to(grad_NI.dtype)
        found = (grad_A.to(lora_A_RI.dtype), grad_B.to(lora_B_NR.dtype))
        return None, *found, None, None, None


class _AddProduct(torch.autograd.Function):
    """Computes out + h B' in place of `out`.

    No linear keeps its output for its backward pass, so nothing else reads `out`. Autograd's
    version counter would detect a change of this.
    """

    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, h: torch.Tensor, lora_B_OQ: torch.Tensor
    ) -> torch.Tensor:
        """[..., O], [..., Q], [O, Q] -> [..., O]"""
        ctx.save_for_backward(h, lora_B_OQ)
        # An alias that is not a view: code compiled after it (SwiGLU) would be compiled again
        # for each shape of a view's base.
        result = out.data if out.is_contiguous() else out.contiguous()
        flat_TO, h_TQ = result.view(-1, out.shape[-1]), h.reshape(-1, h.shape[-1])
        products.add_product_(flat_TO, h_TQ, lora_B_OQ)
        torch.autograd.graph.increment_version(out)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of all three inputs."""
        h, lora_B_OQ = ctx.saved_tensors
        flat = grads[0].reshape(-1, grads[0].shape[-1])
        return grads[0], (flat @ lora_B_OQ).view_as(h), flat.t() @ h.reshape(-1, h.shape[-1])


class _Learn(_AddProduct):
    """The gradients of `_AddProduct`, whose product `out` has already."""

    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, h: torch.Tensor, lora_B_OQ: torch.Tensor
    ) -> torch.Tensor:
        """[..., O], [..., Q], [O, Q] -> [..., O]"""
        ctx.save_for_backward(h, lora_B_OQ)
        return out.view_as(out)
