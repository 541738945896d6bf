"""The middleware in front of a tiny ASGI app and a scripted engine: doors, versions under a swap,
and the order of a commit.
"""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from inference_node.server import actions, all_workers
from inference_node.server.middleware import SpliceMiddleware
from inference_node.server.traffic import BEHIND
from orchestrator.protocol.messages import Manifest, TensorSpec, WireChunk, WireLayout
from tests.inference_node.scripted_server import SECRET, Engine, Server, events, run, soon


def test_a_node_that_leaves_within_its_body_has_asked_nothing() -> None:
    async def test() -> None:
        server, left, ran = Server(), asyncio.Event(), list[str]()

        async def run_action(action: str, *_: object) -> tuple[int, dict[str, object]]:
            ran.append(action)
            return 200, {}

        server.middleware.actions.run = run_action  # type: ignore[method-assign]
        left.set()
        pieces = [b'{"version": 1']
        await server.ask(
            "/splice/v1/resume", headers={"x-splice-secret": SECRET}, pieces=pieces, leaves=left
        )
        assert ran == []

    run(test)


@pytest.mark.parametrize(
    "path",
    [
        "/pause",
        "/resume",
        "/update_weights",
        "/start_weight_update",
        "/finish_weight_update",
        "/init_weight_transfer_engine",
        "/collective_rpc",
        "/sleep",
        "/wake_up",
        "/reset_prefix_cache",
        "/server_info",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/v1/models/../../pause",
        "/splice",
        "/v1/completions/",
        "/abort_requests",
        "/anything",
    ],
)
def test_closed_by_default(path: str) -> None:
    async def test() -> None:
        server = Server()
        for method in ("GET", "POST"):
            answer = await server.ask(path, {}, method=method, headers={"x-splice-secret": SECRET})
            assert answer.status == 403 and answer.headers["x-splice-version"] == "0"
        assert server.backend.asked == []

    run(test)


def test_control_routes_want_secret_and_loopback() -> None:
    async def test() -> None:
        server = Server()
        for headers, client in [
            ({}, "127.0.0.1"),
            ({"x-splice-secret": "other"}, "127.0.0.1"),
            ({"x-splice-secret": SECRET}, "10.0.0.7"),
        ]:
            assert (
                await server.ask("/splice/v1/reset", {}, headers=headers, client=client)
            ).status == 403
        assert (await server.control("reset")).json["layers"] == 1
        assert (await server.control("_workers")).status == 404
        no_secret = SpliceMiddleware(server.backend, name="tiny", secret="")
        server.middleware = no_secret
        assert (
            await server.ask("/splice/v1/reset", {}, headers={"x-splice-secret": ""})
        ).status == 403

    run(test)


def test_names_versions_and_header() -> None:
    async def test() -> None:
        server = Server(None)
        before = await server.ask("/v1/completions", {"model": "tiny"})
        assert (
            before.status == 503
            and "retry-after" in before.headers
            and before.headers["x-splice-version"] == "none"
        )
        await server.swap(0)
        assert (await server.ask("/v1/completions", {"model": "tiny"})).headers[
            "x-splice-version"
        ] == "0"
        await server.swap(1)
        assert server.engine.weight_version == "1"
        listed = json.loads((await server.ask("/v1/models", method="GET")).raw)
        assert [d["id"] for d in listed["data"]] == ["tiny@1", "tiny"]
        gone = await server.ask("/v1/completions", {"model": "tiny@0"})
        assert (
            gone.status == 404 and b"tiny@1" in gone.raw and gone.headers["x-splice-version"] == "1"
        )
        assert (
            json.loads((await server.ask("/v1/completions", {"model": "tiny@1"})).raw)["model"]
            == "tiny@1"
        )

    run(test)


def test_an_unpinned_answer_that_spans_a_swap_says_so() -> None:
    async def test() -> None:
        server = Server()
        plain = asyncio.ensure_future(
            server.ask("/v1/completions", {"model": "tiny", "hold": True})
        )
        stream = asyncio.ensure_future(
            server.ask("/v1/completions", {"model": "tiny", "hold": True, "stream": True})
        )
        await soon(lambda: len(server.backend.asked) == 2)
        await server.swap(1)
        server.backend.release.set()
        answer, streamed = await plain, await stream
        assert json.loads(answer.raw) == {"model": "tiny@1", "choices": [], "versions": [0, 1]}
        assert (
            answer.headers["x-splice-version"] == "1"
            and answer.headers["x-splice-versions"] == "0,1"
        )
        assert int(answer.headers["content-length"]) == len(answer.raw)
        assert events(streamed.raw) == [
            {"model": "tiny@0", "n": 0},
            {"model": "tiny@1", "n": 1, "versions": [0, 1]},
        ]
        assert streamed.raw.endswith(b"data: [DONE]\n\n")

    run(test)


def test_a_request_admitted_while_paused_runs_on_the_next_version_only() -> None:
    async def test() -> None:
        server = Server()
        await server.pause()
        waiting = asyncio.ensure_future(
            server.ask("/v1/completions", {"model": "tiny", "hold": True})
        )
        await soon(lambda: bool(server.backend.asked))
        refused = await server.ask("/v1/completions", {"model": "tiny@0"})
        assert refused.status == 409 and "retry-after" in refused.headers
        await server.control("CommitUpdate", version=1)
        server.backend.release.set()
        assert json.loads((await waiting).raw) == {"model": "tiny@1", "choices": []}

    run(test)


def test_a_pinned_request_lands_before_the_swap_or_is_ended() -> None:
    async def test() -> None:
        server = Server()
        late = asyncio.ensure_future(
            server.ask("/v1/completions", {"model": "tiny@0", "hold": True})
        )
        stream = asyncio.ensure_future(
            server.ask("/v1/completions", {"model": "tiny@0", "hold": True, "stream": True})
        )
        await soon(lambda: len(server.backend.asked) == 2)
        await server.swap(1)
        ended, cut = await late, await stream
        assert ended.status == 409 and b"tiny@1" in ended.raw and server.backend.disconnected
        assert (
            events(cut.raw)[-1]["error"]["code"] == 409
            and cut.raw.endswith(b"data: [DONE]\n\n")
            and not cut.more
        )

        server = Server()
        quick = asyncio.ensure_future(
            server.ask("/v1/completions", {"model": "tiny@0", "hold": True})
        )
        await soon(lambda: bool(server.backend.asked))
        swap = asyncio.ensure_future(server.swap(1, drain_s=5.0))
        await asyncio.sleep(0.05)
        server.backend.release.set()
        await swap
        answer = await quick
        assert (
            answer.status == 200
            and json.loads(answer.raw)["model"] == "tiny@0"
            and answer.headers["x-splice-version"] == "0"
        )
        assert server.engine.calls == ["pause keep True", "resume"]

    run(test)


def test_poison_ends_what_is_in_flight_and_commit_heals() -> None:
    async def test() -> None:
        server = Server()
        flying = asyncio.ensure_future(
            server.ask("/v1/completions", {"model": "tiny", "hold": True})
        )
        await soon(lambda: bool(server.backend.asked))
        await server.pause()
        await server.control("poison", reason="the trainer died half way")
        assert (await flying).status == 503
        refused = await server.ask("/v1/completions", {"model": "tiny"})
        assert (
            refused.status == 503
            and b"half way" in refused.raw
            and "retry-after" in refused.headers
        )
        server.backend.disconnected = False
        await server.swap(1)
        assert (await server.ask("/v1/completions", {"model": "tiny@1"})).status == 200

    run(test)


@pytest.mark.parametrize(
    ("mode", "call"),
    [
        ("keep", "pause keep True"),
        ("keep_kv", "pause keep False"),
        ("wait", "pause wait True"),
        ("abort", "pause abort True"),
    ],
)
def test_pause_modes(mode: str, call: str) -> None:
    async def test() -> None:
        server = Server()
        await server.swap(1, mode=mode)
        assert server.engine.calls == [call, "resume"]

    run(test)


class Stepping(Engine):
    """An engine whose outputs go through a queue, as vLLM's do; it makes one the moment it is
    resumed.
    """

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.outputs_queue: asyncio.Queue[str] = asyncio.Queue()
        self.get_output_async = self.outputs_queue.get
        self.output_processor = SimpleNamespace(request_states={})
        self.handed_out: list[tuple[str, int | None]] = []
        self._server = server

    async def hand_out(self) -> None:
        while True:
            output = await self.engine_core.get_output_async()
            await asyncio.sleep(0)
            self.handed_out.append((output, self._server.middleware.alias.version))

    async def resume_generation(self) -> None:
        await super().resume_generation()
        self.outputs_queue.put_nowait("new")


@pytest.mark.parametrize("breaks", [False, True])
def test_the_engine_goes_on_while_the_last_tokens_leave_and_none_goes_under_the_wrong_name(
    breaks: bool,
) -> None:
    """Also where the commit fails when the engine has gone on: then nothing goes out as the old
    version.
    """

    async def test() -> None:
        server = Server()
        server.engine = engine = Stepping(server)
        server.app.state.engine_client = engine
        task = asyncio.ensure_future(engine.hand_out())
        await server.control("reset")  # the first word: the gate is put up
        engine.outputs_queue.put_nowait("older")
        await soon(lambda: bool(engine.handed_out))
        await server.pause()
        for _ in range(3):
            engine.outputs_queue.put_nowait("old")
        if breaks:
            engine.broken["update_weight_version"] = RuntimeError("no")
        status = (await server.control("CommitUpdate", version=1)).status
        await soon(lambda: len(engine.handed_out) == 5)
        olds = [("older", 0)] + 3 * [("old", 0)]
        assert engine.handed_out[:4] == olds
        if breaks:
            assert (
                status == 500
                and (await server.ask("/v1/completions", {"model": "tiny"})).status == 503
            )
        else:
            assert (
                status == 200
                and engine.handed_out[4:] == [("new", 1)]
                and engine.weight_version == "1"
            )
        task.cancel()

    run(test)


class Busy(Stepping):
    """One whose outputs wait until it is resumed, but for the first."""

    async def hand_out(self) -> None:
        await self.engine_core.get_output_async()
        while "resume" not in self.calls:
            await asyncio.sleep(0)
        await super().hand_out()


@pytest.mark.parametrize("waiting", [BEHIND - 1, BEHIND])
def test_the_log_says_if_the_api_process_is_behind(
    waiting: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        server = Server()
        server.engine = engine = Busy(server)
        server.app.state.engine_client = engine
        await server.control("reset")  # the first word: the gate is put up
        task = asyncio.ensure_future(engine.hand_out())
        engine.outputs_queue.put_nowait("first")
        await server.pause()
        for _ in range(waiting):
            engine.outputs_queue.put_nowait("old")
        assert (await server.control("CommitUpdate", version=1)).status == 200
        task.cancel()

    with caplog.at_level("WARNING", "vllm.splice"):
        run(test)
    said = [r.getMessage() for r in caplog.records if "behind its engine" in r.getMessage()]
    assert len(said) == (waiting == BEHIND)


def test_commit_without_an_update_is_refused() -> None:
    async def test() -> None:
        server = Server()
        assert (await server.control("CommitUpdate", version=1)).status == 409
        assert server.middleware.alias.version == 0

    run(test)


@pytest.mark.parametrize(
    ("pause_breaks", "code", "tensors"),
    [(False, "internal", 2), (True, "internal", None)],
    ids=["workers gone astray", "no pause"],
)
def test_an_update_that_fails_says_whether_anything_may_have_been_written(
    pause_breaks: bool, code: str, tensors: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a replica that may hold a mixture would continue to serve it."""

    async def test() -> None:
        server = Server()
        manifest = Manifest(
            tensors=tuple(TensorSpec(name=n, dtype="float32", shape=(2,)) for n in "ab")
        )
        layout = WireLayout(chunks=(WireChunk(kind="reload", tensors=(0, 1)),))
        update = actions.PlannedUpdate(
            manifest=manifest, layout=layout, arrivals=all_workers.Arrivals(manifest, (), [{}])
        )
        server.middleware.actions._whole = update
        server.engine.broken["splice_receive_weights"] = RuntimeError("the executor lost an answer")
        if pause_breaks:
            monkeypatch.setattr(server.engine, "pause_scheduler_async", broken_pause)
        arguments = {"request_id": "u", "deadline_s": 5.0, "version": 1}
        answer = await server.ask(
            "/splice/v1/ReceiveWeights", arguments, headers={"x-splice-secret": SECRET}
        )
        lines = [json.loads(line) for line in answer.raw.splitlines()]
        if pause_breaks:
            assert answer.status == 500 and len(lines) == 1
            last = lines[0]
        else:
            assert [line.get("progress") for line in lines] == ["paused", None] and lines[1][
                "status"
            ] == 409
            last = lines[1]["answer"]
        assert (last["error"]["code"], last.get("tensors")) == (code, tensors)

    async def broken_pause(**_: Any) -> None:
        raise RuntimeError("the engine does not listen")

    run(test)
