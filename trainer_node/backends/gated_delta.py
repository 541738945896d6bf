"""flash-linear-attention's functions for Megatron's gated delta net, in torch: on a CPU, and on
GPUs on which its kernels refuse (`providers`).

The gated delta rule (Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464) keeps a matrix S for each
head. Each token forgets some of it and corrects what S says of the token's key:

    S <- exp(g) S + beta k (v - exp(g) S' k)'        o = S' q / sqrt(D)

A chunk of tokens is computed at once: its corrections solve a triangular system, which needs only
keys. Chunks of all sequences go through every product but the last few together. Those few go from
chunk to chunk, for all sequences at once.

Axes: T = tokens of the pack, C = channels, A = heads, D = their size, N = chunks, L = tokens of a
chunk, S = sequences.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

CHUNK = 64
"""Tokens, as in flash-linear-attention."""


def install() -> None:
    """Give Megatron's module the functions, as if flash-linear-attention were installed."""
    _give(l2norm, causal_conv1d, chunk_gated_delta_rule)


def use_kernels() -> None:
    """Give Megatron's module the functions of flash-linear-attention (see `megatron_import`). Where
    its kernels cannot train, the rule itself runs in torch. If the package is not installed,
    Megatron's error names it."""
    if importlib.util.find_spec("fla") is None:
        return
    from fla.modules import convolution
    from fla.modules import l2norm as norm
    from fla.ops import gated_delta_rule as theirs

    rule = theirs.chunk_gated_delta_rule if kernels_obstacle() is None else chunk_gated_delta_rule
    _give(norm.l2norm, convolution.causal_conv1d, rule)


def _give(norm: Any, convolution: Any, rule: Any) -> None:
    from megatron.core.ssm.gated_delta_net import common, gdn

    common.HAVE_FLA, common.l2norm = True, norm
    gdn.causal_conv1d, gdn.chunk_gated_delta_rule = convolution, rule


def kernels_obstacle() -> str | None:
    """flash-linear-attention has no backward pass of the rule on Hopper GPUs without tilelang,
    which compiles with nvcc, and with Triton from 3.4 up to 3.7.1, which miscompiles it."""
    if importlib.util.find_spec("fla") is None:
        return None
    from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1

    if not IS_NVIDIA_HOPPER or not TRITON_ABOVE_3_4_0 or TRITON_ABOVE_3_7_1 or _has_tilelang():
        return None
    return (
        "runs in torch, four times slower than flash-linear-attention's kernels; these need "
        "tilelang with CUDA's nvcc, or Triton 3.7.1, on this GPU"
    )


def _has_tilelang() -> bool:
    if importlib.util.find_spec("tilelang") is None:
        return False
    from tilelang.env import CUDA_HOME

    return (Path(CUDA_HOME) / "bin" / "nvcc").exists()


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
    """Convolve each channel over the tokens before and at each place of a sequence, then SiLU; in
    fp32, rounded once.

    Args:
        x: [1, T, C].
        weight: [C, taps].
        activation: "silu", also called "swish"; Megatron takes no other.
    """
    places_T = torch.arange(x.shape[1], device=x.device)
    if cu_seqlens is not None:
        starts_S = cu_seqlens[:-1].long()
        places_T = places_T - starts_S[torch.bucketize(places_T, starts_S, right=True) - 1]

    def convolved(
        x_1TC: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        wide_1TC, taps = x_1TC.float(), weight.shape[1]
        y_1TC = wide_1TC * weight[:, -1].float()
        for back in range(1, taps):
            earlier_1TC = functional.pad(wide_1TC, (0, 0, back, 0))[:, : x_1TC.shape[1]]
            earlier_1TC = earlier_1TC.masked_fill((places_T < back)[:, None], 0)
            y_1TC = y_1TC + earlier_1TC * weight[:, taps - 1 - back].float()
        if bias is not None:
            y_1TC = y_1TC + bias.float()
        return functional.silu(y_1TC).to(x_1TC.dtype)

    return _made_again(convolved, x, weight, bias), None


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
    """The gated delta rule within each sequence, [1, T, A, D] -> [1, T, A, D]; in fp32, rounded
    once.

    Args:
        q, k: [1, T, A, D], with norms of 1.
        g: [1, T, A], the logarithm of what is kept.
        beta: [1, T, A], how far S is corrected.
    """
    lengths = [q.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    return _made_again(_delta_rule, q, k, v, g, beta, _Chunks.of(tuple(lengths), q.device)), None


def _made_again(function: Callable[..., torch.Tensor], *inputs: Any) -> torch.Tensor:
    """The function's result; its steps, in fp32, are made again in the backward pass instead of
    kept."""
    result: torch.Tensor = checkpoint(
        function, *inputs, use_reentrant=False, preserve_rng_state=False
    )
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunks:
    """Where tokens are: the first chunks of all sequences come first, then their second ones, and
    so on, so that one step's chunks are adjacent. Sequences are in descending order of length, so
    that those that continue come first."""

    token_NL: torch.Tensor
    """Each place's token; T where a sequence has ended."""
    place_T: torch.Tensor
    """Each token's place in [N * L]."""
    active: tuple[int, ...]
    """How many sequences each step has."""

    @staticmethod
    @functools.lru_cache(maxsize=4)
    def of(lengths: tuple[int, ...], device: torch.device) -> _Chunks:
        """From each sequence's tokens; all layers share a pack's."""
        total, starts = sum(lengths), torch.tensor([0, *lengths]).cumsum(0)
        order = sorted(range(len(lengths)), key=lambda s: -lengths[s])
        active = [
            sum(n > first for n in lengths) for first in range(0, max(lengths, default=0), CHUNK)
        ]
        token_NL = torch.full((sum(active), CHUNK), total)
        chunk = 0
        for step, count in enumerate(active):
            for s in order[:count]:
                first = int(starts[s]) + step * CHUNK
                here = min(CHUNK, int(starts[s + 1]) - first)
                token_NL[chunk, :here] = torch.arange(first, first + here)
                chunk += 1
        place_T = torch.empty(total, dtype=torch.long)
        places = (token_NL.flatten() < total).nonzero().flatten()
        place_T[token_NL.flatten()[places]] = places
        return _Chunks(
            token_NL=token_NL.to(device), place_T=place_T.to(device), active=tuple(active)
        )

    def cut(self, x_1TA: torch.Tensor) -> torch.Tensor:
        """[1, T, A, ...] -> [N, A, L, ...] in fp32, zeros where a sequence has ended."""
        with_zeros = torch.cat([x_1TA[0], torch.zeros_like(x_1TA[0, :1])])
        return with_zeros[self.token_NL].transpose(1, 2).float()

    def join(self, x_NAL: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[N, A, L, ...] -> [1, T, A, ...]."""
        return x_NAL.transpose(1, 2).flatten(0, 1)[None, self.place_T].to(dtype)


class _Cut(torch.autograd.Function):
    """`cut` and `join` move tokens: each is the other's gradient. That of an index, in torch, sorts
    and adds."""

    @staticmethod
    def forward(ctx: Any, x_1TA: torch.Tensor, chunks: _Chunks) -> torch.Tensor:
        ctx.chunks, ctx.dtype = chunks, x_1TA.dtype
        return chunks.cut(x_1TA)

    @staticmethod
    def backward(ctx: Any, gradient_NAL: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.chunks.join(gradient_NAL, ctx.dtype), None


class _Join(torch.autograd.Function):
    """See `_Cut`."""

    @staticmethod
    def forward(ctx: Any, x_NAL: torch.Tensor, chunks: _Chunks, dtype: torch.dtype) -> torch.Tensor:
        ctx.chunks = chunks
        return chunks.join(x_NAL, dtype)

    @staticmethod
    def backward(ctx: Any, gradient_1TA: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return ctx.chunks.cut(gradient_1TA), None, None


def _delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunks: _Chunks,
) -> torch.Tensor:
    q_NALD, k_NALD, v_NALD, g_NAL, beta_NAL = (_Cut.apply(x, chunks) for x in (q, k, v, g, beta))
    q_NALD = q_NALD * q.shape[-1] ** -0.5
    since_NAL = g_NAL.cumsum(dim=-1)
    kept_NAL1 = since_NAL.exp()[..., None]
    # What a later token sees of an earlier one. A difference the other way has no finite exponent.
    decay_NALL = (since_NAL[..., :, None] - since_NAL[..., None, :]).tril().exp().tril()

    # Corrections of a chunk: value - from_state S, for the S that it begins with.
    system_NALL = (beta_NAL[..., None] * k_NALD) @ k_NALD.mT * decay_NALL
    wanted_NALD = torch.cat([v_NALD, k_NALD * kept_NAL1], dim=-1) * beta_NAL[..., None]
    solved_NALD = torch.linalg.solve_triangular(
        system_NALL, wanted_NALD, upper=False, unitriangular=True
    )
    value_NALD, from_state_NALD = solved_NALD.split([v.shape[-1], k.shape[-1]], dim=-1)

    parts = (
        value_NALD,
        from_state_NALD,
        q_NALD @ k_NALD.mT * decay_NALL,
        q_NALD * kept_NAL1,
        k_NALD * (since_NAL[..., -1:] - since_NAL).exp()[..., None],
        kept_NAL1[:, :, -1:],
    )
    state_SADD, outputs = None, []
    going_on = (*chunks.active[1:], 0)
    for more, (value, from_state, seen, asks, to_end, kept) in zip(
        going_on, zip(*(part.split(chunks.active) for part in parts), strict=True), strict=True
    ):
        correction = value if state_SADD is None else value - from_state @ state_SADD
        o = seen @ correction
        outputs.append(o if state_SADD is None else o + asks @ state_SADD)
        added = to_end[:more].mT @ correction[:more]
        state_SADD = added if state_SADD is None else state_SADD[:more] * kept[:more] + added
    joined: torch.Tensor = _Join.apply(torch.cat(outputs), chunks, q.dtype)
    return joined
