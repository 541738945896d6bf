"""The kernels between the experts' grouped products against torch's own operations, and the stacked
experts in Megatron's layer.

Without a GPU Triton interprets the kernels; marked gpu1 they are compiled, in bf16. What the layer
computes is held by the parity matrix.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.numerics import chain_error_bound
from trainer_node.model import experts
from trainer_node.model.grouped import GateUp

REPO = Path(__file__).parents[3]
E, HIDDEN, INNER, RANK = 7, 48, 40, 8


def ragged(device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Rows of seven experts, two of them without any, one with more than a tile."""
    torch.manual_seed(3)
    counts = torch.tensor([5, 0, 130, 1, 64, 0, 23])
    rows = int(counts.sum())

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(device, dtype)

    return {
        "ends": counts.cumsum(0).int().to(device),
        "y": normal(rows, 2 * INNER),
        "h": normal(rows, 2 * RANK),
        "b": normal(E, 2 * INNER, 2 * RANK) * 0.2,
        "p": torch.rand(rows).to(device, dtype),
        "grad": normal(rows, INNER),
        "down_h": normal(rows, RANK),
        "down_a": normal(E, RANK, INNER) * 0.2,
        "out": normal(rows, HIDDEN),
        "w": normal(E, HIDDEN, RANK),
        "choice": torch.randperm(rows - rows % 2).view(-1, 2).to(device),
    }


def block_diagonal(b: torch.Tensor) -> torch.Tensor:
    """As `Factors` packs it: gate's rows read gate's columns only."""
    b = b.clone()
    b[:, :INNER, RANK:] = 0
    b[:, INNER:, :RANK] = 0
    return b


def inner(d: dict[str, torch.Tensor], *, has_adapter: bool) -> GateUp:
    """SwiGLU's arguments."""
    h, b = (d["h"], d["b"]) if has_adapter else (None, None)
    return GateUp(y_N2F=d["y"], h_N2R=h, lora_B_E2F2R=b, probs_N=d["p"], ends_E=d["ends"])


def check_kernels(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Every kernel against the CPU's operations in fp32."""
    from trainer_node.adapters import product_kernels
    from trainer_node.model import expert_kernels

    d = ragged(device, dtype)
    d["b"] = block_diagonal(d["b"])
    c = {k: v.cpu().float() if v.is_floating_point() else v.cpu() for k, v in d.items()}

    def close(found: torch.Tensor, want: torch.Tensor) -> None:
        assert found.shape == want.shape
        torch.testing.assert_close(
            found.cpu().float(), want.float(), rtol=tolerance, atol=tolerance
        )

    for has_adapter in (True, False):
        ours, theirs = inner(d, has_adapter=has_adapter), inner(c, has_adapter=has_adapter)
        close(expert_kernels.swiglu(ours), experts.swiglu(theirs))
        for has_down in (True, False):
            down, their_down = (
                (x["down_h"], x["down_a"]) if has_down else (None, None) for x in (d, c)
            )
            found = expert_kernels.swiglu_backward(ours, d["grad"], *down)
            want = experts.swiglu_backward(theirs, c["grad"], *their_down)
            for one, other in zip(found, want, strict=True):
                close(one, other)
    for w, cw in ((d["w"], c["w"]), (d["w"].transpose(1, 2).contiguous().transpose(1, 2), c["w"])):
        for stochastic in (False, True):  # in bf16 a neighbour at most
            product_kernels.add_product_(d["out"], d["down_h"], w, d["ends"], stochastic=stochastic)
            experts.add_product_(c["out"], c["down_h"], cw, c["ends"])
            close(d["out"], c["out"])
            c["out"] = d["out"].cpu().float()
        # All rows with one matrix, as a dense linear's.
        product_kernels.add_product_(d["out"], d["down_h"], w[:1], stochastic=True)
        c["out"] += c["down_h"] @ cw[0].t()
        close(d["out"], c["out"])
        c["out"] = d["out"].cpu().float()
    close(expert_kernels.combine(d["out"], d["choice"]), experts.combine(c["out"], c["choice"]))


def test_kernels_interpreted() -> None:
    """In its own process: Triton decides at import whether it interprets."""
    # Sums over gate and up of products of three normal numbers.
    bound = chain_error_bound(torch.float32, roundings=2 * INNER, magnitude=10.0)
    code = f"import torch; from tests.trainer_node.model.test_experts import check_kernels; check_kernels('cpu', torch.float32, {bound})"  # noqa: E501
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(REPO)}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.gpu1
def test_kernels_compiled() -> None:
    check_kernels("cuda", torch.bfloat16, 0.04)


def gradients(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output, and gradients of input, routing weights and the six adapter matrices, of experts with
    the same numbers everywhere.
    """
    torch.manual_seed(5)
    tokens, top_k, rank = 90, 3, 5

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape) * shape[-1] ** -0.5

    class Stacked:
        is_exact = False
        fc1_E2FH = normal(E, 2 * INNER, HIDDEN).bfloat16().to(device, dtype)
        fc2_EHF = normal(E, HIDDEN, INNER).bfloat16().to(device, dtype)

    x = (normal(tokens, HIDDEN) * 7).bfloat16().to(device, dtype).requires_grad_()
    probs = torch.rand(tokens, top_k).bfloat16().to(device, dtype).requires_grad_()
    shapes = [(E, rank, HIDDEN), (E, INNER, rank)] * 2 + [(E, rank, INNER), (E, HIDDEN, rank)]
    params = [normal(*shape).bfloat16().float().to(device).requires_grad_() for shape in shapes]
    weights = torch.rand(E)
    weights[2] = 0  # an expert without tokens
    chosen = torch.multinomial(weights.expand(tokens, -1), top_k).sort(1).values
    rows = experts.Rows.of(
        chosen.to(device), torch.bincount(chosen.flatten(), minlength=E).to(device)
    )
    out = experts._ExpertMlp.apply(x, probs, rows, Stacked, 2.0, False, *params)
    out.backward(normal(tokens, HIDDEN).bfloat16().to(device, dtype))
    return [t.detach().cpu().float() for t in (out, x.grad, probs.grad, *(p.grad for p in params))]


@pytest.mark.gpu1
def test_the_whole_function_in_bf16() -> None:
    """Against fp32 on the CPU: what bf16's rounding leaves, relative to each tensor's size."""
    for found, want in zip(
        gradients("cuda", torch.bfloat16), gradients("cpu", torch.float32), strict=True
    ):
        assert (found - want).norm() < 0.02 * want.norm()
