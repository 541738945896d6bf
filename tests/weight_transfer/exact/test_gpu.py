"""The exact kernels in Triton: right when interpreted on a CPU, exact on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.trainer_node.conftest import REPO

SLOTS = 16
"""Tokens of a block of the cache."""
LENGTHS = (70, 1, 133, 16)


def pack(heads: int, groups: int, size: int, lengths, **kind: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(sum(lengths), n, size, **kind) for n in (heads, groups, groups)]


def starts_of(lengths, device) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def cached(key: torch.Tensor, value: torch.Tensor, lengths) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache with the tokens in scattered blocks, as vLLM has it, and its table."""
    counts = [-(-n // SLOTS) for n in lengths]
    order = torch.randperm(sum(counts) + 3).tolist()
    # Rows of unused slots must not matter, and the heads of a slot are together in memory.
    cache = key.new_full((len(order), SLOTS, key.shape[1], 2 * key.shape[2]), 7.0)
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for row, (start, end) in enumerate(pairwise([0, *accumulate(lengths)])):
        for n, at in enumerate(range(start, end, SLOTS)):
            block, stop = order.pop(), min(at + SLOTS, end)
            table[row, n] = block
            cache[block, : stop - at] = torch.cat([key[at:stop], value[at:stop]], dim=-1)
    return cache.transpose(1, 2), table.to(key.device)


def last(tokens: torch.Tensor, lengths, given) -> torch.Tensor:
    """The last `given` tokens of each sequence."""
    ends = accumulate(lengths)
    return torch.cat([tokens[e - g : e] for e, g in zip(ends, given, strict=True)])


def attention(heads: int, groups: int, size: int, lengths=LENGTHS, **kind: Any) -> Any:
    """(found, of a cache for some numbers of queries, by torch)"""
    from weight_transfer.exact import gpu

    query, key, value = pack(heads, groups, size, lengths, **kind)
    device, scale = query.device, size**-0.5
    starts = starts_of(lengths, device)
    how = {"starts": starts, "most": max(lengths), "scale": scale}
    whole, lse = gpu.attend(query, key, value, **how)
    whole = whole.flatten(1)
    cache, table = cached(key, value, lengths)
    paged = []
    for given in ([1] * len(lengths), [min(n, 1 + n // 3) for n in lengths], lengths):
        some = last(query, lengths, given)
        out = torch.empty_like(some)
        gpu.attend_paged(
            some,
            cache,
            starts=starts_of(given, device),
            lengths=starts.diff(),
            table=table,
            most=max(given),
            scale=scale,
            out=out,
        )
        paged.append((out.flatten(1), last(whole, lengths, given)))
    want, sums = [], []
    for a, b in pairwise(starts.tolist()):
        scores = query[a:b].transpose(0, 1).double() @ (
            key[a:b].double().permute(1, 2, 0).repeat_interleave(heads // groups, dim=0)
        )
        future = torch.ones(b - a, b - a, device=device).triu(1).bool()
        sums.append((scale * scores).masked_fill(future, -torch.inf).logsumexp(-1))
        parts = [t[a:b].transpose(0, 1)[None].double() for t in (query, key, value)]
        out = functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        want.append(out[0].transpose(0, 1).flatten(1))
    assert (lse - torch.cat(sums, dim=1)).abs().max() < (1e-5 if kind == {} else 0.05)
    return whole, paged, torch.cat(want)


def check_interpreted() -> None:
    """In fp32, because Triton's interpreter has no products in bf16."""
    from weight_transfer.exact import gpu

    torch.manual_seed(0)
    x, weight, gamma = torch.randn(100, 96), torch.randn(200, 96), torch.randn(96)
    assert torch.allclose(gpu.linear(x, weight), functional.linear(x, weight), atol=1e-4)
    few = gpu.linear(x[:5], weight)
    assert torch.allclose(few, functional.linear(x[:5], weight), atol=1e-4)
    for tile in gpu.TILES:
        assert torch.allclose(gpu.linear(x, weight, tile=tile), x @ weight.t(), atol=1e-4)
    stacked, ends = torch.randn(4, 72, 96), torch.tensor([30, 30, 95, 100], dtype=torch.int32)
    want = [a @ w.t() for a, w in zip(x.tensor_split(ends[:-1].long()), stacked, strict=True)]
    for tile in (None, *gpu.TILES):
        found = gpu.grouped_linear(x, stacked, ends, tile=tile)
        assert torch.allclose(found, torch.cat(want), atol=1e-4)
    one = gpu.grouped_linear(x[:1], stacked, torch.tensor([0, 0, 1, 1], dtype=torch.int32))
    assert torch.allclose(one, x[:1] @ stacked[2].t(), atol=1e-4)
    from weight_transfer.exact import kernels

    query = torch.randn(50, 8 * 32)[:, 32:128].unflatten(-1, (3, 32))
    table = kernels.rotary_table(torch.arange(90.0)[:, None] * torch.linspace(0, 1, 16))
    places = torch.randint(90, (50,))
    turned = gpu.rotate(query, table, places)
    assert torch.allclose(turned, kernels.rotate(query, table, places), atol=1e-6)
    assert torch.allclose(gpu.rotate(turned, table, places, sign=-1.0), query, atol=1e-6)
    want = functional.rms_norm(x, (96,), gamma, 1e-6)
    assert torch.allclose(gpu.rms_norm(x, gamma, 1e-6), want, atol=1e-5)
    other = torch.randn(100, 96)
    normed, total = gpu.add_rms_norm(x, other, gamma, 1e-6)
    assert torch.equal(total, x + other)
    assert torch.equal(normed, gpu.rms_norm(total, gamma, 1e-6))
    wide = torch.randn(40, 2 * 1100, requires_grad=True)  # more than a block
    gate, up = wide.chunk(2, dim=-1)
    want, grad, shares = functional.silu(gate) * up, torch.randn(40, 1100), torch.rand(40)
    assert torch.allclose(gpu.swiglu(wide), want, atol=1e-5)
    assert torch.allclose(gpu.swiglu(wide, shares), want * shares[:, None], atol=1e-5)
    (right,) = torch.autograd.grad(want, wide, grad)
    assert torch.allclose(gpu.swiglu_backward(grad, wide), right, atol=1e-5)
    for heads, groups, size in ((6, 2, 32), (4, 4, 16), (5, 1, 24)):
        whole, paged, right = attention(heads, groups, size)
        assert (whole - right).abs().max() < 2e-6
        for found, same in paged:
            assert torch.allclose(found, same, atol=1e-6)


def test_the_kernels_interpreted() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.weight_transfer.exact.test_gpu"],
        cwd=REPO,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=240.0,
        check=False,
    )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-6000:]


BF16: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}


@pytest.mark.gpu1
@pytest.mark.parametrize("shape", [(960, 576), (49152, 576), (6144, 4096), (4096, 12288)], ids=str)
def test_a_product_is_the_same_in_any_batch(shape) -> None:
    from weight_transfer.exact import kernels

    torch.manual_seed(0)
    weight, x = torch.randn(shape, **BF16), torch.randn(700, shape[1], **BF16)
    assert kernels.obstacle(shape, weight.device) == ""
    whole, order = kernels.linear(x, weight), torch.randperm(700)
    assert torch.equal(kernels.linear(x[order], weight), whole[order])
    sizes = (1, 2, 61, 64, 65, 250, 257)
    pieces = [kernels.linear(part, weight) for part in x.split(sizes)]
    assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(torch.cat([kernels.linear(row[None], weight) for row in x[:40]]), whole[:40])
    right = functional.linear(x.double(), weight.double())
    assert ((whole.double() - right) / right.norm(dim=-1, keepdim=True)).abs().max() < 2e-3


@pytest.mark.gpu1
@pytest.mark.parametrize(
    ("count", "top_k", "hidden", "inner"), [(8, 2, 64, 32), (128, 8, 2048, 768)]
)
def test_a_mixture_is_the_same_in_any_batch(count, top_k, hidden, inner) -> None:
    from weight_transfer.exact import experts, kernels

    torch.manual_seed(0)
    x, router = torch.randn(1500, hidden, **BF16), torch.randn(count, hidden, **BF16)
    fc1 = torch.randn(count, 2 * inner, hidden, **BF16) / hidden**0.5
    fc2 = torch.randn(count, hidden, inner, **BF16) / inner**0.5
    assert {kernels.obstacle(tuple(w.shape), w.device) for w in (fc1, fc2)} == {""}

    def layer(rows: torch.Tensor) -> torch.Tensor:
        logits = kernels.linear(rows, router) / hidden**0.5
        chosen = experts.chosen(logits, top_k)
        return experts.mlp(rows, experts.shares(logits.gather(1, chosen)), chosen, fc1, fc2)

    whole, order = layer(x), torch.randperm(1500, device="cuda")
    assert torch.equal(layer(x[order]), whole[order])
    assert torch.equal(torch.cat([layer(part) for part in x.split((1, 2, 61, 300, 1136))]), whole)
    assert torch.equal(torch.cat([layer(row[None]) for row in x[:40]]), whole[:40])
    logits = kernels.linear(x[:40], router).double() / hidden**0.5
    top, number = logits.topk(top_k, dim=1)
    for row in range(40):
        gate, up = (fc1[number[row]].double() @ x[row].double()).chunk(2, dim=1)
        outs = (fc2[number[row]].double() @ (functional.silu(gate) * up)[..., None])[..., 0]
        want = (top[row].softmax(0)[:, None] * outs).sum(0)
        assert (whole[row].double() - want).norm() < 0.02 * want.norm()


@pytest.mark.gpu1
@pytest.mark.parametrize("size", [16, 64, 128, 576, 2048, 4096, 5120])
def test_a_norm_is_the_same_in_any_batch(size) -> None:
    from weight_transfer.exact import kernels

    torch.manual_seed(0)
    x, gamma = 3 * torch.randn(301, size, **BF16), torch.randn(size, **BF16)
    whole, order = kernels.rms_norm(x, gamma, 1e-6), torch.randperm(301)
    assert torch.equal(kernels.rms_norm(x[order], gamma, 1e-6), whole[order])
    assert torch.equal(torch.cat([kernels.rms_norm(r[None], gamma, 1e-6) for r in x]), whole)
    apart = torch.zeros(301, 3 * size + 8, **BF16)[:, 3 : 3 + size]
    apart.copy_(x)  # a view at another alignment, as a part of q, k and v
    assert torch.equal(kernels.rms_norm(apart, gamma, 1e-6), whole)
    # As the trainer, which adds first.
    other = torch.randn(301, size, **BF16)
    normed, total = kernels.add_rms_norm(x, other, gamma, 1e-6)
    assert torch.equal(total, x + other)
    assert torch.equal(normed, kernels.rms_norm(x + other, gamma, 1e-6))
    right = functional.rms_norm(x.double(), (size,), gamma.double(), 1e-6)
    assert torch.allclose(whole.double(), right, rtol=2**-8, atol=1e-6)


@pytest.mark.gpu1
@pytest.mark.parametrize(
    ("heads", "groups", "size"), [(9, 3, 64), (32, 8, 128), (32, 4, 128), (14, 2, 64), (4, 2, 16)]
)
def test_attention_is_the_same_from_a_cache_and_in_chunks(heads, groups, size) -> None:
    lengths = (700, 1, 133, 16, 2049, 64)
    whole, paged, right = attention(heads, groups, size, lengths, **BF16)
    assert (whole.double() - right).abs().max() < 0.05
    for found, same in paged:
        assert torch.equal(found, same)


@pytest.mark.gpu1
@pytest.mark.parametrize(("heads", "groups", "size"), [(9, 3, 64), (32, 8, 128), (4, 2, 32)])
def test_attention_has_the_gradients_of_softmax_attention(heads, groups, size) -> None:
    from weight_transfer.exact import kernels

    lengths = (700, 1, 133, 64)
    inputs = [t.requires_grad_() for t in pack(heads, groups, size, lengths, **BF16)]
    out = kernels.attend_pack(*inputs, starts_of(lengths, "cuda"), max(lengths), size**-0.5)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, grad)
    double = [t.detach().double().requires_grad_() for t in inputs]
    parts = zip(*(t.split(lengths) for t in double), strict=True)
    want = [
        functional.scaled_dot_product_attention(
            *(t.transpose(0, 1)[None] for t in part), is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)
        for part in parts
    ]
    right = torch.autograd.grad(torch.cat(want).flatten(1), double, grad.double())
    for ours, theirs in zip(found, right, strict=True):
        assert (ours.double() - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.gpu1
@pytest.mark.parametrize("vocab", [128, 1000, 49152, 151936])
def test_the_log_softmax_is_the_same_in_any_batch(vocab) -> None:
    from weight_transfer.exact import kernels

    torch.manual_seed(0)
    logits = 5 * torch.randn(67, vocab + 128, device="cuda")[:, :vocab]
    whole = kernels.log_softmax(logits)
    assert torch.equal(torch.cat([kernels.log_softmax(row[None]) for row in logits]), whole)


@pytest.mark.gpu1
def test_swiglu_and_rotations_are_the_same_in_any_batch() -> None:
    from weight_transfer.exact import kernels

    torch.manual_seed(0)
    x, shares = torch.randn(101, 2060, **BF16), torch.rand(101, device="cuda")
    whole = kernels.swiglu(x)
    assert torch.equal(torch.cat([kernels.swiglu(row[None]) for row in x]), whole)
    apart = torch.zeros(101, 2070, **BF16)[:, 3:2063]
    apart.copy_(x)
    assert torch.equal(kernels.swiglu(apart), whole)
    routed = kernels.swiglu(x, shares)
    pairs = zip(x, shares, strict=True)
    assert torch.equal(torch.cat([kernels.swiglu(r[None], p[None]) for r, p in pairs]), routed)
    gate, up = x.double().chunk(2, dim=-1)
    right = functional.silu(gate) * up
    assert torch.allclose(whole.double(), right, rtol=2**-8, atol=1e-6)
    assert torch.allclose(routed.double(), right * shares[:, None], rtol=2**-8, atol=1e-6)
    trained, double = x.clone().requires_grad_(), x.double().requires_grad_()
    grad = torch.randn_like(whole)
    (found,) = torch.autograd.grad(kernels.trained_swiglu(trained), trained, grad)
    gate, up = double.chunk(2, dim=-1)
    (want,) = torch.autograd.grad(functional.silu(gate) * up, double, grad.double())
    assert torch.allclose(found.double(), want, rtol=2**-7, atol=1e-4)
    angles = (torch.arange(101.0)[:, None] * torch.linspace(0, 1, 32)).cuda()
    table, places = kernels.rotary_table(angles), torch.arange(101, device="cuda")
    one_by_one = [kernels.rotary_table(angle[None]) for angle in angles]
    assert torch.equal(torch.cat(one_by_one), table)
    fused = torch.randn(101, 9 * 64, **BF16)  # as in the output of one product for q, k and v
    heads = fused[:, 64:384].unflatten(-1, (5, 64)).requires_grad_()
    whole = kernels.rotate(heads, table, places)
    rows = [kernels.rotate(heads[n : n + 1], table, places[n : n + 1]) for n in range(101)]
    assert torch.equal(torch.cat(rows), whole)
    assert torch.equal(kernels.rotate(heads.detach().contiguous(), table, places), whole)
    whole.backward(whole.detach())
    assert heads.grad is not None and (heads.grad - heads).abs().max() < 0.05


if __name__ == "__main__":
    check_interpreted()
