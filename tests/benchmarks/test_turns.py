"""Benchmarks that start side by side and measure one at a time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import turns
from benchmarks.loop import LONGEST, balanced

SHORT_S = 0.3


@pytest.fixture(autouse=True)
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLICE_BENCH_LOCK", str(tmp_path / "lock"))
    monkeypatch.setenv("SPLICE_BENCH_LOCK_S", "20")


class Server:
    """Its start ends when it is told."""

    def __init__(self) -> None:
        self.may_start, self.log = threading.Event(), list[str]()

    def __enter__(self) -> Server:
        assert self.may_start.wait(20)
        self.log.append("started")
        return self

    def __exit__(self, *error: object) -> None:
        self.log.append("stopped" if error[0] is None else "failed")


def test_nobody_measures_beside_a_start() -> None:
    server, measured = Server(), threading.Event()

    def run() -> None:
        with turns.started(server):
            assert measured.wait(20)

    def measure() -> None:
        with turns.alone():
            assert server.log == ["started"]
            measured.set()

    threads = [threading.Thread(target=f) for f in (run, measure)]
    threads[0].start()
    time.sleep(SHORT_S)
    threads[1].start()
    time.sleep(SHORT_S)
    assert not measured.is_set(), "a server is starting"
    server.may_start.set()  # between start and stop it holds no lock, or nobody could measure
    for thread in threads:
        thread.join(20)
    assert measured.is_set() and server.log == ["started", "stopped"]


def test_one_measures_at_a_time_and_none_waits_for_ever() -> None:
    inside, most = list[int](), list[int]()

    def measure(number: int) -> None:
        for _ in range(3):
            with turns.alone():
                inside.append(number)
                most.append(len(inside))
                time.sleep(0.02)
                inside.remove(number)

    threads = [threading.Thread(target=measure, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(most) == 9 and max(most) == 1


def test_a_server_hears_of_a_failure() -> None:
    server = Server()
    server.may_start.set()
    with pytest.raises(ZeroDivisionError), turns.started(server):
        _ = 1 // 0
    assert server.log == ["started", "failed"]


def test_a_wait_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLICE_BENCH_LOCK_S", "0.2")
    with turns.alone(), pytest.raises(TimeoutError, match="other benchmarks held"), turns.alone():
        raise AssertionError("two measure")


def test_without_the_variable_nothing_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPLICE_BENCH_LOCK")
    assert not turns.is_shared()

    @contextlib.contextmanager
    def server() -> Iterator[int]:
        yield 7

    with turns.alone(), turns.alone(), turns.started(server()) as found:
        assert found == 7


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        ((64, 11.0, 3.0), (1024, 11.5, 7.8), 1850),  # the lines meet at 1,850.0
        ((64, 5.0, 3.0), (1024, 6.0, 4.0), 64),  # they never meet
        ((64, 9.0, 1.0), (1024, 9.0, 1.5), LONGEST),
        ((64, 1.0, 3.0), (1024, 1.0, 51.0), 24),
        ((64, 5.0, 4.0), (1024, 7.0, 5.0), 64),  # they part
    ],
)
def test_lengths_with_which_both_sides_take_as_long(
    one: tuple[int, float, float], two: tuple[int, float, float], expected: int
) -> None:
    assert balanced(one, two) == expected
