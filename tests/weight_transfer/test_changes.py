"""Changed elements over TCP: one broadcast or several senders, and whatever is wrong is refused
before anything changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from orchestrator.errors import TransferAborted, TransferError, TransferTimeout
from tests.weight_transfer.random_bits import random_bytes, seeded
from tests.weight_transfer.senders import Ends
from weight_transfer import changes
from weight_transfer.edges import Delivery
from weight_transfer.groups import TransferGroup, join_tcp, open_listener

CPU = torch.device("cpu")
SIZE = 4096


@pytest.fixture
def pair() -> Iterator[tuple[TransferGroup, TransferGroup, ThreadPoolExecutor]]:
    """A sender and a worker."""
    with ThreadPoolExecutor(2) as pool:
        listener = open_listener(transport="tcp", host="127.0.0.1", world_size=2, device="cpu")
        joining = pool.submit(listener.join, 20.0)
        worker = join_tcp(listener.rendezvous, rank=1, deadline_s=20.0)
        sender = joining.result(20)
        yield sender, worker, pool
        sender.close()
        worker.close()


def some_changes(seed: int, share: float, size: int = SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    old_B, other_B = random_bytes(size, seed), random_bytes(size, seed + 1)
    where = (torch.rand(size // 2, generator=seeded(seed)) < share).repeat_interleave(2)
    return old_B, torch.where(where, other_B, old_B)


def soon() -> float:
    return time.monotonic() + 20.0


def never_filled(k: int) -> torch.Tensor:
    raise AssertionError(f"buffer {k} is a code, so it need not be filled")


def moved(
    pair: tuple[TransferGroup, TransferGroup, ThreadPoolExecutor],
    sent: changes.Buffers,
    expected: Sequence[Sequence[Delivery]],
    fill: Callable[[int], torch.Tensor] = never_filled,
) -> changes.Buffers:
    sender, worker, pool = pair
    sending = pool.submit(
        changes.send_changes, {"one": sender}, sent, fill=fill, device=CPU, deadline=soon()
    )
    arrived = changes.receive_changes(worker, expected, device=CPU, deadline=soon())
    sending.result(20)
    return arrived


def test_chunks_by_broadcast_changed_same_and_as_they_are(pair) -> None:
    """The third changes so much that it travels as it is, and the fourth may not be changed."""
    pairs = [
        some_changes(1, 0.02),
        some_changes(2, 0.0),
        some_changes(3, 1.0),
        some_changes(4, 0.1),
    ]
    encoded = [
        changes.encode_buffer(old, new, changes.whole(SIZE), word_bytes=2 if k < 3 else 0)
        for k, (old, new) in enumerate(pairs)
    ]
    sent = [messages for messages, _ in encoded]
    assert [m[0].is_code for m in sent] == [True, True, False, False]
    assert sent[1][0].nbytes == 0 and sent[2][0].nbytes == sent[3][0].nbytes == SIZE
    wanted = [int((o.view(torch.int16) != n.view(torch.int16)).sum()) for o, n in pairs]
    assert [count for _, count in encoded] == [*wanted[:3], 0]
    arrived = moved(pair, sent, [changes.whole(SIZE)] * 4, fill=lambda k: pairs[k][1])
    for (old_B, new_B), messages in zip(pairs, arrived, strict=True):
        there_B = old_B.clone()
        changes.restore(messages, there_B)
        assert torch.equal(there_B, new_B)


def test_two_senders_and_two_workers_each_get_their_own() -> None:
    """Worker 0 gets a part of each rank, worker 1 the same part of rank 1 and nothing of rank 0."""
    ends = Ends()
    one, other = some_changes(1, 0.03), some_changes(5, 0.05)
    to_one = Delivery(peers=(0,), begin=0, end=1024)
    to_both = Delivery(peers=(0, 1), begin=512, end=SIZE)
    sent = [
        [changes.encode_buffer(*one, [to_one], word_bytes=2)[0], []],
        [[], changes.encode_buffer(*other, [to_both], word_bytes=2)[0]],
    ]
    from_one = Delivery(peers=(0,), begin=0, end=1024)
    from_other = Delivery(peers=(1,), begin=0, end=SIZE - 512)
    expected = [[[from_one], [from_other]], [[], [from_other]]]
    try:
        sending = [
            ends.pool.submit(
                changes.send_changes,
                {"one": group},
                buffers,
                fill=never_filled,
                device=CPU,
                deadline=soon(),
            )
            for group, buffers in zip(ends.senders, sent, strict=True)
        ]
        receiving = [
            ends.pool.submit(changes.receive_changes, group, wanted, device=CPU, deadline=soon())
            for group, wanted in zip(ends.workers, expected, strict=True)
        ]
        first, second = [r.result(20) for r in receiving]
        for s in sending:
            s.result(20)
    finally:
        ends.close()
    there_B = one[0][:1024].clone()
    changes.restore(first[0], there_B)
    assert torch.equal(there_B, one[1][:1024])
    for arrived in (first, second):
        there_B = other[0][512:].clone()
        changes.restore(arrived[1], there_B)
        assert torch.equal(there_B, other[1][512:])


def test_another_checksum_is_refused(pair) -> None:
    old_B, new_B = some_changes(1, 0.02)
    (message,), _ = changes.encode_buffer(old_B, new_B, changes.whole(SIZE), word_bytes=2)
    wrong = replace(message, crc=message.crc ^ 1)
    with pytest.raises(TransferError, match=r"another checksum; none of it is used"):
        moved(pair, [[wrong]], [changes.whole(SIZE)])


def test_a_larger_message_than_planned_is_refused(pair) -> None:
    old_B, new_B = some_changes(1, 1.0)
    (message,), _ = changes.encode_buffer(old_B, new_B, changes.whole(SIZE), word_bytes=2)
    sender, worker, pool = pair
    pool.submit(
        changes.send_changes,
        {"one": sender},
        [[message]],
        fill=lambda _: new_B,
        device=CPU,
        deadline=soon(),
    )
    with pytest.raises(TransferError, match=r"announces 4,096 bytes for a part of 4,094"):
        changes.receive_changes(worker, [changes.whole(SIZE - 2)], device=CPU, deadline=soon())
    worker.abort("the test ends")


def test_an_abort_and_a_deadline_end_both(pair) -> None:
    sender, worker, pool = pair
    waiting = pool.submit(
        changes.receive_changes, worker, [changes.whole(SIZE)], device=CPU, deadline=soon()
    )
    time.sleep(0.2)
    worker.abort("told to")
    with pytest.raises(TransferAborted, match="told to"):
        waiting.result(10)
    messages, _ = changes.encode_buffer(*some_changes(1, 0.02), changes.whole(SIZE), word_bytes=2)
    with pytest.raises(TransferTimeout, match="before all changed elements had travelled"):
        changes.send_changes(
            {"one": sender},
            [messages],
            fill=never_filled,
            device=CPU,
            deadline=time.monotonic() - 1,
        )


def test_an_error_names_the_replica(pair) -> None:
    sender, worker, _ = pair
    worker.close()
    old_B, new_B = some_changes(1, 0.02)
    messages, _ = changes.encode_buffer(old_B, new_B, changes.whole(SIZE), word_bytes=2)
    with pytest.raises(TransferError, match="replica 'one'"):
        changes.send_changes(
            {"one": sender}, [messages], fill=never_filled, device=CPU, deadline=soon()
        )


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_the_sign_of_zero_is_dropped_and_nothing_else(dtype: torch.dtype, size: int) -> None:
    floats = torch.tensor([0.0, -0.0, 1.0, -1.0, float("nan"), float("-inf")], dtype=dtype)
    wanted = floats.clone()
    wanted[1] = 0.0
    changes.drop_zero_signs(floats.view(torch.uint8), size)
    assert torch.equal(floats.view(torch.uint8), wanted.view(torch.uint8))


def test_an_element_that_stays_minus_zero_still_travels() -> None:
    """The worker reads 0.0, so the trainer encodes against 0.0."""
    new = torch.tensor([-0.0, 1.0], dtype=torch.bfloat16)
    old_B = new.clone().view(torch.uint8)
    changes.drop_zero_signs(old_B, 2)
    size = old_B.numel()
    messages, changed = changes.encode_buffer(
        old_B, new.view(torch.uint8), [Delivery(peers=(), begin=0, end=size)], word_bytes=2
    )
    assert changed == 1 and messages[0].nbytes > 0


def test_a_buffer_may_change_once_it_was_compared() -> None:
    """It is filled again only for parts whose codes are no shorter."""
    fills = []
    old_B, new_B = some_changes(5, 0.02)
    new_B[2048:] = random_bytes(SIZE - 2048, 9)
    parts = [Delivery(peers=(), begin=begin, end=begin + 1024) for begin in range(0, SIZE, 1024)]
    wanted, changed = changes.encode_buffer(old_B, new_B, parts, word_bytes=2)
    room_B = new_B.clone()
    compared = changes.compare(old_B, room_B, parts, word_bytes=2)
    room_B.zero_()
    (encoding,) = changes.begin_encoding([compared])
    messages = encoding.messages(lambda: fills.append(1) or new_B)
    assert [m.row() for m in messages] == [m.row() for m in wanted] and len(fills) == 1
    assert [m.is_code for m in messages] == [True, True, False, False]
    assert encoding.changed == changed


@pytest.mark.parametrize("ahead", [1, 1 << 25])
def test_buffers_are_restored_in_order_whatever_is_read_ahead(ahead, monkeypatch) -> None:
    """Codes, a buffer without any change, and one that travelled as it is."""
    monkeypatch.setattr(changes, "AHEAD_BYTES", ahead)
    pairs = [some_changes(seed, share) for seed, share in enumerate((0.02, 0.0, 1.0, 0.1, 0.02))]
    sent = [changes.encode_buffer(*p, changes.whole(SIZE), word_bytes=2)[0] for p in pairs]
    sent = [
        [m if m.body_B is not None else replace(m, body_B=new_B) for m in messages]
        for messages, (_, new_B) in zip(sent, pairs, strict=True)
    ]
    for (old_B, new_B), restore in zip(pairs, changes.restoring(sent), strict=True):
        restore(old_B)
        assert torch.equal(old_B, new_B)


@pytest.mark.parametrize("byte", [0, 60])
def test_no_code_is_refused(byte) -> None:
    """Of its head, and of what follows."""
    old_B, new_B = some_changes(1, 0.02)
    (message,), _ = changes.encode_buffer(old_B, new_B, changes.whole(SIZE), word_bytes=2)
    message.body_B[byte] ^= 255
    before_B = old_B.clone()
    with pytest.raises(TransferError, match="4,096 bytes cannot be decoded"):
        changes.restore([message], old_B)
    assert torch.equal(old_B, before_B)


def test_a_large_buffer_is_coded_in_parts(pair, monkeypatch) -> None:
    """Each bounds what a worker decodes at a time, in the memory that generation leaves."""
    monkeypatch.setattr(changes, "PART_BYTES", 1000)
    old_B, new_B = some_changes(5, 0.02)
    old_B[1000:2000], new_B[1000:2000] = 0, 0
    new_B[3000:4000] = random_bytes(1000, 9)  # travels as it is
    parts = changes.whole(SIZE)
    assert [(p.begin, p.end) for p in parts] == [
        (0, 1000), (1000, 2000), (2000, 3000), (3000, 4000), (4000, SIZE)
    ]  # fmt: skip
    messages, _ = changes.encode_buffer(old_B, new_B, parts, word_bytes=2)
    (arrived,) = moved(pair, [messages], [parts], fill=lambda _: new_B)
    changes.restore(arrived, old_B)
    assert torch.equal(old_B, new_B)
