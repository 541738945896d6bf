"""Bytes over TCP between real processes: all of them arrive as they were, and every way to fail
ends in bounded time.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from orchestrator.errors import (
    ConfigError,
    ManifestError,
    TransferAborted,
    TransferError,
    TransferTimeout,
)
from orchestrator.protocol.messages import Manifest, Rendezvous, TensorSpec
from tests.weight_transfer.handshakes import prove
from tests.weight_transfer.peer import (
    big_manifest,
    in_chunks,
    mixed_manifest,
    receive_chunks,
    sender_to,
    sha256,
    values,
)
from weight_transfer import socket_group
from weight_transfer.digest import tensor_digest
from weight_transfer.groups import GroupListener, TransferGroup, join_tcp, open_listener
from weight_transfer.handshake import introduce
from weight_transfer.nccl_group import version_text

SOON_S = 8.0
"""What "bounded" means where nothing has to run into a deadline, which is at least 20 s away; two
busy cores are slow.
"""


def listen(*, world_size: int = 2) -> GroupListener:
    return open_listener(transport="tcp", host="127.0.0.1", world_size=world_size, device="cpu")


class Join:
    """All ranks of a group join, each on a separate thread; and their outcomes."""

    def __init__(
        self,
        world_size: int,
        *,
        deadline_s: float = 20.0,
        wait_for: tuple[int, ...] | None = None,
        absent: tuple[int, ...] = (),
        then: Callable[[TransferGroup], None] = lambda group: None,
        expected: type[Exception] = TransferError,
        start: bool = True,
    ) -> None:
        self.groups: dict[int, TransferGroup] = {}
        self.errors: dict[int, Exception] = {}
        self.listener = listen(world_size=world_size)
        self._deadline_s, self._then, self._expected = deadline_s, then, expected
        self._ranks = [r for r in range(world_size) if r not in absent]
        self._wait_for = self._ranks if wait_for is None else wait_for
        if start:
            self.start()

    def start(self) -> None:
        threads = {
            rank: threading.Thread(target=self._join, args=(rank,), daemon=True)
            for rank in self._ranks
        }
        for thread in threads.values():
            thread.start()
        for rank in self._wait_for:
            threads[rank].join(25.0)
            assert not threads[rank].is_alive(), f"rank {rank} is held"

    def _join(self, rank: int) -> None:
        try:
            if rank == 0:
                group = self.listener.join(self._deadline_s)
                self._then(group)
            else:
                # Longer than the trainer's, so that it is the trainer that gives up.
                group = join_tcp(
                    self.listener.rendezvous, rank=rank, deadline_s=2 * self._deadline_s
                )
            self.groups[rank] = group
        except (TransferError, self._expected) as error:
            self.errors[rank] = error


def both_ends() -> tuple[TransferGroup, TransferGroup]:
    """A trainer's and a worker's group, joined in this process."""
    ends = Join(2)
    assert not ends.errors, ends.errors
    return ends.groups[0], ends.groups[1]


@pytest.fixture
def pair(start_peer: Callable[..., Any]) -> Iterator[Callable[..., tuple[Any, TransferGroup]]]:
    """A receiving peer and the joined group that leads to it."""
    groups: list[TransferGroup] = []

    def connect(manifest: Manifest, **options: Any) -> tuple[Any, TransferGroup]:
        listener = listen()
        peer = start_peer(
            "receive",
            manifest_json=manifest.model_dump_json(),
            rendezvous=listener.rendezvous.model_dump_json(),
            **options,
        )
        groups.append(listener.join(120))
        peer.wait_for("joined")
        return peer, groups[-1]

    yield connect
    for group in groups:
        group.close()


@pytest.mark.parametrize("chunk_bytes", [1, 50, 1000, 1 << 20])
def test_every_byte_arrives(pair: Callable[..., Any], chunk_bytes: int) -> None:
    """Mixed dtypes, a scalar, an empty tensor, tensors larger than a chunk, a chunk
    without bytes.
    """
    manifest = mixed_manifest()
    peer, group = pair(manifest, chunk_bytes=chunk_bytes, hash=True)
    report = sender_to({"r": group}, manifest, chunk_bytes).send(deadline_s=20)
    got = peer.wait_for("received")
    assert got["shapes_fit"] and report.nbytes == manifest.nbytes
    assert got["sha256"] == {s.name: sha256(values(s)) for s in manifest.tensors}
    assert (
        got["digests"]
        == report.digests_N.tolist()
        == [int(tensor_digest(values(s))) for s in manifest.tensors]
    )
    assert set(report.seconds) == {"fill", "wire", "digest", "total"}
    assert peer.exit_code(timeout_s=SOON_S) == 0


def test_a_group_carries_many_rounds(pair: Callable[..., Any]) -> None:
    manifest = mixed_manifest()
    peer, group = pair(manifest, chunk_bytes=2000, rounds=3, hash=True)
    sender = sender_to({"r": group}, manifest, 2000, tensor=lambda spec: values(spec, seed=seed))
    for seed in range(3):
        sender.send(deadline_s=20)
        assert peer.wait_for("received")["sha256"] == {
            s.name: sha256(values(s, seed=seed)) for s in manifest.tensors
        }


def test_two_replicas_and_a_replica_of_two_workers(start_peer: Callable[..., Any]) -> None:
    manifest = mixed_manifest()
    listeners = [listen(world_size=2), listen(world_size=3)]
    peers = [
        start_peer(
            "receive",
            manifest_json=manifest.model_dump_json(),
            rendezvous=listeners[which].rendezvous.model_dump_json(),
            rank=rank,
            chunk_bytes=500,
            hash=True,
        )
        for which, rank in ((0, 1), (1, 1), (1, 2))
    ]
    sender = sender_to(
        {f"replica-{n}": ls.join(120) for n, ls in enumerate(listeners)}, manifest, 500
    )
    try:
        sender.send(deadline_s=20)
        for peer in peers:
            assert peer.wait_for("received")["sha256"] == {
                s.name: sha256(values(s)) for s in manifest.tensors
            }
    finally:
        sender.close()


def test_no_descriptor_stays_open() -> None:
    manifest, counts = mixed_manifest(), []
    for _ in range(4):
        trainer, worker = both_ends()
        sender_to({"r": trainer}, manifest).close()
        worker.close()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] <= counts[0]


def test_a_duplicate_of_a_connection_does_not_keep_it_open() -> None:
    """A forked process has one, for as long as it lives; the peer must hear of the end
    nevertheless.
    """
    trainer, worker = both_ends()
    duplicates = [os.dup(int(name)) for name in os.listdir("/proc/self/fd") if is_socket(name)]
    try:
        worker.close()
        with pytest.raises(TransferError, match="peer is gone"):
            trainer.broadcast(torch.zeros(5, dtype=torch.uint8), deadline_s=20)
    finally:
        trainer.close()
        for duplicate in duplicates:
            os.close(duplicate)


def test_nothing_leaves_before_the_receiver_is_there() -> None:
    """However small: what waits in the kernel would be read as the beginning of the next update."""
    trainer, worker = both_ends()
    try:
        with pytest.raises(TransferTimeout, match=r"\{1: 5\}"):
            trainer.broadcast(torch.ones(5, dtype=torch.uint8), deadline_s=0.3)
    finally:
        trainer.close()
        worker.close()


def test_ends_that_have_other_sizes_in_mind() -> None:
    trainer, worker = both_ends()
    failed: list[Exception] = []

    def receive() -> None:
        try:
            worker.broadcast(torch.zeros(6, dtype=torch.uint8), deadline_s=20)
        except TransferError as error:
            failed.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    try:
        with pytest.raises(TransferError, match="rank 1 requests 6 bytes, the trainer sends 5"):
            trainer.broadcast(torch.ones(5, dtype=torch.uint8), deadline_s=20)
    finally:
        trainer.close()
        thread.join(SOON_S)
        worker.close()
    assert failed


# ------------------------------------------------------------ failures


def test_sender_killed_mid_transfer_frees_the_receiver(start_peer: Callable[..., Any]) -> None:
    manifest = big_manifest(tensors=200, mib_each=1)
    peer, group = join_a_sending_peer(start_peer, manifest)
    try:
        with pytest.raises(TransferError, match="peer is gone") as caught:
            receive_and(peer.kill, after=5, group=group, manifest=manifest, deadline_s=30)
        assert time.monotonic() - caught.value.struck_at < SOON_S  # type: ignore[attr-defined]
    finally:
        group.close()


def test_sender_stopped_mid_transfer_runs_into_the_deadline(start_peer: Callable[..., Any]) -> None:
    manifest = big_manifest(tensors=200, mib_each=1)
    peer, group = join_a_sending_peer(start_peer, manifest)
    began = time.monotonic()
    with pytest.raises(TransferTimeout):
        receive_and(peer.stop, after=2, group=group, manifest=manifest, deadline_s=4)
    assert 4 <= time.monotonic() - began < 4 + SOON_S
    began = time.monotonic()
    group.close()
    assert time.monotonic() - began < SOON_S


def test_abort_from_another_thread_frees_a_receiver_of_a_stopped_sender(
    start_peer: Callable[..., Any],
) -> None:
    manifest = big_manifest(tensors=200, mib_each=1)
    peer, group = join_a_sending_peer(start_peer, manifest)
    aborted_at: list[float] = []

    def strike() -> None:
        peer.stop()

        def abort() -> None:
            aborted_at.append(time.monotonic())
            group.abort("the operator said so")

        threading.Timer(0.5, abort).start()

    with pytest.raises(TransferAborted, match="the operator said so"):
        receive_and(strike, after=5, group=group, manifest=manifest, deadline_s=30)
    freed_after_s = time.monotonic() - aborted_at[0]
    assert freed_after_s < SOON_S, f"freed after {freed_after_s:.3f} s"
    with pytest.raises(TransferAborted, match="the operator said so"):
        group.broadcast(torch.zeros(1, dtype=torch.uint8), deadline_s=1)
    group.abort("too late to matter")
    with pytest.raises(TransferAborted, match="the operator said so"):
        group.broadcast(torch.zeros(1, dtype=torch.uint8), deadline_s=1)
    group.close()
    group.close()


def test_receiver_killed_mid_transfer_frees_the_sender(pair: Callable[..., Any]) -> None:
    manifest = big_manifest(tensors=200, mib_each=1)
    peer, group = pair(manifest, load_s=0.05)
    struck_at: list[float] = []

    def strike(chunk: int) -> None:
        if chunk == 10:
            peer.kill()
            struck_at.append(time.monotonic())

    sender = sender_to({"replica-7": group}, manifest, before=strike)
    with pytest.raises(TransferError, match="'replica-7'"):
        sender.send(deadline_s=30)
    assert time.monotonic() - struck_at[0] < SOON_S
    sender.close()


def test_abort_frees_a_sender_whose_receiver_is_stopped(pair: Callable[..., Any]) -> None:
    manifest = big_manifest(tensors=64, mib_each=4)
    peer, group = pair(manifest)
    sender = sender_to({"r": group}, manifest)
    peer.stop()
    aborted_at: list[float] = []

    def abort() -> None:
        aborted_at.append(time.monotonic())
        sender.abort("watchdog: no progress")

    threading.Timer(1.0, abort).start()
    with pytest.raises(TransferAborted, match="watchdog: no progress"):
        sender.send(deadline_s=30)
    assert time.monotonic() - aborted_at[0] < SOON_S
    began = time.monotonic()
    sender.close()
    assert time.monotonic() - began < SOON_S


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_peer_lost_in_the_middle_of_a_chunk(pair: Callable[..., Any], how: str) -> None:
    """Half of the chunk is written when it happens."""
    manifest = Manifest(tensors=(TensorSpec(name="w.0", dtype="uint8", shape=(512 << 20,)),))
    peer, group = pair(manifest, deadline_s=60)
    freed_from: list[float] = []

    def strike() -> None:
        (peer.kill if how == "killed" else peer.stop)()
        if how == "stopped":
            time.sleep(0.5)
        freed_from.append(time.monotonic())
        if how == "stopped":
            group.abort("the operator said so")

    buffer_B = torch.zeros(manifest.nbytes, dtype=torch.uint8)
    threading.Timer(0.02, strike).start()
    with pytest.raises(TransferAborted if how == "stopped" else TransferError):
        group.broadcast(buffer_B, deadline_s=60)
    assert time.monotonic() - freed_from[0] < SOON_S
    began = time.monotonic()
    group.close()
    assert time.monotonic() - began < SOON_S


def test_a_process_with_a_stuck_send_can_exit(start_peer: Callable[..., Any]) -> None:
    """The receiver is stopped with a chunk half written; the sender gives up and its process ends
    at once.
    """
    manifest = big_manifest(tensors=1, mib_each=64)
    script = f"""
import os, signal, sys, time, torch
from orchestrator.errors import TransferTimeout
from weight_transfer.groups import open_listener
listener = open_listener(transport="tcp", host="127.0.0.1", world_size=2, device="cpu")
print(listener.rendezvous.model_dump_json(), flush=True)
group = listener.join(120)
pid = int(sys.stdin.readline())
time.sleep(0.3)  # the receiver is waiting for the chunk by now
os.kill(pid, signal.SIGSTOP)
try:
    group.broadcast(torch.zeros({64 << 20}, dtype=torch.uint8), deadline_s=1)
except TransferTimeout:
    print("timed out", flush=True)
group.close()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        rendezvous = process.stdout.readline()
        peer = start_peer(
            "receive", manifest_json=manifest.model_dump_json(), rendezvous=rendezvous.strip()
        )
        peer.wait_for("joined")
        process.stdin.write(f"{peer.process.pid}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "timed out\n"
        assert process.wait(SOON_S) == 0
    finally:
        process.kill()
        process.wait(10)


def test_one_dead_replica_ends_the_others_too(start_peer: Callable[..., Any]) -> None:
    """A replica must not wait for the second half of a version that will not come."""
    manifest = big_manifest(tensors=100, mib_each=1)
    listeners = [listen(), listen()]
    peers = [
        start_peer(
            "receive",
            manifest_json=manifest.model_dump_json(),
            rendezvous=listener.rendezvous.model_dump_json(),
        )
        for listener in listeners
    ]

    def strike(chunk: int) -> None:
        if chunk == 10:
            peers[1].kill()

    sender = sender_to(
        {"good": listeners[0].join(120), "bad": listeners[1].join(120)}, manifest, before=strike
    )
    try:
        with pytest.raises(TransferError, match="'bad'"):
            sender.send(deadline_s=30)
        assert peers[0].wait_for("failed", timeout_s=SOON_S)["error"] == "TransferError"
        with pytest.raises(TransferAborted):
            sender.send(deadline_s=30)
    finally:
        sender.close()


def test_a_failing_fill_tells_the_receiver(pair: Callable[..., Any]) -> None:
    """As an export that is not what the manifest says."""
    manifest = mixed_manifest()
    peer, group = pair(manifest, chunk_bytes=10)

    def fail(chunk: int) -> None:
        if chunk == 1:
            raise ManifestError("tensor 1 is not what was planned")

    with pytest.raises(ManifestError, match="not what was planned"):
        sender_to({"r": group}, manifest, 10, before=fail).send(deadline_s=20)
    assert peer.wait_for("failed", timeout_s=SOON_S)["error"] == "TransferError", (
        "the receiver must hear of it"
    )


def test_a_group_that_is_never_complete_times_out() -> None:
    listener = listen(world_size=3)
    began = time.monotonic()
    with pytest.raises(TransferTimeout, match=r"missing: ranks \[1, 2\]"):
        listener.join(0.5)
    assert time.monotonic() - began < SOON_S
    with pytest.raises(TransferAborted):
        listener.join(0.5)


def test_closing_the_listener_ends_a_join() -> None:
    listener = listen()
    threading.Timer(0.3, listener.close).start()
    with pytest.raises(TransferAborted, match="closed"):
        listener.join(30)


def test_a_trainer_that_is_gone_as_soon_as_it_has_joined_leaves_nobody_connecting() -> None:
    """A worker that has proved itself hears of the end, whether or not it was told to go."""
    for _ in range(20):
        ends = Join(3, then=lambda group: group.abort("the trainer died"))
        assert all(type(e) in (TransferError, TransferAborted) for e in ends.errors.values()), (
            ends.errors
        )
        for group in ends.groups.values():
            group.close()


def test_a_rank_that_breaks_off_ends_the_others_joining(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 has proved itself and dies while the others wait for rank 3."""
    is_there = threading.Event()

    def breaks_off(connection: socket.socket, secret: bytes, *, rank: int, deadline: float) -> None:
        if rank == 2:
            prove(connection, secret, rank=2)
            is_there.wait(60)
            raise RuntimeError("died")
        threading.Timer(1.0, is_there.set).start()  # by then rank 1 has proved itself too
        introduce(connection, secret, rank=rank, deadline=deadline)

    monkeypatch.setattr(socket_group, "introduce", breaks_off)
    ends = Join(4, absent=(3,), expected=RuntimeError)
    assert set(ends.errors) == {0, 1, 2} and not ends.groups
    assert "rank 2 disconnected" in str(ends.errors[0]) and "rank 2 disconnected" in str(
        ends.errors[1]
    ), ends.errors


@pytest.mark.parametrize("how", ["deadline", "closed"])
def test_a_rank_that_stands_still_while_connecting_holds_nobody(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    held = threading.Event()

    def stands_still(
        connection: socket.socket, secret: bytes, *, rank: int, deadline: float
    ) -> None:
        if rank == 2:
            held.wait(60)
            raise RuntimeError("ended")
        if how == "closed":
            threading.Timer(0.3, ends.listener.close).start()
        introduce(connection, secret, rank=rank, deadline=deadline)

    monkeypatch.setattr(socket_group, "introduce", stands_still)
    ends = Join(
        3,
        deadline_s=5.0 if how == "deadline" else 60.0,
        wait_for=(0, 1),
        expected=RuntimeError,
        start=False,
    )
    ends.start()
    held.set()
    said = "in time" if how == "deadline" else "listener was closed"
    assert said in str(ends.errors[0]) and said in str(ends.errors[1]), ends.errors


def test_joining_a_trainer_that_is_not_there() -> None:
    listener = listen()
    rendezvous = listener.rendezvous
    listener.close()
    began = time.monotonic()
    with pytest.raises(TransferError):
        join_tcp(rendezvous, rank=1, deadline_s=1.0)
    assert time.monotonic() - began < SOON_S


def test_bad_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cannot send cpu buffers; use tcp"):
        open_listener(transport="nccl", host="127.0.0.1", world_size=2, device="cpu")
    with pytest.raises(ConfigError, match="its own address"):
        open_listener(transport="tcp", host="203.0.113.7", world_size=2, device="cpu")
    with monkeypatch.context() as patched:
        patched.setattr(
            socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 1, 6, "", ("127.0.1.1", 0))]
        )
        with pytest.raises(ConfigError, match=r"`host` head is 127\.0\.1\.1 on this host"):
            open_listener(transport="tcp", host="head", world_size=2, device="cpu")
    rendezvous = Rendezvous(
        transport="tcp", host="127.0.0.1", port=1, secret=bytes(32), world_size=2
    )
    with pytest.raises(ConfigError, match="1 to 1"):
        join_tcp(rendezvous, rank=2, deadline_s=1)
    with pytest.raises(ConfigError, match="a secret of 0 bytes"):
        join_tcp(rendezvous.model_copy(update={"secret": b""}), rank=1, deadline_s=1)


def test_lives_beside_a_default_process_group_and_exits() -> None:
    """Both ends in one process with a default group up; a join that fails, an operation left in
    flight; then a plain exit.
    """
    script = """
import threading, torch, torch.distributed as dist
from orchestrator.errors import TransferError, TransferTimeout
from weight_transfer.groups import join_tcp, open_listener
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def opened(): return open_listener(transport="tcp", host="127.0.0.1", world_size=2, device="cpu")
lonely = opened()
try:
    lonely.join(0.2)
except TransferTimeout:
    print("timed out")
unused = opened()
listener, ends = opened(), {}
thread = threading.Thread(target=lambda: ends.update(worker=join_tcp(listener.rendezvous, rank=1, deadline_s=20)))
thread.start(); ends["trainer"] = listener.join(20); thread.join()
try:
    ends["worker"].broadcast(torch.zeros(5, dtype=torch.uint8), deadline_s=0.2)
except TransferTimeout:
    print("nothing came")
ends["worker"].close(); ends["trainer"].close()
one = torch.ones(1); dist.all_reduce(one); assert one.item() == 1
dist.destroy_process_group()
print("end of script")
"""  # noqa: E501
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.splitlines()) == (
        0,
        ["timed out", "nothing came", "end of script"],
    ), done.stderr


def join_a_sending_peer(
    start_peer: Callable[..., Any], manifest: Manifest
) -> tuple[Any, TransferGroup]:
    """A peer that sends 1 MiB chunks, 20 ms each, and this process's end of the group."""
    peer = start_peer(
        "send", manifest_json=manifest.model_dump_json(), chunk_bytes=1 << 20, load_s=0.02
    )
    rendezvous = Rendezvous.model_validate_json(peer.wait_for("listening")["rendezvous"])
    return peer, join_tcp(rendezvous, rank=1, deadline_s=120)


def receive_and(
    strike: Callable[[], None],
    *,
    after: int,
    group: TransferGroup,
    manifest: Manifest,
    deadline_s: float,
) -> None:
    """Receive, and strike the peer after some chunks; notes on the error when that was."""
    struck_at: list[float] = []
    chunks = 0

    def load(_: object) -> None:
        nonlocal chunks
        chunks += 1
        if chunks == after:
            strike()
            struck_at.append(time.monotonic())

    try:
        receive_chunks(
            group, manifest, in_chunks(manifest, 1 << 20), deadline_s=deadline_s, load=load
        )
    except TransferError as error:
        error.struck_at = struck_at[0] if struck_at else None  # type: ignore[attr-defined]
        raise


def is_socket(name: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    except FileNotFoundError:
        return False


def test_nccl_s_number_is_spelled_as_its_version():
    assert [version_text(n) for n in (22809, 22907, 23000)] == ["2.28.9", "2.29.7", "2.30.0"]
