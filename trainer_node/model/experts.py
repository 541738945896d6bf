"""Computes a mixture's experts and adapters in a few grouped products, without waiting for the
device.

Megatron runs TransformerEngine's grouped linear: one GEMM for each expert and linear. That is some
1,500 launches for a layer's forward and backward pass with 128 experts. The host must know each
expert's number of tokens before the first launch. Here one tensor holds the weights of all local
experts, and `torch.nn.functional.grouped_mm` takes the row counts from the device. The rest of the
layer (adapters, SwiGLU, routing weights, gathering and adding up) is a few kernels of
`expert_kernels`. Only a product's output is kept for the backward pass; gathered rows and
activations are made again.

    x -> rows of x by expert -> [gate | up] = x W1' + s (x A1') B1' -> silu(gate) * up * p -> y = a
    W2' + s (a A2') B2' -> sum over a token's rows

Parameters keep Megatron's names: they become views into the stacked weights. On a CPU the same
function runs on loops over the experts.

Axes: T = tokens, K = experts of a token, N = rows (T * K where all experts are local), E = local
experts, H = hidden size, F = an expert's inner size, R = rank, padded to a multiple of 8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from trainer_node.adapters import products
from trainer_node.adapters.lora import AdapterSet, ExpertAdapter
from trainer_node.model.grouped import GateUp, grouped_matmul, grouped_outer
from weight_transfer.exact import experts as exact
from weight_transfer.exact import kernels

STEP = 8
"""Elements of bf16 in 16 bytes: grouped products need strides in such steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of the grouped products, sorted by expert."""

    ends_E: torch.Tensor
    """int32: the row after each expert's last one."""
    token_N: torch.Tensor | None = None
    """Each row's token; None: the rows are the input's own."""
    choice_N: torch.Tensor | None = None
    """Each row's place among the flattened [T, K] choices."""
    row_TK: torch.Tensor | None = None
    """Row of each choice."""

    @staticmethod
    def of(experts_TK: torch.Tensor, per_expert_E: torch.Tensor) -> Rows:
        """Sort by each token's experts, without a copy to the host."""
        choice_N = torch.argsort(experts_TK.flatten(), stable=True)
        row = torch.empty_like(choice_N)
        row[choice_N] = torch.arange(len(choice_N), device=choice_N.device)
        top_k = experts_TK.shape[1]
        return Rows(
            ends_E=per_expert_E.cumsum(0).to(torch.int32),
            token_N=choice_N // top_k,
            choice_N=choice_N,
            row_TK=row.view(-1, top_k),
        )

    def gather(self, x_TH: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [N, H]."""
        return x_TH if self.token_N is None else x_TH.index_select(0, self.token_N)

    def combine(self, y_NH: torch.Tensor) -> torch.Tensor:
        """[N, H] -> [T, H], a token's rows added up in fp32."""
        return y_NH if self.row_TK is None else combine(y_NH, self.row_TK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """The adapters of one fused linear in the compute dtype: P HF linears side by side, each rank
    padded, B block-diagonal."""

    lora_A_EQI: torch.Tensor
    """[E, P * R, I]."""
    lora_B_EOQ: torch.Tensor
    """[E, P * O, P * R]."""
    scale: float

    @staticmethod
    @torch.no_grad()
    def pack(
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor] | None],
        *,
        scale: float,
        dtype: torch.dtype,
    ) -> Factors | None:
        """Pack (A [E, r, I], B [E, O, r]) of each HF linear in the fused order; None for a linear
        without an adapter. Returns None if no linear has one."""
        present = [p for p in pairs if p is not None]
        if not present:
            return None
        lora_A, lora_B = present[0]
        (experts, rank, in_features), out = lora_A.shape, lora_B.shape[1]
        padded = -(-rank // STEP) * STEP
        packed_A = torch.zeros(
            experts, len(pairs) * padded, in_features, dtype=dtype, device=lora_A.device
        )
        packed_B = torch.zeros(
            experts, len(pairs) * out, len(pairs) * padded, dtype=dtype, device=lora_A.device
        )
        for i, pair in enumerate(pairs):
            if pair is not None:
                packed_A[:, i * padded : i * padded + rank] = pair[0]
                packed_B[:, i * out : (i + 1) * out, i * padded : i * padded + rank] = pair[1]
        return Factors(lora_A_EQI=packed_A, lora_B_EOQ=packed_B, scale=scale)

    def hidden(self, x_NI: torch.Tensor, rows: Rows) -> torch.Tensor:
        """scale * x A', [N, P * R]."""
        return grouped_matmul(x_NI, self.lora_A_EQI.transpose(1, 2), rows.ends_E).mul_(self.scale)

    def grad_hidden(self, grad_NO: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Gradient of `x A'`, from the gradient of the linear's output."""
        return grouped_matmul(grad_NO, self.lora_B_EOQ, rows.ends_E).mul_(self.scale)

    def grads(
        self,
        x_NI: torch.Tensor,
        hidden: torch.Tensor,
        grad_NO: torch.Tensor,
        grad_hidden: torch.Tensor,
        rows: Rows,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of packed A and B."""
        return grouped_outer(grad_hidden, x_NI, rows.ends_E), grouped_outer(
            grad_NO, hidden, rows.ends_E
        )

    @staticmethod
    def unpack(
        grad_A_EQI: torch.Tensor,
        grad_B_EOQ: torch.Tensor,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor] | None],
    ) -> list[torch.Tensor | None]:
        """Gradients of A and B of each HF linear, in their own dtype."""
        found: list[torch.Tensor | None] = []
        padded, out = grad_A_EQI.shape[1] // len(pairs), grad_B_EOQ.shape[1] // len(pairs)
        for i, pair in enumerate(pairs):
            if pair is None:
                found += [None, None]
                continue
            rank = pair[0].shape[1]
            found.append(grad_A_EQI[:, i * padded : i * padded + rank].to(pair[0].dtype))
            found.append(
                grad_B_EOQ[:, i * out : (i + 1) * out, i * padded : i * padded + rank].to(
                    pair[1].dtype
                )
            )
        return found


class _ExpertMlp(torch.autograd.Function):
    """See the module's docstring; the base is frozen."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TH: torch.Tensor,
        probs: torch.Tensor,
        rows: Rows,
        stacked: StackedExperts,
        scale: float,
        is_served: bool,
        *params: torch.Tensor | None,
    ) -> torch.Tensor:
        """`probs`: [T, K], or [N] where the rows are the input's own. `params`: A and B of gate, up
        and down. With `is_served` the weights have their products already."""
        fc1, fc2 = (None, None) if is_served else _factors(params, scale, x_TH.dtype)
        does = EXACT if stacked.is_exact else ORDINARY
        rows_NH = rows.gather(x_TH)
        y_N2F = does.product(rows_NH, stacked.fc1_E2FH, rows.ends_E)
        h_NQ = None if fc1 is None else fc1.hidden(rows_NH, rows)
        del rows_NH
        act_NF = does.swiglu(_gate_up(y_N2F, h_NQ, fc1, probs, rows))
        out_NH = does.product(act_NF, stacked.fc2_EHF, rows.ends_E)
        if fc2 is not None:
            h_NR = fc2.hidden(act_NF, rows)
            add_product_(out_NH, h_NR, fc2.lora_B_EOQ, rows.ends_E, keeps_all=True)
        ctx.rows, ctx.stacked, ctx.scale, ctx.is_served = rows, stacked, scale, is_served
        ctx.save_for_backward(x_TH, probs, y_N2F, h_NQ, *params)
        return out_NH if rows.row_TK is None else does.combine(out_NH, rows.row_TK)

    @staticmethod
    def backward(ctx: Any, grad_TH: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        """Gathered rows and activations once more, then each product's two gradients."""
        x_TH, probs, y_N2F, h_NQ, *params = ctx.saved_tensors
        rows, stacked = ctx.rows, ctx.stacked
        fc1, fc2 = _factors(params, ctx.scale, x_TH.dtype)
        added1, added2 = (None, None) if ctx.is_served else (fc1, fc2)
        grad_NH = rows.gather(grad_TH.contiguous())
        grad_down_NR = None if fc2 is None else fc2.grad_hidden(grad_NH, rows)
        grad_act_NF = grouped_matmul(grad_NH, stacked.fc2_EHF, rows.ends_E)
        act_NF, grad_y_N2F, grad_probs_N = swiglu_backward(
            _gate_up(y_N2F, h_NQ, added1, probs, rows),
            grad_act_NF,
            None if added2 is None else grad_down_NR,
            None if added2 is None else added2.lora_A_EQI,
        )
        del grad_act_NF
        grads: list[torch.Tensor | None] = [None] * len(params)
        if fc2 is not None and grad_down_NR is not None:
            found = fc2.grads(act_NF, fc2.hidden(act_NF, rows), grad_NH, grad_down_NR, rows)
            grads[4:6] = Factors.unpack(*found, _pairs(params)[2:])
        del act_NF, grad_NH
        grad_x_NH = grouped_matmul(grad_y_N2F, stacked.fc1_E2FH, rows.ends_E)
        if fc1 is not None:
            rows_NH, grad_h_NQ = rows.gather(x_TH), fc1.grad_hidden(grad_y_N2F, rows)
            if added1 is None:
                h_NQ = fc1.hidden(rows_NH, rows)
            else:
                add_product_(grad_x_NH, grad_h_NQ, fc1.lora_A_EQI.transpose(1, 2), rows.ends_E)
            found = fc1.grads(rows_NH, h_NQ, grad_y_N2F, grad_h_NQ, rows)
            grads[:4] = Factors.unpack(*found, _pairs(params)[:2])
        if rows.row_TK is not None:
            grad_probs_N = grad_probs_N[rows.row_TK]
        return rows.combine(grad_x_NH), grad_probs_N.to(probs.dtype), *[None] * 4, *grads


def _pairs(params: Sequence[torch.Tensor | None]) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    """(A, B) of gate, up and down."""
    return [
        None if a is None or b is None else (a.detach(), b.detach())
        for a, b in zip(params[::2], params[1::2], strict=True)
    ]


def _factors(
    params: Sequence[torch.Tensor | None], scale: float, dtype: torch.dtype
) -> tuple[Factors | None, Factors | None]:
    """Adapters of fc1 and fc2."""
    gate, up, down = _pairs(params)
    return Factors.pack([gate, up], scale=scale, dtype=dtype), Factors.pack(
        [down], scale=scale, dtype=dtype
    )


def _gate_up(
    y_N2F: torch.Tensor,
    h_N2R: torch.Tensor | None,
    fc1: Factors | None,
    probs: torch.Tensor,
    rows: Rows,
) -> GateUp:
    """Compute the steps between the two products."""
    lora_B = None if fc1 is None else fc1.lora_B_EOQ
    return GateUp(
        y_N2F=y_N2F,
        h_N2R=h_N2R,
        lora_B_E2F2R=lora_B,
        probs_N=_by_row(probs, rows),
        ends_E=rows.ends_E,
    )


def _by_row(probs: torch.Tensor, rows: Rows) -> torch.Tensor:
    return probs if rows.choice_N is None else probs.flatten().index_select(0, rows.choice_N)


# ---------------------------------------------------------------- between the products


def swiglu(inner: GateUp) -> torch.Tensor:
    """silu(gate) * up * p, in fp32, rounded once. [N, F]"""
    if inner.y_N2F.is_cuda:
        from trainer_node.model import expert_kernels

        return expert_kernels.swiglu(inner)
    gate, up = inner.halves()
    return (functional.silu(gate) * up * inner.probs_N.to(gate.dtype)[:, None]).to(
        inner.y_N2F.dtype
    )


def swiglu_backward(
    inner: GateUp,
    grad_NF: torch.Tensor,
    down_NR: torch.Tensor | None,
    down_A_ERF: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(`swiglu`'s output once more [N, F], gradient of y [N, 2F], gradient of p [N]), where the
    output's gradient is grad + down A."""
    if inner.y_N2F.is_cuda:
        from trainer_node.model import expert_kernels

        return expert_kernels.swiglu_backward(inner, grad_NF, down_NR, down_A_ERF)
    gate, up = inner.halves()
    grad = grad_NF.to(gate.dtype)
    if down_NR is not None and down_A_ERF is not None:
        grad = grad + grouped_matmul(
            down_NR.to(gate.dtype), down_A_ERF.to(gate.dtype), inner.ends_E
        )
    p_N1, s = inner.probs_N.to(gate.dtype)[:, None], gate.sigmoid()
    product = gate * s * up
    grad_gate, grad_up = grad * p_N1 * up * (s * (1 + gate * (1 - s))), grad * p_N1 * gate * s
    grad_y = torch.cat([grad_gate, grad_up], dim=1).to(inner.y_N2F.dtype)
    return (product * p_N1).to(inner.y_N2F.dtype), grad_y, (grad * product).sum(1)


def add_product_(
    y_NO: torch.Tensor,
    h_NR: torch.Tensor,
    w_EOR: torch.Tensor,
    ends_E: torch.Tensor,
    *,
    keeps_all: bool = False,
) -> None:
    """y += h w[e]', in place, added in fp32.

    With `keeps_all` the sum is rounded without a bias (`products.added`). y is rounded already, and
    so are the rows that `combine` adds up. To nearest, a small product would vanish here; added
    only after all rows, it would decide the many ties of their sum.
    """
    if y_NO.is_cuda:
        from trainer_node.adapters import product_kernels

        product_kernels.add_product_(y_NO, h_NR, w_EOR, ends_E, stochastic=keeps_all)
    else:
        wide = torch.promote_types(y_NO.dtype, torch.float32)
        product = grouped_matmul(h_NR.to(wide), w_EOR.transpose(1, 2).to(wide), ends_E)
        y_NO.copy_(products.added(y_NO, product) if keeps_all else y_NO.to(wide) + product)


def combine(y_NH: torch.Tensor, row_TK: torch.Tensor) -> torch.Tensor:
    """Sum of the rows that belong to each token, in fp32, rounded once. [T, H]"""
    if y_NH.is_cuda:
        from trainer_node.model import expert_kernels

        return expert_kernels.combine(y_NH, row_TK)
    wide = torch.promote_types(y_NH.dtype, torch.float32)
    return y_NH[row_TK].to(wide).sum(1).to(y_NH.dtype)


class _Operations(NamedTuple):
    """Of a forward pass without adapters."""

    product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """Rows [N, I], weights [E, O, I] and ends_E -> [N, O]."""
    swiglu: Callable[[GateUp], torch.Tensor]
    combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


ORDINARY = _Operations(
    lambda x_NI, w_EOI, ends_E: grouped_matmul(x_NI, w_EOI.transpose(1, 2), ends_E), swiglu, combine
)


def _exact_swiglu(inner: GateUp) -> torch.Tensor:
    assert inner.h_N2R is None, "served weights have their products"
    return kernels.swiglu(inner.y_N2F, inner.probs_N)


EXACT = _Operations(exact.product, _exact_swiglu, exact.combined)


# ---------------------------------------------------------------- in Megatron's layer


class StackedExperts:
    """The experts of one `MoELayer`: their weights in two tensors, and the forward pass.

    On one rank it replaces the layer's forward, on several ranks the experts'.

    Args:
        layer: Megatron's MoELayer.
        adapters: all of the model; those of the layer's linear_fc1 and linear_fc2 count.
        is_exact: whether the forward pass has the bits of `weight_transfer.exact.experts`.

    Raises:
        ConfigError: a product is not exact on this host.
    """

    def __init__(self, layer: Any, adapters: AdapterSet, *, is_exact: bool = False) -> None:
        self.layer, self.is_exact = layer, is_exact
        self.use(adapters)
        self.fc1_E2FH = _stack(layer.experts.linear_fc1, layer.num_local_experts)
        self.fc2_EHF = _stack(layer.experts.linear_fc2, layer.num_local_experts)
        for weight in (self.fc1_E2FH, self.fc2_EHF) if is_exact else ():
            kernels.check(tuple(weight.shape), weight.device)
        if layer.ep_group.size() == 1:
            layer.forward = torch.compiler.disable(self.layer_forward)
        else:
            layer.experts.forward = torch.compiler.disable(self.experts_forward)

    def use(self, adapters: AdapterSet) -> None:
        """Run with these adapters from now on."""
        self._adapters = adapters
        experts = self.layer.experts
        self._own = [adapters.by_module.get(m) for m in (experts.linear_fc1, experts.linear_fc2)]

    def layer_forward(
        self,
        hidden_states: torch.Tensor,
        intermediate_tensors: Any = None,
        padding_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Replace `MoELayer.forward`, [s, b, H] -> [s, b, H].

        All experts are local, so nothing is dispatched.
        """
        if intermediate_tensors is not None or padding_mask is not None:
            raise NotImplementedError(
                "stacked experts take neither a padding mask nor tensors of a partly captured layer"
            )
        shared = self.layer.shared_experts_compute(hidden_states)
        probs_TE, map_TE = self.layer.router(hidden_states)
        top_k = self.layer.config.moe_router_topk
        experts_TK = map_TE.to(torch.uint8).topk(top_k, dim=1).indices.sort(dim=1).values
        rows = Rows.of(experts_TK, map_TE.sum(0))
        out_TH = self._mlp(
            hidden_states.view(-1, hidden_states.shape[-1]), probs_TE.gather(1, experts_TK), rows
        )
        out = out_TH.view(hidden_states.shape)
        return out if shared is None else out + shared, None

    def experts_forward(
        self, rows_NH: torch.Tensor, tokens_per_expert: torch.Tensor, probs_N: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Replace the experts' forward, [N, H] -> [N, H]; the rows come sorted by expert."""
        if not len(rows_NH):
            # Grouped products need at least one row.
            return rows_NH + 0.0 * probs_N.sum(), None
        ends_E = tokens_per_expert.to(rows_NH.device, non_blocking=True).cumsum(0).to(torch.int32)
        return self._mlp(rows_NH.contiguous(), probs_N.contiguous(), Rows(ends_E=ends_E)), None

    def _mlp(self, x_TH: torch.Tensor, probs: torch.Tensor, rows: Rows) -> torch.Tensor:
        params: list[torch.Tensor | None] = [None] * 6
        mode, scale = self._adapters.mode, 1.0
        fc1, fc2 = (None, None) if mode == "base" else self._own
        for adapter, keys in ((fc1, {"0": 0, "1": 2}), (fc2, {"0": 4})):
            for key, place in keys.items():
                if isinstance(adapter, ExpertAdapter) and key in adapter.lora_A:
                    params[place : place + 2] = adapter.lora_A[key], adapter.lora_B[key]
                    scale = adapter.scale
        result: torch.Tensor = _ExpertMlp.apply(
            x_TH, probs, rows, self, scale, mode == "served", *params
        )
        return result


def _stack(linear: nn.Module, count: int) -> torch.Tensor:
    """Put the experts' weights into one tensor [E, O, I]. The parameters become views of it."""
    params = [getattr(linear, f"weight{i}") for i in range(count)]
    stacked = torch.empty(count, *params[0].shape, dtype=params[0].dtype, device=params[0].device)
    for param, place in zip(params, stacked, strict=True):
        place.copy_(param.data)
        param.data = place
    return stacked


def obstacle(config: Any, device: torch.device) -> str | None:
    """What keeps a model's experts from this module; None: nothing.

    It computes SwiGLU without bias, of experts whole on a rank, with sizes in steps of 16 bytes on
    a GPU. Experts that every token takes stay Megatron's.
    """
    sizes = (config.hidden_size, config.moe_ffn_hidden_size)
    if not config.gated_linear_unit or config.activation_func is not functional.silu:
        return "their activation is not SwiGLU"
    if config.activation_func_clamp_value is not None or config.glu_linear_offset:
        return "their SwiGLU is clamped or shifted"
    if config.moe_mlp_glu_interleave_size is not None:
        return "their gate and up lie interleaved"
    if config.add_bias_linear:
        return "they have biases"
    if config.moe_apply_probs_on_input or config.moe_latent_size:
        return "the router's weights do not multiply their activation"
    if config.expert_tensor_parallel_size > 1:
        return "parallel.expert_tensor cuts them"
    if device.type != "cpu" and not config.bf16:
        return "they are not in bfloat16"
    if device.type != "cpu" and any(size % STEP for size in sizes):
        return f"their sizes {sizes} are not multiples of {STEP}"
    return None
