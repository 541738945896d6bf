"""flash-linear-attention's functions for Megatron's gated delta net, in torch: on a CPU, and on
GPUs on which its kernels refuse (`providers`).

The gated delta rule (Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464) is Megatron's own in torch,
which refuses packs; here it runs once for each sequence.

Axes: T = tokens of the pack, C = channels, W = taps of the convolution, A = heads, D = their size.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch.nn import functional


def install() -> None:
    """Give Megatron's module the functions, as if flash-linear-attention were installed."""
    from megatron.core.ssm.gated_delta_net import common, gdn

    common.HAVE_FLA, common.l2norm = True, l2norm
    gdn.causal_conv1d, gdn.chunk_gated_delta_rule = causal_conv1d, chunk_gated_delta_rule


def _sequences(
    cu_seqlens: torch.Tensor | None, *tensors: torch.Tensor
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Cut [1, T, ...] into sequences."""
    if cu_seqlens is None:
        yield tensors
    else:
        for start, end in pairwise(cu_seqlens.tolist()):
            yield tuple(t[:, start:end] for t in tensors)


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """Divide by the norm of the last axis, with flash-linear-attention's epsilon; in fp32, rounded
    once."""
    wide = x.float()
    return (wide * torch.rsqrt((wide * wide).sum(dim=-1, keepdim=True) + 1e-6)).to(x.dtype)


def causal_conv1d(
    *,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    cu_seqlens: torch.Tensor | None,
    initial_state: None,
    output_final_state: bool,
) -> tuple[torch.Tensor, None]:
    """Convolve each channel over the tokens before and at each place, then SiLU; in fp32, rounded
    once.

    Args:
        x: [1, T, C].
        weight: [C, W].
        activation: "silu", also called "swish"; Megatron takes no other.
    """
    channels, taps = weight.shape
    outputs = []
    for (x_1TC,) in _sequences(cu_seqlens, x):
        y_1CT = functional.conv1d(
            functional.pad(x_1TC.float().transpose(1, 2), (taps - 1, 0)),
            weight[:, None].float(),
            None if bias is None else bias.float(),
            groups=channels,
        )
        outputs.append(functional.silu(y_1CT).transpose(1, 2).to(x.dtype))
    return torch.cat(outputs, dim=1), None


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    initial_state: None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[torch.Tensor, None]:
    """The gated delta rule within each sequence, [1, T, A, D] -> [1, T, A, D]."""
    from megatron.core.ssm.gated_delta_net.common import torch_chunk_gated_delta_rule

    outputs = [
        torch_chunk_gated_delta_rule(*qkv, g=g_1TA, beta=beta_1TA)[0]
        for *qkv, g_1TA, beta_1TA in _sequences(cu_seqlens, q, k, v, g, beta)
    ]
    return torch.cat(outputs, dim=1), None
