"""A replica of two workers with every kind of part, without vLLM: plans, live tensors, weights."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from inference_node.server import all_workers
from inference_node.shared.reports import WorkerDigests
from inference_node.worker import chunk_plan, placement
from inference_node.worker.direct import DirectReceiver
from inference_node.worker.placement import ParamFormat, PlacementPlan, Region
from orchestrator.protocol.messages import Manifest, TensorSpec
from tests.inference_node.stand_ins import placed_together
from weight_transfer.digest import tensor_digest

# vocabulary, hidden, rows of q, rows of k and of v, intermediate
V, H, Q, KV, I = 10, 8, 12, 4, 6  # noqa: E741
CPU = torch.device("cpu")
EVERYTHING = slice(None)
SHAPES = {
    "embed": (V, H),
    "norm": (H,),
    "q": (Q, H),
    "k": (KV, H),
    "v": (KV, H),
    "o": (H, Q),
    "gate": (I, H),
    "up": (I, H),
    "down": (H, I),
    "experts.0.up": (I, H),
    "experts.1.up": (I, H),
    "last_norm": (H,),
    "router": (3, 5),
}


@dataclass
class Worker:
    """A worker's plan, live tensors, and what must stand in them in the end, given the weights."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=lambda: SHAPES)
    device: torch.device = CPU
    live: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    formats: dict[tuple[str, str], ParamFormat] = field(default_factory=dict)
    regions: list[Region] = field(default_factory=list)
    shards: list[tuple[str, tuple[slice, ...], tuple[str, str], tuple[slice, ...]]] = field(
        default_factory=list
    )

    def param(
        self, key: str, *shape: int, dtype: torch.dtype = torch.float32, alias_of: str | None = None
    ) -> None:
        module = (key, "weight")
        stride = torch.empty(shape, device="meta").stride()
        self.formats[module] = ParamFormat(
            module=key,
            param="weight",
            shape=shape,
            stride=stride,
            dtype=str(dtype)[6:],
            numel=torch.Size(shape).numel(),
            alias_of=(alias_of, "weight") if alias_of else None,
        )
        if alias_of is None:
            memory = torch.full(
                (torch.Size(shape).numel() + 3,), 7.0, dtype=dtype, device=self.device
            )  # a live tensor need not begin its storage
            self.live[module] = memory[3:].view(shape)

    def shard(
        self,
        name: str,
        taken: tuple[slice, ...],
        key: str,
        at: tuple[slice, ...] | None = None,
        *,
        turned: bool = False,
    ) -> None:
        """`taken` of the HF tensor stands at `at` of the parameter."""
        target = torch.empty(self.formats[(key, "weight")].shape, device="meta")
        target = (target.t() if turned else target)[at or (EVERYTHING,)]
        source = torch.empty(self.shapes[name], device="meta")[taken]
        assert source.shape == target.shape
        self.regions.append(
            Region(
                name=name,
                first_index=source.storage_offset(),
                index_strides=source.stride(),
                size=tuple(source.shape),
                module=key,
                param="weight",
                offset=target.storage_offset(),
                strides=target.stride(),
            )
        )
        self.shards.append((name, taken, (key, "weight"), at or (EVERYTHING,)))

    def plan(self, manifest: Manifest) -> PlacementPlan:
        dtypes = {s.name: s.dtype for s in manifest.tensors}
        return PlacementPlan(
            regions=tuple(self.regions), formats=self.formats, covered={}, sent_dtypes=dict(dtypes)
        )

    def expected(
        self, weights: dict[str, torch.Tensor], turned: str = "down"
    ) -> dict[tuple[str, str], torch.Tensor]:
        wanted = {key: torch.full_like(t, 7.0, device=CPU) for key, t in self.live.items()}
        for name, taken, key, at in self.shards:
            tensor = wanted[self.formats[key].alias_of or key]
            (tensor.t() if name == turned else tensor)[at] = weights[name][taken]
        return wanted


def half(n: int, rank: int) -> slice:
    return slice(rank * n // 2, (rank + 1) * n // 2)


def make_worker(rank: int, device: torch.device = CPU) -> Worker:
    """Tensor parallelism with every kind of shard; experts and the last norm lie on one worker
    only, as with expert and pipeline parallelism.
    """
    w = Worker(device=device)
    w.param("embed", 6, H)  # 12 rows on two workers, 10 of them real
    w.param("head", 6, H, alias_of="embed")
    count = 6 if rank == 0 else 4
    w.shard("embed", (slice(6 * rank, 6 * rank + count),), "embed", (slice(0, count),))
    w.param("norm", H)
    w.shard("norm", (EVERYTHING,), "norm")
    w.param("qkv", Q // 2 + 2 * KV, H)  # fewer key heads than workers: k and v are replicated
    w.shard("q", (half(Q, rank),), "qkv", (slice(0, Q // 2),))
    w.shard("k", (EVERYTHING,), "qkv", (slice(Q // 2, Q // 2 + KV),))
    w.shard("v", (EVERYTHING,), "qkv", (slice(Q // 2 + KV, Q // 2 + 2 * KV),))
    w.param("o", H, Q // 2)
    w.shard("o", (EVERYTHING, half(Q, rank)), "o")
    w.param("gate_up", I, H)
    w.shard("gate", (half(I, rank),), "gate_up", (slice(0, I // 2),))
    w.shard("up", (half(I, rank),), "gate_up", (slice(I // 2, I),))
    w.param("down", I // 2, H)  # kept transposed
    w.shard("down", (EVERYTHING, half(I, rank)), "down", turned=True)
    w.param("w13", 1, I, H)
    w.shard(f"experts.{rank}.up", (EVERYTHING,), "w13", (0,))  # type: ignore[arg-type]
    w.param("router", 3, 5, dtype=torch.bfloat16)  # 30 bytes: what follows must be aligned anyway
    w.shard("router", (EVERYTHING,), "router")
    if rank == 1:
        w.param("last_norm", H)
        w.shard("last_norm", (EVERYTHING,), "last_norm")
    return w


class Replica:
    """Two workers, what they planned together, and weights to send."""

    def __init__(
        self, seed: int = 0, packed_layers: tuple[str, ...] = (), device: torch.device = CPU
    ) -> None:
        torch.manual_seed(seed)
        self.device = device
        self.weights = {
            n: torch.randn(shape).to(torch.bfloat16 if n == "router" else torch.float32)
            for n, shape in SHAPES.items()
        }
        specs = [
            TensorSpec(name=n, dtype=str(t.dtype)[6:], shape=tuple(t.shape))
            for n, t in self.weights.items()
        ]
        self.manifest = Manifest(tensors=tuple(specs))
        self.workers = [make_worker(rank, device) for rank in (0, 1)]
        self.plans = [w.plan(self.manifest) for w in self.workers]
        lives = [w.live | {(k, "weight"): "packed" for k in packed_layers} for w in self.workers]
        self.reload = placed_together(self.manifest, self.plans, lives)
        self.chunks = chunk_plan.plan_chunks(self.manifest, reload=self.reload)
        self.receivers = [self.receiver(p, live) for p, live in zip(self.plans, lives, strict=True)]
        loaded = [placement.local_findings(p, self.manifest).loaded for p in self.plans]
        self.arriving = [i for c in self.chunks if c.kind != "reload" for i in c.tensors]
        self.arrivals = all_workers.Arrivals(self.manifest, self.arriving, loaded)

    def receiver(self, plan: PlacementPlan, live: chunk_plan.Live) -> DirectReceiver:
        return DirectReceiver(
            chunks=self.chunks,
            manifest=self.manifest,
            plan=plan,
            live=live,
            device=self.device,
            digests_on_arrival=True,
        )

    def pieces(self) -> list[torch.Tensor]:
        return [torch.cat([self.bytes_of(i) for i in c.tensors]) for c in self.chunks]

    def bytes_of(self, index: int) -> torch.Tensor:
        return self.weights[self.manifest.tensors[index].name].reshape(-1).view(torch.uint8)

    def wanted(self) -> list[int]:
        return [int(tensor_digest(t)) for t in self.weights.values()]

    def combine(self, *, came: list[list[int]] | None = None) -> list[int]:
        came = [list(r.digests() or ()) for r in self.receivers] if came is None else came
        workers = [WorkerDigests(parts={}, arrived=c) for c in came]
        return list(all_workers.combine(self.manifest, workers, self.arrivals)[0])

    def check_live(self) -> None:
        for worker in self.workers:
            for key, tensor in worker.expected(self.weights).items():
                assert torch.equal(worker.live[key].cpu(), tensor), key
