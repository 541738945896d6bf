"""The gated delta rule and its convolution in torch, against loops over tokens."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from trainer_node.backends import gated_delta
from trainer_node.backends.gated_delta import causal_conv1d, chunk_gated_delta_rule, l2norm

LENGTHS = (130, 1, 64, 65, 200, 63, 7)
HEADS, SIZE = 3, 8


def token_by_token(q, k, v, g, beta, lengths):
    """The recurrence of arXiv:2412.06464, equation 10, in float64."""
    outputs = []
    for sequence in zip(*(x[0].double().split(lengths) for x in (q, k, v, g, beta)), strict=True):
        state = q.new_zeros(HEADS, SIZE, SIZE, dtype=torch.float64)
        for q_AD, k_AD, v_AD, g_A, beta_A in zip(*sequence, strict=True):
            state = state * g_A.exp()[:, None, None]
            said_AD = torch.einsum("akv,ak->av", state, k_AD)
            wanted_AD = beta_A[:, None] * (v_AD - said_AD)
            state = state + torch.einsum("ak,av->akv", k_AD, wanted_AD)
            outputs.append(torch.einsum("akv,ak->av", state, q_AD) * SIZE**-0.5)
    return torch.stack(outputs)[None]


def drawn(total: int, forgets: float) -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k = (l2norm(torch.randn(1, total, HEADS, SIZE)) for _ in range(2))
    v, g = torch.randn(1, total, HEADS, SIZE), -forgets * torch.rand(1, total, HEADS)
    inputs = (q, k, v, g, torch.rand(1, total, HEADS))
    return [x.requires_grad_() for x in inputs]


def same(ours: torch.Tensor, theirs: torch.Tensor, within: float = 2e-6) -> None:
    assert (ours - theirs).detach().norm() < within * theirs.detach().norm()


@pytest.mark.parametrize(("forgets", "within"), [(0.01, 2e-6), (1.0, 2e-6), (40.0, 1e-4)])
@pytest.mark.parametrize("lengths", [LENGTHS, (150,)])
def test_the_delta_rule_and_its_gradients(lengths, forgets, within):
    """`forgets` of 40: after a chunk nothing is left, no exponent may overflow, and differences of
    sums over a chunk lose digits."""
    q, k, v, g, beta = inputs = drawn(sum(lengths), forgets)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int() if len(lengths) > 1 else None
    ours, _ = chunk_gated_delta_rule(
        q, k, v, g=g, beta=beta, cu_seqlens=cu_seqlens, initial_state=None,
        output_final_state=False, use_qk_l2norm_in_kernel=False,
    )  # fmt: skip
    theirs = token_by_token(*inputs, lengths)
    same(ours, theirs, within)
    along = torch.randn_like(ours)
    for found, expected in zip(
        torch.autograd.grad((ours * along).sum(), inputs),
        torch.autograd.grad((theirs * along).sum(), inputs),
        strict=True,
    ):
        assert torch.isfinite(found).all()
        same(found, expected, within)


def test_the_delta_rule_keeps_no_steps_for_the_backward_pass():
    q, k, v, g, beta = drawn(sum(LENGTHS), 1.0)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        chunk_gated_delta_rule(
            q, k, v, g=g, beta=beta, cu_seqlens=None, initial_state=None,
            output_final_state=False, use_qk_l2norm_in_kernel=False,
        )  # fmt: skip
    assert sum(x.nbytes for x in kept) <= sum(x.nbytes for x in (q, k, v, g, beta))


@pytest.mark.parametrize("bias", [None, torch.randn(5)])
def test_the_convolution_stays_within_sequences(bias):
    x, weight = torch.randn(1, sum(LENGTHS), 5), torch.randn(5, 4)
    ours, _ = causal_conv1d(
        x=x, weight=weight, bias=bias, activation="silu",
        cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0).int(), initial_state=None,
        output_final_state=False,
    )  # fmt: skip
    theirs = [
        functional.silu(
            functional.conv1d(functional.pad(s.mT, (3, 0)), weight[:, None], bias, groups=5)
        ).mT
        for s in x.split(LENGTHS, dim=1)
    ]
    same(ours, torch.cat(theirs, dim=1))


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.ModuleType:
    """flash-linear-attention on a Hopper GPU with Triton 3.6, and tilelang without nvcc. Neither is
    installed here."""
    names = ("fla", "fla.utils", "fla.modules", "fla.modules.convolution", "fla.modules.l2norm",
             "fla.ops", "fla.ops.gated_delta_rule",
             "tilelang", "tilelang.env")  # fmt: skip # a list
    made = {name: types.ModuleType(name) for name in names}
    for name, module in made.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    utils = made["fla.utils"]
    utils.IS_NVIDIA_HOPPER = utils.TRITON_ABOVE_3_4_0 = True
    utils.TRITON_ABOVE_3_7_1 = False
    made["tilelang.env"].CUDA_HOME = str(tmp_path)
    made["fla.modules.convolution"].causal_conv1d = "convolution"
    made["fla.modules.l2norm"].l2norm = "norm"
    made["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = "rule"
    return utils


def test_flash_linear_attention_needs_a_backward_pass(
    fla: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "nvcc" in (gated_delta.kernels_obstacle() or "")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert gated_delta.kernels_obstacle() is None
    monkeypatch.delitem(sys.modules, "tilelang")
    assert "tilelang" in (gated_delta.kernels_obstacle() or "")
    fla.TRITON_ABOVE_3_7_1 = True
    assert gated_delta.kernels_obstacle() is None


def test_megatron_gets_flash_linear_attention_back(
    fla: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = types.ModuleType("megatron.core.ssm.gated_delta_net")
    net.common, net.gdn = types.SimpleNamespace(), types.SimpleNamespace()
    for name in ("megatron", "megatron.core", "megatron.core.ssm"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, net.__name__, net)
    gated_delta.use_kernels()
    assert net.gdn.chunk_gated_delta_rule is chunk_gated_delta_rule, "theirs cannot train"
    fla.TRITON_ABOVE_3_7_1 = True
    gated_delta.use_kernels()
    assert (net.common.HAVE_FLA, net.common.l2norm) == (True, "norm")
    assert (net.gdn.causal_conv1d, net.gdn.chunk_gated_delta_rule) == ("convolution", "rule")
