"""Adds an adapter's product to a linear's output without losing it.

A linear in bf16 rounds its output. To nearest, what is added afterwards and is less than half a
unit in the last place vanishes: the sum rounds back. Most of a small update would be lost so in
every layer of the trainer's forward pass, while the served weights have it. So the sum of both is
computed in fp32 and rounded stochastically (`rounding`), which keeps every addend in the mean. The
thresholds depend on row and column alone, so a pass gives the same numbers again.

One fp32 sum before the only rounding would be quieter, but no library has it at the price of this:
cuBLAS 13 rounds a product to bf16 before it adds `beta * C` (measured on an H200: of an addend, the
same share arrives as with a rounding between). With an output in fp32 a product takes a fifth
longer.

Axes: T = tokens or rows, O = out features, Q = columns of the adapters' hidden layer, E = experts.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from trainer_node.adapters.rounding import Corner, Rounding, rounded, thresholds

WORD = Corner("activations").word(Rounding(seed=0))
"""Chooses the thresholds of activations."""


def added(out: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    """out + product, the sum rounded stochastically to out's dtype; differentiable. Other dtypes
    than bf16 round to nearest."""
    nearest = out + product.to(out.dtype)
    if out.dtype is not torch.bfloat16:
        return nearest
    with torch.no_grad():
        total = (out.float() + product.float()).view(-1, out.shape[-1])
        h16 = thresholds(WORD, *total.shape, device=out.device)
        unbiased = rounded(total, nearest.dtype, h16).view(nearest.shape)
        correction = unbiased - nearest  # exact: neighbours
    return nearest + correction


def add_product_(out_TO: torch.Tensor, h_TQ: torch.Tensor, lora_B_OQ: torch.Tensor) -> None:
    """`added` of h B', in place."""
    if out_TO.dtype is not torch.bfloat16:
        out_TO.addmm_(h_TQ, lora_B_OQ.t())
    elif out_TO.is_cuda:
        from trainer_node.adapters import product_kernels

        product_kernels.add_product_(out_TO, h_TQ.contiguous(), lora_B_OQ[None], word=WORD)
    else:
        out_TO.copy_(added(out_TO, functional.linear(h_TQ.float(), lora_B_OQ.float())))
