"""Changed elements on top of live tensors: in place, staged, widened, transposed and reloaded, from
one trainer rank or several, as if everything had come."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from inference_node.shared.watchdog import Watchdog
from inference_node.worker import chunk_plan
from inference_node.worker.direct import DirectReceiver
from inference_node.worker.shadow import Arrived, Shadow
from orchestrator.errors import TransferError
from orchestrator.protocol.messages import Manifest
from tests.inference_node.two_workers import CPU, Replica
from tests.inference_node.worker.experts_layer import moe_layer, plan_layout, spec
from tests.inference_node.worker.planned_edges import (
    SENDERS,
    WORKERS,
    Ends,
    Planned,
    receive_all,
    send_all,
)
from weight_transfer import changes, edges
from weight_transfer.digest import tensor_digest


@pytest.fixture
def moe(monkeypatch):
    """See `moe_layer`; its runs of this size are large."""
    monkeypatch.setattr(chunk_plan, "SMALL_BYTES", 64)
    return moe_layer()


def moved(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Some elements of every second tensor have other bits; one is -0.0 before and after."""
    dice = torch.Generator().manual_seed(seed)
    found = {}
    for n, (name, tensor) in enumerate(weights.items()):
        new = tensor.clone()
        if n % 2 == 0:
            where = torch.rand(tensor.shape, generator=dice) < 0.1
            where.view(-1)[0] = True
            new = torch.where(where, tensor * 1.01, tensor)
        new.view(-1)[-1] = -0.0
        found[name] = new
    return found


def with_bodies(messages: list[changes.Message], new_B: torch.Tensor) -> list[changes.Message]:
    """As they arrive."""
    return [
        m
        if m.body_B is not None
        else replace(m, body_B=new_B[m.delivery.begin : m.delivery.end].clone())
        for m in messages
    ]


def encoded(
    manifest: Manifest, chunk, old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]
) -> list[changes.Message]:
    """A chunk's only message; the trainer reads a reloaded tensor's old bytes without -0.0."""
    names = [manifest.tensors[i].name for i in chunk.tensors]
    olds = [unsigned(old[n]) if chunk.kind == "reload" else old[n] for n in names]
    old_B, new_B = (
        torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors])
        for tensors in (olds, [new[n] for n in names])
    )
    messages, _ = changes.encode_buffer(old_B, new_B, changes.whole(new_B.numel()), word_bytes=2)
    return with_bodies(messages, new_B)


def unsigned(tensor: torch.Tensor) -> torch.Tensor:
    fresh = tensor.clone()
    changes.drop_zero_signs(fresh.view(-1).view(torch.uint8), fresh.element_size())
    return fresh


def encoded_steps(
    planned: Planned, ends: Ends, old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]
) -> list[list[list[changes.Message]]]:
    """The messages of each rank's steps."""
    replica, buffers = planned.replica, []
    reloaded = {replica.manifest.tensors[i].name for i in replica.reload}
    assert reloaded == {"o"}
    for rank in range(SENDERS):
        steps = edges.steps_of_rank(planned.plan, rank, planned.specs)
        sender, mine = planned.sender(rank, ends.senders[rank]), []
        for k, step in enumerate(steps):
            pair = []
            for weights in (old | {n: unsigned(old[n]) for n in reloaded}, new):
                replica.weights = weights
                buffer_B = torch.zeros(step.nbytes, dtype=torch.uint8)
                sender._fill(k, buffer_B)
                pair.append(buffer_B)
            messages, _ = changes.encode_buffer(*pair, step.deliveries, word_bytes=2)
            mine.append(with_bodies(messages, pair[1]))
        buffers.append(mine)
    return buffers


def test_two_ranks_to_two_workers() -> None:
    planned = Planned(packed_layers=("o",))
    replica = planned.replica
    for tensor in replica.weights.values():
        tensor.view(-1)[-1] = -0.0
    with Ends() as ends:
        sends = send_all(planned, ends)
        for future in [*receive_all(planned, ends), *sends]:
            future.result(40.0)
        old = {n: t.clone() for n, t in replica.weights.items()}
        new = moved(old, seed=1)
        buffers = encoded_steps(planned, ends, old, new)
        codes = [m.is_code for mine in buffers for messages in mine for m in messages]
        assert any(codes)
        until = time.monotonic() + 20.0
        sending = [
            ends.pool.submit(
                changes.send_changes,
                {"r": ends.senders[rank]},
                buffers[rank],
                fill=lambda k: pytest.fail("every body is there"),
                device=CPU,
                deadline=until,
            )
            for rank in range(SENDERS)
        ]
        receiving = [
            ends.pool.submit(
                changes.receive_changes,
                ends.workers[w],
                replica.receivers[w].deliveries(),
                device=CPU,
                deadline=until,
            )
            for w in range(WORKERS)
        ]
        arrived = [r.result(30.0) for r in receiving]
        for future in sending:
            future.result(30.0)
    for w, receiver in enumerate(replica.receivers):
        loaded: dict[str, torch.Tensor] = {}
        receiver.apply_changes(
            arrived[w], {"o": old["o"].clone()}, load=loaded.update, on_written=lambda n: None
        )
        assert set(loaded) == {"o"} and same_bits(loaded["o"], new["o"])
        wanted = replica.workers[w].expected(new)
        live = replica.workers[w].live
        assert all(same_bits(live[k], t) for k, t in wanted.items() if k[0] != "o")
    digests = [list(receiver.digests() or ()) for receiver in replica.receivers]
    total_N, differing = replica.arrivals.add_up(digests)
    assert not differing
    for index, digest in replica.arrivals.by_index(total_N).items():
        assert digest == int(tensor_digest(new[replica.manifest.tensors[index].name]))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    pair = (t.contiguous().view(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(*pair)


def test_one_broadcast_to_workers_with_parts() -> None:
    """A worker's buffer has old bytes only where it keeps something."""
    replica = Replica()
    old = replica.weights
    for w, worker in enumerate(replica.workers):
        for key, tensor in worker.expected(old).items():
            worker.live[key].copy_(tensor)
        replica.weights = new = moved(old, seed=2)
        arrived = [encoded(replica.manifest, c, old, new) for c in replica.chunks]
        assert any(m.is_code for messages in arrived for m in messages)
        replica.receivers[w].apply_changes(
            arrived,
            {},
            load=lambda t: pytest.fail("nothing is reloaded"),
            on_written=lambda n: None,
        )
    replica.check_live()
    assert replica.combine() == replica.wanted()


@pytest.mark.parametrize("is_widened", [False, True])
def test_in_place_and_widened(moe, is_widened: bool) -> None:
    """Experts arrive in place; the norm is staged, and may be kept in a wider dtype."""
    manifest, plan, live = moe
    if is_widened:
        tensors = [*manifest.tensors[:-1], spec("norm", 4, dtype="bfloat16")]
        manifest = Manifest(tensors=tuple(tensors))
        plan.sent_dtypes["norm"] = "bfloat16"
    layout = plan_layout(plan, manifest, live)
    assert [c.kind for c in layout.chunks] == ["staged", "live", "live"]
    old = {s.name: torch.randn(s.shape).to(getattr(torch, s.dtype)) for s in manifest.tensors}
    new = moved(old, seed=3)
    receiver = DirectReceiver(
        chunks=layout.chunks, manifest=manifest, plan=plan, live=live, device=CPU
    )
    written: list[int] = []
    for region in plan.regions:
        region.view_in(live[region.module, region.param]).copy_(old[region.name])
    receiver.apply_changes(
        [encoded(manifest, c, old, new) for c in layout.chunks],
        {},
        load=lambda t: pytest.fail("nothing is reloaded"),
        on_written=written.append,
    )
    assert written == [len(manifest.tensors)]
    for region in plan.regions:
        there = region.view_in(live[region.module, region.param])
        assert same_bits(there.to(new[region.name].dtype), new[region.name]), region.name


def test_a_tensor_that_cannot_be_read_is_named(moe) -> None:
    manifest, plan, live = moe
    live["experts", "w2"] = "packed"
    layout = plan_layout(plan, manifest, live)
    old = {s.name: torch.randn(s.shape) for s in manifest.tensors}
    new = moved(old, seed=4)
    receiver = DirectReceiver(
        chunks=layout.chunks, manifest=manifest, plan=plan, live=live, device=CPU
    )
    arrived = [encoded(manifest, c, old, new) for c in layout.chunks]
    with pytest.raises(TransferError, match=r"0\.gate cannot be read back.*brings it whole"):
        receiver.apply_changes(arrived, {}, load=lambda t: None, on_written=lambda n: None)


def arrival(shadow: Shadow) -> Arrived:
    """What has come, once it has."""
    until = time.monotonic() + 30.0
    while (found := shadow.poll()) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("dies", [False, True])
def test_shadow_memory_keeps_messages_as_they_came(dies: bool) -> None:
    """Nothing live changes before all of them are there, and none is used if a rank dies."""
    planned = Planned(packed_layers=("o",))
    replica = planned.replica
    old = {n: t.clone() for n, t in replica.weights.items()}
    new = moved(old, seed=5)
    for worker in replica.workers:
        for key, tensor in worker.expected(old).items():
            worker.live[key].copy_(tensor)
    before = [{k: t.clone() for k, t in w.live.items()} for w in replica.workers]
    watchdog, shadows = Watchdog(None), []
    try:
        with Ends() as ends:
            buffers = encoded_steps(planned, ends, old, new)
            for w, receiver in enumerate(replica.receivers):
                shadow = Shadow(
                    manifest=replica.manifest,
                    chunks=replica.chunks,
                    device=CPU,
                    stream=None,
                    elements=receiver.deliveries(),
                )
                shadow.start(group=ends.workers[w], watchdog=watchdog, update_id="u", deadline_s=20)
                shadows.append(shadow)
            sending = [
                ends.pool.submit(
                    changes.send_changes,
                    {"r": ends.senders[rank]},
                    buffers[rank] if not (dies and rank) else buffers[rank][:1],
                    fill=lambda k: pytest.fail("every body is there"),
                    device=CPU,
                    deadline=time.monotonic() + 20.0,
                )
                for rank in range(SENDERS)
            ]
            if dies:
                with pytest.raises(TransferError):
                    sending[1].result(30.0)
                ends.senders[1].close()
            for w, shadow in enumerate(shadows):
                if dies:
                    with pytest.raises(TransferError):
                        arrival(shadow)
                    assert shadow.changes is None
                else:
                    assert arrival(shadow).digests == [] and shadow.is_whole
                live = replica.workers[w].live
                assert all(same_bits(live[k], t) for k, t in before[w].items())
            for w, shadow in enumerate(() if dies else shadows):
                assert shadow.changes is not None
                replica.receivers[w].apply_changes(
                    shadow.changes,
                    {"o": old["o"].clone()},
                    load=lambda t: None,
                    on_written=lambda n: None,
                )
                wanted, live = replica.workers[w].expected(new), replica.workers[w].live
                assert all(same_bits(live[k], t) for k, t in wanted.items() if k[0] != "o")
            assert all(shadow.close() for shadow in shadows)
    finally:
        watchdog.close()
