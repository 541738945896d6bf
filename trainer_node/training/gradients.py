"""Adds up the gradients of all ranks at a step, and measures them.

Tensor ranks have copies or pieces of a gradient, as in Megatron-Core 0.19's
`_allreduce_non_tensor_model_parallel_grads`. A column- or row-parallel weight is split. The norms
and the router are copied. Their gradients are complete on each rank, because the column-parallel
linears after them sum their inputs' gradients. The q and k norms see only this rank's heads. With
sequence parallelism every copy sees only this rank's positions. In both of these cases the
gradients are parts and must be added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from trainer_node.layout.pieces import TrainedParam
from trainer_node.ranks.topology import tensor_group

BUCKET_ELEMENTS = 1 << 26
"""Elements to reduce or broadcast in one message: 256 MiB of scratch in fp32."""


def buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield consecutive tensors of at most `BUCKET_ELEMENTS`, unless a single one is larger."""
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

    Experts see every token of their expert-data-parallel group. Without sequence parallelism each
    token is there once per tensor rank, hence the division by the tensor size. A parameter that
    expert-tensor ranks copy has the gradient of only their part of the expert's features.
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
