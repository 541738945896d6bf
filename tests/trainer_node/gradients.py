"""Whole gradients and weights of a trainer that may run on several ranks, by HF name on rank 0.

Everything passes through rank 0's memory. Each function is a collective, and returns an empty dict
on the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from trainer_node.ranks import objects
from trainer_node.training.gradients import finalize_gradients
from trainer_node.training.trainer import Trainer


def take_gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The pending gradient as `optim_step` makes it (summed, divided once, not clipped); nothing is
    pending afterwards.

    Adapters have PEFT's names, `lora_A` and `lora_B` after the module's; experts come one by one.
    """
    assert trainer.pending.num_batches
    try:
        finalize(trainer)
        return _whole(trainer, [p.grad for p in trainer.model.params])
    finally:
        trainer.drop_pending()


def finalize(trainer: Trainer) -> None:
    """Reduce and divide the pending gradient."""
    sequence_parallel = bool(trainer.model.provider.sequence_parallel)
    denominator = trainer.pending.denominator
    finalize_gradients(
        trainer.model.params, denominator=denominator, sequence_parallel=sequence_parallel
    )


def trained_tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    """What trains, under the names of `take_gradients`."""
    return _whole(trainer, [p.param.detach() for p in trainer.model.params])


def _whole(trainer: Trainer, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in _gather(trainer, tensors).items():
        before, stacked, rest = name.partition(".experts.")
        if stacked and tensor.dim() == 3:
            found.update({f"{before}.experts.{e}.{rest}": one for e, one in enumerate(tensor)})
        else:
            found[name] = tensor
    return found


def _gather(trainer: Trainer, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors by their pieces' keys, from one tensor for each parameter."""
    group = trainer.model.control_group
    mine = [
        (piece, piece.read(tensor).cpu().contiguous())
        for p, tensor in zip(trainer.model.params, tensors, strict=True)
        if p.counted and p.group.rank() == 0
        for piece in p.pieces
    ]
    heads = [
        (p.key, p.shape, p.offsets, box.shape, str(box.dtype).removeprefix("torch."))
        for p, box in mine
    ]
    everyones = objects.all_gather(heads, group=group)
    whole: dict[str, torch.Tensor] = {}
    if dist.get_rank() != 0:
        for _, box in mine:
            dist.send(box, dst=0, group=group)
        return whole
    for source, parts in enumerate(everyones):
        for n, (key, shape, offsets, sizes, dtype) in enumerate(parts):
            box = mine[n][1] if source == 0 else torch.empty(sizes, dtype=getattr(torch, dtype))
            if source:
                dist.recv(box, src=source, group=group)
            # A box that no rank brings stays NaN.
            target = whole.setdefault(key, torch.full(shape, torch.nan, dtype=box.dtype))
            target[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] = box
    return whole
