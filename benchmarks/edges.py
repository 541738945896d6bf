"""The plan of edges for large clusters: seconds to make it, and the seconds that its busiest link
needs. Pure arithmetic; nothing is sent.

    SHAPE/TOPOLOGY   plan_s        the plan of `weight_transfer.edges`, on one core
                     predicted_s   the most bytes that one GPU sends or receives, over its link; the
                                   peer is rank 0 that sends everything to every replica

| case | layers, experts | from | to | link |
| --- | --- | --- | --- | --- |
| 30b-a3b/ep2-tp2 | 48, 128 | EP 2 | TP 2 | 368 GB/s, NVLink |
| 235b-a22b/ep8-rep8-tp8 | 94, 128 | EP 8 | 8 replicas of TP 8 | 50 GB/s, 400 Gbit/s |
| 1t-fp8/ep128-tp2-rep16-tp8 | 61, 384 | EP 128 x TP 2 | 16 replicas of TP 8 | 50 GB/s |
| 1t-fp8/ep128-tp2-ep128 | 61, 384 | EP 128 x TP 2 | one replica of EP 128 | 50 GB/s |
| 30b-a3b/1024-tp8 | 48, 128 | EP 128 x TP 8 | TP 8 | 50 GB/s |
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.harness import Case
from orchestrator.protocol.messages import Dtype, TensorSpec
from weight_transfer import edges
from weight_transfer.boxes import Box, matrix

NVLINK, ETHERNET = 368e9, 50e9
"""Bytes a second of a GPU's link: `benchmarks wire` at its best, and 400 Gbit/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A mixture of experts, as far as bytes go."""

    layers: int
    experts: int
    hidden: int
    intermediate: int
    queries: int
    keys: int
    vocabulary: int
    dtype: Dtype = "bfloat16"


SHAPES = {
    "30b-a3b": Shape(
        layers=48, experts=128, hidden=2048, intermediate=768, queries=4096, keys=512,
        vocabulary=151936,
    ),
    "235b-a22b": Shape(
        layers=94, experts=128, hidden=4096, intermediate=1536, queries=8192, keys=512,
        vocabulary=151936,
    ),
    "1t-fp8": Shape(
        layers=61, experts=384, hidden=7168, intermediate=2048, queries=12288, keys=512,
        vocabulary=163840, dtype="float8_e4m3fn",
    ),
    "tiny": Shape(
        layers=2, experts=8, hidden=64, intermediate=32, queries=64, keys=32, vocabulary=300
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A trainer's and a replica's sizes, and the link of each GPU."""

    name: str
    shape: str
    expert: int = 1
    tensor: int = 1
    data: int = 1
    workers: int = 1
    """Of each replica: tensor parallel ones, or expert parallel ones."""
    by_expert: bool = False
    replicas: int = 1
    link: float = ETHERNET


PLANS = (
    Plan(name="ep2-tp2", shape="30b-a3b", expert=2, workers=2, link=NVLINK),
    Plan(name="ep8-rep8-tp8", shape="235b-a22b", expert=8, workers=8, replicas=8),
    Plan(name="ep128-tp2-rep16-tp8", shape="1t-fp8", expert=128, tensor=2, workers=8, replicas=16),
    Plan(name="ep128-tp2-ep128", shape="1t-fp8", expert=128, tensor=2, workers=128, by_expert=True),
    Plan(name="1024-tp8", shape="30b-a3b", expert=128, tensor=8, workers=8),
)
SMALL = (Plan(name="ep2-tp2", shape="tiny", expert=2, workers=2),)


@dataclass(slots=True)
class _Model:
    """Tensors, who holds them, and what each worker of a replica keeps."""

    plan: Plan
    specs: list[TensorSpec] = field(default_factory=list)
    holders: list[list[tuple[tuple[int, ...], Box]]] = field(default_factory=list)
    keeps: list[dict[int, list[Box]]] = field(default_factory=list)

    def add(
        self, name: str, shape: tuple[int, ...], ranks: tuple[int, ...], *, axis: int, expert: int
    ) -> None:
        """A tensor that is on `ranks` (expert parallel ones whole, others cut over `tensor`), and
        that tensor parallel workers cut along an axis (2: not at all)."""
        plan, index, dtype = self.plan, len(self.specs), SHAPES[self.plan.shape].dtype
        self.specs.append(TensorSpec(name=name, dtype=dtype, shape=shape))
        cuts = _cuts(shape, plan.tensor, axis) if expert < 0 else _cuts(shape, 1, axis)
        self.holders.append(
            [
                (tuple(r for r in ranks if len(cuts) == 1 or r % plan.tensor == n), box)
                for n, box in enumerate(cuts)
            ]
        )
        if plan.by_expert:
            kept = _cuts(shape, 1, axis) * plan.workers
            mine = range(plan.workers)
            if expert >= 0:
                mine = range(expert * plan.workers // SHAPES[plan.shape].experts, plan.workers)[:1]
        else:
            kept = _cuts(shape, plan.workers, axis)
            kept, mine = (kept * plan.workers)[: plan.workers], range(plan.workers)
        for worker in mine:
            self.keeps[worker][index] = [kept[worker]]


def _cuts(shape: tuple[int, ...], parts: int, axis: int) -> list[Box]:
    height, width = matrix(shape)
    whole = [height, width]
    if axis > 1 or whole[axis] < parts:
        return [Box(0, height, 0, width)]
    ends = [whole[axis] * n // parts for n in range(parts + 1)]
    if axis == 0:
        return [Box(a, b - a, 0, width) for a, b in itertools.pairwise(ends)]
    return [Box(0, height, a, b - a) for a, b in itertools.pairwise(ends)]


def _model(plan: Plan) -> _Model:
    s, model = SHAPES[plan.shape], _Model(plan, keeps=[{} for _ in range(plan.workers)])
    everyone = tuple(range(plan.expert * plan.tensor * plan.data))
    for name in ("embed_tokens", "lm_head"):
        model.add(name, (s.vocabulary, s.hidden), everyone, axis=0, expert=-1)
    for layer in range(s.layers):
        for name, rows in (("q", s.queries), ("k", s.keys), ("v", s.keys)):
            model.add(f"{layer}.{name}", (rows, s.hidden), everyone, axis=0, expert=-1)
        model.add(f"{layer}.o", (s.hidden, s.queries), everyone, axis=1, expert=-1)
        model.add(f"{layer}.norm", (s.hidden,), everyone, axis=2, expert=-1)
        model.add(f"{layer}.router", (s.experts, s.hidden), everyone, axis=2, expert=-1)
        for e in range(s.experts):
            group = e * plan.expert // s.experts
            ranks = tuple(r for r in everyone if r // plan.tensor % plan.expert == group)
            for name, shape, axis in (
                ("gate", (s.intermediate, s.hidden), 0),
                ("up", (s.intermediate, s.hidden), 0),
                ("down", (s.hidden, s.intermediate), 1),
            ):
                model.add(f"{layer}.{e}.{name}", shape, ranks, axis=axis, expert=e)
    return model


def run(*, device: str, small: bool) -> Iterator[Case]:
    """Every plan; with `small` a tiny one."""
    del device
    for plan in SMALL if small else PLANS:
        model = _model(plan)
        ranks = plan.expert * plan.tensor * plan.data
        began = time.monotonic()
        made = edges.plan(
            model.specs, model.holders, model.keeps, order=range(len(model.specs)), ranks=ranks
        )
        plan_s = time.monotonic() - began
        sent, received = edges.bytes_of(made, model.specs, ranks=ranks, workers=plan.workers)
        whole = sum(spec.nbytes for spec in model.specs)
        busiest = max(max(sent) * plan.replicas, max(received))
        name = f"{plan.shape}/{plan.name}"
        settings = {
            "ranks": ranks,
            "replicas": plan.replicas,
            "workers_of_a_replica": plan.workers,
            "tensors": len(model.specs),
            "bytes": whole,
            "steps": len(made),
            "sent_by_the_busiest_rank": max(sent) * plan.replicas,
            "received_by_the_busiest_worker": max(received),
            "link_bytes_per_s": plan.link,
        }
        yield Case(name=name, metric="plan_s", unit="s", samples=(plan_s,), settings=settings)
        yield Case(
            name=name,
            metric="predicted_s",
            unit="s",
            samples=(busiest / plan.link,),
            peer="rank 0 sends everything to every replica",
            peer_samples=(whole * plan.replicas / plan.link,),
            settings=settings,
        )
