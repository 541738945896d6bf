"""The kernel that quantises blocks: interpreted on a CPU, and against vLLM's formula on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.trainer_node.conftest import REPO
from weight_transfer import fp8

SHAPES = [(1, 256, 384), (2, 200, 130), (1, 5, 3)]


def weights(*shape: int, device: str = "cpu") -> torch.Tensor:
    """Values of many magnitudes, a block of zeros, one of tiny values, and ties of the rounding."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(*shape, generator=generator)
    values *= torch.exp(3 * torch.randn(*shape[:-1], 1, generator=generator)) * 0.02
    values[0, :128, :128] = 0.0
    values[-1, :128, -2:] = 1e-7
    values[-1, -1, :] = torch.arange(shape[-1]) * 2.0**-9
    return values.bfloat16().to(device)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check(device: str) -> None:
    from weight_transfer import fp8_kernels

    for shape in SHAPES:
        given = weights(*shape, device=device)
        want = fp8.per_block_by_torch(given)
        # By a number, torch multiplies by its reciprocal on CUDA.
        got = fp8_kernels.per_block(given, reciprocal=device == "cuda", fast=False)
        assert all(same(a, b) for a, b in zip(got, want, strict=True)), shape


def test_the_kernel_interpreted() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.weight_transfer.test_fp8"],
        cwd=REPO,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=120.0,
        check=False,
    )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-6000:]


@pytest.mark.gpu1
def test_the_kernel_on_a_gpu() -> None:
    check("cuda")


@pytest.mark.gpu1
@pytest.mark.parametrize("shape", [(256, 384), (4096, 14336), (200, 130), (17408, 5120)])
def test_the_kernel_rounds_as_a_compiled_quantiser(shape: tuple[int, int]) -> None:
    """vLLM's lines, compiled as it compiles them."""

    @torch.compile(dynamic=True)
    def compiled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        m, n = x.shape
        down, across = -(-m // 128), -(-n // 128)
        padded = torch.zeros((down * 128, across * 128), dtype=x.dtype, device=x.device)
        padded[:m, :n] = x
        view = padded.view(-1, 128, across, 128)
        largest = view.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4)
        scales = largest / 448.0
        codes = (view * (1.0 / scales)).to(torch.float8_e4m3fn)
        return codes.view_as(padded)[:m, :n].contiguous(), scales.view(down, across)

    given = weights(1, *shape, device="cuda")[0]
    got = fp8.per_block(given[None])
    want = compiled(given)
    assert same(got[1][0], want[1]) and same(got[0][0], want[0])


if __name__ == "__main__":
    from tests.weight_transfer.rounding import round_to_nearest

    round_to_nearest()
    check("cpu")
