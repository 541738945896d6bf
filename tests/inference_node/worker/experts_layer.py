"""The plan and the live tensors of a layer of experts, of a few rows, and its layout."""

from __future__ import annotations

import torch

from inference_node.server import all_workers
from inference_node.worker import chunk_plan
from inference_node.worker.placement import ParamFormat, PlacementPlan, Region, whole_layers
from orchestrator.protocol.messages import Manifest, TensorSpec, WireLayout
from weight_transfer.digest import row_major_strides

H, I, E = 4, 6, 3  # hidden, intermediate, experts  # noqa: E741


def spec(name, *shape, dtype="float32"):
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def whole(name, shape, module, param, offset, strides=None):
    dense = row_major_strides(shape)
    return Region(
        name=name,
        first_index=0,
        index_strides=dense,
        size=shape,
        module=module,
        param=param,
        offset=offset,
        strides=strides or dense,
    )


def fmt(module, param, *shape, dtype="float32", alias_of=None):
    numel = torch.Size(shape).numel()
    return ParamFormat(
        module=module,
        param=param,
        shape=shape,
        stride=row_major_strides(shape),
        dtype=dtype,
        numel=numel,
        alias_of=alias_of,
    )


def moe_layer():
    """Three experts whose gate and up follow each other in w13, their downs in w2, and a
    norm; sent expert by expert.
    """
    specs, regions = [], []
    for e in range(E):
        for k, part in enumerate(("gate", "up")):
            specs.append(spec(f"{e}.{part}", I, H))
            regions.append(whole(f"{e}.{part}", (I, H), "experts", "w13", (2 * e + k) * I * H))
        specs.append(spec(f"{e}.down", H, I))
        regions.append(whole(f"{e}.down", (H, I), "experts", "w2", e * H * I))
    specs.append(spec("norm", H))
    regions.append(whole("norm", (H,), "norm", "weight", 0))
    formats = [
        fmt("experts", "w13", E, 2 * I, H),
        fmt("experts", "w2", E, H, I),
        fmt("norm", "weight", H),
    ]
    plan = PlacementPlan(
        regions=tuple(regions),
        formats={(f.module, f.param): f for f in formats},
        covered={},
        sent_dtypes={s.name: s.dtype for s in specs},
    )
    live = {key: torch.zeros(f.shape) for key, f in plan.formats.items()}
    return Manifest(tensors=tuple(specs)), plan, live


def plan_layout(plan, manifest, live):
    """What a replica of one worker comes to, step by step as `Control` takes them."""
    stuck = chunk_plan.obstacles(plan, manifest, live)
    reload = whole_layers(plan, manifest, sorted(stuck))
    reasons = {why: [i for i, w in stuck.items() if w == why] for why in stuck.values()}
    why = all_workers.explain(manifest, reasons, reload, within=range(len(manifest.tensors)))
    chunks = chunk_plan.plan_chunks(
        manifest, reload=reload, runs=chunk_plan.whole_runs(plan, manifest, reload)
    )
    return WireLayout(chunks=chunks, why_not_live=why)


def names(manifest, chunk):
    return [manifest.tensors[i].name for i in chunk.tensors]
