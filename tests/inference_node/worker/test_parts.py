"""Several workers take one layout: whole tensors come, each copies the parts that land on it. On
hand-made shards over real TCP groups, and on the placement that a real vLLM model records with two
tensor-parallel ranks.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from inference_node.server import all_workers
from inference_node.shared.watchdog import Watchdog
from inference_node.worker import chunk_plan, direct, placement
from inference_node.worker.placement import PlacementPlan
from inference_node.worker.shadow import Shadow
from orchestrator.errors import TransferError, VerificationError
from orchestrator.protocol.messages import Manifest, TensorSpec
from tests.inference_node.stand_ins import CudaWire, Wire, placed_together
from tests.inference_node.two_workers import (
    CPU,
    EVERYTHING,
    SHAPES,
    H,
    Replica,
    Worker,
    make_worker,
)
from weight_transfer.chunks import ChunkSender
from weight_transfer.groups import join_tcp, open_listener


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
    assert direct.ring_slots([50, 60, 70, 80], usual=100) == [0, 1, 0, 1]
    assert direct.ring_slots([300, 50, 60, 300, 300, 10], usual=100) == [0, 1, 0, 0, 0, 1]


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
