"""Which version a request enters the engine under, what its answer says of that, and which cached
prefixes it may use.
"""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from inference_node.server import bodies, dialect
from tests.inference_node.scripted_server import Server, events, run, soon

PATH = "/v1/completions"


def asked(server: Server, body: Any, path: str = PATH, **more: Any) -> asyncio.Task[Any]:
    return asyncio.ensure_future(server.ask(path, {"model": "tiny", **body}, **more))


def salts(server: Server) -> list[str]:
    return [request.cache_salt for request in server.engine.entered]


@pytest.mark.parametrize("mode", ["keep", "keep_kv", "wait", "abort"])
def test_no_cached_prefix_is_shared_over_a_swap(mode: str) -> None:
    async def test() -> None:
        server = Server()
        for _ in range(2):
            await asked(server, {})
        await server.swap(1, mode=mode)
        await asked(server, {})
        first, second, third = salts(server)
        assert first and first == second and third and third != first

    run(test)


def test_a_clients_salt_counts_within_a_version_and_a_resync_of_a_version_draws_a_new_one() -> None:
    async def test() -> None:
        server = Server()
        for salt in ("mine", "mine", "theirs", None):
            await asked(server, {"cache_salt": salt})
        await server.swap(0)
        await asked(server, {"cache_salt": "mine"})
        mine, same, theirs, none, later = salts(server)
        assert mine == same and len({mine, theirs, none, later}) == 4 and all(salts(server))

    run(test)


def test_an_update_that_is_given_up_leaves_the_cache_useful() -> None:
    async def test() -> None:
        server = Server()
        await asked(server, {})
        await server.pause(mode="keep_kv")
        waiting = asked(server, {})
        await soon(lambda: len(server.backend.asked) == 2)
        assert len(server.engine.entered) == 1
        await server.control("resume")
        answer = await waiting
        assert len(set(salts(server))) == 1 and answer.headers["x-splice-version"] == "0"

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_what_comes_while_the_engine_stands_still_enters_under_the_next_version(
    stream: bool,
) -> None:
    async def test() -> None:
        server = Server()
        await server.pause()
        waiting = asked(server, {"stream": stream})
        await soon(lambda: bool(server.backend.asked))
        assert server.engine.entered == []
        await server.control("CommitUpdate", version=1)
        answer = await waiting
        assert (
            answer.headers["x-splice-version"] == "1" and "x-splice-versions" not in answer.headers
        )
        said = events(answer.raw) if stream else [json.loads(answer.raw)]
        assert all(event["model"] == "tiny@1" and "versions" not in event for event in said)

    run(test)


def test_what_comes_between_the_pause_and_its_answer_enters_under_the_next_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM may take seconds to stand still; what enters meanwhile runs on the next weights all the
    same.
    """

    async def test() -> None:
        server, answers = Server(), asyncio.Event()

        async def slow(**_: Any) -> None:
            await answers.wait()

        monkeypatch.setattr(server.engine, "pause_scheduler_async", slow)
        pausing = asyncio.ensure_future(server.pause())
        await asyncio.sleep(0.05)
        waiting = asked(server, {})
        await soon(lambda: bool(server.backend.asked))
        answers.set()
        await pausing
        await server.control("CommitUpdate", version=1)
        answer = await waiting
        assert (
            json.loads(answer.raw) == {"model": "tiny@1", "choices": []}
            and answer.headers["x-splice-version"] == "1"
        )

    run(test)


@pytest.mark.parametrize(
    ("mode", "state", "versions"),
    [
        ("keep", {"queued": True}, [1]),
        ("keep_kv", {"queued": True}, [0, 1]),
        ("keep", {}, [0, 1]),
        ("keep", {"done": True}, [0]),
    ],
    ids=[
        "nothing was made",
        "its prompt may have been read",
        "tokens were made",
        "all tokens were made",
    ],
)
def test_a_request_in_the_engine_says_what_made_it(
    mode: str, state: dict[str, bool], versions: list[int]
) -> None:
    async def test() -> None:
        server = Server()
        flying = asked(server, {"hold": True, **state})
        await soon(lambda: bool(server.engine.entered))
        await server.swap(1, mode=mode)
        server.backend.release.set()
        answer = await flying
        body = json.loads(answer.raw)
        assert (
            body["model"] == f"tiny@{versions[-1]}" and body.get("versions", versions) == versions
        )
        assert ("versions" in body) == (len(versions) > 1) and answer.headers[
            "x-splice-version"
        ] == str(versions[-1])

    run(test)


def test_a_stream_that_is_not_read_ends_instead_of_mixing_two_versions() -> None:
    async def test() -> None:
        server = Server()
        flying = asked(server, {"stream": True, "hold": True, "unread": True})
        await soon(lambda: bool(server.engine.entered))
        await server.swap(1)
        first, last = events((await flying).raw)
        assert first["model"] == "tiny@0"
        assert last["error"]["code"] == 409 and "not read" in last["error"]["message"]

    run(test)


def test_only_streams_hold_tokens_back() -> None:
    """vLLM asserts that a request with an interval has a detokenizer; pooling has none."""
    pooling = SimpleNamespace(detokenizer=None, stream_interval=1)
    stream = SimpleNamespace(detokenizer=object(), stream_interval=4)
    states = {"pooling": pooling, "stream": stream}
    engine = SimpleNamespace(output_processor=SimpleNamespace(request_states=states))
    for name in (*states, "gone"):
        dialect.stream_every(engine, name, 8)
    assert (pooling.stream_interval, stream.stream_interval) == (1, 8)
    dialect.stream_every(engine, "stream", 1)
    assert stream.stream_interval == 8, "the server's own interval wins"


@pytest.mark.parametrize(
    ("body", "interval"),
    [
        (b'{"stream_interval": 32}', 32),
        (b'{"sampling_params": {"stream_interval": 8}}', 8),
        (b'{"stream_interval": "8"}', 1),
        (b'{"stream_interval": -1}', 1),
        (b"[1]", 1),
    ],
)
def test_the_interval_of_a_body(body: bytes, interval: int) -> None:
    assert bodies.stream_interval_of(bodies.fields_of(body)) == interval


def test_a_client_that_leaves_while_its_request_waits_leaves_nothing_behind() -> None:
    async def test() -> None:
        server, leaves = Server(), asyncio.Event()
        await server.pause()
        waiting = asked(server, {}, leaves=leaves)
        await soon(lambda: bool(server.engine.output_processor.request_states))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert server.engine.output_processor.request_states == {} and not server.middleware.flights
        await server.control("CommitUpdate", version=1)
        assert server.engine.entered == []

    run(test)


def test_every_event_of_a_response_says_its_versions_and_none_comes_before_the_first_token() -> (
    None
):
    async def test() -> None:
        server = Server()
        await server.pause()
        waiting = asked(server, {"prelude": True}, "/v1/responses")
        await soon(lambda: bool(server.backend.asked))
        await server.control("CommitUpdate", version=1)
        answer = await waiting
        assert answer.headers["x-splice-version"] == "1" and answer.raw.startswith(
            b"event: response.created\n"
        )
        model = {"response": {"model": "tiny@1"}, "versions": [1]}
        assert events(answer.raw) == [model, {"delta": "w3", "versions": [1]}, model]

        server = Server()
        spanning = asked(server, {"prelude": True, "hold": True}, "/v1/responses")
        await soon(lambda: bool(server.engine.entered))
        await server.swap(1)
        server.backend.release.set()
        assert [event["versions"] for event in events((await spanning).raw)] == [[0], [0], [0, 1]]

    run(test)
