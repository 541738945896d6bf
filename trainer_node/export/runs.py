"""Where the adapted elements of a rank are: runs of rows of its Megatron parameters.

A fused `linear_qkv` has a run for each query group of q, k and v; a grouped linear has at least one
for each expert. `wire_export.Merger` merges a run as publications do (`Run.member`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state

from trainer_node.adapters.dense_lora import WeightAdapter
from trainer_node.adapters.linears import Place, stack_of
from trainer_node.adapters.lora import Adapter, AdapterSet, ExpertAdapter
from trainer_node.adapters.rounding import Corner
from trainer_node.export.sources import Delta, Member, Source
from trainer_node.ranks.topology import tensor_group
from weight_transfer.boxes import Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Consecutive rows of a Megatron parameter that are consecutive rows of an HF linear."""

    weight: torch.Tensor
    delta: Delta
    """The adapter of the whole linear, uncut."""
    corner: Corner
    """Where the run begins in its HF tensor."""
    first: int
    """Its first row in the parameter."""
    first_B: int
    """Its first row in the adapter's B."""
    rows: int

    @property
    def columns(self) -> int:
        """Of the parameter."""
        return self.weight.shape[1]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.columns

    def cut(self, first: int, rows: int) -> Run:
        """At most `rows` rows from `first` on."""
        turned, corner = self.delta.transposed, self.corner
        return replace(
            self,
            corner=Corner(
                corner.name,
                corner.row + (0 if turned else first),
                corner.column + (first if turned else 0),
            ),
            first=self.first + first,
            first_B=self.first_B + first,
            rows=min(rows, self.rows - first),
        )

    @property
    def source(self) -> Source:
        """The run as the HF tensor has it: of a transposed one, its columns."""
        step, columns, rows = self.weight.stride(0), self.columns, self.rows
        turned = self.delta.transposed
        return Source(
            param=self.weight,
            offset=self.first * step,
            groups=1,
            rows=columns if turned else rows,
            columns=rows if turned else columns,
            group_stride=0,
            row_stride=1 if turned else step,
            shape=(columns, rows) if turned else (rows, columns),
            column_stride=step if turned else 1,
        )

    def weights(self) -> torch.Tensor:
        """The run as the HF tensor has it [H, W]."""
        source = self.source
        return source.view().reshape(source.shape)

    def member(self, offset: int) -> Member:
        """The run in a chunk's buffer, from byte `offset` on, its HF rows end to end."""
        source = self.source
        return Member(
            source=source,
            delta=self.cut_delta,
            offset=offset,
            row_stride=source.columns,
            corner=self.corner,
        )

    @property
    def cut_delta(self) -> Delta:
        """The adapter, cut to the run."""
        box = Box(self.first_B, self.rows, 0, self.columns)
        if self.delta.transposed:
            box = Box(0, self.columns, self.first_B, self.rows)
        return replace(self.delta, box=box)


def runs_of(adapters: AdapterSet) -> Iterator[Run]:
    """Every adapted element of the model is in a run of one rank; of copies, the first rank has
    it."""
    for adapter in adapters.adapters:
        is_expert = isinstance(adapter, ExpertAdapter)
        group = (
            parallel_state.get_expert_data_parallel_group()
            if is_expert
            else parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        if group.rank():
            continue
        is_first = tensor_group(expert=is_expert).rank() == 0
        for i, place in enumerate(adapter.places):
            if place.split is not None or is_first:
                yield from _runs(adapters, adapter, i)


def runs_in(adapters: AdapterSet, adapter: Adapter | ExpertAdapter) -> Iterator[Run]:
    """Every element of this rank that the adapter adds to."""
    for i in range(len(adapter.places)):
        yield from _runs(adapters, adapter, i)


def _runs(adapters: AdapterSet, adapter: Adapter | ExpertAdapter, i: int) -> Iterator[Run]:
    place = adapter.places[i]
    if adapter.names[i] is None:
        return
    spans = list(_spans(place))
    for weight, delta, corner in _linears(adapter, i, adapters):
        if not is_readable(weight):
            continue
        for first, first_hf, first_B, rows in spans:
            row, column = first_hf, place.columns[0]
            if delta.transposed:
                row, column = column, row
            yield Run(
                weight=weight,
                delta=delta,
                corner=Corner(corner.name, corner.row + row, column),
                first=first,
                first_B=first_B,
                rows=rows,
            )


def is_readable(weight: torch.Tensor) -> bool:
    """Whether rows of a weight are runs of memory. If not, only Bridge can read it."""
    return type(weight.data) is torch.Tensor and weight.stride(1) == 1


def _spans(place: Place) -> Iterator[tuple[int, int, int, int]]:
    """(first row of the parameter, of the HF linear, of B; rows) of each run of a place."""
    if not len(place.rows_N):
        return
    hf_N = torch.cat([torch.arange(first, first + count) for first, count in place.runs])
    is_break = (place.rows_N.diff() != 1) | (hf_N.diff() != 1)
    begins = [0, *(is_break.nonzero().flatten() + 1).tolist(), len(hf_N)]
    for begin, end in itertools.pairwise(begins):
        yield int(place.rows_N[begin]), int(hf_N[begin]), begin, end - begin


def _linears(
    adapter: Adapter | ExpertAdapter, i: int, adapters: AdapterSet
) -> Iterator[tuple[torch.Tensor, Delta, Corner]]:
    """(parameter, adapter, corner of the HF matrix) of an adapter's HF linear `i`: of each local
    expert."""
    names, lora_A, lora_B = adapter.names[i], adapter.lora_A[str(i)], adapter.lora_B[str(i)]
    assert names is not None
    weights = weights_of(adapters, adapter)
    if not isinstance(adapter, ExpertAdapter):
        delta = Delta(lora_A=lora_A, lora_B=lora_B, expert=None)
        yield weights[0], delta, Corner(f"{names}.weight")
        return
    stack, first = stack_of(names[0])
    turned = stack in adapters.transposed
    height = adapter.places[i].shape[1 if turned else 0]
    for e, (name, weight) in enumerate(zip(names, weights, strict=True)):
        corner = Corner(f"{name}.weight")
        if stack in adapters.stacked:
            corner = Corner(stack, (first + e) * height)
        delta = Delta(lora_A=lora_A, lora_B=lora_B, expert=e, transposed=turned)
        yield weight, delta, corner


def weights_of(adapters: AdapterSet, adapter: Adapter | ExpertAdapter) -> list[torch.Tensor]:
    """The Megatron parameters that an adapter adds to: of a grouped linear, each local expert's."""
    if isinstance(adapter, WeightAdapter):
        return [adapter.weight]
    module: Any = adapters.module_of[adapter]
    if isinstance(adapter, ExpertAdapter):
        return [getattr(module, f"weight{e}") for e in range(adapter.num_experts)]
    return [module.weight]
