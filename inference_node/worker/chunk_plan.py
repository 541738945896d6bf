"""Plans in which chunks a replica's tensors travel, and which of them arrive in place. Pure.

A tensor is *placeable* on a worker if each of its elements there belongs in a live parameter that
holds all its values and is kept exactly as loaded: the same shape, strides and dtype, no permuting
packing, no additional packed copy. A tensor travels in one of three ways:

    live      received in place, on a replica of one worker, if it is one contiguous run;
              neighbours in memory share a chunk
    staged    received into a buffer; each worker copies its parts, strided or not, in a few
              launches for each chunk
    reload    not placeable on some worker: the model's own loaders take it, with all tensors that
              share a layer with it, on all workers

All workers of a replica reach the same layout. Each reports what it cannot place (`obstacles`), and
the replica adds every tensor that shares a layer with those. The chunks follow only from the
manifest and that set (`plan_chunks`; with one worker also from its runs).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from inference_node.worker import verify
from inference_node.worker.placement import PlacementPlan, Region, is_kept_whole
from orchestrator.protocol.messages import Manifest, WireChunk
from weight_transfer.digest import row_major_strides
from weight_transfer.layout import in_vectors

MAX_CHUNK_BYTES = 192 * 2**20
"""Large enough for the wire's full rate; both rings hold a few within 2 GiB."""
SMALL_BYTES = 64 * 2**20
"""Smaller runs are staged, many to a chunk.

A receive has a fixed cost of 50 us, as much as 18 MB; a copy on the GPU costs almost nothing.
"""
Live = Mapping[tuple[str, str], torch.Tensor | str]
"""(module, parameter) -> its live tensor, or why it cannot be written in place."""
_EXPERT = re.compile(r"\.\d+\.(?!.*\.\d+\.)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A whole HF tensor in one contiguous run of a live parameter; offset in elements."""

    index: int
    key: tuple[str, str]
    offset: int
    numel: int
    nbytes: int


def live_parameters(
    model: torch.nn.Module, plan: PlacementPlan
) -> dict[tuple[str, str], torch.Tensor | str]:
    """Map each parameter to its live tensor, or to why it cannot be written in place."""
    layers = dict(model.named_modules())
    paths: dict[int, int] = {}
    for _, layer in model.named_modules(remove_duplicate=False):
        paths[id(layer)] = paths.get(id(layer), 0) + 1
    found: dict[tuple[str, str], torch.Tensor | str] = {}
    for key, fmt in plan.formats.items():
        if fmt.alias_of is not None:
            continue
        holders = [fmt, *(f for f in plan.formats.values() if f.alias_of == key)]
        whys = (
            verify.why_not_in_place(
                layer := layers[h.module],
                h,
                plan.formats_of(h.module),
                is_shared=paths[id(layer)] > 1,
            )
            for h in holders
        )
        reasons = [why for why in whys if why is not None]
        found[key] = reasons[0] if reasons else layers[fmt.module]._parameters[fmt.param].data  # type: ignore[union-attr]
    return found


def obstacles(plan: PlacementPlan, manifest: Manifest, live: Live) -> dict[int, str]:
    """Manifest index -> why this worker cannot place the tensor. Pure."""
    by_name = plan.regions_by_name()
    found: dict[int, str] = {}
    for index, spec in enumerate(manifest.tensors):
        reasons = (_why_not(region, plan, live) for region in by_name.get(spec.name, ()))
        why = next((r for r in reasons if r is not None), None)
        if why is not None:
            found[index] = why
    return found


def _why_not(region: Region, plan: PlacementPlan, live: Live) -> str | None:
    fmt, tensor = plan.format_of(region), live[plan.owner_of(region)]
    if isinstance(tensor, str):
        return tensor
    if not is_kept_whole(plan.sent_dtypes[region.name], fmt.dtype):
        return f"it is sent as {plan.sent_dtypes[region.name]} and kept as {fmt.dtype}"
    if any(
        step == 0 and extent > 1
        for step, extent in zip(region.index_strides, region.size, strict=True)
    ):
        return "one element of it lands in many places"
    return None


def whole_runs(plan: PlacementPlan, manifest: Manifest, reload: Collection[int]) -> list[Run]:
    """The tensors outside `reload` that are one whole run of one parameter. Pure."""
    by_name = plan.regions_by_name()
    runs = []
    for index, spec in enumerate(manifest.tensors):
        regions = by_name.get(spec.name, [])
        if index in reload or len(regions) != 1:
            continue
        region, dense = regions[0], row_major_strides(regions[0].size)
        is_whole = (
            spec.dtype == plan.format_of(region).dtype
            and region.numel == spec.numel
            and region.first_index == 0
            and _same(region.index_strides, dense, region.size)
        )
        if is_whole and _same(region.strides, dense, region.size):
            runs.append(
                Run(
                    index=index,
                    key=plan.owner_of(region),
                    offset=region.offset,
                    numel=spec.numel,
                    nbytes=spec.nbytes,
                )
            )
    return runs


def plan_chunks(
    manifest: Manifest,
    *,
    reload: Collection[int],
    runs: Sequence[Run] = (),
    together: Sequence[tuple[int, ...]] = (),
) -> tuple[WireChunk, ...]:
    """The chunks in which the manifest's tensors travel, in order. Pure.

    Args:
        reload: indices that take the reload path.
        runs: tensors that the only worker of a replica may receive in place.
        together: indices that must share a chunk and follow each other; in no run.
    """
    big = _groups(runs)
    small = [group for group in big if sum(r.nbytes for r in group) < SMALL_BYTES]
    big = [group for group in big if sum(r.nbytes for r in group) >= SMALL_BYTES]
    live = {r.index for group in big for r in group}
    if big and not small and len(live) + len(reload) == len(manifest.tensors):
        # The first chunk must not be live.
        big.remove(smallest := min(big, key=lambda group: sum(r.nbytes for r in group)))
        live -= {r.index for r in smallest}
    staged = [i for i in range(len(manifest.tensors)) if i not in live and i not in reload]
    units = _units(_families(staged, manifest), together)
    chunks = [WireChunk(kind="staged", tensors=t) for t in _packed(units, manifest)]
    chunks += [WireChunk(kind="live", tensors=tuple(r.index for r in group)) for group in big]
    single = [(i,) for i in sorted(reload)]
    chunks += [WireChunk(kind="reload", tensors=t) for t in _packed(single, manifest)]
    return tuple(chunks)


def _groups(runs: Sequence[Run]) -> list[list[Run]]:
    """Group neighbours in memory into chunks of similar size, about MAX_CHUNK_BYTES."""
    groups: list[list[Run]] = []
    for run in sorted(runs, key=lambda r: (r.key, r.offset)):
        last = groups[-1][-1] if groups else None
        if last is not None and last.key == run.key and last.offset + last.numel == run.offset:
            groups[-1].append(run)
        else:
            groups.append([run])
    return [chunk for group in groups for chunk in _cut(group)]


def _cut(group: Sequence[Run]) -> list[list[Run]]:
    """Cut neighbours into chunks of similar size, at most a quarter above MAX_CHUNK_BYTES.

    Each tensor goes to the chunk that contains its middle. A small last chunk would cost another
    receive.
    """
    total = sum(r.nbytes for r in group)
    count = -(-4 * total // (5 * MAX_CHUNK_BYTES))
    chunks: list[list[Run]] = [[] for _ in range(count)]
    begin = 0
    for run in group:
        chunks[(2 * begin + run.nbytes) * count // (2 * total)].append(run)
        begin += run.nbytes
    return [chunk for chunk in chunks if chunk]


def _families(indices: Sequence[int], manifest: Manifest) -> list[int]:
    """Order: all gates of a layer's experts, then all ups, all downs; else as in the manifest.

    The sender merges equal shapes in one launch.
    """
    first: dict[str, int] = {}
    for index in indices:
        first.setdefault(_family(manifest.tensors[index].name), index)
    return sorted(indices, key=lambda i: (first[_family(manifest.tensors[i].name)], i))


def _family(name: str) -> str:
    """The name without its expert's number, which is the last of several numbers."""
    return _EXPERT.sub(".*.", name) if len(re.findall(r"\.\d+(?=\.)", name)) > 1 else name


def _units(indices: Sequence[int], together: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The indices, with those that must share a chunk in the place of the first of them."""
    unit_of = {i: unit for unit in together for i in unit}
    return list(dict.fromkeys(unit_of.get(i, (i,)) for i in indices))


def _packed(units: Sequence[tuple[int, ...]], manifest: Manifest) -> list[tuple[int, ...]]:
    """Pack units into chunks of at most MAX_CHUNK_BYTES; a larger unit is a separate chunk."""
    chunks: list[list[tuple[int, ...]]] = []
    size = 0
    for unit in units:
        nbytes = sum(manifest.tensors[i].nbytes for i in unit)
        if chunks and size + nbytes <= MAX_CHUNK_BYTES:
            chunks[-1].append(unit)
            size += nbytes
        else:
            chunks.append([unit])
            size = nbytes
    return [in_vectors(chunk, manifest) for chunk in chunks]


def _same(strides: Sequence[int], dense: Sequence[int], size: Sequence[int]) -> bool:
    return all(s == d or extent == 1 for s, d, extent in zip(strides, dense, size, strict=True))
