"""Digests of the live tensors, read back into checkpoint layout and summed per HF tensor.

Five layouts can be read back:

* *FP8*: e4m3 weights and scales, whose layout was proven at the start (`inference_node.fp8`).
* *as loaded*: the live parameter has the checkpoint's shape and strides, and its dtype or a wider
  one, and its layer is known not to permute it.
* *unquantised MoE*: the kernel's packing permutes each expert's elements. The permutation is found
  by packing the elements' indices (`Packing`), checked on random data, and inverted.
* *layers with tensors beside their parameters*, such as a convolution on the CPU: those tensors and
  the parameter may be arrangements of what was loaded. They are learnt in the same way.
* *linear layers on the CPU*: vLLM keeps a packed copy inside `cpu_linear` and drops the weight. The
  copy's product with unit vectors is exactly the weight (one term per sum), but -0.0 becomes 0.0.
  `zero_sign_correction` accounts for the signs that were received.

Any other layout is *unverified*, with its reason.

Axes: E = experts, U = 2 * intermediate, H = hidden, I = intermediate or in features,
O = out features.
"""

from __future__ import annotations

import array
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from inference_node import dialect, packing
from inference_node.packing import Unreadable
from inference_node.placement import ParamFormat, PlacementPlan, Region, is_kept_whole
from orchestrator.errors import VerificationError
from orchestrator.protocol.messages import Manifest
from weight_transfer.digest import region_digest

PROBE_COLUMNS = 512
"""Unit vectors per product when a packed linear layer is read back; bounds the scratch."""
_PLAIN_METHODS = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
Int64 = npt.NDArray[np.int64]
PartKey = tuple[int, tuple[int, ...], tuple[int, ...]]
"""First index, size and index strides: which elements of the HF tensor a part has."""


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
    is_plain = kind in _PLAIN_METHODS or kind == packing.MOE_METHOD or _is_beside_fp8(siblings)
    if method is not None and not is_plain:
        return f"{kind} converts {fmt.param}"
    if method is not None and (beside := packing.tensors_beside(layer)):
        return f"{name} makes {', '.join(beside)} of its parameters"
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
    is_plain = kind in _PLAIN_METHODS or kind == packing.MOE_METHOD or _is_beside_fp8(siblings)
    if method is not None and not is_plain:
        raise Unreadable(f"{kind} keeps it in a layout that is not read back")
    if method is not None and fmt.param == "weight" and packing.tensors_beside(layer):
        return [
            _Live(tensor=p.unpack(getattr(layer, name).data, fmt.shape, items=1))
            for name, p in packing.of_tensors_beside(layer, method, fmt).items()
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


def _is_beside_fp8(siblings: Mapping[str, ParamFormat]) -> bool:
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
    signed, unsigned = (
        int(region_digest(v, first_index=region.first_index, index_strides=region.index_strides))
        for v in (view, view + 0.0)
    )
    return _wrap(signed - unsigned)


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
            np.array([slots.setdefault(p, len(slots)) for p in self._parts(found)], np.int64)
            for found in loaded
        ]
        self._owner_S = np.array([index for index, _ in slots], np.int64)
        self.covered = dict.fromkeys(self._direct, 0)
        for index, key in slots:
            self.covered[index] += math.prod(key[1])
        self.is_everything = self.covered == {i: t.numel for i, t in enumerate(manifest.tensors)}
        """Whether every element of every tensor is digested on arrival."""

    def _parts(self, loaded: Mapping[str, Sequence[Any]]) -> Iterator[tuple[int, PartKey]]:
        for index in self._direct:
            for first, size, strides in loaded.get(self._manifest.tensors[index].name, ()):
                yield index, (first, tuple(size), tuple(strides))

    def add_up(self, arrived: Sequence[Sequence[int]]) -> tuple[Int64, set[int]]:
        """Digests [N] of what arrived; and the indices whose copies differ between workers.

        It runs within the pause, for up to 40,000 tensors: no loop in Python, and no torch, whose
        threads can take 20 ms to begin on a busy host.

        Raises:
            VerificationError: a worker digested another number of parts.
        """
        digests = [np.asarray(c, np.int64) for c in arrived]
        if [len(d) for d in digests] != [len(s) for s in self._slots]:
            raise VerificationError(
                f"workers digested {[len(d) for d in digests]} parts, "
                f"not {[len(s) for s in self._slots]}"
            )
        value_S, wrong = np.zeros_like(self._owner_S), set[int]()
        for slot_P, digest_P in zip(self._slots, digests, strict=True):
            value_S[slot_P] = digest_P
        for slot_P, digest_P in zip(self._slots, digests, strict=True):
            wrong |= set(self._owner_S[slot_P[value_S[slot_P] != digest_P]].tolist())
        total_N = np.zeros(len(self._manifest.tensors), np.int64)
        np.add.at(total_N, self._owner_S, value_S)  # modulo 2^64
        return total_N, wrong

    def by_index(self, total_N: Int64) -> dict[int, int]:
        """The digests of the tensors that were digested on arrival, by index."""
        totals = total_N.tolist()
        return {i: totals[i] for i in self._direct}


def combine(
    manifest: Manifest, workers: Sequence[WorkerDigests], arrivals: Arrivals | None = None
) -> tuple[Sequence[int], dict[str, str]]:
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
    arrived, disagree = dict[int, int](), set[int]()
    if arrivals is not None and worker_digests:
        total_N, disagree = arrivals.add_up(worker_digests)
        if arrivals.is_everything and not disagree:
            return array.array("q", total_N.tobytes()), unverified
        arrived = arrivals.by_index(total_N)
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
