"""What Megatron's specs take from TransformerEngine, in plain torch.

`cpu_te` loads this file as `megatron.core.extensions.transformer_engine`. Classes and parameters
bear TransformerEngine's names: Bridge picks a parameter's parallelism by its module's class name,
and HF's tensors by the parameter's. A name that is missing here is None, as in the real module
where TransformerEngine is too old for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.utils import is_layer_window_attention
from torch import nn
from torch.nn import functional

from trainer_node.backends.cpu_attention import attend

HAVE_TE = True

TEColumnParallelLinear = ColumnParallelLinear  # does what TransformerEngine's would


class TERowParallelLinear(RowParallelLinear):
    """Megatron's own, for any strides."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[s, b, I local] -> [s, b, O]."""
        # torch multiplies a transposed [s, 1, I] row by row, with a copy of the weight for each.
        result: tuple[torch.Tensor, torch.Tensor | None] = super().forward(
            x.flatten(0, 1).unflatten(0, x.shape[:2])
        )
        return result


def __getattr__(name: str) -> None:
    if name.startswith("__"):
        raise AttributeError(name)


# ---------------------------------------------------------------- norms


def _norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: Any, eps: float
) -> torch.Tensor:
    """RMSNorm (Zhang and Sennrich 2019) or LayerNorm (Ba et al. 2016) over the last axis, in fp32,
    rounded once. A zero-centred gamma is stored minus 1."""
    wide, gamma, shape = x.float(), weight.float(), (x.shape[-1],)
    if config.layernorm_zero_centered_gamma:
        gamma = gamma + 1
    if config.normalization == "RMSNorm":
        return functional.rms_norm(wide, shape, gamma, eps).to(x.dtype)
    beta = None if bias is None else bias.float()
    return functional.layer_norm(wide, shape, gamma, beta, eps).to(x.dtype)


def _norm_params(config: Any, size: int) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Weight, and LayerNorm's bias, as the identity. Under sequence parallelism their gradients are
    sums over this rank's part of the sequence."""
    fill = 0.0 if config.layernorm_zero_centered_gamma else 1.0
    params = [nn.Parameter(torch.full((size,), fill, dtype=config.params_dtype))]
    if config.normalization == "LayerNorm":
        params.append(nn.Parameter(torch.zeros(size, dtype=config.params_dtype)))
    for param in params:
        param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return params[0], params[1] if len(params) > 1 else None


class TENorm(nn.Module):
    """The config's norm."""

    def __init__(
        self, config: Any, hidden_size: int, eps: float = 1e-5, has_residual: bool = False
    ) -> None:
        super().__init__()
        self.config, self.eps = config, eps
        self.weight, self.bias = _norm_params(config, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., H]."""
        return _norm(x, self.weight, self.bias, self.config, self.eps)


# ---------------------------------------------------------------- linears


class TELinear(nn.Module):
    """A linear of which every tensor-parallel rank has a copy."""

    parallel_mode = None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str | None,
        config: Any,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool,
        **_: Any,
    ) -> None:
        super().__init__()
        if parallel_mode != "duplicated" or bias:
            raise NotImplementedError(f"parallel_mode {parallel_mode}, bias {bias}")
        weight = torch.empty(output_size, input_size, dtype=config.params_dtype)
        if config.perform_initialization:
            init_method(weight)
        self.weight = nn.Parameter(weight)
        # Its gradient is then a sum over this rank's part of the sequence.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[..., in] -> [..., out]."""
        return functional.linear(x, self.weight), None


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    """A norm, then a column-parallel linear; has the parameter `layer_norm_weight`.

    With `return_layernorm_output` set, forward returns `((out, norm_out), bias)`, as
    TransformerEngine's does. Under sequence parallelism norm_out is this rank's part of the
    sequence, and out is the whole.
    """

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight, self.layer_norm_bias = _norm_params(config, input_size)
        self.return_layernorm_output = False

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [s, b, h]."""
        return _norm(x, self.layer_norm_weight, self.layer_norm_bias, self.config, self.eps)

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Normalise [s, b, h] and project it."""
        normed = self.normed(input_)
        out, bias = super().forward(normed, *args, **kwargs)
        return ((out, normed), bias) if self.return_layernorm_output else (out, bias)


class _GroupedLinear(nn.Module):
    """One weight per local expert, named weight0, weight1, ..., likewise biases; tokens come sorted
    by expert."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool,
        skip_bias_add: bool,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__()
        self.config, self.num_gemms = config, num_gemms
        self.use_bias, self.skip_bias_add = bias, skip_bias_add
        input_size, output_size = self.local_sizes(
            input_size, output_size, pg_collection.expt_tp.size()
        )
        for i in range(num_gemms):
            weight = torch.empty(output_size, input_size, dtype=config.params_dtype)
            if config.perform_initialization:
                init_method(weight)
            self.register_parameter(f"weight{i}", nn.Parameter(weight))
            if bias:
                zeros = torch.zeros(output_size, dtype=config.params_dtype)
                self.register_parameter(f"bias{i}", nn.Parameter(zeros))

    def local_sizes(self, input_size: int, output_size: int, ranks: int) -> tuple[int, int]:
        """The experts of one expert-tensor rank. The dispatcher gathers tokens and adds up outputs,
        so nothing is exchanged here."""
        raise NotImplementedError

    def forward(
        self, x: torch.Tensor, m_splits: list[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """[t, in] -> [t, out], and the biases where the caller adds them; `m_splits[i]` rows belong
        to expert i."""
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)] if self.use_bias else []
        added = [None] * self.num_gemms if self.skip_bias_add or not biases else biases
        pieces = [
            functional.linear(part, getattr(self, f"weight{i}"), bias)
            for i, (part, bias) in enumerate(zip(torch.split(x, m_splits), added, strict=True))
        ]
        return torch.cat(pieces), biases if biases and self.skip_bias_add else None


class TEColumnParallelGroupedLinear(_GroupedLinear):
    """Experts' gate and up projections, fused as [gate; up], split by rows."""

    def local_sizes(self, input_size: int, output_size: int, ranks: int) -> tuple[int, int]:
        """See the base."""
        return input_size, output_size // ranks


class TERowParallelGroupedLinear(_GroupedLinear):
    """Experts' down projections, split by columns."""

    def local_sizes(self, input_size: int, output_size: int, ranks: int) -> tuple[int, int]:
        """See the base."""
        return input_size // ranks, output_size


# ---------------------------------------------------------------- attention


class TEDotProductAttention(nn.Module):
    """Causal grouped-query attention within each sequence of a pack: see `attention`. It has the
    parameter `softmax_offset`, the sinks, if the config wants one."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *,
        pg_collection: Any,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        if config.attention_dropout:
            raise NotImplementedError(
                "the CPU attention has no dropout; set attention_dropout to 0"
            )
        self.config, self._context_group = config, pg_collection.cp
        channels = config.kv_channels if k_channels is None else k_channels
        self.softmax_scale = channels**-0.5 if softmax_scale is None else softmax_scale
        is_window = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self._window = config.window_size[0] if is_window else None
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: Any,
        **_: Any,
    ) -> torch.Tensor:
        """[t, heads, d] -> [t, heads * v]; the mask is ignored."""
        return attend(
            query,
            key,
            value,
            packed_seq_params.cu_seqlens_q.tolist(),
            key_bounds=packed_seq_params.cu_seqlens_kv.tolist(),
            scale=self.softmax_scale,
            window=self._window,
            sink_A=self.softmax_offset,
            context_group=self._context_group,
        )


# ---------------------------------------------------------------- the rest


def get_cpu_offload_context(*_: Any) -> tuple[contextlib.AbstractContextManager[None], None]:
    """No offloading."""
    return contextlib.nullcontext(), None


def set_save_original_input(module: nn.Module) -> None:
    """Autograd saves what it needs."""
