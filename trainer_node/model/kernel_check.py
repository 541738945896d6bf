"""Checks the attention kernels that this GPU's TransformerEngine and cuDNN give a model.

    each kind of attention layer -> random packed queries, keys and values in bf16
    -> output and gradients by the layer, and in fp32 by torch -> they differ only by rounding

A wrong backward pass shows nowhere else: cuDNN 9.14 had the right output for heads of 256, and
other gradients. Gated delta rules are not compared.

Axes: T = tokens of the pack, A = heads, G = key-value heads, D = their size, V = the values' size.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.utils import is_layer_window_attention

from orchestrator.errors import ConfigError
from trainer_node.backends import cudnn
from trainer_node.backends.cpu_attention import attend
from trainer_node.model import paths, rng
from trainer_node.model.model import Model
from trainer_node.ranks import objects

LENGTHS = (700, 64, 333)
LONGEST = 2500
"""Of the first sequence, which is longer than the layer's window, unless that is longer yet."""
SHORTER = 100
"""Tokens of the first sequence that the others do not begin with."""
BOUND = 0.03
"""Of a tensor's norm: some times what bf16 leaves."""
NAMES = ("output", "query's gradient", "key's gradient", "value's gradient")
_ONE_RANK = types.SimpleNamespace(size=lambda: 1, rank=lambda: 0)
Function = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What an attention kernel is chosen by. `window` as in `attend`."""

    heads: int
    groups: int
    width: int
    value_width: int
    scale: float
    window: int | None
    has_sinks: bool

    @staticmethod
    def of(attention: Attention) -> Kind:
        """Of one layer."""
        config = attention.core_attention.config  # its own kind may differ from the model's
        heads = attention.num_attention_heads_per_partition
        is_latent = config.multi_latent_attention
        width = attention.q_head_dim if is_latent else attention.hidden_size_per_attention_head
        scale = attention.softmax_scale if is_latent else config.softmax_scale
        is_window = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, attention.layer_number
        )
        return Kind(
            heads=heads,
            groups=heads if is_latent else attention.num_query_groups_per_partition,
            width=width,
            value_width=config.v_head_dim if is_latent else width,
            scale=width**-0.5 if scale is None else scale,
            window=config.window_size[0] if is_window else None,
            has_sinks=config.softmax_type == "learnable",
        )


def check(model: Model) -> None:
    """Check each kind of attention among a model's layers. In fp32 TransformerEngine has no fused
    kernel. With context parallelism a layer is a collective and is not checked: there
    `cudnn.refuse_wide_heads` goes by the version.

    Raises:
        ConfigError: a kernel is wrong.
    """
    config = model.config
    if config.dtype != "bfloat16" or config.parallel.context > 1:
        return
    generators = rng.state(model.device)
    try:
        _check(model)
    finally:
        rng.restore(generators, model.device)


def paths_obstacle(model: Model) -> str | None:
    """Why sequences cannot share prefixes on this GPU: its kernels cannot attend along paths, or do
    it wrong. None: they can. A collective."""
    why = None
    if model.config.dtype != "bfloat16":
        why = "fused attention wants bfloat16"
    generators = rng.state(model.device)
    try:
        for kind, layer in () if why else layers_of(model).items():
            found = differences_of(layer, kind, model.device, shares=True)
            if not all(difference <= BOUND for difference in found):  # NaN too
                why = f"attention along paths is wrong by {max(found):.0%} with {kind}"
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, AssertionError) as error:
        why = f"no kernel attends along paths: {error}"
    finally:
        rng.restore(generators, model.device)
    everyones = objects.all_gather(why, group=model.control_group)
    return next((reason for reason in everyones if reason), None)


def layers_of(model: Model) -> dict[Kind, Attention]:
    """Each kind of attention in a model -> a layer of it."""
    layers = (m for m in model.modules[0].modules() if isinstance(m, Attention))
    return {Kind.of(layer): layer for layer in layers}


def _check(model: Model) -> None:
    for kind, layer in layers_of(model).items():
        try:
            found = differences_of(layer, kind, model.device)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"no attention kernel for {kind}: {error}; {_advice(model.config.numerics)}"
            ) from error
        for name, difference in zip(NAMES, found, strict=True):
            if not difference <= BOUND:  # NaN too
                raise ConfigError(
                    f"attention is wrong on this GPU: with heads of {kind.width}, the {name} "
                    f"differs from torch's by {difference:.0%} of its norm; "
                    f"{_advice(model.config.numerics)}"
                )


def _advice(numerics: str) -> str:
    if numerics == "exact":
        return "use numerics = 'served' on this GPU"
    return f"TransformerEngine loaded cuDNN {cudnn.version()}: {cudnn.advice()}"


def differences_of(
    layer: Attention, kind: Kind, device: torch.device, *, shares: bool = False
) -> list[float]:
    """Differences of a layer's output and gradients (NAMES) from torch's, relative to their norms.

    Args:
        shares: whether the later sequences begin with tokens of the first one (`model.paths`).
    """
    beyond = 0 if kind.window is None else min(LONGEST, kind.window + 200)
    lengths = (max(LENGTHS[0], beyond), *LENGTHS[1:])
    bounds = list(accumulate(lengths, initial=0))
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    runs, key_bounds = [(0, bounds[-1])], bounds
    if shares:
        common = lengths[0] - SHORTER
        runs = [(0, lengths[0])]
        for start, length in zip(bounds[1:], lengths[1:], strict=False):
            runs += [(0, common), (start, length)]
        keys = [lengths[0], *(common + n for n in lengths[1:])]
        key_bounds = list(accumulate(keys, initial=0))
        along = replace(
            packed,
            cu_seqlens_kv=torch.tensor(key_bounds, dtype=torch.int32, device=device),
            max_seqlen_kv=max(keys),
        )
        packed.paths = paths.Paths(runs=tuple(runs), packed=along)  # type: ignore[attr-defined]

    def kernel(*qkv: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = layer._run_core_attention(
            *qkv, None, attn_mask_type=layer.attn_mask_type, packed_seq_params=packed
        )
        return output.flatten(1)

    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        sinks = layer.core_attention.softmax_offset.flatten() if kind.has_sinks else None
        k, v = (torch.cat([t[start : start + n] for start, n in runs]) for t in (k, v))
        return attend(
            q, k, v, bounds, key_bounds=key_bounds,
            scale=kind.scale, window=kind.window, sink_A=sinks, context_group=_ONE_RANK,
        )  # fmt: skip # tensors, then rules

    generator = torch.Generator(device).manual_seed(0)
    sizes = ((kind.heads, kind.width), (kind.groups, kind.width), (kind.groups, kind.value_width))
    *qkv, slope = (
        torch.randn(bounds[-1], *size, generator=generator, device=device)
        for size in (*sizes, (kind.heads * kind.value_width,))
    )
    return differences(kernel, reference, qkv, slope)


def differences(
    kernel: Function, reference: Function, inputs: list[torch.Tensor], slope: torch.Tensor
) -> list[float]:
    """Differences of a bf16 kernel from an fp32 reference, relative to the reference's norm: of the
    output, and of each input's gradient for the output's `slope`."""
    found = []
    for function, dtype in ((kernel, torch.bfloat16), (reference, torch.float32)):
        leaves = [x.bfloat16().to(dtype).requires_grad_() for x in inputs]
        output = function(*leaves)
        gradients = torch.autograd.grad(output, leaves, slope.bfloat16().to(output.dtype))
        found.append([x.detach().float() for x in (output, *gradients)])
    return [float((a - b).norm() / b.norm()) for a, b in zip(*found, strict=True)]
