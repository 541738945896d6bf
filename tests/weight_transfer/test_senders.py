"""Several senders and several workers in one group over TCP: each message reaches its end, and
whoever ends it ends it for all.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from orchestrator.errors import ConfigError, TransferAborted, TransferError, TransferTimeout
from tests.weight_transfer.senders import DEADLINE_S, SENDERS, SOON_S, WORKERS, Ends, open_all
from weight_transfer.groups import TransferGroup, join_tcp


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def message(sender: int, worker: int, n: int, nbytes: int = 100_000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * sender + 10 * worker + n)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def done(*futures: Future[Any]) -> None:
    for future in futures:
        assert future.result(2 * DEADLINE_S) is None


def test_each_pair_has_its_messages_in_order(ends: Ends) -> None:
    """Two for each pair, of other sizes, interleaved differently at both ends; then again."""
    sizes = (300_000, 7)
    for _ in range(2):
        got = [
            [(s, torch.zeros(sizes[n], dtype=torch.uint8)) for n in (0, 1) for s in (1, 0)]
            for _ in range(WORKERS)
        ]
        calls = [ends.start(ends.workers[w].receive, got[w]) for w in range(WORKERS)]
        for s in range(SENDERS):
            sent = [(w, message(s, w, n, sizes[n])) for w in (0, 1) for n in (0, 1)]
            calls.append(ends.start(ends.senders[s].send, sent))
        done(*calls)
        for w in range(WORKERS):
            for k, (s, buffer_B) in enumerate(got[w]):
                assert torch.equal(buffer_B, message(s, w, k // 2, sizes[k // 2]))


def test_a_message_larger_than_what_the_kernel_holds_and_many_small_ones(ends: Ends) -> None:
    """Requests wait in the kernel while the first message leaves."""
    count = 1000
    large_B, small = message(0, 0, 0, 32 << 20), [message(0, 0, n, 3) for n in range(count)]
    got = [torch.zeros(32 << 20, dtype=torch.uint8)]
    got += [torch.zeros(3, dtype=torch.uint8) for _ in range(count)]
    sent = [(0, large_B), *((0, small_B) for small_B in small)]
    done(
        ends.start(ends.workers[0].receive, [(0, buffer_B) for buffer_B in got]),
        ends.start(ends.senders[0].send, sent),
    )
    assert torch.equal(torch.cat(got), torch.cat([large_B, *small]))


def test_calls_without_messages_do_nothing(ends: Ends) -> None:
    for group in ends.senders:
        assert group.send([], deadline_s=0.0) is None
    for group in ends.workers:
        assert group.receive([], deadline_s=0.0) is None
    got_B = torch.zeros(100_000, dtype=torch.uint8)
    empty_B = torch.zeros(0, dtype=torch.uint8)
    done(
        ends.start(ends.workers[1].receive, [(1, got_B), (0, empty_B)]),
        ends.start(ends.senders[1].send, [(1, message(1, 1, 0)), (0, empty_B)]),
        ends.start(ends.workers[0].receive, []),
        ends.start(ends.senders[0].send, [(1, empty_B)]),
    )
    assert torch.equal(got_B, message(1, 1, 0))


def test_a_call_of_one_pair_may_be_ahead(ends: Ends) -> None:
    """Worker 0 asks for its second message while its sender still serves worker 1's first."""
    got = [torch.zeros(100_000, dtype=torch.uint8) for _ in range(3)]

    def twice(call: Callable[..., Any], first: Any, second: Any, *, deadline_s: float) -> None:
        call(first, deadline_s=deadline_s)
        call(second, deadline_s=deadline_s)

    calls = [
        ends.start(
            twice,
            ends.senders[0].send,
            [(0, message(0, 0, 0)), (1, message(0, 1, 0))],
            [(0, message(0, 0, 1))],
        ),
        ends.start(twice, ends.workers[0].receive, [(0, got[0])], [(0, got[1])]),
    ]
    time.sleep(0.3)
    assert not calls[0].done()
    done(*calls[2:], ends.start(ends.workers[1].receive, [(0, got[2])]), *calls)
    for buffer_B, (w, n) in zip(got, [(0, 0), (0, 1), (1, 0)], strict=True):
        assert torch.equal(buffer_B, message(0, w, n))


def test_a_second_message_waits_until_it_is_asked_for(ends: Ends) -> None:
    receiving = ends.start(ends.workers[1].receive, [(1, torch.zeros(9, dtype=torch.uint8))])
    with pytest.raises(TransferTimeout, match=r"\{3: 7\}"):
        ends.senders[1].send([(1, message(1, 1, n, (9, 7)[n])) for n in (0, 1)], deadline_s=1.0)
    done(receiving)


@pytest.mark.parametrize("has_second", [True, False])
def test_another_size_is_refused_by_name(ends: Ends, has_second: bool) -> None:
    """Of the second message, or of one that the sender does not have."""
    wanted = [(1, torch.zeros(size, dtype=torch.uint8)) for size in (100_000, 6)]
    receiving = ends.start(ends.workers[1].receive, wanted)
    # Worker 0 receives nothing, so the sender is still there when it hears the second request.
    sent = [
        (1, message(1, 1, 0)),
        (1, message(1, 1, 1, 5)) if has_second else (0, message(1, 0, 0)),
    ]
    size = 5 if has_second else 0
    with pytest.raises(TransferError, match=f"rank 3 requests 6 bytes, the trainer sends {size}"):
        ends.senders[1].send(sent, deadline_s=DEADLINE_S)
    ends.senders[1].close()
    with pytest.raises(TransferError, match="peer is gone: the connection to rank 1"):
        receiving.result(SOON_S)


@pytest.mark.parametrize("waits_for", [0, 1])
def test_an_abort_on_one_sender_frees_all(ends: Ends, waits_for: int) -> None:
    """The workers also hear of it while they wait for the other sender, and end the group there."""

    def receive(worker: TransferGroup, *, deadline_s: float) -> None:
        try:
            got_B = torch.zeros(5, dtype=torch.uint8)
            worker.receive([(waits_for, got_B)], deadline_s=deadline_s)
        finally:
            worker.close()

    receiving = [ends.start(receive, worker) for worker in ends.workers]
    large_B = torch.zeros(64 << 20, dtype=torch.uint8)
    sending = ends.start(ends.senders[1 - waits_for].send, [(0, large_B), (1, large_B)])
    threading.Timer(0.3, ends.senders[0].abort, ["the operator said so"]).start()
    for call in receiving:
        with pytest.raises(TransferError, match="the connection to rank 0 broke"):
            call.result(SOON_S)
    with pytest.raises(TransferError):
        sending.result(SOON_S)
    with pytest.raises(TransferAborted, match="the operator said so"):
        ends.senders[0].send([], deadline_s=1)


def test_a_broadcast_comes_from_the_first_sender(ends: Ends) -> None:
    got = [torch.zeros(100_000, dtype=torch.uint8) for _ in range(WORKERS)]
    calls = [ends.start(ends.workers[w].broadcast, got[w]) for w in range(WORKERS)]
    assert ends.senders[1].broadcast(torch.zeros(1, dtype=torch.uint8), deadline_s=0.0) is None
    done(*calls, ends.start(ends.senders[0].broadcast, message(0, 0, 0)))
    assert all(torch.equal(buffer_B, message(0, 0, 0)) for buffer_B in got)


def test_a_worker_that_dies_in_the_middle_of_a_message_fails_its_senders() -> None:
    """A process, which both senders serve when it is killed."""
    script = f"""
import sys, torch
from orchestrator.protocol.messages import Rendezvous
from tests.weight_transfer.senders import DEADLINE_S, SENDERS, SOON_S, WORKERS, Ends, open_all
from weight_transfer.groups import join_tcp
where = Rendezvous.model_validate_json(sys.stdin.readline())
group = join_tcp(where, rank={SENDERS}, deadline_s=120)
got = [(s, torch.zeros(1 << 30, dtype=torch.uint8)) for s in range({SENDERS})]
print("receiving", flush=True)
group.receive(got, deadline_s=120)
"""
    listeners, where = open_all(workers=1)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(where.model_dump_json() + "\n")
        process.stdin.flush()
        with ThreadPoolExecutor(SENDERS) as pool:
            groups = [j.result() for j in [pool.submit(x.join, 120.0) for x in listeners]]
            assert process.stdout.readline() == "receiving\n"
            whole_B = torch.zeros(1 << 30, dtype=torch.uint8)
            calls = [pool.submit(g.send, [(0, whole_B)], deadline_s=120.0) for g in groups]
            time.sleep(0.1)
            assert not any(call.done() for call in calls)
            os.kill(process.pid, signal.SIGKILL)
            for call in calls:
                with pytest.raises(TransferError, match="connection to rank 2 broke"):
                    call.result(SOON_S)
            for group in groups:
                group.close()
    finally:
        process.kill()
        process.wait(10)


def test_a_join_fails_on_the_worker_if_one_sender_is_gone() -> None:
    """And the sender that it had joined hears of it."""
    listeners, where = open_all(workers=1)
    listeners[1].close()
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(listeners[0].join, DEADLINE_S)
        with pytest.raises(
            TransferError, match=f"joining the trainer at 127.0.0.1:{where.others[0].port}"
        ):
            join_tcp(where, rank=SENDERS, deadline_s=DEADLINE_S)
        group = joining.result(SOON_S)
    with pytest.raises(TransferError, match="connection to rank 2 broke"):
        group.send([(0, message(0, 0, 0))], deadline_s=DEADLINE_S)
    group.close()


def test_a_join_that_lacks_a_worker_names_its_rank() -> None:
    listeners, _ = open_all()
    with pytest.raises(TransferTimeout, match=r"missing: ranks \[2, 3\]"):
        listeners[1].join(0.2)
    listeners[0].close()


def test_a_rendezvous_that_lacks_a_sender_is_refused() -> None:
    listeners, where = open_all()
    try:
        with pytest.raises(ConfigError, match="2 senders has 1 addresses"):
            join_tcp(where.model_copy(update={"others": ()}), rank=2, deadline_s=1)
        with pytest.raises(ConfigError, match="worker ranks are 2 to 3, got 1"):
            join_tcp(where, rank=1, deadline_s=1)
    finally:
        for listener in listeners:
            listener.close()
