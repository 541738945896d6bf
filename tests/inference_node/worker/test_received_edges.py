"""Two trainer ranks send straight to two workers over TCP: each worker receives only what it keeps,
in place, through a reload and in shadow memory."""

from __future__ import annotations

import pytest
import torch

from inference_node.server import all_workers
from inference_node.shared.watchdog import Watchdog
from inference_node.worker.shadow import Shadow
from orchestrator.errors import TransferError
from tests.inference_node.two_workers import CPU
from tests.inference_node.worker.planned_edges import (
    WORKERS,
    Ends,
    Planned,
    added_up,
    of_wrap,
    receive_all,
    send_all,
)
from weight_transfer import edges


def test_each_worker_receives_what_it_keeps_and_digests_add_up() -> None:
    planned = Planned()
    replica = planned.replica
    assert len(planned.plan) > 3
    for steps in planned.steps:
        pieces = [one.piece for step in steps for one in step.placed]
        received = sum(4 * piece.box.numel for piece in pieces)
        assert received < 0.8 * replica.manifest.nbytes, "a worker receives everything"
    written: list[list[int]] = [[], []]
    with Ends() as ends:
        sends = send_all(planned, ends)
        receives = receive_all(
            planned,
            ends,
            loads=[lambda t: pytest.fail("nothing is reloaded")] * WORKERS,
            written=written,
        )
        for receive in receives:
            receive.result(40.0)
        sent = added_up(sends)
    replica.check_live()
    assert replica.combine() == sent == replica.wanted()
    assert [sum(w) for w in written] == [len(update.keeps()) for update in planned.updates]


def test_tensors_to_reload_come_whole_from_several_ranks() -> None:
    planned = Planned(packed_layers=("qkv", "o"))
    replica = planned.replica
    names = {replica.manifest.tensors[i].name for i in replica.reload}
    assert names == {"q", "k", "v", "o"}
    loaded: list[dict[str, torch.Tensor]] = [{}, {}]
    with Ends() as ends:
        sends = send_all(planned, ends)
        receives = receive_all(planned, ends, loads=[each.update for each in loaded])
        for receive in receives:
            receive.result(40.0)
        assert added_up(sends) == replica.wanted()
    for found in loaded:
        assert set(found) == names
        assert all(torch.equal(found[n], replica.weights[n]) for n in names)


def test_shadow_memory_holds_a_workers_own_pieces() -> None:
    planned = Planned(packed_layers=("qkv",))
    replica = planned.replica
    pieces = all_workers.Arrivals.of_pieces(
        replica.manifest, [edges.to_text(table) for table in planned.tables]
    )
    assert pieces.is_everything
    watchdog = Watchdog(None)
    loaded: list[dict[str, torch.Tensor]] = [{}, {}]
    try:
        with Ends() as ends:
            sends = send_all(planned, ends)
            shadows = []
            for w in range(WORKERS):
                shadow = Shadow(
                    manifest=replica.manifest,
                    chunks=replica.chunks,
                    steps=planned.steps[w],
                    device=CPU,
                    stream=None,
                )
                shadow.start(group=ends.workers[w], watchdog=watchdog, update_id="u", deadline_s=20)
                shadows.append(shadow)
            sent = added_up(sends)
            arrived = []
            for shadow in shadows:
                while (found := shadow.poll()) is None:
                    pass
                arrived.append(found.digests)
            total_N, differing = pieces.add_up(arrived)
            assert not differing and of_wrap(total_N) == sent == replica.wanted()
            arrived[1][0] ^= 1
            total_N, differing = pieces.add_up(arrived)
            assert differing or of_wrap(total_N) != sent, "a wrong piece is not seen"
            for w, shadow in enumerate(shadows):
                replica.receivers[w].apply(
                    shadow.buffers, load=loaded[w].update, on_written=lambda n: None
                )
                assert shadow.close()
    finally:
        watchdog.close()
    assert all(set(found) == {"q", "k", "v"} for found in loaded)
    for worker in replica.workers:
        wanted = worker.expected(replica.weights)
        assert all(torch.equal(worker.live[k], t) for k, t in wanted.items() if k[0] != "qkv")


@pytest.mark.parametrize("dies_at", [0, 2])
def test_a_rank_that_dies_ends_it_on_all_ends(dies_at: int) -> None:
    """Until a worker's first step is whole, its live tensors are as they were."""
    planned = Planned()
    replica = planned.replica
    written: list[list[int]] = [[], []]
    with Ends() as ends:
        sends = send_all(planned, ends, dies_at=dies_at)
        receives = receive_all(planned, ends, written=written)
        with pytest.raises(TransferError, match="the rank died"):
            sends[1].result(10.0)
        for receive in receives:
            with pytest.raises(TransferError):
                receive.result(10.0)
        for group in ends.workers:  # what the workers' engines do after a failure
            group.close()
        with pytest.raises(TransferError):
            sends[0].result(10.0)
    if dies_at == 0:
        assert written == [[], []]
        for worker in replica.workers:
            assert all(bool((t == 7).all()) for t in worker.live.values())
