"""Reads and gathers the whole model's adapters, whose pieces the ranks hold.

`read_on_all_ranks` reads PEFT's files on every rank: all ranks get it, or all refuse it.
`gather_stacks` and `gather_deltas` collect the live adapters on rank 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer_node.adapters.linears import expert_name
from trainer_node.adapters.lora import LocalMatrix
from trainer_node.adapters.merge import LoraDelta
from trainer_node.adapters.peft_io import AdapterError, Key, Stack, read_adapter
from trainer_node.layout.pieces import Piece
from trainer_node.model.model import Model
from trainer_node.ranks import objects
from trainer_node.ranks.lockstep import Failure, agree


def expected_tensors(matrices: Iterable[LocalMatrix], *, group: Any) -> dict[Key, tuple[int, ...]]:
    """Every matrix of a whole model's adapters and its whole shape. A collective."""
    mine = [(m.module, m.matrix, m.whole_shape) for m in matrices]
    everyones = objects.all_gather(mine, group=group)
    return {(name, matrix): shape for one in everyones for name, matrix, shape in one}


def read_on_all_ranks(model: Model, folder: Path) -> dict[Key, torch.Tensor]:
    """`read_adapter` on every rank; if one refuses, all do. A collective.

    Raises:
        AdapterError: on every rank, with the first failed rank's message.
    """
    expected = expected_tensors(model.adapters.local_matrices(), group=model.control_group)
    with agree(model.control_group, partial(_refusal, folder)):
        return read_adapter(
            folder,
            lora=model.config.lora,
            expected=expected,
            stacked=model.adapters.stacked,
            base=model.checkpoint.state,
        )


def _refusal(folder: Path, failures: Sequence[Failure], _: Exception | None) -> AdapterError:
    first = failures[0]
    if first.kind == AdapterError.__name__:
        return AdapterError(first.text)
    return AdapterError(f"the adapter in {folder} cannot be read: {first}")


@torch.no_grad()
def gather_stacks(model: Model, *, group: Any) -> list[Stack]:
    """Return the whole model's adapters on rank 0, and an empty list elsewhere.

    Rank 0's own tensors are not copied. A collective with one message from each rank.

    Args:
        group: its timeout limits the wait for a rank; None: the default group.
    """
    mine = [
        (piece, piece.read(p.param))
        for p in model.params
        if p.counted and p.group.rank() == 0 and not p.is_value
        for piece in p.pieces
    ]
    plans = objects.all_gather(
        [(asdict(replace(piece, place=None)), t.shape) for piece, t in mine], group=group
    )
    if dist.get_rank() != 0:
        if mine:
            dist.send(torch.cat([t.reshape(-1) for _, t in mine]), dst=0)
        return []
    for source, plan in enumerate(plans):
        if source and plan:
            sizes = [math.prod(shape) for _, shape in plan]
            flat = torch.empty(sum(sizes), device=model.device)
            dist.recv(flat, src=source)
            mine += [
                (Piece(**piece), t.view(shape))
                for (piece, shape), t in zip(plan, flat.split(sizes), strict=True)
            ]
    by_key: dict[str, list[tuple[Piece, torch.Tensor]]] = defaultdict(list)
    for piece, tensor in mine:
        by_key[piece.key].append((piece, tensor))
    return [_stack(key, pieces, model.adapters.stacked) for key, pieces in by_key.items()]


def gather_deltas(model: Model) -> dict[str, LoraDelta]:
    """The live adapters of the whole model on rank 0, by HF module; empty elsewhere. A collective.

    With one rank they are views of the parameters: use them before the next optimizer step.
    """
    whole: dict[Key, torch.Tensor] = {}
    transposed: set[str] = set()
    if not model.trains_all:
        transposed = set().union(
            *objects.all_gather(sorted(model.adapters.transposed), group=model.control_group)
        )
    for stack in [] if model.trains_all else gather_stacks(model, group=None):
        flat = [tensor.reshape(-1) for _, tensor in stack.pieces]
        matrices = flat[0] if len(flat) == 1 else torch.cat(flat)
        if stack.tensor is not None:
            whole[stack.tensor, stack.matrix] = matrices.view(-1, *stack.shape)
            continue
        for name, matrix in zip(stack.names, matrices.view(-1, *stack.shape), strict=True):
            whole[name, stack.matrix] = matrix
    return {
        name: LoraDelta(lora_A_RI=matrix, lora_B_OR=whole[name, "B"], transposed=name in transposed)
        for (name, kind), matrix in whole.items()
        if kind == "A"
    }


def _stack(
    key: str, pieces: Sequence[tuple[Piece, torch.Tensor]], stacked: Collection[str]
) -> Stack:
    shape = pieces[0][0].shape
    module, _, matrix = key.rpartition(".lora_")
    if all(tuple(t.shape[1:]) == shape[1:] for _, t in pieces):
        row = math.prod(shape[1:])
        parts = tuple(
            sorted(
                ((piece.offsets[0] * row, t.contiguous()) for piece, t in pieces),
                key=lambda x: x[0],
            )
        )
    else:  # cut along the columns
        whole = pieces[0][1].new_empty(shape)
        for piece, t in pieces:
            whole[tuple(slice(o, o + n) for o, n in zip(piece.offsets, t.shape, strict=True))] = t
        parts = ((0, whole),)
    if len(shape) == 2:
        return Stack(names=(module,), matrix=matrix, shape=shape, pieces=parts)
    return Stack(
        names=tuple(expert_name(module, e) for e in range(shape[0])),
        matrix=matrix,
        shape=shape[1:],
        pieces=parts,
        tensor=module if module in stacked else None,
    )
