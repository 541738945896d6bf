"""Connections from somebody who does not have the rendezvous's secret: none gets a byte of the
weights, none keeps the workers out.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import psutil
import pytest
import torch

from orchestrator.errors import TransferError, TransferTimeout
from orchestrator.protocol.messages import Rendezvous
from tests.weight_transfer.handshakes import answer_to, knock, prove, read, want
from weight_transfer import handshake
from weight_transfer.groups import GroupListener, TransferGroup, join_tcp, open_listener
from weight_transfer.handshake import ANSWER_BYTES, CHALLENGE_BYTES, PROOF_BYTES

WEIGHTS_B = torch.randint(
    0, 256, (1 << 16,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)
JOIN_S = 20.0


class Trainer:
    """Rank 0 on a thread: joins, then sends `WEIGHTS_B`."""

    def __init__(self, *, world_size: int = 2, deadline_s: float = JOIN_S) -> None:
        self.listener: GroupListener = open_listener(
            transport="tcp", host="127.0.0.1", world_size=world_size, device="cpu"
        )
        self.rendezvous = self.listener.rendezvous
        self.error: TransferError | None = None
        self._deadline_s = deadline_s
        self._group: TransferGroup | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._group = self.listener.join(self._deadline_s)
            self._group.broadcast(WEIGHTS_B, deadline_s=JOIN_S)
        except TransferError as error:
            self.error = error

    def wait(self) -> None:
        self._thread.join(2 * JOIN_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.listener.close()
        self.wait()
        if self._group is not None:
            self._group.close()


@pytest.fixture
def start_trainer() -> Iterator[Callable[..., Trainer]]:
    trainers: list[Trainer] = []

    def start(**options: int) -> Trainer:
        trainers.append(Trainer(**options))  # type: ignore[arg-type]
        return trainers[-1]

    yield start
    for trainer in trainers:
        trainer.close()


@pytest.fixture
def trainer(start_trainer: Callable[..., Trainer]) -> Trainer:
    return start_trainer()


def assert_worker_is_served(trainer: Trainer) -> None:
    """The real worker joins and gets every byte."""
    began = time.monotonic()
    group = join_tcp(trainer.rendezvous, rank=1, deadline_s=JOIN_S)
    try:
        buffer_B = torch.zeros_like(WEIGHTS_B)
        group.broadcast(buffer_B, deadline_s=JOIN_S)
        trainer.wait()
        assert trainer.error is None and torch.equal(buffer_B, WEIGHTS_B)
        assert time.monotonic() - began < JOIN_S / 2
    finally:
        group.close()


def assert_nothing_but_a_challenge(stranger: socket.socket, *, already: int = 0) -> None:
    """All that ever comes is a challenge, then the end."""
    stranger.settimeout(JOIN_S)
    with suppress(ConnectionResetError):  # dropped with bytes of ours unread
        assert len(read(stranger, 1000)) == CHALLENGE_BYTES - already


def say_again_and_again(stranger: socket.socket, said: bytes) -> None:
    until = time.monotonic() + JOIN_S / 2
    while time.monotonic() < until:
        stranger.sendall(said)
        time.sleep(0.1)


# ------------------------------------------------------------ at the trainer's port


def test_a_stranger_with_the_wrong_secret(trainer: Trainer) -> None:
    wrong = trainer.rendezvous.model_copy(update={"secret": secrets.token_bytes(32)})
    with pytest.raises(TransferTimeout, match="dropped every connection"):
        join_tcp(wrong, rank=1, deadline_s=0.5)
    assert_worker_is_served(trainer)


@pytest.mark.parametrize(
    "said",
    [bytes(ANSWER_BYTES), b"\x00\x00\x00\x01" + bytes(ANSWER_BYTES - 4), b"\xff" * (1 << 16)],
)
def test_a_stranger_without_a_secret(trainer: Trainer, said: bytes) -> None:
    with knock(trainer.rendezvous) as stranger:
        stranger.sendall(said)
        assert_nothing_but_a_challenge(stranger)
    assert_worker_is_served(trainer)


def test_a_stranger_that_is_there_first_and_says_nothing(trainer: Trainer) -> None:
    with knock(trainer.rendezvous) as stranger:
        assert_worker_is_served(trainer)
        assert_nothing_but_a_challenge(stranger)


def test_an_endless_handshake(
    start_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte now and then: it ends after `PROOF_S`, however alive it is."""
    monkeypatch.setattr(handshake, "PROOF_S", 1.0)
    trainer = start_trainer()
    with knock(trainer.rendezvous) as stranger:
        read(stranger, CHALLENGE_BYTES)
        began = time.monotonic()
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            say_again_and_again(stranger, b"\0")
        assert time.monotonic() - began < 5.0
    assert_worker_is_served(trainer)


def test_more_strangers_than_are_heard(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "PROOF_S", 10 * JOIN_S)
    with ExitStack() as stack:
        strangers = [
            stack.enter_context(knock(trainer.rendezvous))
            for _ in range(handshake.MOST_UNPROVEN + 40)
        ]
        assert_nothing_but_a_challenge(strangers[0])  # pushed out
        assert_worker_is_served(trainer)


def test_strangers_that_keep_coming(trainer: Trainer) -> None:
    ended = threading.Event()

    def come() -> None:
        while not ended.is_set():
            try:
                knock(trainer.rendezvous).close()
            except OSError:  # the listener is closed: all have joined
                return

    crowd = [threading.Thread(target=come, daemon=True) for _ in range(2)]
    for one in crowd:
        one.start()
    try:
        assert_worker_is_served(trainer)
    finally:
        ended.set()
        for one in crowd:
            one.join(JOIN_S)


def test_a_replayed_proof(trainer: Trainer) -> None:
    """What a worker answered to one challenge is not an answer to another."""
    with knock(trainer.rendezvous) as worker, knock(trainer.rendezvous) as stranger:
        recorded = answer_to(read(worker, CHALLENGE_BYTES), trainer.rendezvous.secret, rank=1)
        read(stranger, CHALLENGE_BYTES)
        stranger.sendall(recorded)
        assert_nothing_but_a_challenge(stranger, already=CHALLENGE_BYTES)
    assert_worker_is_served(trainer)


@pytest.mark.parametrize("rank", [0, 2, 1 << 31])
def test_a_rank_that_no_worker_has(trainer: Trainer, rank: int) -> None:
    with knock(trainer.rendezvous) as stranger:
        stranger.sendall(
            answer_to(read(stranger, CHALLENGE_BYTES), trainer.rendezvous.secret, rank=rank)
        )
        assert_nothing_but_a_challenge(stranger, already=CHALLENGE_BYTES)
    assert_worker_is_served(trainer)


def test_the_place_of_a_worker_that_is_there_is_not_taken(
    start_trainer: Callable[..., Trainer],
) -> None:
    """Not even with its proof: the first one of a rank stays."""
    trainer = start_trainer(world_size=3)
    secret = trainer.rendezvous.secret
    with (
        knock(trainer.rendezvous) as first,
        knock(trainer.rendezvous) as second,
        knock(trainer.rendezvous) as other,
    ):
        prove(first, secret, rank=1)
        second.sendall(answer_to(read(second, CHALLENGE_BYTES), secret, rank=1))
        assert_nothing_but_a_challenge(second, already=CHALLENGE_BYTES)
        prove(other, secret, rank=2)
        for worker in (first, other):
            assert read(worker, 2) == b"\0\0"
            want(worker, WEIGHTS_B.numel())
        for worker in (first, other):
            assert read(worker, WEIGHTS_B.numel()) == WEIGHTS_B.numpy().tobytes()


def test_a_proof_after_the_join_is_over_comes_too_late(trainer: Trainer) -> None:
    with knock(trainer.rendezvous) as late:
        challenge = read(late, CHALLENGE_BYTES)
        assert_worker_is_served(trainer)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            say_again_and_again(late, answer_to(challenge, trainer.rendezvous.secret, rank=1))


def test_a_worker_with_the_proof_that_never_reads_is_ended_by_the_deadline() -> None:
    """The trainer's thread would stand in a blocking send for ever."""
    listener = open_listener(transport="tcp", host="127.0.0.1", world_size=2, device="cpu")
    with knock(listener.rendezvous) as worker:
        proving = threading.Thread(
            target=prove, args=(worker, listener.rendezvous.secret), kwargs={"rank": 1}
        )
        proving.start()
        group = listener.join(JOIN_S)
        proving.join(JOIN_S)
        want(worker, 64 << 20)
        began = time.monotonic()
        try:
            with pytest.raises(TransferTimeout, match=r"is the peer stopped"):
                group.broadcast(torch.zeros(64 << 20, dtype=torch.uint8), deadline_s=1.0)
            assert time.monotonic() - began < 5.0
        finally:
            group.close()


def test_it_listens_on_its_own_host_only() -> None:
    before = {
        c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN
    }
    listener = open_listener(transport="tcp", host="127.0.0.1", world_size=2, device="cpu")
    after = {
        c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN
    }
    listener.close()
    assert after - before == {("127.0.0.1", listener.rendezvous.port)}


def test_the_secret_is_new_each_time_and_not_printed() -> None:
    found = []
    for _ in range(2):
        listener = open_listener(transport="tcp", host="127.0.0.1", world_size=2, device="cpu")
        found.append(listener.rendezvous)
        listener.close()
    assert found[0].secret != found[1].secret and len(found[0].secret) == 32
    assert "secret" not in repr(found[0])


# ------------------------------------------------------------ in the trainer's place


class FalseTrainer:
    """Takes the port that a trainer had and says what it likes; keeps what it hears."""

    def __init__(self, say: Callable[[bytes], bytes]) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.heard, self._say = b"", say
        self.rendezvous = Rendezvous(
            transport="tcp",
            host="127.0.0.1",
            port=self._listening.getsockname()[1],
            secret=os.urandom(32),
            world_size=2,
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        connection, _ = self._listening.accept()
        with connection:
            connection.sendall(bytes(CHALLENGE_BYTES))
            self.heard = read(connection, ANSWER_BYTES)
            connection.sendall(self._say(self.heard) + b"\0\0" + bytes(64))
            with suppress(ConnectionResetError):
                connection.recv(1)  # until the worker has left

    def close(self) -> None:
        self._thread.join(JOIN_S)
        self._listening.close()


@pytest.mark.parametrize(
    "say",
    [lambda heard: os.urandom(PROOF_BYTES), lambda heard: heard[-PROOF_BYTES:]],
    ids=["any", "the worker's own proof"],
)
def test_a_stranger_in_the_trainers_place(say: Callable[[bytes], bytes]) -> None:
    """The worker takes no weights from it, and tells it nothing that helps."""
    stranger = FalseTrainer(say)
    try:
        with pytest.raises(TransferError, match="does not know the trainer's secret"):
            join_tcp(stranger.rendezvous, rank=1, deadline_s=JOIN_S)
        assert (
            len(stranger.heard) == ANSWER_BYTES and stranger.rendezvous.secret not in stranger.heard
        )
    finally:
        stranger.close()
