"""Digests of the live tensors, read back into checkpoint layout and summed per HF tensor.

Five layouts can be read back:

* *FP8*: e4m3 weights and scales, whose layout was proven at the start (`fp8`).
* *as loaded*: the live parameter has the checkpoint's shape and strides, and its dtype or a wider
  one, and its layer is known not to permute it.
* *unquantised MoE*: the kernel's packing permutes each expert's elements. The permutation is found
  by packing the elements' indices (`Packing`), checked on random data, and inverted.
* *layers with additional tensors*, such as a convolution on the CPU: those tensors and
  the parameter may be arrangements of what was loaded. They are learnt in the same way.
* *linear layers on the CPU*: vLLM keeps a packed copy inside `cpu_linear` and drops the weight. The
  copy's product with unit vectors is exactly the weight (one term per sum), but -0.0 becomes 0.0.
  `zero_sign_correction` accounts for the signs that were received.

Any other layout is *unverified*, with its reason.

Axes: E = experts, U = 2 * intermediate, H = hidden, I = intermediate or in features,
O = out features.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

import torch

from inference_node.shared.reports import PartDigest, WorkerDigests
from inference_node.worker import dialect, packing
from inference_node.worker.packing import Unreadable
from inference_node.worker.placement import ParamFormat, PlacementPlan, Region, is_kept_whole
from orchestrator.protocol.messages import TensorSpec
from weight_transfer.layout import torch_dtype

PROBE_COLUMNS = 512
"""Unit vectors per product when a packed linear layer is read back; bounds the scratch."""
_PLAIN_METHODS = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})


def why_not_in_place(
    layer: torch.nn.Module,
    fmt: ParamFormat,
    siblings: Mapping[str, ParamFormat],
    *,
    is_shared: bool = False,
) -> str | None:
    """Why received bytes may not be written straight into this parameter; None if they may.

    Args:
        siblings: all parameters of the layer, by name.
        is_shared: the model uses the layer in several places, such as a tied embedding.
    """
    live, method = layer._parameters.get(fmt.param), getattr(layer, "quant_method", None)
    kind, name = type(method).__name__, type(layer).__name__
    if fmt.is_computed:
        return f"the loader of {name} computes {fmt.param}"
    if live is None or live.numel() == 0:
        return f"{name} keeps {fmt.param} elsewhere"
    if fmt.is_fp8:
        return None
    if not _is_as_loaded(live, fmt) or str(live.dtype) != f"torch.{fmt.dtype}":
        return f"{name} keeps {fmt.param} in another shape"
    if hasattr(layer, "cpu_linear") and (is_shared or not _only_looks_up(layer)):
        return f"{name} multiplies by a packed copy of {fmt.param}"
    if dialect.is_deferred_attention(layer):
        return f"{name} derives other tensors from {fmt.param}"
    if kind == packing.MOE_METHOD and fmt.param in packing.MOE_PARAMS:
        try:
            is_identity = packing.of_experts(layer, method, siblings)[fmt.param].is_identity
        except Unreadable as why:
            return str(why)
        return None if is_identity else f"{name} keeps {fmt.param} packed"
    is_plain = kind in _PLAIN_METHODS or kind == packing.MOE_METHOD or _is_next_to_fp8(siblings)
    if method is not None and not is_plain:
        return f"{kind} converts {fmt.param}"
    if method is not None and (extra := packing.extra_tensors(layer)):
        return f"{name} derives {', '.join(extra)} from its parameters"
    return None


def read_back(
    model: torch.nn.Module,
    plan: PlacementPlan,
    corrections: Mapping[Region, int],
    *,
    skip: Container[str] = (),
) -> WorkerDigests:
    """Digest every region of the plan in every live copy of its parameter.

    Args:
        corrections: `zero_sign_correction` of the regions whose reader loses the sign of zero.
        skip: HF names that were digested already.
    """
    layers = dict(model.named_modules())
    parts: dict[str, list[tuple[Region, torch.Tensor]]] = {}
    unverified: dict[str, str] = {}
    for (module, param), all_regions in _by_param(plan).items():
        regions = [r for r in all_regions if r.name not in skip]
        if not regions:
            continue
        try:
            copies = _live_copies(layers, plan, plan.formats[(module, param)])
        except Unreadable as why:
            unverified.update({r.name: str(why) for r in regions})
            continue
        for live in copies:
            for region in regions:
                view = _as_sent(live.tensor, plan, region)
                total = region.digest(view)
                if live.loses_zero_sign:
                    total = total + corrections.get(region, 0)
                parts.setdefault(region.name, []).append((region, total))
    return WorkerDigests(parts=_to_host(parts), unverified=unverified)


def read_tensors(
    model: torch.nn.Module, plan: PlacementPlan, specs: Sequence[TensorSpec]
) -> dict[str, torch.Tensor]:
    """These HF tensors as they were sent, read from the live ones; -0.0 may be 0.0.

    Elements that this worker does not keep are 0, and tensors that it cannot read are left out.
    """
    layers, wanted = dict(model.named_modules()), {spec.name: spec for spec in specs}
    found: dict[str, torch.Tensor] = {}
    for (module, param), all_regions in _by_param(plan).items():
        regions = [r for r in all_regions if r.name in wanted]
        if not regions:
            continue
        try:
            live = _live_copies(layers, plan, plan.formats[(module, param)])[0].tensor
        except Unreadable:
            continue
        for region in regions:
            spec = wanted[region.name]
            if spec.name not in found:
                dtype = torch_dtype(spec.dtype)
                found[spec.name] = torch.zeros(spec.shape, dtype=dtype, device=live.device)
            there = torch.as_strided(
                found[spec.name], region.size, region.index_strides, region.first_index
            )
            there.copy_(_as_sent(live, plan, region))
    return found


def _by_param(plan: PlacementPlan) -> dict[tuple[str, str], list[Region]]:
    grouped: dict[tuple[str, str], list[Region]] = {}
    for region in plan.regions:
        grouped.setdefault(region.key, []).append(region)
    return grouped


def _as_sent(live: torch.Tensor, plan: PlacementPlan, region: Region) -> torch.Tensor:
    view = region.view_in(live)
    sent = getattr(torch, plan.sent_dtypes[region.name])
    return view if view.dtype == sent else view.to(sent)


def _to_host(
    parts: Mapping[str, Sequence[tuple[Region, torch.Tensor]]],
) -> dict[str, list[PartDigest]]:
    """Copy all digests from the device in one go."""
    flat = [total for found in parts.values() for _, total in found]
    values = iter(torch.stack(flat).tolist() if flat else ())
    return {
        name: [PartDigest(key=r.part, numel=r.numel, digest=next(values)) for r, _ in found]
        for name, found in parts.items()
    }


# ------------------------------------------ reading live tensors back into checkpoint layout


@dataclass(frozen=True, slots=True, kw_only=True)
class _Live:
    tensor: torch.Tensor
    loses_zero_sign: bool = False


def _live_copies(
    layers: Mapping[str, torch.nn.Module], plan: PlacementPlan, fmt: ParamFormat
) -> list[_Live]:
    """Every live copy of a parameter in checkpoint layout, also those of layers that share it."""
    holders = [fmt, *(f for f in plan.formats.values() if f.alias_of == (fmt.module, fmt.param))]
    copies: list[_Live] = []
    for holder in holders:
        try:
            siblings = plan.formats_of(holder.module)
            copies += _layer_copies(layers[holder.module], holder, siblings)
        except Unreadable as why:
            raise Unreadable(f"{holder.module}.{holder.param}: {why}") from why
    if not copies:
        raise Unreadable(f"{fmt.module}.{fmt.param} has no live tensor")
    return copies


def _layer_copies(
    layer: torch.nn.Module, fmt: ParamFormat, siblings: Mapping[str, ParamFormat]
) -> list[_Live]:
    live, method = layer._parameters.get(fmt.param), getattr(layer, "quant_method", None)
    kind = type(method).__name__
    if fmt.is_computed:
        raise Unreadable("its loader computes new values")
    if fmt.is_fp8 and live is not None:
        return [_Live(tensor=live.data)]
    if kind == packing.MOE_METHOD and fmt.param in packing.MOE_PARAMS:
        assert live is not None
        packed = packing.of_experts(layer, method, siblings)[fmt.param]
        return [_Live(tensor=packed.unpack(live.data, fmt.shape, items=fmt.shape[0]))]
    is_plain = kind in _PLAIN_METHODS or kind == packing.MOE_METHOD or _is_next_to_fp8(siblings)
    if method is not None and not is_plain:
        raise Unreadable(f"{kind} keeps it in a layout that is not read back")
    if method is not None and fmt.param == "weight" and packing.extra_tensors(layer):
        return [
            _Live(tensor=p.unpack(getattr(layer, name).data, fmt.shape, items=1))
            for name, p in packing.of_extra_tensors(layer, method, fmt).items()
        ]
    copies: list[_Live] = []
    if live is not None and live.numel() > 0:
        if not _is_as_loaded(live, fmt):
            raise Unreadable(
                f"it is kept as {tuple(live.shape)} {live.dtype}, loaded as {fmt.shape}"
            )
        copies.append(_Live(tensor=live.data))
    multiplies = getattr(layer, "cpu_linear", None)
    if (
        multiplies is not None
        and fmt.param == "weight"
        and len(fmt.shape) == 2
        and _is_multiplied(layer, copies)
    ):
        if multiplies is torch.nn.functional.linear and live is not None and live.numel() == 0:
            raise Unreadable("its weight was dropped for a packed copy elsewhere")
        copies.append(_Live(tensor=_probe_linear(layer, multiplies, fmt), loses_zero_sign=True))
    return copies


def _is_next_to_fp8(siblings: Mapping[str, ParamFormat]) -> bool:
    """Whether a layer's quantisation is described, so that its bias is as loaded."""
    return any(fmt.is_fp8 for fmt in siblings.values())


def _is_as_loaded(live: torch.Tensor, fmt: ParamFormat) -> bool:
    """Whether a live tensor has the shape and strides of the loaded one, and all of its bits."""
    kept = str(live.dtype).removeprefix("torch.")
    same = (tuple(live.shape), tuple(live.stride())) == (fmt.shape, fmt.stride)
    return same and is_kept_whole(fmt.dtype, kept)


def _is_multiplied(layer: torch.nn.Module, copies: Sequence[_Live]) -> bool:
    """Whether a packed copy is used: a pure embedding has one, but only looks up rows."""
    return not copies or not _only_looks_up(layer)


def _only_looks_up(layer: torch.nn.Module) -> bool:
    return type(layer).__name__ == "VocabParallelEmbedding"


def _probe_linear(
    layer: torch.nn.Module, packed: Callable[..., torch.Tensor], fmt: ParamFormat
) -> torch.Tensor:
    """The weight [O, I] inside a packed linear layer, multiplied out with unit vectors."""
    out_features, in_features = fmt.shape
    dtype = getattr(torch, fmt.dtype)
    weight_OI = torch.empty_strided(fmt.shape, fmt.stride, dtype=dtype)
    for start in range(0, in_features, PROBE_COLUMNS):
        count = min(PROBE_COLUMNS, in_features - start)
        units = torch.zeros(count, in_features, dtype=dtype)
        units[torch.arange(count), torch.arange(start, start + count)] = 1
        weight_OI[:, start : start + count] = (
            packed(units, layer.weight, None).view(count, out_features).t()
        )
    return weight_OI


def loses_zero_sign(model: torch.nn.Module, plan: PlacementPlan) -> set[tuple[str, str]]:
    """(module, param) of the parameters that are read back through a product."""
    layers = dict(model.named_modules())
    return {
        fmt.alias_of or key
        for key, fmt in plan.formats.items()
        if hasattr(layers[key[0]], "cpu_linear")
    }


def zero_sign_correction(tensor: torch.Tensor, region: Region) -> int:
    """The change of the region's digest when its -0.0 become 0.0; nearly always 0.

    Args:
        tensor: the HF tensor as received, contiguous.
    """
    view = torch.as_strided(
        tensor, region.size, region.index_strides, tensor.storage_offset() + region.first_index
    )
    if not bool(((view == 0) & torch.signbit(view)).any()):
        return 0
    return int(region.digest(view) - region.digest(view + 0.0))
