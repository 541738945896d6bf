"""A MoE layer's frozen experts, forward and the gradient of their input, against
TransformerEngine's GroupedLinear.

Qwen3-30B-A3B's shape: 128 experts, hidden 2048, inner 768, 8 experts of each token. Rows come
sorted by expert, as many for each as a random router gives.

    experts/products   the four grouped products, on rows in bf16
    experts/mlp        with SwiGLU and routing weights between them; the peer has Megatron's

Our products read the row counts on the device. The peer is `GroupedLinear` with splits on the
host, as Megatron calls it. In the cases `-device-splits` its splits are on the device too, which
TransformerEngine 2.20 does on Hopper with cuBLASLt 13.4; elsewhere these cases are missing. On a
CPU the peer is a loop of torch linears. Both sides have the same weights, and their outputs and
gradients are compared first. Settings: SPLICE_BENCH_TOKENS (4096,16384 on cuda).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from benchmarks.harness import Case
from benchmarks.timing import seconds
from trainer_node.model.experts import Rows, _ExpertMlp
from trainer_node.model.grouped import grouped_matmul

AGREE = 0.02
"""Largest difference from the peer, of the norm: both round to bf16 at other places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer's weights and rows; it takes the place of `StackedExperts`. Axes as in
    `trainer_node.model.experts`.
    """

    fc1_E2FH: torch.Tensor
    fc2_EHF: torch.Tensor
    x_NH: torch.Tensor
    probs_N: torch.Tensor
    grad_NH: torch.Tensor
    counts_E: torch.Tensor
    is_exact: bool = False

    @staticmethod
    def of(experts: int, hidden: int, inner: int, rows: int, device: str) -> Layer:
        """Random weights, and as many rows for each expert as a random router gives."""
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device).normal_(0.0, scale)

        chosen = torch.randint(experts, (rows,), device=device)
        return Layer(
            fc1_E2FH=normal(experts, 2 * inner, hidden, scale=hidden**-0.5),
            fc2_EHF=normal(experts, hidden, inner, scale=inner**-0.5),
            x_NH=normal(rows, hidden).requires_grad_(),
            probs_N=torch.rand(rows, device=device).requires_grad_(),
            grad_NH=normal(rows, hidden),
            counts_E=torch.bincount(chosen, minlength=experts),
        )

    @property
    def rows(self) -> Rows:
        """The rows are the input's own."""
        return Rows(ends_E=self.counts_E.cumsum(0).to(torch.int32))


Pass = Callable[[], tuple[torch.Tensor, ...]]
"""A forward and a backward pass: the output and the input's gradient."""


def run(*, device: str, small: bool) -> list[Case]:
    """Seconds of a forward and backward pass of one layer."""
    is_small = small or device == "cpu"
    experts, hidden, inner, top_k = (8, 64, 32, 2) if is_small else (128, 2048, 768, 8)
    usual = "128" if is_small else os.environ.get("SPLICE_BENCH_TOKENS", "4096,16384")
    repeats = 3 if is_small else 20
    cases = []
    for tokens in map(int, usual.split(",")):
        layer = Layer.of(experts, hidden, inner, tokens * top_k, device)
        ours: dict[str, Pass] = {"products": partial(_products, layer), "mlp": partial(_mlp, layer)}
        for suffix, peer, passes in _peers(layer, device):
            for what, work in passes.items():
                _check(what + suffix, ours[what](), work())
                settings = {
                    "experts": experts,
                    "hidden": hidden,
                    "inner": inner,
                    "tokens": tokens,
                    "top_k": top_k,
                    "most_rows": int(layer.counts_E.max()),
                    "cublaslt": _cublaslt() if device == "cuda" else 0,
                }
                cases.append(
                    Case(
                        name=f"experts/{what}-{tokens}{suffix}",
                        metric="seconds",
                        unit="s",
                        samples=_times(ours[what], device, repeats),
                        peer=peer,
                        peer_samples=_times(work, device, repeats),
                        settings=settings,
                    )
                )
    return cases


def _products(layer: Layer) -> tuple[torch.Tensor, ...]:
    """The grouped products of `_ExpertMlp` without adapters; the gate's half continues."""
    ends_E, inner = layer.rows.ends_E, layer.fc2_EHF.shape[2]
    with torch.no_grad():
        y_N2F = grouped_matmul(layer.x_NH, layer.fc1_E2FH.transpose(1, 2), ends_E)
        out_NH = grouped_matmul(
            y_N2F[:, :inner].contiguous(), layer.fc2_EHF.transpose(1, 2), ends_E
        )
        grad_NF = grouped_matmul(layer.grad_NH, layer.fc2_EHF, ends_E)
        grad_N2F = functional.pad(grad_NF, (0, inner))
        return out_NH, grouped_matmul(grad_N2F, layer.fc1_E2FH, ends_E)


def _mlp(layer: Layer) -> tuple[torch.Tensor, ...]:
    out = _ExpertMlp.apply(layer.x_NH, layer.probs_N, layer.rows, layer, 1.0, False, *[None] * 6)
    return out, *_gradients(layer, out, layer.x_NH, layer.probs_N)


def _gradients(layer: Layer, out: torch.Tensor, *of: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(out, of, layer.grad_NH)


# ------------------------------------------------------------ peers


def _peers(layer: Layer, device: str) -> list[tuple[str, str, dict[str, Pass]]]:
    """(the cases' suffix, the peer's name, its passes)."""
    if device == "cpu":
        linears = (_loop(layer, layer.fc1_E2FH), _loop(layer, layer.fc2_EHF))
        return [("", "a loop of linears", _passes(layer, *linears, _swiglu))]
    from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl

    def swiglu(y_N2F: torch.Tensor, probs_N: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = weighted_bias_swiglu_impl(y_N2F, None, probs_N[:, None])
        return out

    found = []
    for suffix, name, on_device in (
        ("", "TransformerEngine's GroupedLinear", False),
        ("-device-splits", "TransformerEngine's GroupedLinear, splits on the device", True),
    ):
        if on_device and not _takes_device_splits():
            continue
        linears = (
            _grouped_linear(layer, layer.fc1_E2FH, on_device=on_device),
            _grouped_linear(layer, layer.fc2_EHF, on_device=on_device),
        )
        found.append((suffix, name, _passes(layer, *linears, swiglu)))
    return found


def _passes(
    layer: Layer,
    fc1: Callable[[torch.Tensor], torch.Tensor],
    fc2: Callable[[torch.Tensor], torch.Tensor],
    swiglu: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> dict[str, Pass]:
    inner = layer.fc2_EHF.shape[2]

    def products() -> tuple[torch.Tensor, ...]:
        out = fc2(fc1(layer.x_NH)[:, :inner].contiguous())
        return out, *_gradients(layer, out, layer.x_NH)

    def mlp() -> tuple[torch.Tensor, ...]:
        out = fc2(swiglu(fc1(layer.x_NH), layer.probs_N))
        return out, *_gradients(layer, out, layer.x_NH, layer.probs_N)

    return {"products": products, "mlp": mlp}


def _swiglu(y_N2F: torch.Tensor, probs_N: torch.Tensor) -> torch.Tensor:
    gate, up = y_N2F.chunk(2, dim=1)
    return functional.silu(gate) * up * probs_N[:, None]


def _loop(layer: Layer, weight_EOI: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    counts = layer.counts_E.tolist()

    def apply(x_NI: torch.Tensor) -> torch.Tensor:
        return torch.cat([x @ w.T for x, w in zip(x_NI.split(counts), weight_EOI, strict=True)])

    return apply


def _grouped_linear(
    layer: Layer, weight_EOI: torch.Tensor, *, on_device: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    """TransformerEngine's, with these weights, frozen."""
    from transformer_engine.pytorch import GroupedLinear

    experts, out_features, in_features = weight_EOI.shape
    chosen: dict[str, Any] = {"use_grouped_tensor": True} if on_device else {}
    linear = GroupedLinear(
        experts, in_features, out_features, bias=False, params_dtype=torch.bfloat16, **chosen
    )
    with torch.no_grad():
        for i, weight in enumerate(weight_EOI):
            getattr(linear, f"weight{i}").copy_(weight)
    linear.requires_grad_(requires_grad=False)
    splits = layer.counts_E if on_device else layer.counts_E.tolist()
    return lambda x_NI: linear(x_NI, splits)


def _takes_device_splits() -> bool:
    """TransformerEngine 2.20 and cuBLASLt of this process decide it."""
    try:
        from transformer_engine.pytorch.module.grouped_linear import (
            is_module_grouped_tensor_path_supported as supports,
        )
    except ImportError:
        return False
    return bool(supports(None, torch.bfloat16))


def _cublaslt() -> int:
    """Version of the library that TransformerEngine has loaded: 130400 is 13.4."""
    import transformer_engine_torch

    return int(transformer_engine_torch.get_cublasLt_version())


# ------------------------------------------------------------ measuring


def _check(name: str, ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> None:
    """What is measured is right."""
    for n, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        one, other = one.detach().float(), other.detach().float()
        difference = float((one - other).norm() / other.norm())
        if not difference < AGREE:
            raise AssertionError(f"{name}: result {n} differs from the peer's by {difference:.3g}")


def _times(work: Pass, device: str, repeats: int) -> tuple[float, ...]:
    """After three untimed rounds."""
    return tuple([seconds(work, device) for _ in range(repeats + 3)][3:])
