"""Several workers take one layout: whole tensors come, each copies the parts that land on it. On
hand-made shards over real TCP groups, and on the placement that a real vLLM model records with two
tensor-parallel ranks.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from inference_node.server import all_workers
from inference_node.shared.reports import WorkerDigests
from inference_node.shared.watchdog import Watchdog
from inference_node.worker import chunk_plan, direct, placement
from inference_node.worker.direct import DirectReceiver
from inference_node.worker.placement import ParamFormat, PlacementPlan, Region
from inference_node.worker.shadow import Shadow
from orchestrator.errors import TransferError, VerificationError
from orchestrator.protocol.messages import Manifest, TensorSpec
from tests.inference_node.stand_ins import CudaWire, Wire, placed_together
from weight_transfer.chunks import ChunkSender
from weight_transfer.digest import tensor_digest
from weight_transfer.groups import join_tcp, open_listener

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


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_plan, "MAX_CHUNK_BYTES", 700)


class Transfer:
    """A sender and two receivers on threads, over one TCP group; the sender dies before a chunk if
    told to.
    """

    def __init__(self, replica: Replica, *, dies_at: int = -1) -> None:
        self.replica, self.dies_at = replica, dies_at
        self.errors: list[BaseException] = []
        self.written: list[list[int]] = [[], []]
        self.loaded: list[dict[str, torch.Tensor]] = [{}, {}]
        self.sent: list[int] = []
        self.groups: list[Any] = []

    def run(self) -> Transfer:
        listener = open_listener(transport="tcp", host="127.0.0.1", world_size=3, device=CPU)
        jobs = [
            lambda r=r: self._receive(r, join_tcp(listener.rendezvous, rank=1 + r, deadline_s=20.0))
            for r in (0, 1)
        ]
        threads = [
            threading.Thread(target=self._noted, args=(job,))
            for job in [*jobs, lambda: self._send(listener.join(20.0))]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40.0)
            assert not thread.is_alive()
        for group in self.groups:
            group.close()
        return self

    def _noted(self, job) -> None:  # type: ignore[no-untyped-def]
        try:
            job()
        except (TransferError, RuntimeError) as error:
            self.errors.append(error)

    def _receive(self, rank: int, group) -> None:  # type: ignore[no-untyped-def]
        self.groups.append(group)  # left when all are done, as workers do
        self.replica.receivers[rank].receive(
            group=group,
            deadline_s=20.0,
            load=lambda t: self.loaded[rank].update(t),
            on_written=self.written[rank].append,
        )

    def _send(self, group) -> None:  # type: ignore[no-untyped-def]
        replica, order = self.replica, [c.tensors for c in self.replica.chunks]

        def fill(k: int, out_B: torch.Tensor) -> None:
            if k == self.dies_at:
                raise TransferError("the trainer died")
            out_B.copy_(torch.cat([replica.bytes_of(i) for i in order[k]]))

        sender = ChunkSender(
            groups={"r": group}, manifest=replica.manifest, chunks=order, fill=fill, device="cpu"
        )
        self.groups.append(sender)
        self.sent = sender.send(deadline_s=20.0).digests_N.tolist()


def test_every_part_lands_in_its_place_on_both_workers(small_chunks: None) -> None:
    for seed in (0, 1):
        replica = Replica(seed)
        assert (
            replica.reload == []
            and {c.kind for c in replica.chunks} == {"staged"}
            and len(replica.chunks) > 3
        )
        transfer = Transfer(replica).run()
        assert transfer.errors == []
        replica.check_live()
        assert replica.combine() == transfer.sent == replica.wanted()
        assert [sum(w) for w in transfer.written] == [len(SHAPES)] * 2


def test_what_one_worker_cannot_place_is_reloaded_on_both_and_takes_its_layers_with_it(
    small_chunks: None,
) -> None:
    replica = Replica(packed_layers=("qkv",))
    names = [replica.manifest.tensors[i].name for i in replica.reload]
    assert names == ["q", "k", "v"]
    transfer = Transfer(replica).run()
    assert transfer.errors == [] and all(set(found) == {"q", "k", "v"} for found in transfer.loaded)
    assert all(
        torch.equal(found[n], replica.weights[n]) for found in transfer.loaded for n in names
    )
    for worker in replica.workers:
        wanted = worker.expected(replica.weights)
        assert all(torch.equal(worker.live[k], t) for k, t in wanted.items() if k[0] != "qkv")
        assert bool((worker.live["qkv", "weight"] == 7).all())


def test_layers_chained_over_workers_are_reloaded_to_the_last(small_chunks: None) -> None:
    """On one worker a shares a layer with b, on the other b with c; d is single."""
    shapes = dict.fromkeys("abcd", (4,))
    specs = tuple(TensorSpec(name=n, dtype="float32", shape=shape) for n, shape in shapes.items())
    plans, lives = [], []
    for fused in ("ab", "bc"):
        worker = Worker(shapes=shapes)
        for key in (fused, *(n for n in shapes if n not in fused)):
            worker.param(key, 4 * len(key))
            for n, name in enumerate(key):
                worker.shard(name, (EVERYTHING,), key, (slice(4 * n, 4 * n + 4),))
        plans.append(worker.plan(Manifest(tensors=specs)))
        lives.append(worker.live | ({("a", "weight"): "packed"} if fused == "bc" else {}))
    assert placed_together(Manifest(tensors=specs), plans, lives) == [0, 1, 2]


@pytest.mark.parametrize("dies_at", [0, 1, 3])
def test_a_trainer_that_dies_leaves_all_as_it_was_until_the_first_chunk_is_whole(
    small_chunks: None, dies_at: int
) -> None:
    replica = Replica()
    transfer = Transfer(replica, dies_at=dies_at).run()
    assert len(transfer.errors) == 3, "both workers and the trainer hear of it"
    early = [len(c.tensors) for c in replica.chunks[:dies_at]]
    for worker, written in zip(replica.workers, transfer.written, strict=True):
        assert written == early
        touched = {
            replica.manifest.tensors[i].name
            for c in replica.chunks[: len(written)]
            for i in c.tensors
        }
        reached = {key for name, _, key, _ in worker.shards if name in touched}
        assert all(bool((t == 7).all()) for key, t in worker.live.items() if key not in reached)
        assert dies_at < 3 or any(bool((t != 7).any()) for t in worker.live.values())


@pytest.mark.gpu1
def test_every_part_lands_in_its_place_on_cuda(small_chunks: None) -> None:
    """Over a wire with a separate stream: the ring is written again after the copies, and
    digested after them.
    """
    replica = Replica(device=torch.device("cuda", 0))
    for seed in (1, 2):
        replica.weights = Replica(seed).weights
        for receiver in replica.receivers:
            receiver.receive(
                group=CudaWire(replica.pieces()),
                deadline_s=20,
                load=lambda t: None,
                on_written=lambda n: None,
            )
        replica.check_live()
        assert replica.combine() == replica.wanted()


# ------------------------------------------------------------ mutants: each must be seen


def received(replica: Replica) -> Replica:
    for receiver in replica.receivers:
        receiver.receive(
            group=Wire(replica.pieces()),
            deadline_s=5,
            load=lambda t: None,
            on_written=lambda n: None,
        )
    return replica


def differing(replica: Replica) -> set[str]:
    pairs = zip(replica.manifest.tensors, replica.combine(), replica.wanted(), strict=True)
    return {spec.name for spec, found, wanted in pairs if found != wanted}


@pytest.mark.parametrize("name", ["embed", "q", "o", "down"])
def test_a_wrong_stride_or_place_in_the_copy_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = direct.Part

    def one_off(index: int):  # type: ignore[no-untyped-def]
        def part(**fields):  # type: ignore[no-untyped-def]
            if fields["target"].numel() == numel and not done:
                done.append(1)
                wrong = {"strides": tuple(s - 1 if s > 1 else s for s in fields["strides"])}
                fields |= wrong if index == 0 else {"offset_bytes": fields["offset_bytes"] + 4}
            return made(**fields)

        return part

    for index in (0, 1):
        done: list[int] = []
        numel = next(r.numel for r in make_worker(0).regions if r.name == name)
        monkeypatch.setattr(direct, "Part", one_off(index))
        replica = received(Replica())
        assert done and len(differing(replica)) == 1


def test_a_wrong_region_of_the_plan_is_found() -> None:
    """Where copy and digest believe the same wrong thing."""
    for name, wrong in (
        ("o", {"first_index": 1}),
        ("down", {"strides": (1, 7)}),
        ("q", {"index_strides": (H - 1, 1)}),
    ):
        replica = Replica()
        regions = replica.plans[0].regions
        plan = PlacementPlan(
            regions=tuple(replace(r, **wrong) if r.name == name else r for r in regions),
            formats=replica.plans[0].formats,
            covered={},
            sent_dtypes=replica.plans[0].sent_dtypes,
        )
        replica.receivers[0] = replica.receiver(plan, replica.workers[0].live)
        assert name in differing(received(replica))


def test_replicas_must_agree_and_shards_must_cover() -> None:
    replica = received(Replica())
    assert differing(replica) == set()
    came = [r.digests() or [] for r in replica.receivers]
    order = [
        i
        for i in replica.arriving
        for r in replica.plans[1].regions
        if r.name == replica.manifest.tensors[i].name
    ]
    norm = sorted(order).index(1)  # its only part on worker 1, in the manifest's order
    came[1][norm] += 1
    with pytest.raises(VerificationError, match=r"norm \(its live copies disagree\)"):
        replica.combine(came=came)
    with pytest.raises(VerificationError, match="parts"):
        replica.combine(came=[came[0][:-1], came[1]])
    replica.plans = replica.plans[:1]
    loaded = [placement.local_findings(p, replica.manifest).loaded for p in replica.plans]
    replica.arrivals = all_workers.Arrivals(replica.manifest, replica.arriving, loaded)
    with pytest.raises(VerificationError, match=r"embed \(48 of 80 elements found\)"):
        replica.combine(came=came[:1])


# ------------------------------------------------------------ order, ring, shadow mode


def test_the_layout_keeps_families_together_aligned_and_within_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunk_plan, "MAX_CHUNK_BYTES", 130)
    layer = "model.layers.{}.mlp.experts.{}.{}.weight"
    names = [
        layer.format(n, e, part) for n in (0, 1) for e in (0, 1) for part in ("gate", "down")
    ] + ["model.layers.0.norm.weight", "w"]
    specs = [
        TensorSpec(
            name=n, dtype="bfloat16" if n == "w" else "float32", shape=(5,) if n == "w" else (8,)
        )
        for n in names
    ]
    chunks = chunk_plan.plan_chunks(Manifest(tensors=tuple(specs)), reload=[3])
    assert [[names[i].removeprefix("model.layers.") for i in c.tensors] for c in chunks] == [
        [
            "0.mlp.experts.0.gate.weight",
            "0.mlp.experts.1.gate.weight",
            "0.mlp.experts.0.down.weight",
            "1.mlp.experts.0.gate.weight",
        ],
        [
            "1.mlp.experts.1.gate.weight",
            "1.mlp.experts.0.down.weight",
            "1.mlp.experts.1.down.weight",
            "0.norm.weight",
        ],
        ["w"],
        ["0.mlp.experts.1.down.weight"],
    ]
    mixed = Manifest(tensors=(specs[-1], specs[0]))
    assert [c.tensors for c in chunk_plan.plan_chunks(mixed, reload=[])] == [
        (1, 0)
    ]  # 10 bytes first would not be aligned


def test_the_ring_holds_one_large_tensor_and_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_plan, "MAX_CHUNK_BYTES", 100)
    assert direct.ring_slots([50, 60, 70, 80]) == [0, 1, 0, 1]
    assert direct.ring_slots([300, 50, 60, 300, 300, 10]) == [0, 1, 0, 0, 0, 1]


class Queued(Wire):
    """Queues as NCCL does: the bytes come when they are waited for, and whatever is copied before
    that is rubbish. May die with them on their way.
    """

    def __init__(self, pieces: list[torch.Tensor], *, dies_at: int = -1) -> None:
        super().__init__(pieces, dies_at)
        self.buffers: list[torch.Tensor] = []
        self.log: list[str] = []

    def broadcast(self, buffer_B: torch.Tensor, *, deadline_s: float) -> int:  # type: ignore[override]
        buffer_B.fill_(99)
        self.buffers.append(buffer_B)
        self.log.append(f"ask {len(self.buffers) - 1}")
        return len(self.buffers) - 1

    def synchronize(self, event: int | None = None, *, deadline_s: float) -> None:  # type: ignore[override]
        assert event is not None
        while self.count <= event:
            self.log.append(f"wait {self.count}")
            super().broadcast(self.buffers[self.count], deadline_s=deadline_s)


def test_chunks_come_by_turns_into_two_buffers_one_ahead_of_the_copy(small_chunks: None) -> None:
    replica = Replica()
    wires = [Queued(replica.pieces()) for _ in replica.receivers]
    for receiver, wire in zip(replica.receivers, wires, strict=True):
        receiver.receive(
            group=wire,
            deadline_s=5,
            load=lambda t: None,
            on_written=lambda n: wire.log.append("copy"),  # noqa: B023 - called at once
        )
    replica.check_live()
    assert differing(replica) == set()
    last = len(replica.chunks) - 1
    steps = [f"ask {k + 1},wait {k},copy".split(",") for k in range(last)]
    assert wires[0].log == [
        "ask 0",
        *(word for step in steps for word in step),
        f"wait {last}",
        "copy",
    ]
    addresses = [b.data_ptr() for b in wires[0].buffers]
    assert len(set(addresses)) == 2 and addresses == [addresses[k % 2] for k in range(last + 1)]


def test_nothing_is_copied_from_a_buffer_whose_bytes_did_not_come(small_chunks: None) -> None:
    for dies_at in range(3):
        replica = Replica()
        written: list[int] = []
        with pytest.raises(TransferError):
            replica.receivers[0].receive(
                group=Queued(replica.pieces(), dies_at=dies_at),
                deadline_s=5,
                load=lambda t: None,
                on_written=written.append,
            )
        came = {
            replica.manifest.tensors[i].name for c in replica.chunks[:dies_at] for i in c.tensors
        }
        worker = replica.workers[0]
        worker.shards = [shard for shard in worker.shards if shard[0] in came]
        assert all(
            torch.equal(worker.live[key], tensor)
            for key, tensor in worker.expected(replica.weights).items()
        )
        assert written == [len(c.tensors) for c in replica.chunks[:dies_at]]


def test_shadow_mode_copies_parts_where_they_belong(small_chunks: None) -> None:
    replica = Replica()
    watchdog = Watchdog(None)
    try:
        for receiver in replica.receivers:
            beside = Shadow(
                manifest=replica.manifest, chunks=replica.chunks, device=CPU, stream=None
            )
            beside.start(
                group=Wire(replica.pieces()), watchdog=watchdog, update_id="u", deadline_s=5
            )  # type: ignore[arg-type]
            while (arrived := beside.poll()) is None:
                pass
            assert arrived.digests == replica.wanted()
            receiver.apply(beside.buffers, load=lambda t: None, on_written=lambda n: None)
            assert beside.close()
    finally:
        watchdog.close()
    replica.check_live()
    assert differing(replica) == set()
