"""Kernels of others that the trainer's gradients go through, against torch in fp32 on the same
bf16 inputs: attention in packs (TransformerEngine over cuDNN) and the gated delta rule
(flash-linear-attention). cuDNN 9.14's backward pass of wide heads is wrong, and its forward pass is
not, so only a gradient shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.trainer_node.conftest import run_on_gpus
from trainer_node.backends import gated_delta
from trainer_node.model.kernel_check import BOUND, Function, differences

LENGTHS = (1111, 64, 333, 700)


@pytest.mark.gpu1
def test_attention(tmp_path: Path) -> None:
    run_on_gpus(1, "model.kernel_kinds", tmp_path, "cuda")


@pytest.mark.gpu1
def test_the_gated_delta_rule() -> None:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    torch.manual_seed(1)
    tokens, heads, width = sum(LENGTHS), 8, 128
    q, k, v = (torch.randn(1, tokens, heads, width, device="cuda") for _ in range(3))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    g, beta = (torch.rand(1, tokens, heads, device="cuda") for _ in range(2))
    inputs = [x.bfloat16() for x in (q, k, v, -0.2 * g, beta)]
    cu_seqlens = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0)

    def by(rule: Callable[..., tuple[torch.Tensor, None]]) -> Function:
        def run(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *gates: torch.Tensor
        ) -> torch.Tensor:
            g, beta = (gate.float() for gate in gates)
            output, _ = rule(
                q, k, v, g=g, beta=beta.to(q.dtype), cu_seqlens=cu_seqlens,
                initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
            )  # fmt: skip # as Megatron calls it
            return output

        return run

    ours = by(gated_delta.chunk_gated_delta_rule)
    found = differences(
        by(chunk_gated_delta_rule), ours, inputs, torch.randn(v.shape, device="cuda")
    )
    assert all(difference < BOUND for difference in found)
