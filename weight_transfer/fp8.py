"""bf16 weights to e4m3 and fp32 scales, bit for bit as vLLM's online quantisation makes them.

    per_tensor(groups_GN)     one scale for each group, such as q, k and v end to end
    per_channel(rows_OI)      one scale for each row, which is an output channel
    per_block(weights_TOI)    one scale for each block of 128 x 128

A scale is the largest magnitude divided by 448, the largest e4m3. vLLM multiplies by the scale's
reciprocal, or divides by the scale for rows, clamps, and rounds to nearest even. So do these. No
value exceeds 448 by more than rounding, so none needs the clamp. In a group of zeros, 0 / 0 would
be NaN; these give 0. A server proves at its start that its own kernels give the same bytes
(`inference_node.worker.fp8`).

vLLM compiles its quantiser of blocks, so on CUDA a Triton kernel follows it
(`weight_transfer.fp8_kernels`). Elsewhere on CUDA each pass reads the weights once: one for the
scales, one to round. A trainer of one rank needs none of these there: it quantises while it merges
(`trainer_node.export.fp8_fused`).

Axes: G = groups, N = elements of a group, T = tensors of one shape, O = out features, I = in
features.
"""

from __future__ import annotations

import math

import torch

from orchestrator.protocol.messages import FP8_BLOCK

E4M3_MAX = 448.0


@torch.no_grad()
def per_tensor(groups_GN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [G, N], fp32 scales [G])."""
    scales_G, inverse_G = scales_of("per_tensor", largest(groups_GN))
    out_GN = torch.empty_like(groups_GN, dtype=torch.float8_e4m3fn)
    rounded("per_tensor", groups_GN, inverse_G[:, None], out_GN)
    return out_GN, scales_G


@torch.no_grad()
def per_channel(rows_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [O, I], fp32 scales [O, 1])."""
    scales_O1 = scales_of("per_channel", largest(rows_OI))[0][:, None]
    out_OI = torch.empty_like(rows_OI, dtype=torch.float8_e4m3fn)
    rounded("per_channel", rows_OI, scales_O1, out_OI)
    return out_OI, scales_O1


@torch.no_grad()
def per_block(weights_TOI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [T, O, I], fp32 scales [T, blocks of O, blocks of I])."""
    if weights_TOI.is_cuda:
        from weight_transfer import fp8_kernels

        return fp8_kernels.per_block(weights_TOI, reciprocal=True, fast=True)
    return per_block_by_torch(weights_TOI)


@torch.no_grad()
def per_block_by_torch(weights_TOI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with torch's divisions: on CUDA the second one differs from vLLM's."""
    count, height, width = weights_TOI.shape
    rows, columns = -(-height // FP8_BLOCK), -(-width // FP8_BLOCK)
    padding = (0, columns * FP8_BLOCK - width, 0, rows * FP8_BLOCK - height)
    whole = torch.nn.functional.pad(weights_TOI, padding) if any(padding) else weights_TOI
    blocks = whole.reshape(count, rows, FP8_BLOCK, columns, FP8_BLOCK)
    out = torch.empty_like(blocks, dtype=torch.float8_e4m3fn)
    largest_of_blocks = torch.linalg.vector_norm(
        blocks, ord=math.inf, dim=(2, 4), keepdim=True, dtype=torch.float32
    )
    scales, inverse = _scales_of_blocks(largest_of_blocks)
    rounded("per_block", blocks, inverse, out)
    out_TOI = out.view(whole.shape)[:, :height, :width].contiguous()
    return out_TOI, scales.view(count, rows, columns)


# ------------------------------------------------------------ where several ranks have a group


@torch.no_grad()
def scales_of(kind: str, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of groups, rows or blocks with these largest magnitudes, in fp32, and what
    `rounded` takes."""
    if kind == "per_block":
        if largest.is_cuda:
            from weight_transfer import fp8_kernels

            return fp8_kernels.scales_of_blocks(largest, reciprocal=True, fast=True)
        return _scales_of_blocks(largest)
    limit = torch.tensor(E4M3_MAX, device=largest.device)  # by a number, CUDA would multiply
    scales = largest / limit
    if kind == "per_channel":
        scales.clamp_min_(1.0 / (limit * 512))
        return scales, scales
    return scales, scales.reciprocal().masked_fill_(scales == 0, 0.0)


@torch.no_grad()
def rounded(kind: str, values: torch.Tensor, factors: torch.Tensor, out: torch.Tensor) -> None:
    """Quantise values to e4m3 by the factors of `scales_of`, which have as many dimensions."""
    (torch.div if kind == "per_channel" else torch.mul)(values, factors, out=out)


def _scales_of_blocks(largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = largest.clamp(1e-4) / E4M3_MAX  # by a number, as vLLM's function does
    return scales, 1.0 / scales


def largest(values_NI: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each row, in fp32 [N]."""
    low_N, high_N = values_NI.aminmax(dim=1)
    return torch.maximum(low_N.abs(), high_N.abs()).float()
