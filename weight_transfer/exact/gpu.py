"""The products, norms, SwiGLU and attention of `weight_transfer.exact.kernels` on a GPU, in Triton.

Numbers are bf16, and sums are fp32. A row's bits do not depend on its place in a tile: a tensor
core computes each row of a tile by itself, and adds up its products from the first feature, or key,
to the last. So every kernel goes through features and keys in their order, without splitting them,
and the size of the tile is free. `obstacle` compares two sizes on this GPU.

A reduction within a thread block has an order that its layout gives. The layout follows from
constants of the kernel, which depend on the model only.

Axes: see `weight_transfer.exact.kernels`; B = sequences or requests, S = slots of a block of vLLM's
cache.
"""

# Triton takes annotations for globals:
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

TILES = ((128, 256, 64, 8, 3), (128, 128, 64, 4, 3), (64, 64, 128, 4, 4), (64, 32, 128, 4, 4))
"""Tiles of a product: rows, columns, features at a time, warps, stages of loading."""
PROGRAMS = 128
"""A product has the largest tile that makes so many programs: about one for each multiprocessor."""
QUERIES = 64
"""Rows of attention's tile: queries times the heads that share their keys."""
KEYS = 64
"""Keys that attention takes at a time, counted from the sequence's beginning."""
_LOG2_E = 1.4426950408889634
_ALIGNED = 16
"""Bytes. Triton compiles another kernel for a pointer that is not."""


def _rows_of(x: torch.Tensor) -> torch.Tensor:
    """[..., F] -> [N, F], contiguous and aligned."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return rows if rows.data_ptr() % _ALIGNED == 0 else rows.clone()


# ---------------------------------------------------------------- products


@triton.jit(do_not_specialize=["num_rows", "tiles_n"])
def _linear_kernel(
    x_ptr, w_ptr, out_ptr, tiles_ptr, num_rows, tiles_n, OUT: tl.constexpr, IN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, GROUP: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip # many constants
    # Programs that run at the same time share rows and weights: GROUP tiles of rows together.
    tiles_o = tl.cdiv(OUT, BLOCK_O)
    program = tl.program_id(0)
    first_n = program // (GROUP * tiles_o) * GROUP
    high = tl.minimum(tiles_n - first_n, GROUP)
    tile_n = first_n + program % (GROUP * tiles_o) % high
    tile_o = program % (GROUP * tiles_o) // high
    low, features = tile_n * BLOCK_N, IN
    if EXPERTS:  # a tile's rows are those of one expert; the last tiles have none
        w_ptr += tl.load(tiles_ptr + 3 * tile_n) * OUT * IN
        low = tl.load(tiles_ptr + 3 * tile_n + 1)
        num_rows = tl.load(tiles_ptr + 3 * tile_n + 2)
        features = tl.where(low < num_rows, IN, 0)
    n = low + tl.arange(0, BLOCK_N)
    o = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
    i = tl.arange(0, BLOCK_I)
    x_ptrs = x_ptr + n.to(tl.int64)[:, None] * IN + i[None, :]
    w_ptrs = w_ptr + o.to(tl.int64)[None, :] * IN + i[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_O), dtype=tl.float32)
    for first in range(0, features, BLOCK_I):
        here = first + i < IN
        x = tl.load(x_ptrs + first, mask=(n < num_rows)[:, None] & here[None, :], other=0.0)
        w = tl.load(w_ptrs + first, mask=(o < OUT)[None, :] & here[:, None], other=0.0)
        total = tl.dot(x, w, total)
    out_ptrs = out_ptr + n.to(tl.int64)[:, None] * OUT + o[None, :]
    tl.store(
        out_ptrs,
        total.to(out_ptr.dtype.element_ty),
        mask=(n < num_rows)[:, None] & (o < OUT)[None, :],
    )


def linear(
    x: torch.Tensor, weight_OI: torch.Tensor, *, tile: tuple[int, ...] | None = None
) -> torch.Tensor:
    """[..., I] -> [..., O].

    Args:
        tile: one of `TILES`; None: the one that suits the sizes.
    """
    rows = _rows_of(x)
    result = _multiply(rows, weight_OI, None, tile or _tile(len(rows), len(weight_OI)))
    return result.view(*x.shape[:-1], len(weight_OI))


def grouped_linear(
    x_NI: torch.Tensor,
    weight_EOI: torch.Tensor,
    ends_E: torch.Tensor,
    *,
    tile: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Each row times its expert's weight, [N, O]; the host does not wait.

    Args:
        ends_E: int32; the row after each expert's last one.
        tile: as in `linear`.
    """
    experts, out = weight_EOI.shape[:2]
    rows = _rows_of(x_NI)
    tile = tile or _tile(len(rows), out, most=len(rows) // experts)
    return _multiply(rows, weight_EOI, _tiles(ends_E, len(rows), tile[0]), tile)


def _multiply(
    rows: torch.Tensor, weight: torch.Tensor, tiles: torch.Tensor | None, tile: tuple[int, ...]
) -> torch.Tensor:
    num, (out, into) = len(rows), weight.shape[-2:]
    result = rows.new_empty(num, out)
    high, wide, deep, warps, stages = tile
    tiles_n = triton.cdiv(num, high) if tiles is None else len(tiles)
    if num:
        _linear_kernel[(tiles_n * triton.cdiv(out, wide),)](
            rows, weight.contiguous(), result, rows if tiles is None else tiles, num, tiles_n,
            out, into, high, wide, deep, 8, tiles is not None, num_warps=warps, num_stages=stages,
        )  # fmt: skip # many arguments
    return result


def _tiles(ends_E: torch.Tensor, num: int, high: int) -> torch.Tensor:
    """Expert, first row, and the row after the last one, of as many tiles as there can be: the last
    ones may be empty. int64."""
    ends_E = ends_E.long()
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    tiles_E = (counts_E + high - 1) // high
    until_E = tiles_E.cumsum(0)
    tile = torch.arange(num // high + min(num, len(ends_E)), device=ends_E.device)
    expert = torch.searchsorted(until_E, tile, right=True).clamp_(max=len(ends_E) - 1)
    low = (ends_E - counts_E)[expert] + (tile - (until_E - tiles_E)[expert]) * high
    return torch.stack((expert, low, ends_E[expert]), dim=1)


def _tile(num: int, out: int, *, most: int | None = None) -> tuple[int, ...]:
    """The tile for a product; of at most 64 or `most` rows."""
    for tile in TILES:
        high, wide = tile[:2]
        is_small = most is None or high <= max(64, most)
        if is_small and triton.cdiv(num, high) * triton.cdiv(out, wide) >= PROGRAMS:
            return tile
    return TILES[-1]


@functools.cache
def obstacle(shape: tuple[int, ...], device: torch.device, parts: int = 1) -> str:
    """Why products with a weight of this shape, [O, I], or [E, O, I] of experts, are not exact on
    this GPU; empty: they are.

    Args:
        parts: in how many parts another process may have the weight's rows.
    """
    generator = torch.Generator(device).manual_seed(0)
    settings = {"generator": generator, "device": device, "dtype": torch.bfloat16}
    weight = torch.randn(shape[-2:], **settings)  # type: ignore[call-overload]
    x = torch.randn(150, shape[-1], **settings)  # type: ignore[call-overload]
    where = f"on {torch.cuda.get_device_name()}, with Triton {triton.__version__}"
    multiply = linear if len(shape) == 2 else _by_the_second
    try:
        want = multiply(x, weight)
        found = [multiply(x.roll(5, 0), weight, tile=tile).roll(-5, 0) for tile in TILES]
        found.append(torch.cat([multiply(part, weight) for part in x.split((1, 70, 79))]))
        found.append(torch.cat([multiply(x, part) for part in weight.chunk(parts)], dim=1))
    except triton.runtime.errors.OutOfResources as error:
        return f"a product of shape {shape} does not fit {where}: {error}"
    if all(torch.equal(want, one) for one in found):
        return ""
    return f"a product of shape {shape} depends on a row's tile {where}"


def _by_the_second(
    x: torch.Tensor, weight_OI: torch.Tensor, *, tile: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Rows times the weight of the second of three experts; the others have a row each."""
    ends = torch.tensor([1, 1 + len(x), 2 + len(x)], dtype=torch.int32, device=x.device)
    rows = torch.cat((x[:1], x, x[:1]))
    return grouped_linear(rows, weight_OI.expand(3, -1, -1), ends, tile=tile)[1:-1]


# ---------------------------------------------------------------- norms


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x_ptr, residual_ptr, gamma_ptr, out_ptr, sum_ptr, num_rows, eps,
    SIZE: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip # many constants
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    h = tl.arange(0, PADDED)
    here = (n < num_rows)[:, None] & (h < SIZE)[None, :]
    places = n.to(tl.int64)[:, None] * SIZE + h[None, :]
    x = tl.load(x_ptr + places, mask=here, other=0.0).to(tl.float32)
    if ADDS:  # rounded, as the sum that the next layer gets
        x += tl.load(residual_ptr + places, mask=here, other=0.0).to(tl.float32)
        x = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + places, x, mask=here)
        x = x.to(tl.float32)
    gamma = tl.load(gamma_ptr + h, mask=h < SIZE, other=0.0).to(tl.float32)
    square = tl.sum(x * x, 1)
    scale = 1.0 / tl.sqrt_rn(square / SIZE + eps)
    out = x * scale[:, None] * gamma[None, :]
    tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=here)


def rms_norm(x: torch.Tensor, gamma_H: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis, rounded once."""
    return _normed(x, None, gamma_H, eps)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, gamma_H: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of x + residual, and that sum."""
    return _normed(x, residual, gamma_H, eps)


def _normed(
    x: torch.Tensor, residual: torch.Tensor | None, gamma_H: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = _rows_of(x)
    num, size = rows.shape
    padded = triton.next_power_of_2(size)
    high = max(1, 2048 // padded)
    adds, result = residual is not None, torch.empty_like(rows)
    other = rows if residual is None else _rows_of(residual)
    total = torch.empty_like(rows) if adds else rows
    if num:
        _norm_kernel[(triton.cdiv(num, high),)](
            rows, other, gamma_H, result, total, num, eps, size, high, padded, adds, num_warps=4
        )
    return result.view(x.shape), total.view(x.shape)


# ---------------------------------------------------------------- SwiGLU


@triton.jit
def _swiglu_kernel(
    x_ptr, share_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr
):
    n, f = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = x_ptr + n * 2 * SIZE + f
    gate = tl.load(row, mask=f < SIZE, other=0.0).to(tl.float32)
    up = tl.load(row + SIZE, mask=f < SIZE, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    if SHARED:
        out = out * tl.load(share_ptr + n)
    tl.store(out_ptr + n * SIZE + f, out.to(out_ptr.dtype.element_ty), mask=f < SIZE)


@triton.jit
def _swiglu_backward_kernel(grad_ptr, x_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    n, f = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, here = n * 2 * SIZE + f, f < SIZE
    gate = tl.load(x_ptr + row, mask=here, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row + SIZE, mask=here, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + n * SIZE + f, mask=here, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    to_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(out_ptr + row, to_gate.to(out_ptr.dtype.element_ty), mask=here)
    to_up = grad * gate * sigmoid
    tl.store(out_ptr + row + SIZE, to_up.to(out_ptr.dtype.element_ty), mask=here)


_SWIGLU_BLOCK = 1024


def swiglu(x: torch.Tensor, shares_N: torch.Tensor | None = None) -> torch.Tensor:
    """silu of the first half times the second half, in fp32, rounded once. [..., 2 F] -> [..., F].

    Args:
        shares_N: factors of the rows, fp32.
    """
    rows = _rows_of(x)
    num, size = len(rows), rows.shape[1] // 2
    out = rows.new_empty(num, size)
    if num:
        _swiglu_kernel[(num, triton.cdiv(size, _SWIGLU_BLOCK))](
            rows, rows if shares_N is None else shares_N.contiguous(), out, size, _SWIGLU_BLOCK,
            shares_N is not None, num_warps=4,
        )  # fmt: skip # many arguments
    return out.view(*x.shape[:-1], size)


def swiglu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of `swiglu`'s input without shares, [..., 2 F]."""
    rows, grads = _rows_of(x), _rows_of(grad)
    num, size = grads.shape
    out = torch.empty_like(rows)
    if num:
        _swiglu_backward_kernel[(num, triton.cdiv(size, _SWIGLU_BLOCK))](
            grads, rows, out, size, _SWIGLU_BLOCK, num_warps=4
        )
    return out.view(x.shape)


# ---------------------------------------------------------------- rotary embeddings


@triton.jit
def _rotate_kernel(
    x_ptr, table_ptr, places_ptr, out_ptr, stride_n, stride_a, sign,
    HEADS: tl.constexpr, HALF: tl.constexpr, PADDED_HEADS: tl.constexpr, PADDED_HALF: tl.constexpr,
):  # fmt: skip # many constants
    n = tl.program_id(0).to(tl.int64)
    a, d = tl.arange(0, PADDED_HEADS), tl.arange(0, PADDED_HALF)
    row = table_ptr + tl.load(places_ptr + n).to(tl.int64) * 2 * HALF + d
    cos = tl.load(row, mask=d < HALF, other=0.0)[None, :]
    sin = tl.load(row + HALF, mask=d < HALF, other=0.0)[None, :] * sign
    here = (a < HEADS)[:, None] & (d < HALF)[None, :]
    given = x_ptr + n * stride_n + a[:, None] * stride_a + d[None, :]
    first = tl.load(given, mask=here, other=0.0).to(tl.float32)
    second = tl.load(given + HALF, mask=here, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    out = out_ptr + (n * HEADS + a[:, None]) * 2 * HALF + d[None, :]
    tl.store(out, (first * cos - second * sin).to(kind), mask=here)
    tl.store(out + HALF, (second * cos + first * sin).to(kind), mask=here)


def rotate(
    x_NAD: torch.Tensor, table_PD: torch.Tensor, places_N: torch.Tensor, *, sign: float = 1.0
) -> torch.Tensor:
    """Turn the halves of each head, [N, A, D]; back with sign -1."""
    num, heads, size = x_NAD.shape
    x_NAD = x_NAD if x_NAD.stride(2) == 1 else x_NAD.contiguous()
    out = x_NAD.new_empty(num, heads, size)
    if num:
        _rotate_kernel[(num,)](
            x_NAD, table_PD, places_N, out, x_NAD.stride(0), x_NAD.stride(1), sign, heads,
            size // 2, triton.next_power_of_2(heads), triton.next_power_of_2(size // 2),
            num_warps=4,
        )  # fmt: skip # many arguments
    return out


# ---------------------------------------------------------------- attention


@triton.jit(do_not_specialize=["stride_table", "num_rows"])
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, starts_ptr, lengths_ptr, key_starts_ptr, table_ptr,
    scale, stride_table, stride_block, stride_key, stride_group, num_rows,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr,
    SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, LN2: tl.constexpr,
):  # fmt: skip # many constants
    # A row is a query of one of the GROUP heads that share the keys of group g.
    sequence, g = tl.program_id(2), tl.program_id(1)
    start, end = tl.load(starts_ptr + sequence), tl.load(starts_ptr + sequence + 1)
    length = tl.load(lengths_ptr + sequence)
    first = tl.program_id(0) * (ROWS // PADDED_GROUP)
    if first < end - start:
        row = tl.arange(0, ROWS)
        query, member = first + row // PADDED_GROUP, row % PADDED_GROUP
        is_row = (query < end - start) & (member < GROUP)
        place = length - (end - start) + query
        d = tl.arange(0, PADDED_SIZE)
        rows = ((start + query).to(tl.int64) * HEADS + g * GROUP + member) * SIZE
        has_d = d < SIZE
        q = tl.load(q_ptr + rows[:, None] + d[None, :], mask=is_row[:, None] & has_d[None, :],
                    other=0.0)  # fmt: skip # a mask
        top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
        weight = tl.zeros((ROWS,), dtype=tl.float32)
        total = tl.zeros((ROWS, PADDED_SIZE), dtype=tl.float32)
        last = tl.minimum(length, length - (end - start) + first + ROWS // PADDED_GROUP)
        for at in range(0, last, KEYS):
            key = at + tl.arange(0, KEYS)
            is_key = key < length
            if SLOTS == 0:
                offset = (tl.load(key_starts_ptr + sequence) + key).to(tl.int64) * stride_key
            else:
                block = tl.load(table_ptr + sequence.to(tl.int64) * stride_table + key // SLOTS,
                                mask=is_key, other=0)  # fmt: skip # a mask
                offset = block.to(tl.int64) * stride_block + (key % SLOTS) * stride_key
            offset += g * stride_group
            mask = is_key[:, None] & has_d[None, :]
            k = tl.load(k_ptr + offset[:, None] + d[None, :], mask=mask, other=0.0)
            v = tl.load(v_ptr + offset[:, None] + d[None, :], mask=mask, other=0.0)
            score = tl.dot(q, tl.trans(k)) * scale
            sees = (key[None, :] <= place[:, None]) & is_key[None, :]
            score = tl.where(sees, score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            # A row that is none sees no key.
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            p = tl.exp2(score - shift[:, None])
            kept = tl.exp2(top - shift)
            weight = weight * kept + tl.sum(p, 1)
            total = tl.dot(p.to(v.dtype), v, total * kept[:, None])
            top = new_top
        if SLOTS == 0:  # of a pack, for the gradients
            lse = (top + tl.log2(weight)) * LN2
            lse_at = (g * GROUP + member).to(tl.int64) * num_rows + start + query
            tl.store(lse_ptr + lse_at, lse, mask=is_row)
        out = total / weight[:, None]
        tl.store(out_ptr + rows[:, None] + d[None, :], out.to(out_ptr.dtype.element_ty),
                 mask=is_row[:, None] & has_d[None, :])  # fmt: skip # a mask


def attend(
    query_NAD: torch.Tensor,
    key_KGD: torch.Tensor,
    value_KGD: torch.Tensor,
    *,
    starts: torch.Tensor,
    most: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention within each sequence of a pack.

    Args:
        starts: where each sequence begins, and the pack's length. [B + 1], int32.
        most: tokens of the longest sequence.

    Returns: the output, [N, A, D], and the logarithm of each softmax's denominator, [A, N], fp32.
    """
    query_NAD, key_KGD, value_KGD = (t.contiguous() for t in (query_NAD, key_KGD, value_KGD))
    out, num = torch.empty_like(query_NAD), len(query_NAD)
    lse_AN = torch.empty(query_NAD.shape[1], num, dtype=torch.float32, device=out.device)
    strides = (0, 0, key_KGD.stride(0), key_KGD.stride(1))
    lengths = starts[1:] - starts[:-1]
    tensors = (query_NAD, key_KGD, value_KGD, out, lse_AN)
    _launch(*tensors, starts, lengths, None, strides, 0, most, scale)
    return out, lse_AN


def attend_backward(
    grad_NAD: torch.Tensor,
    query_NAD: torch.Tensor,
    key_KGD: torch.Tensor,
    value_KGD: torch.Tensor,
    out_NAD: torch.Tensor,
    lse_AN: torch.Tensor,
    *,
    starts: torch.Tensor,
    most: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, by torch's FlashAttention (Dao 2023, arXiv:2307.08691)."""
    nothing = torch.empty(2, dtype=torch.uint64, device=grad_NAD.device)  # there is no dropout
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    found = torch.ops.aten._flash_attention_backward(
        grad_NAD, query_NAD, key_KGD, value_KGD, out_NAD, lse_AN, starts, starts, most, most,
        0.0, True, nothing, nothing[:0], scale=scale,
    )  # fmt: skip # many arguments
    return found


def attend_paged(
    query_NAD: torch.Tensor,
    cache_BGSV: torch.Tensor,
    *,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    most: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Causal attention of each request's last tokens to vLLM's cache, whose rows are a key and its
    value.

    Args:
        starts: where each request's queries begin, and their number. [B + 1], int32.
        lengths: tokens of each request. [B], int32.
        table: blocks of each request. [B, blocks], int32.
        most: queries of one request, at most.
        out: gets the result, [N, A, D].
    """
    size, slots = query_NAD.shape[-1], cache_BGSV.shape[2]
    key, value = cache_BGSV[..., :size], cache_BGSV[..., size:]
    strides = (table.stride(0), cache_BGSV.stride(0), cache_BGSV.stride(2), cache_BGSV.stride(1))
    query_NAD = query_NAD.contiguous()
    _launch(query_NAD, key, value, out, out, starts, lengths, table, strides, slots, most, scale)


def _launch(
    query, key, value, out, lse, starts, lengths, table, strides, slots, most, scale
) -> None:
    heads, size = query.shape[1:]
    group = heads // key.shape[1]
    padded = triton.next_power_of_2(group)
    grid = (triton.cdiv(most * padded, QUERIES), key.shape[1], len(lengths))
    stride_table, *others = strides
    _attend_kernel[grid](
        query, key, value, out, lse, starts, lengths, starts, starts if table is None else table,
        scale * _LOG2_E, stride_table, *others, len(query), heads, group, padded, size,
        max(16, triton.next_power_of_2(size)), slots, QUERIES, KEYS, 1 / _LOG2_E, num_warps=4,
        num_stages=2,
    )  # fmt: skip # many arguments
