"""bf16 weights to e4m3 and fp32 scales, bit for bit as vLLM's online quantisation makes them.

    per_tensor(groups_GN)     one scale for each group, such as q, k and v end to end
    per_channel(rows_OI)      one scale for each row, which is an output channel
    per_block(weights_TOI)    one scale for each block of 128 x 128

A scale is the largest magnitude divided by 448, the largest e4m3. vLLM multiplies by the scale's
reciprocal, or divides by the scale for rows, clamps, and rounds to nearest even. So do these. A
server proves at its start that its own kernels give the same bytes (`inference_node.fp8`).

Axes: G = groups, N = elements of a group, T = tensors of one shape, O = out features, I = in
features.
"""

from __future__ import annotations

import torch

from orchestrator.protocol.messages import FP8_BLOCK

E4M3_MAX = 448.0
SCRATCH_ELEMENTS = 1 << 26
"""Elements that are held as fp32 at a time, 256 MiB."""


@torch.no_grad()
def per_tensor(groups_GN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [G, N], fp32 scales [G])."""
    low_G, high_G = groups_GN.aminmax(dim=1)
    largest_G = torch.maximum(low_G.abs(), high_G.abs()).float()
    # A tensor divides truly; by a number, torch multiplies by its reciprocal on CUDA.
    scales_G = largest_G / torch.tensor(E4M3_MAX, device=groups_GN.device)
    inverse_G1 = scales_G.reciprocal()[:, None]
    out_GN = torch.empty_like(groups_GN, dtype=torch.float8_e4m3fn)
    rows = max(1, SCRATCH_ELEMENTS // groups_GN.shape[1])
    for g in range(0, len(groups_GN), rows):
        for n in range(0, groups_GN.shape[1], SCRATCH_ELEMENTS):
            piece = (slice(g, g + rows), slice(n, n + SCRATCH_ELEMENTS))
            out_GN[piece] = _round(groups_GN[piece].float() * inverse_G1[g : g + rows])
    return out_GN, scales_G


def _round(values: torch.Tensor) -> torch.Tensor:
    """Clamped and rounded. The kernels' fmin takes 448 for NaN, which is 0 / 0 in a zero tensor."""
    values.nan_to_num_(nan=E4M3_MAX, posinf=E4M3_MAX, neginf=-E4M3_MAX)
    return values.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


@torch.no_grad()
def per_channel(rows_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [O, I], fp32 scales [O, 1])."""
    low_O1, high_O1 = rows_OI.aminmax(dim=1, keepdim=True)
    limit = torch.tensor(E4M3_MAX, device=rows_OI.device)
    scales_O1 = torch.maximum(low_O1.abs(), high_O1.abs()).float() / limit
    scales_O1 = scales_O1.clamp_min(1.0 / (limit * 512))
    out_OI = torch.empty_like(rows_OI, dtype=torch.float8_e4m3fn)
    step = max(1, SCRATCH_ELEMENTS // rows_OI.shape[1])
    for o in range(0, len(rows_OI), step):
        out_OI[o : o + step] = _round(rows_OI[o : o + step] / scales_O1[o : o + step])
    return out_OI, scales_O1


@torch.no_grad()
def per_block(weights_TOI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [T, O, I], fp32 scales [T, blocks of O, blocks of I])."""
    count, height, width = weights_TOI.shape
    rows, columns = -(-height // FP8_BLOCK), -(-width // FP8_BLOCK)
    out_TOI = torch.empty_like(weights_TOI, dtype=torch.float8_e4m3fn)
    scales_TRC = weights_TOI.new_empty(count, rows, columns, dtype=torch.float32)
    step = max(1, SCRATCH_ELEMENTS // (rows * columns * FP8_BLOCK * FP8_BLOCK))
    for t in range(0, count, step):
        part = weights_TOI[t : t + step]
        padding = (0, columns * FP8_BLOCK - width, 0, rows * FP8_BLOCK - height)
        whole = torch.nn.functional.pad(part, padding) if any(padding) else part
        blocks = whole.reshape(len(part), rows, FP8_BLOCK, columns, FP8_BLOCK)
        largest = blocks.abs().float().amax(dim=(2, 4), keepdim=True).clamp(1e-4)
        scales = largest / E4M3_MAX
        rounded = (blocks * (1.0 / scales)).to(torch.float8_e4m3fn).view(whole.shape)
        out_TOI[t : t + step] = rounded[:, :height, :width]
        scales_TRC[t : t + step] = scales.view(len(part), rows, columns)
    return out_TOI, scales_TRC
