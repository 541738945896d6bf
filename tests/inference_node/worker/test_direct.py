"""Which bytes may arrive in place, in which order, and that they do: on hand-made plans and live
tensors of a few rows.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from inference_node.shared.watchdog import Watchdog
from inference_node.worker import chunk_plan
from inference_node.worker.direct import DirectReceiver
from inference_node.worker.placement import PlacementPlan, Region
from inference_node.worker.shadow import Shadow
from orchestrator.errors import TransferError
from orchestrator.protocol.messages import Manifest
from tests.inference_node.stand_ins import CudaWire, Wire
from tests.inference_node.worker.experts_layer import (
    E,
    H,
    I,
    moe_layer,
    names,
    plan_layout,
    whole,
)
from weight_transfer.digest import PreparedDigest, tensor_digest


@pytest.fixture
def moe(monkeypatch):
    """See `moe_layer`; its runs of this size are large."""
    monkeypatch.setattr(chunk_plan, "SMALL_BYTES", 64)
    return moe_layer()


def test_all_experts_of_a_layer_are_one_piece_in_the_order_of_memory(moe):
    manifest, plan, live = moe
    layout = plan_layout(plan, manifest, live)
    assert [c.kind for c in layout.chunks] == [
        "staged",
        "live",
        "live",
    ] and layout.why_not_live == {}
    assert names(manifest, layout.chunks[1]) == [
        "0.gate",
        "0.up",
        "1.gate",
        "1.up",
        "2.gate",
        "2.up",
    ]
    assert names(manifest, layout.chunks[2]) == ["0.down", "1.down", "2.down"]
    assert names(manifest, layout.chunks[0]) == ["norm"]
    assert sorted(i for c in layout.chunks for i in c.tensors) == list(range(len(manifest.tensors)))


def test_pieces_are_cut_at_the_limit(moe, monkeypatch):
    manifest, plan, live = moe
    monkeypatch.setattr(chunk_plan, "MAX_CHUNK_BYTES", 2 * I * H * 4)
    layout = plan_layout(plan, manifest, live)
    assert [names(manifest, c) for c in layout.chunks[1:4]] == [
        ["0.gate", "0.up"],
        ["1.gate", "1.up"],
        ["2.gate", "2.up"],
    ]
    assert [names(manifest, c) for c in layout.chunks[4:]] == [["0.down"], ["1.down", "2.down"]]


def test_pieces_are_alike_in_size(moe, monkeypatch):
    """Six tensors where five fit into a piece: three and three, not five and one."""
    manifest, plan, live = moe
    monkeypatch.setattr(chunk_plan, "MAX_CHUNK_BYTES", 4 * I * H * 4)
    layout = plan_layout(plan, manifest, live)
    assert [len(c.tensors) for c in layout.chunks if c.kind == "live"] == [3, 3, 3]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda plan, live: live.update({("experts", "w2"): "packed"}), "packed"),
        (lambda plan, live: plan.sent_dtypes.update({"0.down": "float64"}), "sent as float64"),
    ],
)
def test_what_is_not_understood_takes_its_whole_layer_to_the_reload(moe, change, reason):
    manifest, plan, live = moe
    change(plan, live)
    layout = plan_layout(plan, manifest, live)
    reloaded = [n for c in layout.chunks if c.kind == "reload" for n in names(manifest, c)]
    assert reloaded == [
        s.name for s in manifest.tensors if s.name != "norm"
    ]  # in manifest order, the layer as a whole
    assert any(reason in why for why in layout.why_not_live)


def test_a_transposed_or_partial_tensor_is_staged_not_taken_for_a_run(moe, monkeypatch):
    monkeypatch.setattr(chunk_plan, "SMALL_BYTES", 1)
    manifest, plan, live = moe
    regions = list(plan.regions)
    regions[0] = whole("0.gate", (I, H), "experts", "w13", 0, strides=(1, I))
    regions[-1] = Region(
        name="norm",
        first_index=1,
        index_strides=(1,),
        size=(H - 1,),
        module="norm",
        param="weight",
        offset=0,
        strides=(1,),
    )
    plan = PlacementPlan(
        regions=tuple(regions), formats=plan.formats, covered={}, sent_dtypes=plan.sent_dtypes
    )
    layout = plan_layout(plan, manifest, live)
    assert [c.kind for c in layout.chunks] == [
        "staged",
        "live",
        "live",
    ] and layout.why_not_live == {}
    assert names(manifest, layout.chunks[0]) == ["0.gate", "norm"]
    weights = {s.name: torch.randn(s.shape) for s in manifest.tensors}
    receiver = DirectReceiver(
        chunks=layout.chunks, manifest=manifest, plan=plan, live=live, device=torch.device("cpu")
    )
    receiver.receive(
        group=Wire(packed(manifest, layout, weights)),
        deadline_s=5,
        load=lambda t: None,
        on_written=lambda n: None,
    )
    assert torch.equal(
        live["experts", "w13"].reshape(-1)[: I * H].view(H, I).t(), weights["0.gate"]
    )
    assert live["norm", "weight"].tolist() == [*weights["norm"][1:].tolist(), 0.0]


def test_the_first_chunk_is_never_live(moe, monkeypatch):
    """Where everything could be: then the smallest piece is staged first."""
    monkeypatch.setattr(chunk_plan, "SMALL_BYTES", 1)
    manifest, plan, live = moe
    layout = plan_layout(plan, manifest, live)
    assert [c.kind for c in layout.chunks] == ["staged", "live", "live"] and names(
        manifest, layout.chunks[0]
    ) == ["norm"]


def packed(manifest, layout, weights):
    return [
        torch.cat([weights[n].reshape(-1).view(torch.uint8) for n in names(manifest, c)])
        for c in layout.chunks
    ]


def test_bytes_arrive_in_place_and_the_rest_is_loaded(moe):
    manifest, plan, live = moe
    live["norm", "weight"] = "kept elsewhere"
    layout = plan_layout(plan, manifest, live)
    weights = {s.name: torch.randn(s.shape) for s in manifest.tensors}
    receiver = DirectReceiver(
        chunks=layout.chunks, manifest=manifest, plan=plan, live=live, device=torch.device("cpu")
    )
    assert receiver.needs_reload and receiver.direct_names == frozenset(weights) - {"norm"}
    loaded, written = {}, []
    address = live["experts", "w13"].data_ptr()
    receiver.receive(
        group=Wire(packed(manifest, layout, weights)),
        deadline_s=5,
        load=lambda t: loaded.update(t),
        on_written=written.append,
    )
    for e in range(E):
        assert torch.equal(live["experts", "w13"][e, :I], weights[f"{e}.gate"])
        assert torch.equal(live["experts", "w13"][e, I:], weights[f"{e}.up"])
        assert torch.equal(live["experts", "w2"][e], weights[f"{e}.down"])
    assert set(loaded) == {"norm"} and torch.equal(loaded["norm"], weights["norm"])
    assert live["experts", "w13"].data_ptr() == address and sum(written) == len(weights)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu1)])
def test_what_is_kept_in_a_wider_dtype_is_placed_and_digested_as_sent(moe, device):
    manifest, plan, live = moe
    wide = {"norm", "1.up", "2.down"}
    specs = [
        s.model_copy(update={"dtype": "bfloat16"}) if s.name in wide else s
        for s in manifest.tensors
    ]
    manifest = Manifest(tensors=tuple(specs))
    plan = replace(plan, sent_dtypes={s.name: s.dtype for s in specs})
    live = {key: tensor.to(device) for key, tensor in live.items()}
    layout = plan_layout(plan, manifest, live)
    assert {c.kind for c in layout.chunks} == {"staged", "live"} and layout.why_not_live == {}
    weights = {s.name: torch.randn(s.shape).to(getattr(torch, s.dtype)) for s in specs}
    receiver = DirectReceiver(
        chunks=layout.chunks,
        manifest=manifest,
        plan=plan,
        live=live,
        device=torch.device(device),
        digests_on_arrival=True,
    )
    for _ in range(2):
        wire = packed(manifest, layout, weights)
        receiver.receive(
            group=Wire(wire) if device == "cpu" else CudaWire(wire),
            deadline_s=5,
            load=lambda t: None,
            on_written=lambda n: None,
        )
    assert torch.equal(live["norm", "weight"].cpu(), weights["norm"].float())
    assert torch.equal(live["experts", "w13"][1, I:].cpu(), weights["1.up"].float())
    assert torch.equal(live["experts", "w2"][2].cpu(), weights["2.down"].float())
    assert list(receiver.digests() or ()) == [int(tensor_digest(weights[s.name])) for s in specs]


@pytest.mark.gpu1
def test_staged_chunks_are_queued_behind_the_first_which_is_waited_for(moe, monkeypatch):
    monkeypatch.setattr(chunk_plan, "SMALL_BYTES", 1 << 20)
    monkeypatch.setattr(chunk_plan, "MAX_CHUNK_BYTES", I * H * 4)
    manifest, plan, live = moe
    live = {key: tensor.cuda() for key, tensor in live.items()}
    layout = plan_layout(plan, manifest, live)
    count = len(layout.chunks)
    assert count >= 3 * E and {c.kind for c in layout.chunks} == {"staged"}
    receiver = DirectReceiver(
        chunks=layout.chunks, manifest=manifest, plan=plan, live=live, device=torch.device("cuda")
    )
    for dies_at in (-1, 0, 1, count - 1, -1):
        before = {key: tensor.clone() for key, tensor in live.items()}
        weights = {s.name: torch.randn(s.shape) for s in manifest.tensors}
        written = []
        wire = CudaWire(packed(manifest, layout, weights), dies_at=dies_at)
        if dies_at < 0:
            receiver.receive(
                group=wire, deadline_s=5, load=lambda t: None, on_written=written.append
            )
            digests = [int(tensor_digest(weights[s.name])) for s in manifest.tensors]
            assert list(receiver.digests() or ()) == digests and sum(written) == len(weights)
            for e in range(E):
                assert torch.equal(live["experts", "w2"][e].cpu(), weights[f"{e}.down"])
                assert torch.equal(live["experts", "w13"][e, :I].cpu(), weights[f"{e}.gate"])
            # The first chunk was waited for with the second one after it, the others at the end.
            assert wire.waited[0] == 2 and set(wire.waited[1:]) == {count}
            continue
        with pytest.raises(TransferError):
            receiver.receive(
                group=wire, deadline_s=5, load=lambda t: None, on_written=written.append
            )
        torch.cuda.synchronize()
        unchanged = all(torch.equal(before[key], live[key]) for key in live)
        assert (sum(written) == 0) == unchanged == (dies_at <= 1)


def test_a_wire_that_dies_has_said_what_it_touched(moe):
    manifest, plan, live = moe
    layout = plan_layout(plan, manifest, live)
    weights = {s.name: torch.randn(s.shape) for s in manifest.tensors}
    receiver = DirectReceiver(
        chunks=layout.chunks, manifest=manifest, plan=plan, live=live, device=torch.device("cpu")
    )
    before = {key: tensor.clone() for key, tensor in live.items()}
    for dies_at, touched in ((0, 0), (1, 1 + 2 * E), (2, 1 + 3 * E)):
        written = []
        wire = Wire(packed(manifest, layout, weights), dies_at=dies_at)
        with pytest.raises(TransferError):
            receiver.receive(
                group=wire, deadline_s=5, load=lambda t: None, on_written=written.append
            )
        assert sum(written) == touched
        if touched == 0:  # the first chunk is staged: nothing has changed, and @N can continue
            assert all(torch.equal(before[key], live[key]) for key in live)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu1)])
def test_what_came_beside_is_copied_to_its_places_and_the_rest_loaded(moe, device):
    """On CUDA next to a busy default stream, for which the receive must not wait; digests of the
    live tensors after the copy.
    """
    manifest, plan, live = moe
    device = torch.device(device)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    live = {key: tensor.to(device) for key, tensor in live.items()}
    live["norm", "weight"] = "kept elsewhere"
    layout = plan_layout(plan, manifest, live)
    weights = {s.name: torch.randn(s.shape) for s in manifest.tensors}
    receiver = DirectReceiver(
        chunks=layout.chunks, manifest=manifest, plan=plan, live=live, device=device
    )
    before = {
        key: tensor.clone() for key, tensor in live.items() if isinstance(tensor, torch.Tensor)
    }
    addresses = {key: live[key].data_ptr() for key in before}
    watchdog = Watchdog(None)
    beside = Shadow(manifest=manifest, chunks=layout.chunks, device=device, stream=stream)
    busy = None
    if stream is not None:
        PreparedDigest([torch.zeros(4, device=device)], rows=[0]).launch(
            torch.zeros(1, dtype=torch.int64, device=device)
        )
        torch.cuda.synchronize()  # its kernel is compiled and loaded now
        torch.cuda._sleep(2**33)  # seconds of work for the model's stream
        busy = torch.cuda.Event()
        busy.record()
    try:
        beside.start(
            group=(Wire if stream is None else CudaWire)(packed(manifest, layout, weights)),
            watchdog=watchdog,
            update_id="u",
            deadline_s=5,
        )
        deadline = time.monotonic() + 5
        while (arrived := beside.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert busy is None or not busy.query()
        wanted = [int(tensor_digest(weights[s.name])) for s in manifest.tensors]
        assert arrived.digests == wanted
        assert all(
            torch.equal(before[key], live[key]) for key in before
        )  # nothing live has changed yet
        loaded, written = {}, []
        receiver.apply(beside.buffers, load=lambda t: loaded.update(t), on_written=written.append)
        if stream is not None:
            torch.cuda.synchronize()
            assert list(receiver.digests() or ()) == [
                w for i, w in enumerate(wanted) if manifest.tensors[i].name != "norm"
            ]
    finally:
        assert beside.close()
        watchdog.close()
    for e in range(E):
        assert torch.equal(live["experts", "w13"][e, :I].cpu(), weights[f"{e}.gate"])
        assert torch.equal(live["experts", "w13"][e, I:].cpu(), weights[f"{e}.up"])
        assert torch.equal(live["experts", "w2"][e].cpu(), weights[f"{e}.down"])
    assert set(loaded) == {"norm"} and torch.equal(loaded["norm"].cpu(), weights["norm"])
    assert {key: live[key].data_ptr() for key in before} == addresses and sum(written) == len(
        weights
    )
