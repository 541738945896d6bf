"""Adds an adapter's product to a linear's own before the sum is rounded.

A linear in bf16 rounds its output. What is added afterwards and is less than half a unit in the
last place vanishes: the sum rounds back. Most of a small update would be lost so in every layer of
the trainer's forward pass, while the served weights have it. Two ways keep it:

- `begin`: the product of the linear that runs next begins from the adapter's product instead of
  from zero (`beta = 1` in BLAS's words): one fp32 sum, rounded once. `install` replaces the
  functions that compute these products: `general_gemm` in TransformerEngine's linears, and
  Megatron's `LinearWithFrozenWeight`. On a CPU `cpu_te` calls `linear`.
- `added`: where the product is out of reach (compiled layers, Megatron's grouped linears), the sum
  of both is rounded stochastically, which is unbiased.

Axes: T = tokens, I = in features, O = out features.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from trainer_node.adapters.rounding import Corner, Rounding, rounded, thresholds

Addend = Callable[[torch.Tensor], torch.Tensor]
"""The product's input [..., I] -> what it begins from, [..., O], a new tensor."""
WORD = Corner("activations").word(Rounding(seed=0))
"""Chooses the thresholds of activations."""
_TE_MODULES = ("linear", "layernorm_linear")
_addend: Addend | None = None
_is_installed = False


def begin(addend: Addend) -> None:
    """Let the next product begin from `addend` of its input."""
    global _addend
    _addend = addend


def end() -> None:
    """Forget an addend that no product took."""
    global _addend
    _addend = None


def _take() -> Addend | None:
    global _addend
    addend, _addend = _addend, None
    return addend


def linear(x: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """x W', from the addend if there is one: [..., I] -> [..., O]."""
    addend = _take()
    if addend is None:
        return functional.linear(x, weight_OI)
    start = addend(x)
    out = torch.addmm(start.flatten(0, -2), x.reshape(-1, x.shape[-1]), weight_OI.t())
    return out.view(start.shape)


def added(out: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    """out + product, the sum rounded stochastically to out's dtype; differentiable."""
    nearest = out + product.to(out.dtype)
    if out.dtype is not torch.bfloat16:
        return nearest
    with torch.no_grad():
        total = (out.float() + product.float()).view(-1, out.shape[-1])
        h16 = thresholds(WORD, *total.shape, device=out.device)
        unbiased = rounded(total, nearest.dtype, h16).view(nearest.shape)
        correction = unbiased - nearest  # exact: neighbours
    return nearest + correction


# ---------------------------------------------------------------- where products are computed


def install() -> None:
    """Have Megatron's and TransformerEngine's linears ask for an addend; safe to call twice."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    _megatron()
    if "transformer_engine" in sys.modules and torch.cuda.is_available():
        for name in _TE_MODULES:
            _transformer_engine(f"transformer_engine.pytorch.module.{name}")


def _megatron() -> None:
    from megatron.core.tensor_parallel import layers

    original: Any = layers.LinearWithFrozenWeight

    class LinearWithAddend(original):  # type: ignore[misc]
        """Megatron's function; its product may begin from an addend."""

        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda")  # type: ignore[untyped-decorator]  # as Megatron
        def forward(
            ctx: Any,
            input: torch.Tensor,
            weight: torch.Tensor,
            bias: torch.Tensor | None,
            allreduce_dgrad: bool,
            tp_group: Any,
        ) -> torch.Tensor:
            """[..., I] -> [..., O]."""
            ctx.save_for_backward(weight)
            ctx.allreduce_dgrad, ctx.tp_group = allreduce_dgrad, tp_group
            output = linear(input, weight)
            return output if bias is None else output + bias

    layers.LinearWithFrozenWeight = LinearWithAddend


def _transformer_engine(name: str) -> None:
    """TransformerEngine 2.12: a module's forward pass calls its `general_gemm` once, as TN, and
    without `out`."""
    module: Any = importlib.import_module(name)
    original = module.general_gemm

    def general_gemm(weight: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        is_forward = kwargs.get("layout", "TN") == "TN" and kwargs.get("out") is None
        addend = _take() if is_forward and not kwargs.get("grad") else None
        if addend is None:
            return original(weight, x, *args, **kwargs)
        return original(weight, x, *args, **kwargs, out=addend(x), accumulate=True)

    module.general_gemm = general_gemm
