"""The FP8 parameters of a server, their layout, and the proof of both.

vLLM's online quantisation loads bf16 weights and keeps e4m3 and scales. A block-scaled checkpoint
has e4m3 and scales already (`X.weight_scale_inv`). The trainer sends both alike. For each such
layer:

    refusals(model)     vLLM's own method quantises random weights on a stand-in;
                        weight_transfer.fp8 must give the same bytes, scales, shapes and strides
    as_bf16(plan, ...)  of a block-scaled checkpoint: the plan of the bf16 weights it stands for
    groups(plan, ...)   which HF matrices share an FP8 parameter, or an expert of one
    placed(plan, ...)   the plan of what is sent: e4m3 in the same places, and the scales

The proof replaces a list of kernels. A layout that permutes, pads or transforms differs from the
prediction on this very hardware, and is named before anything is sent.

Axes: O = out features, I = in features, E = experts, G = groups.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from inference_node.worker import dialect, packing
from inference_node.worker.placement import ParamFormat, PlacementPlan, Region
from orchestrator.errors import ManifestError
from orchestrator.protocol.messages import FP8_BLOCK, Fp8Group, Manifest, fp8_scale
from weight_transfer import fp8

LINEAR = {
    "Fp8PerTensorOnlineLinearMethod": "per_tensor",
    "Fp8PtpcOnlineLinearMethod": "per_channel",
    "Fp8PerBlockOnlineLinearMethod": "per_block",
}
EXPERTS = {
    "Fp8PerTensorOnlineMoEMethod": "per_tensor",
    "Fp8PtpcOnlineMoEMethod": "per_channel",
    "Fp8PerBlockOnlineMoEMethod": "per_block",
}
STATIC = frozenset({"Fp8LinearMethod", "Fp8MoEMethod"})
"""Methods of checkpoints that are FP8 already."""
WEIGHTS = ("weight", "w13_weight", "w2_weight")
_PROOF_EXPERTS = 2
_ABSORBED = "MLA absorbs an FP8 kv_b_proj, and the absorbed tensors are not compared"
_COUNTS = ("num_experts", "local_num_experts")
_DONE = "_already_called_process_weights_after_loading"
_FAILURES = (NotImplementedError, RuntimeError, AssertionError, TypeError, AttributeError, KeyError)


def method_of(layer: torch.nn.Module) -> Any:
    """The layer's quantisation method, or None."""
    return getattr(layer, "quant_method", None)


def kind_of(layer: torch.nn.Module) -> str | None:
    """The layer's quantisation, if splice describes it."""
    if is_static(layer):
        block = getattr(method_of(layer), "weight_block_size", None) or ()
        return "per_block" if tuple(block) == (FP8_BLOCK, FP8_BLOCK) else None
    name = type(method_of(layer)).__name__
    return LINEAR.get(name) or EXPERTS.get(name)


def is_static(layer: torch.nn.Module) -> bool:
    """Whether a layer loads FP8, instead of quantising what it loads."""
    return type(method_of(layer)).__name__ in STATIC


def refusals(model: torch.nn.Module) -> dict[str, list[str]]:
    """Why layers of a model cannot be updated and verified -> their paths."""
    found: dict[str, list[str]] = {}
    proofs: dict[Any, str | None] = {}
    for path, layer in model.named_modules():
        if kind_of(getattr(layer, "kv_b_proj", layer)) is not None and hasattr(layer, "kv_b_proj"):
            found.setdefault(_ABSORBED, []).append(path)
        name = type(method_of(layer)).__name__
        if not dialect.is_quantised(layer):
            continue
        why: str | None = f"{name} is not a quantisation that splice supports"
        if is_static(layer):
            why = f"{name} has other scales than one for each {FP8_BLOCK} x {FP8_BLOCK}"
        if kind_of(layer) is not None:
            key = _proof_key(layer)
            if key not in proofs:
                proofs[key] = _disproof(layer)
            why = proofs[key] or _unfollowed(layer)
        if why is not None:
            found.setdefault(why, []).append(path)
    return found


# ---------------------------------------------------------------- the proof


def _proof_key(layer: torch.nn.Module) -> Any:
    method = method_of(layer)
    kernel, backend = getattr(method, "fp8_linear", None), getattr(method, "fp8_backend", None)
    live = [(n, p.shape, p.stride(), p.dtype) for n, p in _parameters(layer).items()]
    return type(method), type(kernel), str(backend), *live


def _parameters(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.data for n, p in layer._parameters.items() if p is not None}


def _disproof(layer: torch.nn.Module) -> str | None:
    """Why the layer's own quantisation is not the one that splice predicts; None if it is."""
    name, live = type(method_of(layer)).__name__, _parameters(layer)
    weights = [n for n in WEIGHTS if n in live]
    if not weights or any(live[n].dtype != torch.float8_e4m3fn for n in weights):
        return f"{name} keeps no e4m3 weight"
    is_linear, is_turned, kind = weights == ["weight"], _is_turned(layer), str(kind_of(layer))
    experts = () if is_linear else (_PROOF_EXPERTS,)
    shapes = {n: (*experts, *_loaded_shape(layer, n)[-2:]) for n in weights}
    device = live[weights[0]].device
    generator = torch.Generator(device).manual_seed(0)
    loaded = {
        n: torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        for n, shape in shapes.items()
    }
    ours = {n: _as_ours(weight, kind) for n, weight in loaded.items()}
    try:
        made = _as_vllm(layer, _given(layer, loaded, ours))
    except _FAILURES as error:
        return f"{name} could not be tried on a stand-in: {type(error).__name__}: {error}"[:300]
    for n, (want, scale) in ours.items():
        scale_name = fp8_scale(n, kind)
        if n not in made or scale_name not in made or scale_name not in live:
            return f"{name} keeps no {scale_name} with {n}"
        got = made[n].t() if is_turned else made[n]
        if not _same_bytes(got, want) or not _same_bytes(made[scale_name], scale):
            return (
                f"{name} quantises {n} to other bytes than splice{dialect.fp8_block_remedy(kind)}"
            )
        pairs = ((made[n], live[n]), (made[scale_name], live[scale_name]))
        if any(a.dtype != b.dtype for a, b in pairs):
            return f"{name} keeps {n} or {scale_name} in another dtype than after loading"
        if is_linear and any(a.shape != b.shape or a.stride() != b.stride() for a, b in pairs):
            return f"{name} keeps {n} in another shape than after loading"
    if any(not _is_dense(live[n], is_turned=is_turned) for n in weights):
        return f"{name} keeps its weight with gaps"
    return None


def _given(
    layer: torch.nn.Module,
    loaded: Mapping[str, torch.Tensor],
    ours: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """Copies of what the layer's loaders fill: bf16, or e4m3 and scales."""
    if not is_static(layer):
        return {n: t.clone() for n, t in loaded.items()}
    given: dict[str, torch.Tensor] = {}
    for n, (weight, scale) in ours.items():
        given[n] = weight.view(loaded[n].shape).clone()
        given[fp8_scale(n, str(kind_of(layer)))] = scale.view(
            *loaded[n].shape[:-2], *scale.shape[-2:]
        ).clone()
    return given


def _is_turned(layer: torch.nn.Module) -> bool:
    """Whether a weight is kept as [I, O], a view of [O, I] in memory."""
    return type(method_of(layer)).__name__ in LINEAR and kind_of(layer) != "per_block"


def _loaded_shape(layer: torch.nn.Module, param: str) -> tuple[int, ...]:
    live = _parameters(layer)[param]
    return tuple((live.t() if _is_turned(layer) else live).shape)


def _is_dense(weight: torch.Tensor, *, is_turned: bool) -> bool:
    return (weight.t() if is_turned else weight).is_contiguous()


def _same_bytes(got: torch.Tensor, want: torch.Tensor) -> bool:
    if got.dtype != want.dtype or got.numel() != want.numel():
        return False
    return torch.equal(
        got.contiguous().view(torch.uint8).flatten(), want.contiguous().view(torch.uint8).flatten()
    )


def _as_vllm(layer: torch.nn.Module, loaded: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Convert weights as loaded by vLLM's method. Layer and method stay as they are."""
    method = copy.copy(method_of(layer))
    if hasattr(method, "fp8_linear"):
        method.fp8_linear = copy.copy(method.fp8_linear)
        stand_in = copy.copy(layer)
        stand_in.__dict__["_parameters"] = {}
        stand_in.__dict__.pop(_DONE, None)
        for n, tensor in loaded.items():
            stand_in._parameters[n] = torch.nn.Parameter(tensor, requires_grad=False)
    else:
        stand_in = dialect.moe_stand_in(layer, loaded, hides=layer._parameters.keys())
        for name, value in ((_DONE, False), *dict.fromkeys(_COUNTS, _PROOF_EXPERTS).items()):
            setattr(stand_in, name, value)
    method.process_weights_after_loading(stand_in)
    return _parameters(stand_in)


def _as_ours(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    if kind == "per_block":
        return fp8.per_block(weight.reshape(-1, *weight.shape[-2:]))
    if kind == "per_channel":
        return fp8.per_channel(weight.reshape(-1, weight.shape[-1]))
    return fp8.per_tensor(weight.reshape(1 if weight.dim() == 2 else len(weight), -1))


def _unfollowed(layer: torch.nn.Module) -> str | None:
    """Why a tensor other than the parameters depends on them and would keep old values; or None."""
    method, own = method_of(layer), {t.data_ptr() for t in _parameters(layer).values()}
    name = type(method).__name__
    if extra := packing.extra_tensors(layer):
        return f"{name} derives {', '.join(extra)} from its weights"
    held = (getattr(method, a, None) for a in ("fp8_linear", "moe_quant_config"))
    if any(t.data_ptr() not in own for one in held for t in _tensors_in(one, depth=3)):
        return f"{name} keeps a copy of scales in its kernel"
    return None


def _tensors_in(value: Any, *, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value) and depth:
        for f in dataclasses.fields(value):
            yield from _tensors_in(getattr(value, f.name, None), depth=depth - 1)
    elif hasattr(value, "__dict__") and depth == 3:
        for held in vars(value).values():
            if isinstance(held, torch.Tensor):
                yield held


# ---------------------------------------------------------------- the plan


def as_bf16(plan: PlacementPlan, model: torch.nn.Module) -> PlacementPlan:
    """The plan as if layers of a block-scaled checkpoint loaded bf16, without their scales.

    The plan was recorded with bf16 tensors. What they become is `placed`'s, as for layers that
    quantise themselves.
    """
    formats = dict(plan.formats)
    for (path, name), layer in _quantised(plan, model).items():
        if is_static(layer):
            formats[path, name] = dataclasses.replace(formats[path, name], dtype="bfloat16")
            formats.pop((path, fp8_scale(name, "per_block")), None)
    return dataclasses.replace(plan, formats=formats)


def _quantised(
    plan: PlacementPlan, model: torch.nn.Module
) -> dict[tuple[str, str], torch.nn.Module]:
    """The FP8 weights that the plan fills -> their layers."""
    layers = dict(model.named_modules())
    keys = {r.key for r in plan.regions if r.param in WEIGHTS}
    return {key: layers[key[0]] for key in sorted(keys) if kind_of(layers[key[0]]) is not None}


def groups(plan: PlacementPlan, manifest: Manifest, model: torch.nn.Module) -> list[Fp8Group]:
    """The HF matrices that this worker keeps together in FP8.

    Raises:
        ManifestError: a tensor cannot be sent as FP8; says why.
    """
    quantised, index_of = (
        _quantised(plan, model),
        {s.name: i for i, s in enumerate(manifest.tensors)},
    )
    found: dict[tuple[str, str, int], set[int]] = {}
    place_of: dict[str, tuple[str, str, int]] = {}
    for region in plan.regions:
        key = region.key
        if key not in quantised:
            continue
        spec, fmt = manifest.tensors[index_of[region.name]], plan.formats[key]
        place = (*key, _expert(region, fmt))
        if len(spec.shape) != 2 or spec.dtype != "bfloat16" or fmt.dtype != "bfloat16":
            what = f"{region.name} is {spec.dtype} {spec.shape}, kept by {'.'.join(key)}"
            raise ManifestError(f"{what}; only bf16 matrices are sent as FP8")
        if place_of.setdefault(region.name, place) != place:
            raise ManifestError(
                f"{region.name} lands in several FP8 weights; serve this model in bf16"
            )
        found.setdefault(place, set()).add(index_of[region.name])
    kinds = {key: kind_of(layer) for key, layer in quantised.items()}
    return [
        Fp8Group(kind=kinds[place[:2]], tensors=tuple(sorted(indices)))  # type: ignore[arg-type]
        for place, indices in found.items()
    ]


def placed(plan: PlacementPlan, sent: Manifest, model: torch.nn.Module) -> PlacementPlan:
    """The plan of `fp8_manifest`: e4m3 in the places of bf16, and the scales.

    Raises:
        ManifestError: a tensor's blocks do not begin where its scales do.
    """
    quantised, formats, covered = _quantised(plan, model), dict(plan.formats), dict(plan.covered)
    shapes = {spec.name: spec.shape for spec in sent.tensors}
    scales: dict[Region, None] = {}
    for part in plan.regions:
        layer = quantised.get(part.key)
        if layer is not None:
            scale = _scale_region(part, plan, str(kind_of(layer)), _parameters(layer), shapes)
            scales[scale] = None
    cells: dict[tuple[str, str], set[tuple[int, int]]] = {}
    for scale in scales:
        cells.setdefault(scale.key, set()).add((scale.offset, scale.numel))
    for key, layer in quantised.items():
        if _loaded_shape(layer, key[1]) != formats[key].shape:
            raise ManifestError(
                f"{'.'.join(key)} is padded, and no FP8 weight with padding is known"
            )
        formats[key] = dataclasses.replace(formats[key], dtype="float8_e4m3fn", is_fp8=True)
        scale_key = (key[0], fp8_scale(key[1], str(kind_of(layer))))
        formats[scale_key] = _format_of(scale_key, _parameters(layer)[scale_key[1]])
        covered[scale_key] = sum(count for _, count in cells[scale_key])
    return dataclasses.replace(
        plan,
        regions=(*plan.regions, *scales),
        formats=formats,
        covered=covered,
        sent_dtypes={spec.name: spec.dtype for spec in sent.tensors},
    )


def _expert(region: Region, fmt: ParamFormat) -> int:
    """The expert whose weight a region is in; 0 in a linear layer."""
    return region.offset // (fmt.shape[-2] * fmt.shape[-1])


def _format_of(key: tuple[str, str], live: torch.Tensor) -> ParamFormat:
    return ParamFormat(
        module=key[0],
        param=key[1],
        shape=tuple(live.shape),
        stride=tuple(live.stride()),
        dtype="float32",
        numel=live.numel(),
        is_fp8=True,
    )


def _scale_region(
    part: Region,
    plan: PlacementPlan,
    kind: str,
    live: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
) -> Region:
    """The scales of a part of an HF matrix."""
    fmt, (height, width) = plan.format_of(part), shapes[part.name]
    scale = fp8_scale(part.param, kind)
    made = Region(
        name=fp8_scale(part.name, kind),
        first_index=0,
        index_strides=(1,),
        size=(1,),
        module=part.module,
        param=scale,
        offset=_expert(part, fmt) * live[scale].stride(0) if len(fmt.shape) == 3 else 0,
        strides=(1,),
    )
    if kind == "per_tensor":
        return made
    rows, columns = fmt.shape[-2:]
    if part.strides != (columns, 1) or part.index_strides != (width, 1):
        raise ManifestError(f"{part.name} lands in pieces of {part.module}.{part.param}")
    cut = _Cut(
        size=(part.size[0], part.size[1]),
        at=divmod(part.offset % (rows * columns), columns),
        first=divmod(part.first_index, width),
        own=(rows, columns),
        whole=(height, width),
    )
    *_, down, across = live[scale].stride()
    if kind == "per_channel":
        return dataclasses.replace(
            made,
            first_index=cut.first[0],
            index_strides=(1, 1),
            size=(cut.size[0], 1),
            offset=made.offset + cut.at[0] * down,
            strides=(down, across),
        )
    if not cut.is_whole_blocks:
        raise ManifestError(
            f"{part.name} begins or ends within a block of {FP8_BLOCK} of "
            f"{part.module}.{part.param}; start vLLM with fp8_per_tensor"
        )
    begin, place = (tuple(i // FP8_BLOCK for i in corner) for corner in (cut.first, cut.at))
    columns_of_hf = -(-width // FP8_BLOCK)
    return dataclasses.replace(
        made,
        first_index=begin[0] * columns_of_hf + begin[1],
        index_strides=(columns_of_hf, 1),
        size=tuple(-(-extent // FP8_BLOCK) for extent in cut.size),
        offset=made.offset + place[0] * down + place[1] * across,
        strides=(down, across),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """Rows and columns of a part of an HF matrix, and where they begin."""

    size: tuple[int, int]
    at: tuple[int, int]
    """First row and column in the worker's parameter, of shape `own`."""
    first: tuple[int, int]
    """First row and column in the HF matrix, of shape `whole`."""
    own: tuple[int, int]
    whole: tuple[int, int]

    @property
    def is_whole_blocks(self) -> bool:
        """Whether it begins and ends with blocks, or ends where both matrices do."""
        ends = tuple(
            (at + size, first + size) == (own, whole)
            for size, at, first, own, whole in zip(
                self.size, self.at, self.first, self.own, self.whole, strict=True
            )
        )
        begins = all(i % FP8_BLOCK == 0 for i in (*self.at, *self.first))
        return begins and all(
            size % FP8_BLOCK == 0 or end for size, end in zip(self.size, ends, strict=True)
        )
