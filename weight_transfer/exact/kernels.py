"""Operations of a decoder whose bits for a token depend on nothing but the token and those before
it: not on its batch, its place in it, the number of threads, or prefill against decode.

With `trainer.numerics = "exact"` Megatron and vLLM both compute with them: on a CPU in fp32, and on
a GPU in bf16, where products, norms and attention are `gpu`'s. The rest of this list is of a CPU.

- A product runs on blocks of `ROWS` rows, so the library always gets one shape. That a row's bits
  then do not depend on its place is checked at the start (`obstacle`).
- A sum over features is a product with ones.
- Everything else is made of IEEE additions, multiplications, divisions and square roots, which
  round the same way in every kernel. torch's own silu differs between whole vectors and the rest.
- Attention takes queries in blocks that begin at multiples of `ROWS` and keys in blocks of `KEYS`,
  counted from the sequence's beginning.

A backward pass is the ordinary one of the same function: `differentiable`.

Axes: N = tokens, I = in, O = out, H = features, A = heads, G = key-value heads, D = their size,
Q = tokens that attend, K = those and all before them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

from orchestrator.errors import ConfigError

ROWS = 32
"""Rows of every product, and queries of a block."""
KEYS = 64
"""Keys of a block: a multiple of `ROWS`, so that the queries of a block end in the same one."""
_ONES = 16
"""Columns of the product that sums up: one column would be another routine."""
_LOG2_E = 1.4426950408889634
_LN2 = (0.693359375, -2.12194440e-4)
"""ln 2 in two parts, of which n times the first is exact."""
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
        5.0000001201e-1)  # fmt: skip # a polynomial
"""exp(r) = 1 + r + r^2 (... r + 0.5) for |r| <= ln 2 / 2 (Moshier's Cephes, expf)."""
_LEAST = -87.0
"""exp of less is 0 here."""


def linear(
    x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None
) -> torch.Tensor:
    """[..., I] -> [..., O]."""
    if x.is_cuda:
        out = on_gpu().linear(x, weight_OI)
        return out if bias_O is None else out + bias_O
    x_NI = x.reshape(-1, x.shape[-1])
    num, weight_IO = len(x_NI), weight_OI.t()
    out_NO = x_NI.new_empty(-(-num // ROWS) * ROWS, len(weight_OI))
    for start in range(0, num, ROWS):
        block = x_NI[start : start + ROWS]
        if len(block) < ROWS:
            block = functional.pad(block, (0, 0, 0, ROWS - len(block)))
        torch.mm(block.contiguous(), weight_IO, out=out_NO[start : start + ROWS])
    out_NO = out_NO[:num]
    if bias_O is not None:
        out_NO = out_NO + bias_O
    return out_NO.view(*x.shape[:-1], len(weight_OI))


def linear_in_parts(x: torch.Tensor, weight_OI: torch.Tensor, parts: int) -> torch.Tensor:
    """The product of tensor parallel ranks that have a part of the features each: their rounded
    products, added up in the order of the ranks. [..., I] -> [..., O]."""
    pairs = zip(x.chunk(parts, dim=-1), weight_OI.chunk(parts, dim=1), strict=True)
    return added(linear(part, weight.contiguous()) for part, weight in pairs)


def added(terms: Iterable[torch.Tensor]) -> torch.Tensor:
    """Their sum in their order, in fp32, rounded once."""
    rest = iter(terms)
    first = total = next(rest)
    for term in rest:
        total = total.float() + term.float()
    return total.to(first.dtype)


def on_gpu() -> Any:
    """`gpu`: Triton is loaded where there is a GPU."""
    from weight_transfer.exact import gpu

    return gpu


@functools.cache
def obstacle(shape: tuple[int, ...], device: torch.device, parts: int = 1) -> str:
    """Why products with a weight of this shape, [O, I], or [E, O, I] of experts, are not exact on
    this host; empty: they are.

    Args:
        parts: in how many parts another process may have the weight's rows.
    """
    if device.type == "cuda":
        found: str = on_gpu().obstacle(shape, device, parts)
        return found
    shape_OI = shape[-2:]
    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(shape_OI, generator=generator)
    x = torch.randn(ROWS, shape_OI[1], generator=generator)
    want = linear(x, weight_OI)
    turned = linear(x.roll(5, 0), weight_OI).roll(-5, 0)
    single = torch.cat([linear(row[None], weight_OI) for row in x[:3]])
    columns = torch.cat([linear(x, part) for part in weight_OI.chunk(parts)], dim=1)
    if torch.equal(want, turned) and torch.equal(want[:3], single) and torch.equal(want, columns):
        return ""
    return (
        f"a product of shape {shape_OI} depends on a row's place in its block on this "
        "processor, with this torch"
    )


def check(shape: tuple[int, ...], device: torch.device, parts: int = 1) -> None:
    """Refuse a host as `obstacle` says.

    Raises:
        ConfigError: a product is not exact there.
    """
    if why := obstacle(shape, device, parts):
        raise ConfigError(f"numerics = 'exact' does not go with this host: {why}")


def rms_norm(x: torch.Tensor, gamma_H: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis (Zhang and Sennrich 2019)."""
    if x.is_cuda:
        normed: torch.Tensor = on_gpu().rms_norm(x, gamma_H, eps)
        return normed
    size = x.shape[-1]
    squares = linear(x * x, x.new_ones(_ONES, size))[..., :1]
    return x / (squares / size + eps).sqrt() * gamma_H


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, gamma_H: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of x + residual, and that sum, rounded."""
    if x.is_cuda:
        both: tuple[torch.Tensor, torch.Tensor] = on_gpu().add_rms_norm(x, residual, gamma_H, eps)
        return both
    total = x + residual
    return rms_norm(total, gamma_H, eps), total


def exp(x: torch.Tensor) -> torch.Tensor:
    """exp of numbers that are 0 or less, to about a unit in the last place."""
    inside = x.clamp(min=_LEAST)
    n = (inside * _LOG2_E).round_()
    r = inside.sub_(n * _LN2[0]).sub_(n * _LN2[1])
    p = torch.full_like(r, _EXP[0])
    for factor in _EXP[1:]:
        p.mul_(r).add_(factor)
    p.mul_(r).mul_(r).add_(r).add_(1.0)
    power = ((n.to(torch.int32) + 127) << 23).view(torch.float32)
    return p.mul_(power).masked_fill_(x < _LEAST, 0.0)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x)), on a CPU."""
    small = exp(-x.abs())
    return x * (torch.where(x >= 0, torch.ones_like(x), small) / (small + 1.0))


def swiglu(x: torch.Tensor, shares_N: torch.Tensor | None = None) -> torch.Tensor:
    """silu of the first half times the second half, rounded once. [..., 2 F] -> [..., F].

    Args:
        shares_N: factors of the rows, fp32.
    """
    if x.is_cuda:
        on_it: torch.Tensor = on_gpu().swiglu(x, shares_N)
        return on_it
    gate, up = x.chunk(2, dim=-1)
    out = silu(gate) * up
    return out if shares_N is None else out * shares_N[:, None]


def rotary_table(angles: torch.Tensor) -> torch.Tensor:
    """[P, D / 2] angles of positions from 0 on -> [P, D], their cosines, then sines: in fp64,
    rounded once. Blocks of positions have one shape each, and so the same vectors; a GPU has none.
    """
    num = len(angles)
    padded = functional.pad(angles, (0, 0, 0, -num % ROWS)).double()
    blocks = [padded] if angles.is_cuda else padded.split(ROWS)
    parts = [torch.cat([f(b) for b in blocks])[:num].float() for f in (torch.cos, torch.sin)]
    return torch.cat(parts, dim=-1)


def rotate(x_NAD: torch.Tensor, table_PD: torch.Tensor, places_N: torch.Tensor) -> torch.Tensor:
    """Turn the halves of each head (Su et al. 2021) by the angles of its token's position."""
    if x_NAD.is_cuda:
        turned: torch.Tensor = _Rotate.apply(x_NAD, table_PD, places_N)
        return turned
    cos, sin = table_PD[places_N][:, None].chunk(2, dim=-1)
    first, second = x_NAD.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NAD: torch.Tensor, table_PD: torch.Tensor, places_N: torch.Tensor
    ) -> torch.Tensor:
        """[N, A, D] -> [N, A, D]"""
        ctx.save_for_backward(table_PD, places_N)
        turned: torch.Tensor = on_gpu().rotate(x_NAD, table_PD, places_N)
        return turned

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Turn the gradient back."""
        return on_gpu().rotate(grads[0], *ctx.saved_tensors, sign=-1.0), None, None


def attend_pack(
    query_NAD: torch.Tensor,
    key_NGD: torch.Tensor,
    value_NGD: torch.Tensor,
    starts: torch.Tensor,
    most: int,
    scale: float,
) -> torch.Tensor:
    """Causal attention within each sequence of a pack. [N, A, D] -> [N, A * D].

    Args:
        starts: where each sequence begins, and the pack's length. [B + 1], int32.
        most: tokens of the longest sequence.
    """
    if query_NAD.is_cuda:
        how = {"starts": starts, "most": most, "scale": scale}
        packed: torch.Tensor = _Attend.apply(how, query_NAD, key_NGD, value_NGD)
        return packed.flatten(1)
    pieces = [
        attend(query_NAD[a:b], key_NGD[a:b], value_NGD[a:b], scale)
        for a, b in pairwise(starts.tolist())
    ]
    return torch.cat(pieces)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: dict[str, Any], *tensors: torch.Tensor) -> torch.Tensor:
        """On a GPU: query, key and value -> [N, A, D]"""
        ctx.how = how
        out_NAD: torch.Tensor
        out_NAD, lse_AN = on_gpu().attend(*tensors, **how)
        ctx.save_for_backward(*tensors, out_NAD, lse_AN)
        return out_NAD

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Of query, key and value."""
        found = on_gpu().attend_backward(grads[0].contiguous(), *ctx.saved_tensors, **ctx.how)
        return None, *found


def attend(
    query_QAD: torch.Tensor, key_KGD: torch.Tensor, value_KGD: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention of a sequence's last Q tokens. [Q, A, D] -> [Q, A * D]."""
    given, length = len(query_QAD), len(key_KGD)
    first, group = length - given, query_QAD.shape[1] // key_KGD.shape[1]
    keys_AKD, values_AKD = (
        _padded(t, length, KEYS).transpose(0, 1).repeat_interleave(group, dim=0)
        for t in (key_KGD, value_KGD)
    )
    # The column of ones gives the sum of the weights.
    values = torch.cat([values_AKD, torch.ones_like(values_AKD[..., :1])], dim=-1).contiguous()
    keys = keys_AKD.transpose(1, 2).contiguous()
    skipped = first % ROWS
    queries = _padded(functional.pad(query_QAD, (0, 0, 0, 0, skipped, 0)), skipped + given, ROWS)
    outputs = [
        _attend_block(block.transpose(0, 1).contiguous() * scale, keys, values, at)
        for at, block in zip(range(first - skipped, length, ROWS), queries.split(ROWS), strict=True)
    ]
    return torch.cat(outputs)[skipped : skipped + given].flatten(1)


def _attend_block(
    query_AQD: torch.Tensor, keys_ADK: torch.Tensor, values_AKV: torch.Tensor, at: int
) -> torch.Tensor:
    """The block of queries from position `at` on: [Q, A, D]."""
    blocks = range(0, at + ROWS, KEYS)
    scores = torch.cat(
        [torch.bmm(query_AQD, keys_ADK[..., k : k + KEYS].contiguous()) for k in blocks], dim=-1
    )
    place = torch.arange(scores.shape[-1])
    scores.masked_fill_(place > torch.arange(at, at + ROWS)[:, None], -torch.inf)
    weights = exp(scores - scores.amax(-1, keepdim=True))
    total = None
    for k in blocks:
        part = torch.bmm(
            weights[..., k : k + KEYS].contiguous(), values_AKV[:, k : k + KEYS].contiguous()
        )
        total = part if total is None else total + part
    assert total is not None
    return (total[..., :-1] / total[..., -1:]).transpose(0, 1)


def _padded(x: torch.Tensor, length: int, multiple: int) -> torch.Tensor:
    return functional.pad(x, (0, 0, 0, 0, 0, -length % multiple))


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """vLLM's own: torch sums each row by itself. On a GPU the order is the same for rows that begin
    at multiples of 16 bytes (`orchestrator.protocol.exact`)."""
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


# ---------------------------------------------------------------- backward


def differentiable(
    exact: Callable[..., torch.Tensor], ordinary: Callable[..., torch.Tensor], *args: torch.Tensor
) -> torch.Tensor:
    """`exact(*args)`, with the gradients of `ordinary`, the same function of the same tensors."""
    result: torch.Tensor = _Both.apply(exact, ordinary, *args)
    return result


def product(x: torch.Tensor, weight_OI: torch.Tensor, parts: int = 1) -> torch.Tensor:
    """`linear_in_parts`, with the gradients of torch's product."""
    result: torch.Tensor = _Product.apply(x, weight_OI, parts)
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_OI: torch.Tensor, parts: int) -> torch.Tensor:
        """[..., I], [O, I] -> [..., O]"""
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight_OI)
        return linear_in_parts(x, weight_OI, parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients that are wanted."""
        x, weight_OI = ctx.saved_tensors
        # torch multiplies a transposed [N, 1, O] row by row.
        grad_NO, grad_x = grads[0].flatten(0, -2), None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_NO @ weight_OI).view(*grads[0].shape[:-1], -1)
        if x is None:
            return grad_x, None, None
        return grad_x, grad_NO.t() @ x.flatten(0, -2), None


def trained_swiglu(x: torch.Tensor) -> torch.Tensor:
    """`swiglu`, with gradients."""
    if x.is_cuda:
        result: torch.Tensor = _Swiglu.apply(x)
        return result

    def ordinary(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up

    return differentiable(swiglu, ordinary, x)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """On a GPU: [..., 2 F] -> [..., F]"""
        ctx.save_for_backward(x)
        return swiglu(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """In fp32, rounded once."""
        gradient: torch.Tensor = on_gpu().swiglu_backward(grads[0], *ctx.saved_tensors)
        return gradient


class _Both(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        exact: Callable[..., torch.Tensor],
        ordinary: Callable[..., torch.Tensor],
        *args: torch.Tensor,
    ) -> torch.Tensor:
        """Keeps the inputs only."""
        ctx.ordinary = ordinary
        ctx.save_for_backward(*args)
        return exact(*args)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Run the ordinary function again."""
        wanted = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            args = [
                t.detach().requires_grad_(w) for t, w in zip(ctx.saved_tensors, wanted, strict=True)
            ]
            out = ctx.ordinary(*args)
            found = iter(torch.autograd.grad(out, [t for t in args if t.requires_grad], grads[0]))
        return None, None, *(next(found) if w else None for w in wanted)
