"""Digests of the live tensors, read back into checkpoint layout and summed per HF tensor.

Three layouts can be read back:

* *as loaded*: the live parameter has the checkpoint's shape, strides and dtype, and its layer is
  known not to permute it.
* *unquantised MoE*: the kernel's packing permutes each expert's elements. The permutation is found
  by packing the elements' indices (`_PackedMoe`), checked on random data, and inverted.
* *linear layers on the CPU*: vLLM keeps a packed copy inside `cpu_linear` and drops the weight. The
  copy's product with unit vectors is exactly the weight (one term per sum), but -0.0 becomes 0.0.
  `zero_sign_correction` accounts for the signs that were received.

Any other layout is *unverified*, with its reason.

Axes: E = experts, U = 2 * intermediate, H = hidden, I = intermediate or in features,
O = out features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from inference_node import dialect
from inference_node.placement import ParamFormat, PlacementPlan, Region
from orchestrator.errors import VerificationError
from orchestrator.protocol.messages import Manifest
from weight_transfer.digest import region_digest

PROBE_COLUMNS = 512
"""Unit vectors per product when a packed linear layer is read back; bounds the scratch."""
_PLAIN_METHODS = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
PartKey = tuple[int, tuple[int, ...], tuple[int, ...]]
"""First index, size and index strides: which elements of the HF tensor a part has."""
_MOE_METHOD = "UnquantizedFusedMoEMethod"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDigest:
    """Digest of one region on one worker; `key` distinguishes replicas from shards."""

    key: PartKey
    numel: int
    digest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDigests:
    """One worker's parts by HF name, and tensors that it could not read back."""

    parts: dict[str, list[PartDigest]]
    unverified: dict[str, str] = field(default_factory=dict)
    arrived: Sequence[int] | None = None
    """Digests taken on arrival, in the order of `Arrivals`. None: there are none."""


class Unreadable(Exception):
    """A live layout that cannot be read back; the text is the reported reason."""


def why_not_in_place(
    layer: torch.nn.Module, fmt: ParamFormat, *, is_shared: bool = False
) -> str | None:
    """Why received bytes may not be written straight into this parameter; None if they may.

    Args:
        is_shared: the model uses the layer in several places, such as a tied embedding.
    """
    live, method = layer._parameters.get(fmt.param), getattr(layer, "quant_method", None)
    kind = type(method).__name__
    if live is None or live.numel() == 0:
        return f"{type(layer).__name__} keeps {fmt.param} elsewhere"
    if (tuple(live.shape), tuple(live.stride()), str(live.dtype)) != (
        fmt.shape,
        fmt.stride,
        f"torch.{fmt.dtype}",
    ):
        return f"{type(layer).__name__} keeps {fmt.param} in another shape"
    if hasattr(layer, "cpu_linear") and (is_shared or not _only_looks_up(layer)):
        return f"{type(layer).__name__} multiplies by a packed copy of {fmt.param}"
    if dialect.is_deferred_attention(layer):
        return f"{type(layer).__name__} derives other tensors from {fmt.param}"
    if kind == _MOE_METHOD and fmt.param in ("w13_weight", "w2_weight"):
        try:
            packing = _packing(layer, method, fmt)[fmt.param]
        except Unreadable as why:
            return str(why)
        return None if packing.is_identity else f"{type(layer).__name__} keeps {fmt.param} packed"
    if method is not None and kind not in _PLAIN_METHODS and kind != _MOE_METHOD:
        return f"{kind} converts {fmt.param}"
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
                total = region_digest(
                    view, first_index=region.first_index, index_strides=region.index_strides
                )
                if live.loses_zero_sign:
                    total = total + corrections.get(region, 0)
                parts.setdefault(region.name, []).append((region, total))
    return WorkerDigests(parts=_to_host(parts), unverified=unverified)


def _by_param(plan: PlacementPlan) -> dict[tuple[str, str], list[Region]]:
    grouped: dict[tuple[str, str], list[Region]] = {}
    for region in plan.regions:
        grouped.setdefault((region.module, region.param), []).append(region)
    return grouped


def _as_sent(live: torch.Tensor, plan: PlacementPlan, region: Region) -> torch.Tensor:
    view = region.view_in(live)
    sent = getattr(torch, plan.sent_dtypes[region.name])
    return view if view.dtype == sent else view.to(sent)


def _to_host(
    parts: Mapping[str, Sequence[tuple[Region, torch.Tensor]]],
) -> dict[str, list[PartDigest]]:
    """Copy all digests from the device at once."""
    flat = [total for found in parts.values() for _, total in found]
    values = iter(torch.stack(flat).tolist() if flat else ())
    return {
        name: [
            PartDigest(
                key=(r.first_index, r.size, r.index_strides), numel=r.numel, digest=next(values)
            )
            for r, _ in found
        ]
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
    copies = [live for holder in holders for live in _layer_copies(layers[holder.module], holder)]
    if not copies:
        raise Unreadable(f"{fmt.module}.{fmt.param} has no live tensor")
    return copies


def _layer_copies(layer: torch.nn.Module, fmt: ParamFormat) -> list[_Live]:
    live, method = layer._parameters.get(fmt.param), getattr(layer, "quant_method", None)
    kind = type(method).__name__
    if kind == _MOE_METHOD and fmt.param in ("w13_weight", "w2_weight"):
        return [_Live(tensor=_unpack_moe(layer, method, fmt))]
    if method is not None and kind not in _PLAIN_METHODS:
        raise Unreadable(
            f"{kind} of {fmt.module} keeps {fmt.param} in a layout that is not read back"
        )
    copies: list[_Live] = []
    if live is not None and live.numel() > 0:
        if (tuple(live.shape), tuple(live.stride()), str(live.dtype)) != (
            fmt.shape,
            fmt.stride,
            f"torch.{fmt.dtype}",
        ):
            raise Unreadable(
                f"{fmt.module}.{fmt.param} is kept as {tuple(live.shape)} {live.dtype}, "
                f"loaded as {fmt.shape}"
            )
        copies.append(_Live(tensor=live.data))
    packed = getattr(layer, "cpu_linear", None)
    if (
        packed is not None
        and fmt.param == "weight"
        and len(fmt.shape) == 2
        and _is_multiplied(layer, copies)
    ):
        copies.append(_Live(tensor=_probe_linear(layer, packed, fmt), loses_zero_sign=True))
    return copies


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
    signed, unsigned = (
        int(region_digest(v, first_index=region.first_index, index_strides=region.index_strides))
        for v in (view, view + 0.0)
    )
    return signed - unsigned


# ------------------------------------------ MoE: the packing, learnt and inverted


@dataclass(frozen=True, slots=True, kw_only=True)
class _PackedMoe:
    """The packing of one parameter of one MoE layer.

    Element p of a packed expert is checkpoint element `source_P[p]`; -1 is padding.
    """

    source_P: torch.Tensor
    is_identity: bool


_PACKINGS: dict[tuple[Any, ...], dict[str, _PackedMoe]] = {}


def _unpack_moe(layer: torch.nn.Module, method: Any, fmt: ParamFormat) -> torch.Tensor:
    """The live MoE parameter in checkpoint layout [E, ., .]."""
    live = layer._parameters[fmt.param]
    assert live is not None
    packing = _packing(layer, method, fmt)[fmt.param]
    live_EP = live.data.reshape(live.shape[0], -1)
    if live_EP.shape != (fmt.shape[0], packing.source_P.numel()):
        raise Unreadable(
            f"{fmt.module}.{fmt.param}: live shape {tuple(live.shape)} is not what its "
            f"packing makes of {fmt.shape}"
        )
    if packing.is_identity:
        return live_EP.reshape(fmt.shape)
    kept_P = packing.source_P >= 0
    loaded_EF = live_EP.new_empty(fmt.shape[0], fmt.shape[1] * fmt.shape[2])
    loaded_EF[:, packing.source_P[kept_P]] = live_EP[:, kept_P]
    return loaded_EF.view(fmt.shape)


def _packing(layer: torch.nn.Module, method: Any, fmt: ParamFormat) -> dict[str, _PackedMoe]:
    w13_shape, w2_shape = _moe_shapes(layer, fmt)
    key = (
        type(method),
        id(type(getattr(getattr(method, "moe_kernel", None), "fused_experts", None))),
        w13_shape,
        w2_shape,
        fmt.dtype,
    )
    if key not in _PACKINGS:
        _PACKINGS[key] = _learn_packing(
            layer, method, w13_shape, w2_shape, getattr(torch, fmt.dtype)
        )
    return _PACKINGS[key]


def _moe_shapes(
    layer: torch.nn.Module, fmt: ParamFormat
) -> tuple[tuple[int, int], tuple[int, int]]:
    """([U, H], [H, I]) of one expert in checkpoint format, from either of the two."""
    config: Any = layer.moe_config
    halves = 2 if config.is_act_and_mul else 1
    if fmt.param == "w13_weight":
        up, hidden = fmt.shape[1:]
        return (up, hidden), (hidden, up // halves)
    hidden, inner = fmt.shape[1:]
    return (inner * halves, hidden), (hidden, inner)


def _learn_packing(
    layer: torch.nn.Module,
    method: Any,
    w13_shape: tuple[int, int],
    w2_shape: tuple[int, int],
    dtype: torch.dtype,
) -> dict[str, _PackedMoe]:
    """Pack an expert whose elements are their indices, one exact base-256 digit at a time."""
    shapes = {"w13_weight": w13_shape, "w2_weight": w2_shape}
    device = next(p.device for p in layer.parameters())
    elements = max(s[0] * s[1] for s in shapes.values()) + 1

    def pack(w13_EF: torch.Tensor, w2_EF: torch.Tensor) -> dict[str, torch.Tensor]:
        try:
            w13, w2 = dialect.convert_moe_weights(
                method=method,
                layer=layer,
                w13_EUH=w13_EF.view(-1, *w13_shape).to(dtype),
                w2_EHI=w2_EF.view(-1, *w2_shape).to(dtype),
            )
        except (
            NotImplementedError,
            RuntimeError,
            AssertionError,
            TypeError,
            AttributeError,
        ) as error:
            raise Unreadable(
                f"the packing of {type(layer).__name__} could not be learnt: {error}"
            ) from error
        return {
            "w13_weight": w13.reshape(w13.shape[0], -1),
            "w2_weight": w2.reshape(w2.shape[0], -1),
        }

    # 1-based, because padding reads 0. Two experts, because some kernels interleave them.
    numbers = {n: torch.arange(1, s[0] * s[1] + 1, device=device) for n, s in shapes.items()}
    found = {n: torch.zeros(0) for n in shapes}
    for digit in range(max(1, -(-elements.bit_length() // 8))):
        planes = {n: ((v >> (8 * digit)) & 255).repeat(2, 1) for n, v in numbers.items()}
        packed = pack(planes["w13_weight"], planes["w2_weight"])
        for n in shapes:
            plane_P = packed[n][0].round().to(torch.int64) << (8 * digit)
            found[n] = plane_P if digit == 0 else found[n] + plane_P
    packings = {n: _as_packing(n, source_P - 1, shapes[n]) for n, source_P in found.items()}
    _check_packing(pack, packings, shapes, device)
    return packings


def _as_packing(name: str, source_P: torch.Tensor, shape: tuple[int, int]) -> _PackedMoe:
    kept = source_P[source_P >= 0]
    numel = shape[0] * shape[1]
    if kept.numel() != numel or not torch.equal(
        kept.sort().values, torch.arange(numel, device=kept.device)
    ):
        raise Unreadable(f"the packing of {name} is not a permutation of each expert's elements")
    identity = source_P.numel() == numel and torch.equal(
        source_P, torch.arange(numel, device=source_P.device)
    )
    return _PackedMoe(source_P=source_P, is_identity=identity)


def _check_packing(
    pack: Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]],
    packings: Mapping[str, _PackedMoe],
    shapes: Mapping[str, tuple[int, int]],
    device: torch.device,
) -> None:
    """Check the packings on three experts of random bytes."""
    generator = torch.Generator().manual_seed(0)
    data = {
        n: torch.randint(1, 256, (3, s[0] * s[1]), generator=generator).to(device)
        for n, s in shapes.items()
    }
    packed = pack(data["w13_weight"], data["w2_weight"])
    for n, packing in packings.items():
        kept = packing.source_P >= 0
        same = packed[n].shape == (3, kept.numel()) and torch.equal(
            packed[n][:, kept].long(), data[n][:, packing.source_P[kept]]
        )
        if not same:
            raise Unreadable(f"the packing of {n} mixes experts or depends on their values")


# ------------------------------------------ putting the workers' parts together


class Arrivals:
    """What the workers of a replica digest on arrival.

    The order is the manifest's, and within a tensor that of `Findings.loaded`.

    Args:
        direct: indices of the tensors that do not take the reload path.
        loaded: for each worker, HF name -> the (first index, size, index strides) of its parts.

    Axes: P = parts of one worker, S = different parts, N = tensors of the manifest.
    """

    def __init__(
        self,
        manifest: Manifest,
        direct: Iterable[int],
        loaded: Sequence[Mapping[str, Sequence[Any]]],
    ) -> None:
        self._manifest, self._direct = manifest, sorted(direct)
        slots: dict[tuple[int, PartKey], int] = {}
        self._slots = [
            torch.tensor([slots.setdefault(p, len(slots)) for p in self._parts(found)])
            for found in loaded
        ]
        self._owner_S = torch.tensor([index for index, _ in slots], dtype=torch.int64)
        self.covered = dict.fromkeys(self._direct, 0)
        for index, key in slots:
            self.covered[index] += math.prod(key[1])
        self.is_everything = self.covered == {i: t.numel for i, t in enumerate(manifest.tensors)}
        """Whether every element of every tensor is digested on arrival."""

    def _parts(self, loaded: Mapping[str, Sequence[Any]]) -> Iterator[tuple[int, PartKey]]:
        for index in self._direct:
            for first, size, strides in loaded.get(self._manifest.tensors[index].name, ()):
                yield index, (first, tuple(size), tuple(strides))

    def add_up(self, arrived: Sequence[Sequence[int]]) -> tuple[dict[int, int], set[int]]:
        """Index -> digest of what arrived; and the indices whose copies differ between workers.

        Raises:
            VerificationError: a worker digested another number of parts.
        """
        digests = [torch.tensor(c, dtype=torch.int64) for c in arrived]
        if [len(d) for d in digests] != [len(s) for s in self._slots]:
            raise VerificationError(
                f"workers digested {[len(d) for d in digests]} parts, "
                f"not {[len(s) for s in self._slots]}"
            )
        value_S, wrong = torch.zeros_like(self._owner_S), set[int]()
        for slot_P, digest_P in zip(self._slots, digests, strict=True):
            value_S[slot_P.long()] = digest_P
        for slot_P, digest_P in zip(self._slots, digests, strict=True):
            differing = slot_P.long()[value_S[slot_P.long()] != digest_P]
            wrong |= set(self._owner_S[differing].tolist())
        total_N = torch.zeros(len(self._manifest.tensors), dtype=torch.int64).index_add_(
            0, self._owner_S, value_S
        )
        totals = total_N.tolist()
        return {i: totals[i] for i in self._direct}, wrong


def combine(
    manifest: Manifest, workers: Sequence[WorkerDigests], arrivals: Arrivals | None = None
) -> tuple[list[int], dict[str, str]]:
    """The digest of every tensor in order, 0 if unverified; and why tensors are unverified. Pure.

    Parts with the same elements are replicas, which must agree and count once. Different parts are
    shards, which add up.

    Raises:
        VerificationError: replicas disagree, or parts do not cover a tensor; names the tensors.
    """
    unverified = {name: why for worker in workers for name, why in worker.unverified.items()}
    digests: list[int] = []
    wrong: list[str] = []
    worker_digests = [w.arrived for w in workers if w.arrived is not None]
    arrived, disagree = (
        ({}, set[int]())
        if arrivals is None or not worker_digests
        else arrivals.add_up(worker_digests)
    )
    if arrived and arrivals is not None and arrivals.is_everything and not disagree:
        return list(arrived.values()), unverified  # one by one, 19,000 tensors take 6 ms
    for index, spec in enumerate(manifest.tensors):
        if index not in arrived and spec.name in unverified:
            digests.append(0)
            continue
        if arrivals is not None and index in arrived:
            digest, covered, agree = arrived[index], arrivals.covered[index], index not in disagree
        else:
            digest, covered, agree = _add_up(
                [p for w in workers for p in w.parts.get(spec.name, ())]
            )
        if not agree:
            wrong.append(f"{spec.name} (its live copies disagree)")
        if covered != spec.numel:
            wrong.append(f"{spec.name} ({covered} of {spec.numel} elements found)")
        digests.append(digest)
    if wrong:
        raise VerificationError(f"live tensors are wrong: {', '.join(dict.fromkeys(wrong[:8]))}")
    return digests, unverified


def _add_up(found: Sequence[PartDigest]) -> tuple[int, int, bool]:
    """One tensor's digest, its number of elements, and whether copies of its parts agree."""
    parts = {p.key: p for p in found}
    agree = all(parts[p.key].digest == p.digest for p in found)
    return _wrap(sum(p.digest for p in parts.values())), sum(p.numel for p in parts.values()), agree


def _wrap(value: int) -> int:
    """The value as int64, modulo 2^64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value
