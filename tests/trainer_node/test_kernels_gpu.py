"""Kernels of others that the trainer's gradients go through, against torch in fp32 on the same
bf16 inputs: attention in packs (TransformerEngine over cuDNN) and the gated delta rule
(flash-linear-attention). cuDNN 9.14's backward pass of wide heads is wrong, and its forward pass is
not, so only a gradient shows it.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from itertools import accumulate

import pytest
import torch

from trainer_node.model import gated_delta
from trainer_node.model.cpu_te.attention import attend
from trainer_node.model.kernel_check import BOUND, Function, differences

LENGTHS = (1111, 64, 333, 700)
ONE_RANK = types.SimpleNamespace(size=lambda: 1, rank=lambda: 0)


@pytest.mark.gpu1
@pytest.mark.parametrize(
    ("heads", "groups", "width"),
    [
        pytest.param(32, 8, 128, id="usual"),
        pytest.param(16, 2, 256, id="qwen3.5"),
        pytest.param(20, 20, 256, id="glm-4.7-flash"),
        pytest.param(16, 16, 192, id="deepseek"),
    ],
)
def test_attention(heads: int, groups: int, width: int) -> None:
    from transformer_engine.pytorch import DotProductAttention

    torch.manual_seed(1)
    bounds = list(accumulate(LENGTHS, initial=0))
    inputs = [
        torch.randn(bounds[-1], count, width, device="cuda").bfloat16()
        for count in (heads, groups, groups)
    ]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    attention = DotProductAttention(
        heads,
        width,
        num_gqa_groups=groups,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
    )

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = attention(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max(LENGTHS),
            max_seqlen_kv=max(LENGTHS),
        )
        return output

    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(
            q, k, v, bounds, scale=width**-0.5, window=None, sink_A=None, context_group=ONE_RANK
        )

    slope = torch.randn(bounds[-1], heads * width, device="cuda")
    found = differences(kernel, reference, inputs, slope)
    assert all(difference < BOUND for difference in found)  # none is NaN


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
