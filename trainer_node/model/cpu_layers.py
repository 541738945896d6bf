"""CPU stand-ins for TransformerEngine's layers, for `cpu_shims` alone.

The classes bear TransformerEngine's names because Megatron-Bridge picks a parameter's parallelism
by its module's class name.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import nn
from torch.nn import functional

from trainer_node.training.batch import context_places


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm with Megatron's constructor. Megatron's own wrapper refuses sequence
    parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        if config.normalization != "RMSNorm":
            raise NotImplementedError(
                f"the CPU layers know RMSNorm only, not {config.normalization}"
            )
        super().__init__(hidden_size, eps=eps)
        # Its gradient is then a sum over this rank's part of the sequence.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm, then a column-parallel linear; It has the parameter `layer_norm_weight`.

    With `return_layernorm_output` set, forward returns `((out, norm_out), bias)`, as
    TransformerEngine's does. Under sequence parallelism norm_out is this rank's part of the
    sequence, and out is the whole.
    """

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        if config.normalization != "RMSNorm":
            raise NotImplementedError(
                f"the CPU layers know RMSNorm only, not {config.normalization}"
            )
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.return_layernorm_output = False

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Normalise [s, b, h] and project it."""
        normed = functional.rms_norm(
            input_, (input_.shape[-1],), self.layer_norm_weight, self.config.layernorm_epsilon
        )
        out, bias = super().forward(normed, *args, **kwargs)
        return ((out, normed), bias) if self.return_layernorm_output else (out, bias)


class _GroupedLinear(nn.Module):
    """One weight per local expert, named weight0, weight1, ...; tokens come sorted by expert."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__()
        if bias:
            raise NotImplementedError("the CPU experts have no bias")
        self.config, self.num_gemms = config, num_gemms
        input_size, output_size = self.local_sizes(
            input_size, output_size, pg_collection.expt_tp.size()
        )
        for i in range(num_gemms):
            weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
            if config.perform_initialization:
                init_method(weight)
            self.register_parameter(f"weight{i}", weight)

    def local_sizes(self, input_size: int, output_size: int, ranks: int) -> tuple[int, int]:
        """The experts of one expert-tensor rank. The dispatcher gathers tokens and adds up outputs,
        so nothing is exchanged here."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, None]:
        """[t, in] -> [t, out]; `m_splits[i]` rows belong to expert i."""
        pieces = [
            functional.linear(part, getattr(self, f"weight{i}"))
            for i, part in enumerate(torch.split(x, m_splits))
        ]
        return torch.cat(pieces), None


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


class CausalSdpa(nn.Module):
    """Causal grouped-query attention within each sequence of a pack, by torch's own kernel; no
    dropout. A context-parallel rank gathers the others' keys and values."""

    def __init__(
        self, *, config: Any, pg_collection: Any, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__()
        if config.attention_dropout:
            raise NotImplementedError(
                "the CPU attention has no dropout; set attention_dropout to 0"
            )
        self._context_group = pg_collection.cp
        self.softmax_scale = (
            softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        )

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
        """Attend: [t, heads, d] -> [t, heads * d].

        `cu_seqlens_q` bounds the sequences; the mask is ignored.
        """
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        lengths = [end - start for start, end in pairwise(bounds)]
        size, rank = self._context_group.size(), self._context_group.rank()
        if size == 1:
            pieces = zip(*(t.split(lengths) for t in (query, key, value)), strict=True)
            return torch.cat([self._one_sequence(*piece) for piece in pieces])
        # Gathered rank by rank; the backward pass adds the ranks' gradients up and gives each its
        # own.
        order = torch.from_numpy(
            np.concatenate([context_places(bounds, rank=r, size=size) for r in range(size)])
        ).argsort()
        key, value = (
            gather_from_sequence_parallel_region(t, group=self._context_group)[order]
            for t in (key, value)
        )
        queries = query.split([n // size for n in lengths])
        masks = [_mask(n, rank=rank, size=size) for n in lengths]
        whole = zip(queries, key.split(lengths), value.split(lengths), masks, strict=True)
        return torch.cat([self._one_sequence(*piece) for piece in whole])

    def _one_sequence(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale
        )
        return out[0].transpose(0, 1).flatten(1)


def _mask(length: int, *, rank: int, size: int) -> torch.Tensor:
    """Return bool [this rank's tokens of a sequence, all its tokens]: which come no later."""
    places = torch.from_numpy(context_places([0, length], rank=rank, size=size))
    return places[:, None] >= torch.arange(length)
