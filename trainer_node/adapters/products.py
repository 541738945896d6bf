"""Adds an adapter's product to a linear's output without losing it.

A linear in bf16 rounds its output. With rounding to nearest, an addend of less than half a unit in
the last place vanishes: the sum rounds back. Every layer of the trainer's forward pass would lose
most of a small update, while the served weights have it. So the sum of both is computed in fp32 and
rounded stochastically (`rounding`), which keeps every addend in the mean.

The threshold of an element is a hash of the sum's own bits and of its column. A token's numbers
therefore do not depend on its place in a pack, on the cut into packs, or on the ranks, and the
errors of two layers are unrelated.

A single rounding of one fp32 sum would be less noisy, but no library offers it at this price.
cuBLAS 13 rounds a product to bf16 before it adds `beta * C`: on an H200, the same share of an
addend survived as with a separate rounding. With an output in fp32 a product takes a fifth longer.

Axes: T = tokens or rows, O = out features, Q = columns of the adapters' hidden layer, E = experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from trainer_node.adapters.rounding import content_thresholds, rounded

CHUNK_ELEMENTS = 1 << 24
"""Elements to add at a time on a GPU. This bounds the memory."""


def added(out: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    """out + product [..., O], the sum rounded stochastically to out's dtype; differentiable. Other
    dtypes than bf16 round to nearest."""
    if out.dtype is not torch.bfloat16:
        return out + product.to(out.dtype)
    if torch.compiler.is_compiling():
        nearest = out + product.to(out.dtype)
        unbiased = sum_of(out, product)
        # Exact: neighbours. Infinite ones have no difference.
        return nearest + torch.where(nearest.isfinite(), unbiased - nearest, 0.0).detach()
    found: torch.Tensor = _Added.apply(out, product)
    return found


def learnt(out: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    """`out` itself, with the gradients of `added`."""
    found: torch.Tensor = _Learnt.apply(out, product)
    return found


@torch.no_grad()
def sum_of(out: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    """`added` of bf16, without gradients."""
    total = (out.float() + product.float()).reshape(-1, out.shape[-1])
    return rounded(total, out.dtype, content_thresholds(total)).view(out.shape)


class _Added(torch.autograd.Function):
    """`sum_of`, a chunk of rows at a time, with the gradients of both."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        """[..., O], [..., O] -> [..., O]"""
        ctx.dtype = product.dtype
        result = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        rows = max(1, CHUNK_ELEMENTS // out.shape[-1])
        flat = (t.reshape(-1, out.shape[-1]).split(rows) for t in (result, out, product))
        for into, one, other in zip(*flat, strict=True):
            into.copy_(sum_of(one, other))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of both."""
        return grads[0], grads[0].to(ctx.dtype)


class _Learnt(torch.autograd.Function):
    """`learnt`."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        """[..., O], [..., O] -> [..., O]"""
        ctx.dtype = product.dtype
        return out.view_as(out)

    backward = _Added.backward


def add_product_(out_TO: torch.Tensor, h_TQ: torch.Tensor, lora_B_OQ: torch.Tensor) -> None:
    """`added` of h B', in place."""
    if out_TO.dtype is not torch.bfloat16:
        out_TO.addmm_(h_TQ, lora_B_OQ.t())
    elif out_TO.is_cuda:
        from trainer_node.adapters import product_kernels

        one = h_TQ.contiguous(), lora_B_OQ[None]
        product_kernels.add_product_(out_TO, *one, stochastic=True)
    else:
        out_TO.copy_(sum_of(out_TO, functional.linear(h_TQ.float(), lora_B_OQ.float())))
