"""What a request's body may be; and that every answer says the version, whatever went wrong."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from inference_node.server import bodies
from inference_node.shared.names import MAX_BODY_BYTES
from tests.inference_node.scripted_server import Server, run

PATH = "/v1/completions"
LIMIT = 2**16


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv(MAX_BODY_BYTES, str(LIMIT))
    return Server()


def refused(server: Server, status: int, **request: Any) -> Any:
    async def test() -> None:
        answer = await server.ask(PATH, **request)
        assert answer.status == status and answer.headers["x-splice-version"] == "0", answer
        answers.append(answer)

    answers: list[Any] = []
    run(test)
    assert server.backend.asked == []
    return answers[0]


def test_a_body_that_says_it_is_too_large_is_refused_unread(server: Server) -> None:
    answer = refused(server, 413, pieces=[], headers={"content-length": str(LIMIT + 1)})
    assert str(LIMIT).encode() in answer.raw and b"max_body_bytes" in answer.raw


def test_a_body_that_does_not_end_is_refused_when_it_is_too_large(server: Server) -> None:
    read = iter(range(10**6))
    refused(server, 413, pieces=(b"x" * 1000 for _ in read))
    assert next(read) <= LIMIT / 1000 + 2


def test_a_body_at_the_limit_is_taken(server: Server) -> None:
    async def test() -> None:
        empty = len('{"model": "tiny", "p": ""}')
        assert (await server.ask(PATH, {"model": "tiny", "p": "x" * (LIMIT - empty)})).status == 200

    run(test)


def test_a_body_that_does_not_come_is_not_waited_for(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "READ_S", 0.05)
    refused(server, 408, pieces=[b"{"])


def test_so_many_unfinished_bodies_are_held_and_no_more(server: Server) -> None:
    async def test() -> None:
        half = [b"x" * (LIMIT // 2)]
        held = [
            asyncio.ensure_future(server.ask(PATH, pieces=half))
            for _ in range(2 * bodies.BODIES_AT_ONCE)
        ]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in held)
        answer = await server.ask(PATH, pieces=half)
        assert (
            answer.status == 503
            and "retry-after" in answer.headers
            and answer.headers["x-splice-version"] == "0"
        )
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        assert (await server.ask(PATH, {"model": "tiny"})).status == 200

    run(test)


@pytest.mark.parametrize("start", [b"", b'{"model":'])
def test_a_body_nested_too_deeply_is_refused(server: Server, start: bytes) -> None:
    async def test() -> None:
        raw = start + b"[" * 50_000
        answer = await server.ask(PATH, pieces=itertools.chain([raw]), ends=True)
        assert (
            answer.status == 400
            and answer.headers["x-splice-version"] == "0"
            and b"nested" in answer.raw
        )

    run(test)


def test_a_handler_that_breaks_is_answered_with_the_version(server: Server) -> None:
    async def test() -> None:
        answer = await server.ask(PATH, {"model": "tiny", "breaks": True})
        assert (
            answer.status == 500
            and answer.headers["x-splice-version"] == "0"
            and b"breaks" in answer.raw
        )

    run(test)


def test_a_poisoned_replica_is_not_healthy_until_a_commit(server: Server) -> None:
    async def test() -> None:
        async def health() -> int:
            return int((await server.ask("/health", method="GET")).status)

        assert await health() == 200
        await server.control("poison", reason="its orchestrator is gone")
        answer = await server.ask("/health", method="GET")
        assert (
            answer.status == 503
            and answer.headers["x-splice-version"] == "0"
            and b"orchestrator" in answer.raw
        )
        await server.swap(1)
        assert await health() == 200

    run(test)
