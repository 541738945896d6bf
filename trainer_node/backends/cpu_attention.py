"""Causal attention within each sequence of a pack, on torch's own kernel.

Sliding windows (Beltagy et al. 2020, arXiv:2004.05150) limit how far back a token sees. A sink
(Xiao et al. 2023, arXiv:2309.17453; as a learned logit in GPT-OSS) takes a part of the softmax that
adds nothing to the output: it is a key whose logit is given and whose value is 0.

A sequence may bring more keys than queries (`trainer_node.model.paths`). The queries are then its
last tokens.

Axes: T = tokens of the pack on this rank, Q = of one sequence, K = tokens of the whole sequence,
A = heads, G = key-value heads, D = their size, V = the values' size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch.nn import functional

from trainer_node.layout.context import context_places


def attend(
    query_TAD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGV: torch.Tensor,
    bounds: Sequence[int],
    *,
    scale: float,
    window: int | None,
    sink_A: torch.Tensor | None,
    context_group: Any,
    key_bounds: Sequence[int] | None = None,
) -> torch.Tensor:
    """Attend: [T, A, D] -> [T, A * V].

    A context-parallel rank has chunks of every sequence, as `context_places` cuts them, and gathers
    the others' keys and values.

    Args:
        bounds: where each whole sequence begins, and the whole pack's length.
        window: how many tokens before itself a token sees; None: all.
        sink_A: the logit of each head's sink.
        key_bounds: where each sequence's keys begin; None: as the queries.
    """
    key_bounds = bounds if key_bounds is None else key_bounds
    lengths = [end - start for start, end in pairwise(bounds)]
    key_lengths = [end - start for start, end in pairwise(key_bounds)]
    size, rank = context_group.size(), context_group.rank()
    if size > 1:
        # Gathered rank by rank; the backward pass adds the ranks' gradients up and gives each its
        # own.
        order = torch.from_numpy(
            np.concatenate([context_places(bounds, rank=r, size=size) for r in range(size)])
        ).argsort()
        key_TGD, value_TGV = (
            gather_from_sequence_parallel_region(t, group=context_group)[order]
            for t in (key_TGD, value_TGV)
        )
    heads_of_group = query_TAD.shape[1] // key_TGD.shape[1]
    pieces = zip(
        query_TAD.split([n // size for n in lengths]),
        key_TGD.split(key_lengths),
        value_TGV.split(key_lengths),
        key_lengths,
        strict=True,
    )
    outputs = []
    for query, key, value, length in pieces:
        q_AQD, k_AKD, v_AKV = (t.transpose(0, 1) for t in (query, key, value))
        if heads_of_group > 1:
            k_AKD, v_AKV = (t.repeat_interleave(heads_of_group, dim=0) for t in (k_AKD, v_AKV))
        mask = None
        given = len(query) * size
        if size > 1 or window is not None or sink_A is not None or given < length:
            mask = _visible(given, length, window, rank=rank, size=size).to(query.device)
        if sink_A is not None and mask is not None:
            mask = _with_sink(mask, sink_A.to(q_AQD.dtype))
            k_AKD, v_AKV = (functional.pad(t, (0, 0, 1, 0)) for t in (k_AKD, v_AKV))
        out_1AQV = functional.scaled_dot_product_attention(
            q_AQD[None],
            k_AKD[None],
            v_AKV[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
        )
        outputs.append(out_1AQV[0].transpose(0, 1).flatten(1))
    return torch.cat(outputs)


def _visible(given: int, length: int, window: int | None, *, rank: int, size: int) -> torch.Tensor:
    """Which tokens of a sequence each of this rank's sees, [Q, K]; the queries are those of its
    last `given` tokens."""
    own = torch.arange(length - given, length)
    if size > 1:
        own = torch.from_numpy(context_places([0, length], rank=rank, size=size))
    back_QK = own[:, None] - torch.arange(length)
    sees_QK = back_QK >= 0
    return sees_QK if window is None else sees_QK & (back_QK <= window)


def _with_sink(sees_QK: torch.Tensor, sink_A: torch.Tensor) -> torch.Tensor:
    """What is added to the logits of the sink and the keys, [A, Q, 1 + K]."""
    blind_QK = sink_A.new_zeros(sees_QK.shape).masked_fill(~sees_QK, float("-inf"))
    sink_AQ1 = sink_A[:, None, None].expand(-1, len(sees_QK), 1)
    return torch.cat([sink_AQ1, blind_QK.expand(len(sink_A), -1, -1)], dim=-1)
