"""Chunks leave in the receiver's order, digested from the ring; a group in memory stands for the
wire (the wires have other tests).
"""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest
import torch

from orchestrator.errors import ManifestError, TransferAborted, TransferError, TransferTimeout
from orchestrator.protocol.messages import Manifest, TensorSpec
from weight_transfer import chunks, cuda_events
from weight_transfer.chunks import ChunkSender
from weight_transfer.cuda_events import wait_for_event
from weight_transfer.digest import PreparedDigest, tensor_digest

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu1)]


class Memory:
    """A `TransferGroup` that keeps what was sent."""

    def __init__(self, fail_at: int = -1) -> None:
        self.rank, self.world_size, self.sent, self.fail_at, self.reason = 0, 2, [], fail_at, None

    def broadcast(self, buffer_B, *, deadline_s):
        assert deadline_s > 0
        if len(self.sent) == self.fail_at:
            raise TransferError("the peer is gone")
        self.sent.append(buffer_B.clone())
        if not buffer_B.is_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def synchronize(self, event=None, *, deadline_s):
        if event is not None:
            event.synchronize()

    def abort(self, reason):
        self.reason = self.reason or reason

    def close(self):
        self.abort("closed")


def model(device, *, dtypes=(torch.float32,), count=11):
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, 5), (64,), (17, 16), (1,), (300, 33)]
    tensors = [
        torch.randn(shapes[i % 5], generator=generator).to(dtypes[i % len(dtypes)]).to(device)
        for i in range(count)
    ]
    specs = tuple(
        TensorSpec(name=f"t{i}", dtype=str(t.dtype)[6:], shape=tuple(t.shape))
        for i, t in enumerate(tensors)
    )
    return tensors, Manifest(tensors=specs)


def filler(tensors, order):
    def fill(k, out_B):
        out_B.copy_(torch.cat([tensors[i].reshape(-1).view(torch.uint8) for i in order[k]]))

    return fill


def test_the_ring_has_room_for_usual_chunks_not_for_as_many_of_the_largest(monkeypatch):
    monkeypatch.setattr(chunks, "RING_BYTES", 1 << 20)
    assert chunks.ring_bytes([1024] * 9, 1024, at_once=3) == 3 * 1024
    assert (
        chunks.ring_bytes([4096, *[1024] * 9], 1024, at_once=3) == 5 * 1024
    )  # an embedding, and another chunk
    assert (
        chunks.ring_bytes([1000, 10], 1000, at_once=3) == 1024 + 512
    )  # no more than all of them take
    assert chunks.ring_bytes([1 << 19] * 9, 1 << 19, at_once=3) == 1 << 20
    assert (
        chunks.ring_bytes([3 << 20, 1 << 19], 1 << 19, at_once=3) == 3 << 20
    )  # one chunk that is larger than the ring may be
    assert chunks.ring_bytes([1024] * 9, 1024, at_once=1) == 1024


def test_a_ring_has_room_for_three_matrices_that_are_chunks_alone():
    """A wide layer: gate, up and down are separate chunks; smaller ones share."""
    wide, shared, head = 178_257_920, 157_286_400, 1_555_824_640
    sizes = [head, *[shared, wide, wide, wide] * 40, head]
    usual = chunks.usual_bytes(sizes, at_once=3)
    assert usual == wide
    capacity = chunks.ring_bytes(sizes[1:-1], usual, at_once=3)
    assert 3 * wide <= capacity < 3 * wide + 3 * chunks.RING_ALIGN
    places = chunks.ring_places(sizes[1:-1], capacity, usual=usual)
    spans = [(at, at + size) for at, size in zip(places, sizes[1:-1], strict=True)]
    for three in zip(spans, spans[1:], spans[2:], strict=False):
        assert all(a[1] <= b[0] or b[1] <= a[0] for a, b in itertools.combinations(three, 2))
    assert chunks.usual_bytes([5], at_once=3) == 5


@pytest.mark.parametrize("wait_s", [0.0005, 0.01, 0.2])
def test_a_wait_notices_its_event_soon(wait_s, monkeypatch):
    """Counted on a separate clock: the machine's load must not matter."""
    now = [0.0]
    monkeypatch.setattr(cuda_events.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(cuda_events.time, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    event = SimpleNamespace(query=lambda: now[0] >= wait_s)
    cuda_events.wait_for_event(event, deadline_s=1.0, check=lambda: None, late="late")
    assert now[0] - wait_s <= max(cuda_events.FIRST_POLL_S, wait_s * cuda_events.SHARE_OF_WAIT)
    never = SimpleNamespace(query=lambda: False)
    with pytest.raises(TransferTimeout, match="late"):
        cuda_events.wait_for_event(never, deadline_s=1.0, check=lambda: None, late="late")


@pytest.mark.parametrize("device", DEVICES)
def test_what_lies_somewhere_leaves_from_there_and_needs_no_ring(device):
    tensors, manifest = model(device)
    order = [[1, 3], [4], [0, 2, 5], [9], [6, 7, 8, 10]]  # 4 and 9 are the largest
    copies = {1: tensors[4].clone(), 3: tensors[9].clone()}
    filled = []

    def resident(k):
        return copies[k].reshape(-1).view(torch.uint8) if k in copies else None

    def fill(k, out_B):
        filled.append((k, out_B.data_ptr()))
        if k not in copies:
            filler(tensors, order)(k, out_B)

    group = Memory()
    sender = ChunkSender(
        groups={"a": group},
        manifest=manifest,
        chunks=order,
        fill=fill,
        resident=resident,
        device=device,
    )
    assert sender._ring_B.numel() < tensors[4].nbytes
    for _ in range(2):
        report = sender.send(deadline_s=30)
        assert [k for k, _ in filled] == [0, 1, 2, 3, 4] and filled[1][1] == copies[1].data_ptr()
        wanted = [
            torch.cat([tensors[i].reshape(-1).view(torch.uint8) for i in chunk]) for chunk in order
        ]
        assert all(torch.equal(a, b) for a, b in zip(group.sent, wanted, strict=True))
        assert report.digests_N.tolist() == [int(tensor_digest(t.cpu())) for t in tensors]
        copies[1], copies[3] = (
            copies[1].clone(),
            copies[3].clone(),
        )  # they have moved, as offloaded parameters do
        filled.clear()
        group.sent.clear()
    sender.close()


@pytest.mark.parametrize("seed", range(20))
def test_places_in_the_ring(seed):
    dice = random.Random(seed)
    sizes = [dice.choice([1, 511, 512, 4000, 9000]) for _ in range(30)]
    capacity = chunks.ring_bytes(sizes, 4000, at_once=3)
    places = chunks.ring_places(sizes, capacity, usual=4000)
    spans = [(at, at + size) for at, size in zip(places, sizes, strict=True)]
    assert all(at % chunks.RING_ALIGN == 0 and end <= capacity for at, end in spans)
    for (_, end), (then, _) in itertools.pairwise(spans):
        assert then == 0 or end <= then


def test_a_chunk_waits_for_those_that_lie_where_it_goes():
    specs = tuple(
        TensorSpec(name=f"t{i}", dtype="uint8", shape=(n,))
        for i, n in enumerate([900, 400, 400, 400, 1000, 400])
    )
    sender = ChunkSender(
        groups={"a": Memory()},
        manifest=Manifest(tensors=specs),
        chunks=[(i,) for i in range(6)],
        fill=lambda k, out_B: None,
        device="cpu",
    )
    sender._places = chunks.ring_places(sender._nbytes, 2048, usual=1)
    assert sender._places == [0, 1024, 1536, 0, 512, 1536]
    for k, wanted in enumerate([[], [], [], [0], [0, 1], [2]]):
        assert sender._uses_of_place(k) == wanted and not sender._is_too_far_ahead(k), k
        # No broadcast of one group is queued after another's: an abort would wait for it.
        sender._groups["b"] = Memory()
        assert sender._is_too_far_ahead(k) == bool(wanted)
        del sender._groups["b"]
        sender._busy.append((k, [("a", k)]))  # the number stands for the event
    sender._busy.extend((k, []) for k in range(6, chunks.QUEUED_CHUNKS))
    assert sender._is_too_far_ahead(2)
    sender.close()


@pytest.mark.parametrize("device", DEVICES)
def test_bytes_order_and_digests(device, monkeypatch):
    monkeypatch.setattr(chunks, "RING_BYTES", 200_000)
    tensors, manifest = model(device)
    order = [(4, 0), (9,), (1, 2, 3, 10), (8, 7, 6, 5)]
    groups = {"a": Memory(), "b": Memory()}
    sender = ChunkSender(
        groups=groups, manifest=manifest, chunks=order, fill=filler(tensors, order), device=device
    )
    for _ in range(3):
        for group in groups.values():
            group.sent.clear()
        report = sender.send(deadline_s=30)
        assert report.digests_N.tolist() == [int(tensor_digest(t)) for t in tensors]
        assert report.nbytes == manifest.nbytes and set(report.seconds) == {
            "fill",
            "wire",
            "digest",
            "total",
        }
        for group in groups.values():
            wanted = [
                torch.cat([tensors[i].reshape(-1).view(torch.uint8) for i in c]) for c in order
            ]
            assert all(torch.equal(a, b) for a, b in zip(group.sent, wanted, strict=True))
        tensors[3].add_(1.0)  # the next version: nothing of the last one may linger
    sender.close()
    with pytest.raises(TransferAborted):
        sender.send(deadline_s=1)


class Slow(Memory):
    """A wire with a separate stream, which reads a chunk long after it was queued."""

    def __init__(self):
        super().__init__()
        self.stream, self.waited = torch.cuda.Stream(), 0

    def broadcast(self, buffer_B, *, deadline_s):
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(2_000_000)  # a millisecond
            return super().broadcast(buffer_B, deadline_s=deadline_s)

    def synchronize(self, event=None, *, deadline_s):
        self.waited += not event.query()
        super().synchronize(event, deadline_s=deadline_s)


@pytest.mark.gpu1
def test_the_host_runs_ahead_of_a_slow_wire_but_no_fill_does():
    tensors, manifest = model("cuda", count=40)
    order = [(i,) for i in range(40)]
    group = Slow()
    sender = ChunkSender(
        groups={"a": group},
        manifest=manifest,
        chunks=order,
        fill=filler(tensors, order),
        device="cuda",
    )
    for _ in range(3):
        group.sent.clear()
        report = sender.send(deadline_s=30)
        assert report.digests_N.tolist() == [int(tensor_digest(t)) for t in tensors]
        sent = [t.reshape(-1).view(torch.uint8) for t in tensors]
        assert all(torch.equal(a, b) for a, b in zip(group.sent, sent, strict=True))
        tensors[3].add_(1.0)
    assert group.waited, "the wire was never behind: the test shows nothing"
    sender.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_prepared_digest_is_the_digest(device):
    sizes = (
        (16, torch.bfloat16),
        (8192 * 2 + 160, torch.bfloat16),
        (77, torch.float32),
        (33, torch.bfloat16),
        (9000, torch.float32),
    )
    tensors = [torch.randn(n).to(dtype).to(device) for n, dtype in sizes]
    prepared = PreparedDigest(tensors, rows=[4, 0, 2, 1, 3])
    for _ in range(2):
        out = torch.zeros(5, dtype=torch.int64, device=device)
        prepared.launch(out)
        assert out.tolist() == [int(tensor_digest(tensors[i])) for i in (1, 3, 2, 4, 0)]
        tensors[1].view(torch.int16)[8200] ^= 1


@pytest.mark.parametrize("device", DEVICES)
def test_prepared_digests_of_shards_add_up(device):
    """Rows and columns of whole tensors, as two tensor-parallel workers hold them; a wrong stride
    is another number.
    """
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        t = (torch.randn(64, 768) * 50).to(dtype)
        shards = [
            t[:, :384].to(device),
            t[:32, 384:].to(device).t().contiguous().t(),
            t[32:, 384:].to(device),
        ]
        origins = [(0, (768, 1)), (384, (768, 1)), (32 * 768 + 384, (768, 1))]
        for origin, is_right in ((origins[2], True), ((origins[2][0], (767, 1)), False)):
            out = torch.zeros(2, dtype=torch.int64, device=device)
            PreparedDigest(shards, rows=[1, 1, 1], origins=[*origins[:2], origin]).launch(out)
            assert out[0] == 0 and (int(out[1]) == int(tensor_digest(t))) == is_right


def test_what_is_no_partition_is_refused():
    tensors, manifest = model("cpu", count=3)
    for order in ([(0, 1)], [(0, 1, 2), (2,)], [(0, 1, 3)]):
        with pytest.raises(ManifestError, match="exactly once"):
            ChunkSender(
                groups={},
                manifest=manifest,
                chunks=order,
                fill=filler(tensors, order),
                device="cpu",
            )


def test_an_element_across_a_word_is_refused():
    tensors, manifest = model(
        "cpu", dtypes=(torch.bfloat16, torch.float32), count=2
    )  # 15 bf16, then float32 at byte 30
    order = [(0, 1)]
    sender = ChunkSender(
        groups={"a": Memory()},
        manifest=manifest,
        chunks=order,
        fill=filler(tensors, order),
        device="cpu",
    )
    with pytest.raises(ManifestError, match="t1"):
        sender.send(deadline_s=5)


def test_one_failing_replica_ends_all_and_is_named():
    tensors, manifest = model("cpu")
    order = [(i,) for i in range(11)]
    groups = {"good": Memory(), "bad": Memory(fail_at=4)}
    sender = ChunkSender(
        groups=groups, manifest=manifest, chunks=order, fill=filler(tensors, order), device="cpu"
    )
    with pytest.raises(TransferError, match="bad"):
        sender.send(deadline_s=5)
    assert groups["good"].reason and groups["bad"].reason
    with pytest.raises(TransferAborted):
        sender.send(deadline_s=5)


class Event:
    """A CUDA event that is done after some polls."""

    def __init__(self, polls):
        self.polls = polls

    def query(self):
        self.polls -= 1
        return self.polls < 0


def test_waiting_for_an_event_hears_the_deadline_and_the_abort():
    checked = []
    wait_for_event(Event(3), deadline_s=5, check=lambda: checked.append(1), late="late")
    assert len(checked) == 3
    with pytest.raises(TransferTimeout, match="stuck"):
        wait_for_event(Event(10**9), deadline_s=0.05, check=lambda: None, late="stuck")

    def abort():
        raise TransferAborted("told to")

    with pytest.raises(TransferAborted):
        wait_for_event(Event(10**9), deadline_s=60, check=abort, late="late")
