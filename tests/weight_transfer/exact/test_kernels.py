"""A token's bits depend on it and on those before it, and on nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn import functional

from weight_transfer.exact import bits, experts, kernels

HEADS, GROUPS, SIZE, LENGTH = 6, 3, 32, 150


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1)


def pack() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(LENGTH, n, SIZE) for n in (HEADS, GROUPS, GROUPS))  # type: ignore[return-value]


@pytest.mark.parametrize("chunks", [[1] * LENGTH, [7, 90, 53], [64, 86], [149, 1]], ids=str)
def test_attention_is_the_same_token_by_token_and_in_chunks(chunks) -> None:
    query, key, value = pack()
    whole, found, end = kernels.attend(query, key, value, 0.2), [], 0
    for size in chunks:
        start, end = end, end + size
        found.append(kernels.attend(query[start:end], key[:end], value[:end], 0.2))
    assert torch.equal(torch.cat(found), whole)


def test_attention_is_softmax_attention() -> None:
    query, key, value = pack()
    heads = [t.transpose(0, 1)[None].double() for t in (query, key, value)]
    want = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    found = kernels.attend(query, key, value, SIZE**-0.5)
    assert (found - want[0].transpose(0, 1).flatten(1)).abs().max() < 2e-6


OPERATIONS = {
    "linear": (lambda x: kernels.linear(x, WEIGHT), lambda x: functional.linear(x, WEIGHT)),
    "rms_norm": (
        lambda x: kernels.rms_norm(x, GAMMA, 1e-6),
        lambda x: functional.rms_norm(x, (96,), GAMMA, 1e-6),
    ),
    "silu": (
        lambda x: kernels.silu(x[:, :95].contiguous()),  # an odd number: not only whole vectors
        lambda x: functional.silu(x[:, :95]),
    ),
    "log_softmax": (kernels.log_softmax, lambda x: functional.log_softmax(x, dim=-1)),
}
WEIGHT = torch.randn(200, 96, generator=torch.Generator().manual_seed(2))
GAMMA = torch.randn(96, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_row_is_the_same_in_any_batch(name) -> None:
    exact, ordinary = OPERATIONS[name]
    x = 3 * torch.randn(77, 96)
    whole, order = exact(x), torch.randperm(77)
    assert torch.equal(exact(x[order]), whole[order])
    assert torch.equal(torch.cat([exact(row[None]) for row in x]), whole)
    assert torch.equal(torch.cat([exact(x[:40]), exact(x[40:])]), whole)
    assert torch.allclose(whole, ordinary(x), rtol=1e-5, atol=1e-5)


def mixture(x: torch.Tensor, top_k: int = 3) -> torch.Tensor:
    """With 5 experts, of which the last one is nobody's."""
    logits = kernels.linear(x, WEIGHT[:5])
    logits[:, 4] -= 100
    chosen = experts.chosen(logits, top_k)
    fc1, fc2 = WEIGHT[:160].view(5, 32, 96), WEIGHT[-80:].view(5, 96, 16)
    return experts.mlp(x, experts.shares(logits.gather(1, chosen)), chosen, fc1, fc2)


def test_a_mixture_is_the_same_in_any_batch() -> None:
    x = torch.randn(77, 96)
    whole, order = mixture(x), torch.randperm(77)
    assert torch.equal(mixture(x[order]), whole[order])
    assert torch.equal(torch.cat([mixture(row[None]) for row in x]), whole)
    logits = x @ WEIGHT[:4].t()
    top, number = logits.topk(3, dim=1)
    want = torch.zeros_like(x)
    for row, (share, chosen) in enumerate(zip(top.softmax(1), number, strict=True)):
        for p, e in zip(share, chosen, strict=True):
            gate, up = (WEIGHT[:160].view(5, 32, 96)[e] @ x[row]).chunk(2)
            want[row] += p * (WEIGHT[-80:].view(5, 96, 16)[e] @ (functional.silu(gate) * up))
    assert torch.allclose(whole, want, rtol=1e-4, atol=1e-4)


def test_of_equal_logits_the_lower_experts_are_chosen() -> None:
    logits = torch.tensor([[2.0, 1.0, 2.0, 1.0, 1.0], [-0.0, 0.0, -1.0, -3.0, -1.0]])
    for dtype in (torch.float32, torch.bfloat16):
        assert experts.chosen(logits.to(dtype), 3).tolist() == [[0, 1, 2], [0, 1, 2]]
    many = torch.randn(200, 64).bfloat16().sort(dim=1).values
    for top_k in (1, 8):
        found = experts.chosen(many, top_k)
        # With equal ones that are as large as the least chosen one, the first of them.
        least = many.gather(1, found).amin(1, keepdim=True)
        taken = torch.zeros_like(many, dtype=torch.bool).scatter(1, found, True)
        assert bool(((many > least) <= taken).all())
        equal, first = many == least, (many == least).cumsum(1)
        assert bool(
            (taken == ((many > least) | (equal & (first <= (equal & taken).sum(1, True))))).all()
        )


def test_parts_are_added_up_in_the_order_of_their_ranks() -> None:
    x, rounded = torch.randn(50, 96), []
    for part, weight in zip(x.split(24, dim=1), WEIGHT.split(24, dim=1), strict=True):
        rounded.append(kernels.linear(part, weight.contiguous()))
    want = ((rounded[0] + rounded[1]) + rounded[2]) + rounded[3]
    assert torch.equal(kernels.linear_in_parts(x, WEIGHT, 4), want)
    assert not torch.equal(kernels.added(rounded[::-1]), want)
    assert torch.equal(kernels.linear_in_parts(x, WEIGHT, 1), kernels.linear(x, WEIGHT))
    low = [part.bfloat16() for part in rounded]
    total = ((low[0].float() + low[1].float()) + low[2].float()) + low[3].float()
    assert torch.equal(kernels.added(low), total.bfloat16())


def test_an_ordinary_product_is_not() -> None:
    """What the blocks are for: one row goes to another routine."""
    x = torch.randn(77, 96)
    single = torch.cat([functional.linear(row[None], WEIGHT) for row in x])
    assert not torch.equal(single, functional.linear(x, WEIGHT))


def test_exp_is_right_to_a_unit_in_the_last_place() -> None:
    x = torch.linspace(-87.0, 0.0, 100_001)
    want = x.double().exp()
    assert ((kernels.exp(x).double() - want) / want).abs().max() < 2**-23
    ends = torch.tensor([-torch.inf, -200.0, 0.0, -0.0])
    assert kernels.exp(ends).tolist() == [0.0, 0.0, 1.0, 1.0]
    assert kernels.exp(torch.tensor([torch.nan])).isnan().all()


def test_rotary_tables_do_not_depend_on_their_length() -> None:
    angles = torch.arange(500.0)[:, None] * 10000 ** -torch.linspace(0, 1, 16)
    whole, short = kernels.rotary_table(angles), kernels.rotary_table(angles[:45])
    assert torch.equal(whole[:45], short)


def test_a_rotation_keeps_lengths() -> None:
    query, _, _ = pack()
    angles = torch.arange(float(LENGTH))[:, None] * torch.linspace(0, 1, 16)
    turned = kernels.rotate(query, kernels.rotary_table(angles), torch.arange(LENGTH))
    assert torch.allclose(turned.norm(dim=-1), query.norm(dim=-1), rtol=1e-5)
    assert torch.equal(turned[0], query[0])


def test_gradients_are_those_of_the_ordinary_function() -> None:
    x, weight = torch.randn(40, 96, requires_grad=True), WEIGHT.clone().requires_grad_()
    grad = torch.randn(40, 200)
    found = torch.autograd.grad(
        kernels.differentiable(kernels.linear, functional.linear, x, weight), (x, weight), grad
    )
    want = torch.autograd.grad(functional.linear(x, weight), (x, weight), grad)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    frozen = kernels.differentiable(kernels.linear, functional.linear, x, WEIGHT)
    assert torch.equal(torch.autograd.grad(frozen, x, grad)[0], want[0])


_THREADS = """
import hashlib, sys, torch
from weight_transfer.exact import kernels
torch.set_num_threads(int(sys.argv[1]))
torch.manual_seed(1)
x, w = torch.randn(130, 576), torch.randn(960, 576)
q, k = torch.randn(130, 9, 64), torch.randn(130, 3, 64)
found = [kernels.linear(x, w), kernels.rms_norm(x, w[0], 1e-6), kernels.silu(x),
         kernels.attend(q, k, k, 0.125), kernels.log_softmax(kernels.linear(x, w))]
print(hashlib.sha256(b"".join(t.numpy().tobytes() for t in found)).hexdigest())
"""


def test_the_number_of_threads_changes_no_bit() -> None:
    digests = [
        subprocess.run(
            [sys.executable, "-c", _THREADS, str(n)], capture_output=True, check=True, timeout=120
        ).stdout
        for n in (1, 2)
    ]
    assert digests[0] == digests[1] != b""


def test_the_comparison_names_the_first_operation_and_its_size() -> None:
    ones = {
        "embedding": torch.ones(4, 2),
        "0.input_norm": torch.ones(4, 2),
        "0.qkv": torch.ones(4, 6),
        "1.input_norm": torch.ones(4, 2),
        "1.qkv": torch.ones(4, 6),
        "log_probs": torch.zeros(4, 3),
        bits.SAMPLED: torch.zeros(5),
    }
    rows, first = bits.compare(ones, {k: t.clone() for k, t in ones.items()})
    assert first == "" and not any(row.differing for row in rows)
    others = {k: t.clone() for k, t in ones.items()}
    others["1.input_norm"][2, 1] = 1 + 2**-22
    others["0.qkv"][0, :2] = 1 + 2**-23
    rows, first = bits.compare(ones, others)
    assert first == "q, k, v products of layer 0"
    qkv = next(row for row in rows if row.operation == "qkv")
    assert (qkv.layers, qkv.differing, qkv.count, qkv.ulps) == (2, 2, 48, 1)
    assert qkv.largest == 2**-23 and qkv.first_layer == 0
    norm = next(row for row in rows if row.operation == "input_norm")
    assert (norm.ulps, norm.first_layer) == (2, 1)
    others = {k: t.clone() for k, t in ones.items()} | {bits.SAMPLED: torch.ones(5)}
    assert bits.compare(ones, others)[1] == "decoding"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_has_neighbours_on_both_sides(dtype) -> None:
    tiny = torch.tensor([torch.finfo(dtype).smallest_normal], dtype=dtype)
    _, _, ulps = bits.differing(tiny, -tiny)
    assert ulps == 2 * bits.differing(tiny, 0 * tiny)[2] > 0
    assert bits.differing(torch.tensor([0.0]), torch.tensor([-0.0])) == (0, 0.0, 0)


def test_a_gradient_of_other_strides_gives_one_product() -> None:
    """The output layer's arrives as a transposed [1, N, O]. torch would multiply it row by row,
    each with all of the weight."""
    torch.manual_seed(0)
    x, weight = torch.randn(96, 1, 64, requires_grad=True), torch.randn(320, 64)
    grad = torch.randn(96, 1, 320)
    turned = torch.empty_strided((96, 1, 320), (320, 96 * 320, 1)).copy_(grad)
    found = [torch.autograd.grad(kernels.product(x, weight), x, one)[0] for one in (grad, turned)]
    assert torch.equal(*found)
    assert found[1].is_contiguous() and found[1].stride() == x.stride()
