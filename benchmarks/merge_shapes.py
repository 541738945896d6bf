"""`merge` for whole models: the merge in bf16, in FP8, and a send next to a stand-in for the wire.

A model's layers in vLLM's order, cut into chunks as a server asks for them; adapters of rank 16 on
all projections. `DISTINCT` layers take turns, more than any cache holds. Cases, for each shape:

    merge/SHAPE             bytes written a second; peer: a copy of as many bytes, the floor
    merge/SHAPE/host        seconds to queue it all
    merge/SHAPE/fp8_KIND    seconds of merge and quantiser in one go; peer: a merge into a scratch,
                            then two passes
    merge/SHAPE/send        seconds of `ChunkSender`, merge and digests next to the wire; peer: the
                            wire alone. The wire is a copy by a few thread blocks of high priority,
                            at about NVLink's rate, as NCCL's. `send-fp8_KIND`: the same in FP8.
    merge/SHAPE/tile-...    with SPLICE_BENCH_TILES=1: other tiles; `same_bits` says whether the
                            bytes of the first chunk are the default's

Axes: B = bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness import Case
from benchmarks.timing import seconds, wait
from benchmarks.wire_stand_in import WIRE_BYTES_PER_S, StandIn
from orchestrator.protocol.messages import (
    Fp8Group,
    Fp8Weights,
    Manifest,
    TensorSpec,
    fp8_manifest,
    fp8_places,
)
from trainer_node.adapters.rounding import NEAREST, Corner, Rounding
from trainer_node.export import fp8_export, fp8_fused
from trainer_node.export.merger import Merger
from trainer_node.export.sources import Delta, Member, Source
from weight_transfer import chunks
from weight_transfer.chunks import ChunkSender
from weight_transfer.layout import in_vectors

SCALE, RANK, DISTINCT = 2.0, 16, 4
_rounding = [Rounding()]
"""How everything here merges now."""
CHUNK_BYTES = 192 * 2**20
KINDS = ("per_tensor", "per_channel", "per_block")
TILES = ((32, 128, 4), (32, 128, 8), (64, 128, 4), (64, 128, 8), (128, 128, 8),
         (64, 64, 4), (64, 64, 8), (32, 256, 8), (64, 256, 16))  # fmt: skip # a table


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a Qwen3. `experts` 0: dense."""

    layers: int
    hidden: int
    q_rows: int
    kv_rows: int
    inner: int
    experts: int = 0


SHAPES = {
    "tiny": Shape(layers=2, hidden=256, q_rows=256, kv_rows=128, inner=384),
    "8b": Shape(layers=36, hidden=4096, q_rows=4096, kv_rows=1024, inner=12288),
    "14b": Shape(layers=40, hidden=5120, q_rows=5120, kv_rows=1024, inner=17408),
    "30b-a3b": Shape(
        layers=48, hidden=2048, q_rows=4096, kv_rows=512, inner=768, experts=128
    ),
}  # fmt: skip # a table


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Its tensors, what shares an FP8 scale, and where each comes from."""

    manifest: Manifest
    weights: dict[str, Fp8Weights]
    sources: list[tuple[Source, Delta | None]]


def cases(name: str, device: str, repeats: int) -> list[Case]:
    """All cases of a shape."""
    model = _model(SHAPES[name], device)
    order = _order(model.manifest, [(i,) for i in range(len(model.manifest.tensors))])
    merger = _merger(model, order, device)
    ring = _ring(merger, device)
    settings = {
        "bytes": model.manifest.nbytes,
        "chunks": merger.num_chunks,
        "launches": sum(len(c.launches) for c in merger._chunks),
        "rank": RANK,
    }

    def merge() -> None:
        _fill(merger, ring, merger.chunk_nbytes, merger.num_chunks)

    def copy() -> None:
        for c in range(merger.num_chunks):
            size = merger.chunk_nbytes(c)
            ring[c % 2][:size].copy_(ring[(c + 1) % 2][:size])

    total = model.manifest.nbytes
    merged_s, copied_s = _times(merge, device, repeats), _times(copy, device, repeats)
    found = [
        Case(
            name=f"merge/{name}",
            metric="bytes_per_s",
            unit="B/s",
            samples=tuple(total / s for s in merged_s),
            peer="copy_ of the same bytes",
            peer_samples=tuple(total / s for s in copied_s),
            settings=settings,
        ),
        _case(f"merge/{name}", "whole_s", merged_s, settings, "copy_ of the same bytes", copied_s),
        _case(f"merge/{name}/host", "host_s", _host(merge, device, repeats), settings),
    ]
    sends = [(f"merge/{name}/send", merger.fill, model.manifest, order)]
    for kind in KINDS:
        more, export, sent, order_fp8 = _fp8(name, kind, model, device, repeats)
        found += more
        sends.append((f"merge/{name}/send-fp8_{kind}", export.fill, sent, order_fp8))
    found += [_send(*what, device=device, repeats=repeats) for what in sends]
    found += _nearest(name, merge, merged_s, sends, settings, device, repeats)
    if device == "cuda" and os.environ.get("SPLICE_BENCH_TILES") == "1":
        found += _tiles(name, merge, merger, ring, total, repeats)
    return found


def _nearest(
    name: str,
    merge: Callable[[], None],
    merged_s: Sequence[float],
    sends: Sequence[tuple[Any, ...]],
    settings: dict[str, Any],
    device: str,
    repeats: int,
) -> list[Case]:
    """The same merge and sends rounded to nearest, the merge as the stochastic one's peer."""
    usual = _rounding[0]
    _rounding[0] = NEAREST
    try:
        nearest_s = _times(merge, device, repeats)
        cases = [
            _send(f"{title}-nearest", *what, device=device, repeats=repeats)
            for title, *what in sends
        ]
    finally:
        _rounding[0] = usual
    peer = "the same rounded to nearest"
    title = f"merge/{name}/stochastic"
    return [_case(title, "whole_s", merged_s, settings, peer, nearest_s), *cases]


# ------------------------------------------------------------ the model


def _model(shape: Shape, device: str) -> Model:
    distinct = [_layer(shape, device) for _ in range(min(DISTINCT, shape.layers))]
    specs, sources = list[TensorSpec](), list[tuple[Source, Delta | None]]()
    groups: dict[str, list[Fp8Group]] = {kind: [] for kind in KINDS}
    for layer in range(shape.layers):
        for names in _fused(shape):
            indices = []
            for name in names:
                source, delta = distinct[layer % len(distinct)][name]
                indices.append(len(specs))
                sources.append((source, delta))
                whole = f"model.layers.{layer}.{name}.weight"
                specs.append(TensorSpec(name=whole, dtype="bfloat16", shape=source.shape))
            for kind in KINDS if names != ("norm",) else ():
                groups[kind].append(Fp8Group(kind=kind, tensors=tuple(indices)))  # type: ignore[arg-type]
    weights = {kind: Fp8Weights(groups=tuple(found)) for kind, found in groups.items()}
    return Model(manifest=Manifest(tensors=tuple(specs)), weights=weights, sources=sources)


def _fused(shape: Shape) -> list[tuple[str, ...]]:
    """What vLLM keeps in one parameter, in its order."""
    mlp = [("gate", "up"), ("down",)]
    if shape.experts:
        each = range(shape.experts)
        mlp = [(f"{e}.gate", f"{e}.up") for e in each] + [(f"{e}.down",) for e in each]
    return [("q", "k", "v"), ("o",), ("norm",), *mlp]


def _layer(shape: Shape, device: str) -> dict[str, tuple[Source, Delta | None]]:
    """q, k and v lie in groups of rows in one weight, gate and up end to end, as Megatron's."""

    def weight(out: int, into: int) -> torch.Tensor:
        return torch.empty(out, into, dtype=torch.bfloat16, device=device).normal_(0.0, 0.02)

    def delta(out: int, into: int) -> Delta:
        a = torch.randn(RANK, into, device=device) * 0.02
        return Delta(lora_A=a, lora_B=torch.randn(out, RANK, device=device) * 0.02, expert=None)

    hidden, inner, found = shape.hidden, shape.inner, dict[str, tuple[Source, Delta | None]]()
    qkv, head = weight(shape.q_rows + 2 * shape.kv_rows, hidden), min(128, shape.kv_rows)
    groups = shape.kv_rows // head
    per_group = shape.q_rows // groups
    stride = (per_group + 2 * head) * hidden
    for name, first, rows in (("q", 0, per_group), ("k", per_group, head),
                              ("v", per_group + head, head)):  # fmt: skip
        source = Source(
            param=qkv, offset=first * hidden, groups=groups, rows=rows, columns=hidden,
            group_stride=stride, row_stride=hidden, shape=(groups * rows, hidden),
        )  # fmt: skip
        found[name] = (source, delta(groups * rows, hidden))
    found["o"] = (Source.whole(weight(hidden, shape.q_rows)), delta(hidden, shape.q_rows))
    found["norm"] = (Source.whole(weight(1, hidden)[0]), None)
    for prefix in [f"{e}." for e in range(shape.experts)] or [""]:
        both = weight(2 * inner, hidden)
        for n, name in enumerate(("gate", "up")):
            source = Source.whole(both, first=n * inner, rows=inner)
            found[prefix + name] = (source, delta(inner, hidden))
        found[f"{prefix}down"] = (Source.whole(weight(hidden, inner)), delta(hidden, inner))
    return found


def _order(manifest: Manifest, units: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Chunks of at most CHUNK_BYTES unless a unit is larger, as servers ask for them."""
    chunks: list[list[tuple[int, ...]]] = [[]]
    room = CHUNK_BYTES
    for unit in units:
        size = sum(manifest.tensors[i].nbytes for i in unit)
        if chunks[-1] and size > room:
            chunks.append([])
            room = CHUNK_BYTES
        chunks[-1].append(unit)
        room -= size
    return [in_vectors(chunk, manifest) for chunk in chunks]


def _merger(model: Model, order: Sequence[Sequence[int]], device: str) -> Merger:
    planned = []
    for chunk in order:
        members, offset = list[Member](), 0
        for i in chunk:
            source, delta = model.sources[i]
            spec = model.manifest.tensors[i]
            members.append(
                Member(
                    source=source,
                    delta=delta,
                    offset=offset,
                    row_stride=source.columns,
                    corner=Corner(spec.name),
                )
            )
            offset += spec.nbytes
        planned.append((offset, members))
    return Merger(planned, scale=SCALE, rounding=lambda: _rounding[0], device=device)


# ------------------------------------------------------------ FP8


class _Filling:
    """The merge as `fp8_export` calls it."""

    longest_s = float("inf")

    def __init__(self, merger: Merger) -> None:
        self.fill = merger.fill


def _fp8(
    name: str, kind: str, model: Model, device: str, repeats: int
) -> tuple[list[Case], fp8_export.Fp8Export, Manifest, list[tuple[int, ...]]]:
    weights = model.weights[kind]
    sent = fp8_manifest(model.manifest, weights)
    places = fp8_places(model.manifest, weights)
    together = {g.tensors[0]: g.tensors for g in weights.groups}
    within = {i for group in weights.groups for i in group.tensors}
    units = []
    for i, found in enumerate(places):
        if i in together:
            members = together[i]
            units.append(tuple(places[m][at] for at in (1, 0) for m in members))
        elif i not in within:
            units.append(found)
    order = _order(sent, units)
    base = fp8_export.plan(model.manifest, sent, weights, order, None)
    merger = _merger(model, base.order, device)
    nbytes = [sum(sent.tensors[i].nbytes for i in chunk) for chunk in order]
    target = torch.device(device)
    common: dict[str, Any] = {
        "specs": model.manifest.tensors, "sent": sent, "order": order, "device": target
    }  # fmt: skip # a table
    plain = fp8_export.Fp8Export(_Filling(merger), base, **common)  # type: ignore[arg-type]
    export, ring = plain, [torch.empty(max(nbytes), dtype=torch.uint8, device=device)] * 2
    settings = {"bytes": sum(nbytes), "chunks": len(order), "rank": RANK}
    title, peer = f"merge/{name}/fp8_{kind}", "a merge into a scratch, then two passes"

    def run(of: fp8_export.Fp8Export) -> Callable[[], None]:
        return lambda: _fill(of, ring, nbytes.__getitem__, len(order))

    plain_s = _times(run(plain), device, repeats)
    if device != "cuda":
        return [_case(title, "whole_s", plain_s, settings)], plain, sent, order
    fused = fp8_fused.plan(
        merger, base.batches, nbytes, scale=SCALE, rounding=lambda: _rounding[0], device=target
    )
    export = fp8_export.Fp8Export(_Filling(merger), base, **common, fused=fused)  # type: ignore[arg-type]
    _check_same(plain, export, nbytes, device)
    fused_s = _times(run(export), device, repeats)
    host = _case(f"{title}/host", "host_s", _host(run(export), device, repeats), settings)
    return [_case(title, "whole_s", fused_s, settings, peer, plain_s), host], export, sent, order


def _check_same(
    plain: fp8_export.Fp8Export, fused: fp8_export.Fp8Export, nbytes: Sequence[int], device: str
) -> None:
    """What is measured is right: every byte of the first chunks."""
    for k in range(min(3, len(nbytes))):
        want_B, got_B = (torch.zeros(nbytes[k], dtype=torch.uint8, device=device) for _ in "ab")
        plain.fill(k, want_B)
        fused.fill(k, got_B)
        if not torch.equal(want_B, got_B):
            wrong = int((want_B != got_B).sum())
            raise AssertionError(f"chunk {k}: {wrong} of {nbytes[k]} bytes differ")


# ------------------------------------------------------------ a send


def _send(
    name: str,
    fill: Callable[[int, torch.Tensor], None],
    manifest: Manifest,
    order: Sequence[Sequence[int]],
    *,
    device: str,
    repeats: int,
) -> Case:
    usual = chunks.RING_CHUNKS
    chunks.RING_CHUNKS = in_flight = int(os.environ.get("SPLICE_BENCH_RING_CHUNKS", str(usual)))
    largest = max(sum(manifest.tensors[i].nbytes for i in chunk) for chunk in order)
    group = StandIn(largest, device)
    try:
        sender = ChunkSender(
            groups={"stand-in": group}, manifest=manifest, chunks=order, fill=fill, device=device
        )
        parts: list[dict[str, float]] = []

        def send() -> None:
            parts.append(sender.send(deadline_s=120.0).seconds)

        def wire() -> None:
            for k in range(len(order)):
                group.broadcast(sender._buffer(k), deadline_s=60.0)

        sent_s, wire_s = _times(send, device, repeats), _times(wire, device, repeats)
        sender.close()
    finally:
        chunks.RING_CHUNKS = usual
    spent = {f"{phase}_s": round(s, 5) for phase, s in parts[-1].items()}
    settings = {"bytes": manifest.nbytes, "chunks": len(order), "in_flight": in_flight}
    settings |= spent | {"wire_bytes_per_s": WIRE_BYTES_PER_S}
    return _case(name, "send_s", sent_s, settings, "the stand-in's wire alone", wire_s)


# ------------------------------------------------------------ variants


def _tiles(
    name: str,
    merge: Callable[[], None],
    merger: Merger,
    ring: Sequence[torch.Tensor],
    total: int,
    repeats: int,
) -> list[Case]:
    """The same merge with other tiles."""
    from trainer_node.adapters import merge_kernels
    from trainer_node.adapters.merge_kernels import Tile

    size = merger.chunk_nbytes(0)
    usual, found = merge_kernels.MERGE_TILE, []
    merger.fill(0, ring[0][:size])
    want_B = ring[0][:size].clone()
    try:
        for rows, columns, warps in TILES:
            merge_kernels.MERGE_TILE = Tile(rows=rows, columns=columns, num_warps=warps)
            merger.fill(0, ring[0][:size])
            same = torch.equal(ring[0][:size], want_B)
            samples = tuple(total / s for s in _times(merge, "cuda", repeats))
            found.append(
                Case(
                    name=f"merge/{name}/tile-{rows}x{columns}x{warps}",
                    metric="bytes_per_s",
                    unit="B/s",
                    samples=samples,
                    settings={"same_bits": same},
                )
            )
    finally:
        merge_kernels.MERGE_TILE = usual
    return found


# ------------------------------------------------------------ timing


def _ring(merger: Merger, device: str) -> list[torch.Tensor]:
    size = max(map(merger.chunk_nbytes, range(merger.num_chunks)))
    return [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]


def _fill(
    export: Any, ring: Sequence[torch.Tensor], nbytes: Callable[[int], int], count: int
) -> None:
    for k in range(count):
        export.fill(k, ring[k % 2][: nbytes(k)])


def _times(work: Callable[[], None], device: str, repeats: int) -> list[float]:
    """Seconds until the work is done, after one untimed round."""
    return [seconds(work, device) for _ in range(repeats + 1)][1:]


def _host(work: Callable[[], None], device: str, repeats: int) -> list[float]:
    """Seconds until the work is queued (on a CPU: done)."""
    import time

    found = []
    for _ in range(repeats):
        wait(device)
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    wait(device)
    return found


def _case(
    name: str,
    metric: str,
    samples: Sequence[float],
    settings: dict[str, Any],
    peer: str | None = None,
    peer_samples: Sequence[float] = (),
) -> Case:
    return Case(
        name=name,
        metric=metric,
        unit="s",
        samples=tuple(samples),
        peer=peer,
        peer_samples=tuple(peer_samples),
        settings=settings,
    )
