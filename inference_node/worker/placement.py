"""The place of each element of each HF tensor in the model's parameters.

The plan comes from one run of the model's own `load_weights`. Sources are meta tensors with the
manifest's shapes; destinations are the model's parameters in checkpoint format, also on meta. Every
loader (fused qkv, gate and up, experts' w13 and w2, tensor-parallel shards, padded vocabularies)
ends in `copy_` from a strided view of a source into a strided view of a destination. A dispatch
mode records these pairs and moves nothing.

The result is plain data: which elements of which HF tensor each parameter gets. Two things use it:
the check before a publication (`local_findings`, `judge`) and the read-back of live tensors
(`verify`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from inference_node.shared.reports import MAX_REFUSALS, Findings, PartKey
from inference_node.worker import dialect, reload
from orchestrator.protocol.messages import Manifest, TensorSpec
from weight_transfer.boxes import Strided
from weight_transfer.digest import region_digest

LOADER_ERRORS = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions by which a loader refuses a tensor; NotImplementedError is a RuntimeError."""
_FILLS = frozenset(
    {torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default}
)
_DENSE_COPIES = frozenset({torch.ops.aten._to_copy.default, torch.ops.aten.clone.default})
_CONSTANTS = frozenset(
    {
        torch.ops.aten.zeros_like.default,
        torch.ops.aten.ones_like.default,
        torch.ops.aten.full_like.default,
        torch.ops.aten.new_zeros.default,
        torch.ops.aten.new_ones.default,
        torch.ops.aten.new_full.default,
    }
)
"""They look at a tensor's shape only."""
OPTIONAL = "splice_optional"
"""Attribute of a parameter that need not get all of its elements."""
_LOSSLESS = {("bfloat16", "float32"), ("float16", "float32"), ("float32", "float64")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Region(Strided):
    """Elements of one HF tensor and their place in a parameter.

    All counts are in elements; HF indices are row-major.
    """

    name: str
    module: str
    param: str

    @property
    def key(self) -> tuple[str, str]:
        """(module, param)."""
        return self.module, self.param

    @property
    def part(self) -> PartKey:
        """Which elements of the HF tensor they are."""
        return self.first_index, self.size, self.index_strides

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    def digest(self, values: torch.Tensor) -> torch.Tensor:
        """Digest of values in the region's shape, as a part of the HF tensor."""
        return region_digest(values, first_index=self.first_index, index_strides=self.index_strides)

    def view_in(self, live: torch.Tensor) -> torch.Tensor:
        """View of the elements in the live tensor, which need not begin its storage."""
        return torch.as_strided(live, self.size, self.strides, live.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamFormat:
    """A parameter as `load_weights` sees it.

    `numel` excludes declared padding; `alias_of` shares another parameter's live tensor.
    `is_computed`: its loader makes new values of the HF tensors. `is_fp8`: an e4m3 weight whose
    memory has the shape's order, or its scales (`inference_node.worker.fp8`).
    """

    module: str
    param: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    numel: int
    alias_of: tuple[str, str] | None = None
    optional: bool = False
    is_computed: bool = False
    is_fp8: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """One worker's plan for one manifest."""

    regions: tuple[Region, ...]
    formats: dict[tuple[str, str], ParamFormat]
    covered: dict[tuple[str, str], int]
    """Elements that copies or fills reach."""
    sent_dtypes: dict[str, str] = field(default_factory=dict)
    """HF name -> dtype in the manifest."""
    refused: dict[str, str] = field(default_factory=dict)
    """HF name -> the exception of its loader."""

    def regions_by_name(self) -> dict[str, list[Region]]:
        """HF name -> its regions on this worker."""
        found: dict[str, list[Region]] = {}
        for region in self.regions:
            found.setdefault(region.name, []).append(region)
        return found

    def format_of(self, region: Region) -> ParamFormat:
        """The parameter that a region lands in."""
        return self.formats[region.key]

    def owner_of(self, region: Region) -> tuple[str, str]:
        """(module, param) of the live tensor that a region lands in."""
        return self.format_of(region).alias_of or region.key

    def formats_of(self, module: str) -> dict[str, ParamFormat]:
        """The parameters of one layer, by name."""
        return {param: fmt for (path, param), fmt in self.formats.items() if path == module}


def record(model: torch.nn.Module, manifest: Manifest) -> PlacementPlan:
    """Run `model.load_weights` over meta tensors of the manifest and record every copy.

    The model is unchanged afterwards. A tensor whose loader raises is noted in `refused`.
    """
    live = {(path, name): p for path, layer in model.named_modules() for name, p in _params(layer)}
    refused: dict[str, str] = {}
    load_weights: Any = model.load_weights
    with reload.checkpoint_format(model), torch.no_grad():
        formats = _formats(model, live)
        while True:
            recorder = _Recorder(model)
            feed = _Feed(spec for spec in manifest.tensors if spec.name not in refused)
            try:
                with recorder, dialect.partial_load():
                    load_weights(feed.sources(recorder))
                break
            except LOADER_ERRORS as error:
                again = feed.last in refused
                refused[feed.last] = f"{type(error).__name__}: {error}"[:300]
                if again or len(refused) >= MAX_REFUSALS:
                    break
    for key in recorder.computed:
        formats[key] = replace(formats[key], is_computed=True)
    return PlacementPlan(
        regions=tuple(recorder.regions),
        formats=formats,
        covered=dict(recorder.covered),
        refused=refused,
        sent_dtypes={spec.name: spec.dtype for spec in manifest.tensors},
    )


def whole_layers(
    plan: PlacementPlan, manifest: Manifest, indices: Sequence[int]
) -> tuple[int, ...]:
    """The indices, with those of all tensors that share a layer with them on this worker. Pure.

    A reload rebuilds a layer as a whole.
    """
    by_name = plan.regions_by_name()
    layers_of = [{r.module for r in by_name.get(spec.name, ())} for spec in manifest.tensors]
    wanted, layers = set(indices), {m for i in indices for m in layers_of[i]}
    while more := {i for i, found in enumerate(layers_of) if i not in wanted and found & layers}:
        wanted |= more
        layers |= {m for i in more for m in layers_of[i]}
    return tuple(sorted(wanted))


def only(plan: PlacementPlan, part: Manifest) -> PlacementPlan:
    """The plan of a part of its manifest. Pure."""
    dtypes = {spec.name: spec.dtype for spec in part.tensors}
    regions = tuple(r for r in plan.regions if r.name in dtypes)
    return replace(plan, regions=regions, sent_dtypes=dict(dtypes))


class _Feed:
    """Yields meta sources; the last name tells to which tensor a loader's exception belongs."""

    def __init__(self, specs: Iterator[TensorSpec]) -> None:
        self._specs, self.last = specs, ""

    def sources(self, recorder: _Recorder) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in self._specs:
            self.last = spec.name
            source = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
            recorder.add_source(spec.name, source)
            yield spec.name, source


def _params(layer: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for name, p in layer._parameters.items() if p is not None]


def _formats(
    model: torch.nn.Module, live: dict[tuple[str, str], torch.nn.Parameter]
) -> dict[tuple[str, str], ParamFormat]:
    skip = dialect.skip_load_tensors()
    first_owner: dict[int, tuple[str, str]] = {}
    formats: dict[tuple[str, str], ParamFormat] = {}
    for path, layer in model.named_modules():
        for name, param in _params(layer):
            key = (path, name)
            shared = live.get(key)
            owner = (
                first_owner.setdefault(id(shared), key)
                if shared is not None and shared.numel() > 0
                else key
            )
            formats[key] = ParamFormat(
                module=path,
                param=name,
                shape=tuple(param.shape),
                stride=tuple(param.stride()),
                dtype=str(param.dtype).removeprefix("torch."),
                numel=dialect.loadable_numel(param),
                alias_of=owner if owner != key else None,
                optional=name in skip
                or dialect.is_deferred_attention(layer)
                or hasattr(param, OPTIONAL),
            )
    return formats


@dataclass(frozen=True, slots=True, kw_only=True)
class _Derived:
    """A fresh dense tensor whose element at coordinate c is the source's element at c."""

    name: str
    first_index: int
    size: tuple[int, ...]
    index_strides: tuple[int, ...]
    strides: tuple[int, ...]


class _Recorder(TorchDispatchMode):
    """Records `copy_` from a known source into a known parameter, by storage, without copying.

    Fills, and copies of tensors that depend on no HF tensor, cover a parameter without a region.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.regions: list[Region] = []
        self.covered: dict[tuple[str, str], int] = {}
        self.computed: set[tuple[str, str]] = set()
        """Parameters that get values which are computed from HF tensors."""
        self._seen: set[tuple[Any, ...]] = set()
        self._sources: dict[int, str | _Derived] = {}
        self._computed: set[int] = set()
        """Storages of tensors that are computed from HF tensors or parameters."""
        self._keep: list[torch.Tensor] = []
        self._targets = {
            _storage(p): (path, name)
            for path, layer in model.named_modules()
            for name, p in _params(layer)
        }

    def add_source(self, name: str, tensor: torch.Tensor) -> None:
        """Register a contiguous tensor as HF tensor `name`, and keep it: addresses are reused."""
        self._sources[_storage(tensor)] = name
        self._keep.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default:
            return self._on_copy(func, args, kwargs)
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor):
            target = self._targets.get(_storage(args[0]))
            if target is not None:  # a live one is among them: never run it
                if func in _FILLS:
                    self._cover(target, args[0])
                else:
                    self.computed.add(target)
                return args[0]
            self._on_change(args[0], is_filled=func in _FILLS)
        out = func(*args, **kwargs)
        if func in _DENSE_COPIES and isinstance(out, torch.Tensor):
            self._on_dense_copy(args[0], out)
        elif func not in _CONSTANTS:
            self._note_computed(args, kwargs, out)
        return out

    def _on_change(self, changed: torch.Tensor, *, is_filled: bool) -> None:
        """A source is changed in place: it is a constant now, or computed."""
        storage = _storage(changed)
        is_whole = changed.numel() * changed.element_size() == changed.untyped_storage().nbytes()
        if self._sources.pop(storage, None) is not None and not (is_filled and is_whole):
            self._computed.add(storage)

    def _note_computed(self, args: Any, kwargs: Any, out: Any) -> None:
        known = (self._sources, self._targets, self._computed)
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        new = [t for t in made if not any(_storage(t) in tensors for tensors in known)]
        if not new:  # views, nearly always
            return
        inputs = (t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        if any(_storage(t) in tensors for t in inputs for tensors in known):
            self._computed.update(map(_storage, new))
            self._keep += new

    def _on_copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        target, source = self._targets.get(_storage(args[0])), self._sources.get(_storage(args[1]))
        if target is None:
            self._on_change(args[0], is_filled=False)
            self._note_computed(args[1:], kwargs, args[0])
            return func(*args, **kwargs)
        if source is None:
            if _storage(args[1]) in self._computed or _storage(args[1]) in self._targets:
                self.computed.add(target)
            else:
                self._cover(target, args[0])
            return args[0]
        destination, view = args[0], args[1].expand(args[0].shape)
        origin = _origin(source, view)
        if origin is None:
            raise NotImplementedError(
                f"the loader of {target} rearranges a copy of its tensor; its placement is unknown"
            )
        name, first_index, index_strides = origin
        region = Region(
            name=name,
            first_index=first_index,
            index_strides=index_strides,
            size=tuple(destination.shape),
            module=target[0],
            param=target[1],
            offset=int(destination.storage_offset()),
            strides=tuple(destination.stride()),
        )
        if self._cover(target, destination):
            self.regions.append(region)
        return destination

    def _cover(self, target: tuple[str, str], destination: torch.Tensor) -> bool:
        key = (
            target,
            destination.storage_offset(),
            tuple(destination.shape),
            tuple(destination.stride()),
        )
        if key in self._seen:
            return False
        self._seen.add(key)
        self.covered[target] = self.covered.get(target, 0) + destination.numel()
        return True

    def _on_dense_copy(self, original: torch.Tensor, out: torch.Tensor) -> None:
        source = self._sources.get(_storage(original))
        origin = None if source is None else _origin(source, original)
        if _storage(out) == _storage(original):
            return
        if origin is None:
            self._note_computed((original,), {}, out)
            return
        name, first_index, index_strides = origin
        self._sources[_storage(out)] = _Derived(
            name=name,
            first_index=first_index,
            size=tuple(out.shape),
            index_strides=index_strides,
            strides=tuple(out.stride()),
        )
        self._keep.append(out)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _origin(source: str | _Derived, view: torch.Tensor) -> tuple[str, int, tuple[int, ...]] | None:
    """(HF name, first index, index strides) of a view of a source.

    None: the view does not follow the copy's dimensions.
    """
    if isinstance(source, str):
        return source, int(view.storage_offset()), tuple(view.stride())
    dims = sorted(
        (d for d in range(len(source.size)) if source.size[d] > 1), key=lambda d: -source.strides[d]
    )
    start, rest = dict.fromkeys(dims, 0), int(view.storage_offset())
    for d in dims:
        start[d], rest = divmod(rest, source.strides[d])
    strides: list[int] = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1 or stride == 0:
            strides.append(0)
            continue
        along = next((d for d in dims if stride % source.strides[d] == 0), None)
        if (
            along is None
            or start[along] + (size - 1) * (stride // source.strides[along]) >= source.size[along]
        ):
            return None
        strides.append(stride // source.strides[along] * source.index_strides[along])
    first = source.first_index + sum(start[d] * source.index_strides[d] for d in dims)
    return (source.name, first, tuple(strides)) if rest == 0 else None


# ---------------------------------------------------------------- the check before a publication


def is_kept_whole(sent: str, kept: str) -> bool:
    """Whether a dtype holds all values of another one."""
    return sent == kept or (sent, kept) in _LOSSLESS


def local_findings(plan: PlacementPlan, manifest: Manifest) -> Findings:
    """This worker's part of the check. Pure."""
    specs = {spec.name: spec for spec in manifest.tensors}
    loaded: dict[str, list[PartKey]] = {}
    lossy: dict[str, str] = {}
    for region in plan.regions:
        loaded.setdefault(region.name, []).append(region.part)
        sent, kept = specs[region.name].dtype, plan.format_of(region).dtype
        if not is_kept_whole(sent, kept):
            lossy[region.name] = f"sent as {sent}, kept as {kept} in {region.module}.{region.param}"
    return Findings(
        loaded=loaded, refused=dict(plan.refused), uncovered=_uncovered(plan), lossy=lossy
    )


def _uncovered(plan: PlacementPlan) -> dict[str, str]:
    missing: dict[str, str] = {}
    for key, fmt in plan.formats.items():
        got = plan.covered.get(key, 0)
        if fmt.alias_of is not None and plan.covered.get(fmt.alias_of, 0) > 0:
            continue
        if not fmt.optional and got < fmt.numel:
            missing[".".join(key).lstrip(".")] = f"{got} of {fmt.numel} elements get data"
    return missing
