"""The router in front of HTTP servers that answer as replicas do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientPayloadError, ClientSession, web
from aiohttp.test_utils import TestServer

from orchestrator.protocol.messages import NodeStatus
from splice import replica_router
from splice.replica_router import REPLICA_HEADER, STATE_ROUTE, ReplicaRouter, application

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeReplica:
    """Serves one version; counts requests. A request for `tiny` with `hang` never ends."""

    def __init__(self, node_id: str, version: int) -> None:
        self.node_id, self.version, self.asked = node_id, version, 0
        self.headers: dict[str, str] = {}
        self.left = asyncio.Event()
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        self.server = TestServer(app, handler_cancellation=True)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        self.headers = dict(request.headers)
        body = await request.json()
        if self.version < 0:
            return web.json_response({"error": "nothing is served"}, status=503)
        if body["model"] not in ("tiny", f"tiny@{self.version}"):
            return web.json_response({"error": f"serves tiny@{self.version}"}, status=404)
        if body.get("hang"):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.left.set()
                raise
        if body.get("slow"):
            await asyncio.sleep(0.5)
        if not body.get("stream"):
            return web.json_response({"model": f"tiny@{self.version}"})
        response = web.StreamResponse(headers={"x-splice-version": str(self.version)})
        await response.prepare(request)
        await response.write(b"first")
        if body.get("breaks"):
            assert request.transport is not None
            request.transport.abort()
            return response
        await asyncio.sleep(0.5)
        await response.write(b"second")
        return response

    def status(self, state: Any = "ready") -> NodeStatus:
        url = str(self.server.make_url("")).rstrip("/")
        return NodeStatus(
            node_id=self.node_id, role="inference", state=state, detail={"base_url": url}
        )


@asynccontextmanager
async def routed(*versions: int) -> AsyncIterator[tuple[ReplicaRouter, list[FakeReplica], Any]]:
    """A router, its replicas, and a client's session at the router."""
    replicas = [FakeReplica(f"inference-{i}", version) for i, version in enumerate(versions)]
    for replica in replicas:
        await replica.server.start_server()
    router = ReplicaRouter()
    await router.update([replica.status() for replica in replicas])
    front = TestServer(application(router, max_body_bytes=2**16), handler_cancellation=True)
    await front.start_server()
    async with ClientSession(base_url=str(front.make_url(""))) as http:
        yield router, replicas, http
    await router.close()
    await front.close()
    for replica in replicas:
        await replica.server.close()


async def ask(http: ClientSession, model: str = "tiny", **more: Any) -> tuple[int, Any, str]:
    """Status, body, and the replica that answered."""
    async with http.post("/v1/completions", json={"model": model, **more}) as answer:
        replica = answer.headers.get(REPLICA_HEADER, "")
        return answer.status, json.loads(await answer.text()), replica


def test_a_pinned_request_reaches_the_replica_that_serves_it():
    async def run() -> None:
        async with routed(1, 2) as (_, replicas, http):
            for _ in range(4):
                assert await ask(http, "tiny@1") == (200, {"model": "tiny@1"}, "inference-0")
                assert await ask(http, "tiny@2") == (200, {"model": "tiny@2"}, "inference-1")
            code, body, _ = await ask(http, "tiny@3")
            assert code == 404 and "serves" in body["error"], "a replica's own words"
            replicas[0].version = 2
            served = [await ask(http, "tiny@2") for _ in range(4)]
            assert {code for code, *_ in served} == {200}

    asyncio.run(run())


def test_an_unpinned_404_is_the_answer():
    async def run() -> None:
        async with routed(1, 1) as (_, replicas, http):
            assert (await ask(http, "other"))[0] == 404
            assert sum(replica.asked for replica in replicas) == 1

    asyncio.run(run())


def test_a_lost_replica_gets_no_request_and_its_requests_go_elsewhere():
    async def run() -> None:
        async with routed(1, 1) as (router, (one, other), http):
            router.replicas.by_id["inference-1"].in_flight = 5
            hanging = asyncio.ensure_future(ask(http, "tiny", hang=True))
            while not one.asked:
                await asyncio.sleep(0.01)
            await router.update([one.status("lost")])
            while not other.asked:
                await asyncio.sleep(0.01)
            before = one.asked
            assert {(await ask(http))[2] for _ in range(4)} == {"inference-1"}
            assert one.asked == before
            hanging.cancel()
            await asyncio.wait_for(other.left.wait(), 10)

            await router.update([one.status()])
            router.replicas.by_id["inference-1"].in_flight = 5
            assert (await ask(http))[2] == "inference-0", "it is back"

    asyncio.run(run())


@pytest.mark.parametrize("how", ["closed", "serves nothing"])
def test_before_the_orchestrator_knows_no_request_fails(how: str):
    async def run() -> None:
        async with routed(1, 1) as (router, (one, _), http):
            if how == "closed":
                await one.server.close()
            else:
                one.version = -1
            assert [(await ask(http))[0] for _ in range(4)] == [200] * 4
            assert router.replicas.by_id["inference-0"].in_flight == 0

    asyncio.run(run())


def test_a_request_at_a_replica_without_a_vllm_goes_elsewhere_and_its_streams_go_on():
    async def run() -> None:
        async with routed(1, 1) as (router, (one, other), http):
            router.replicas.by_id["inference-1"].in_flight = 5
            body = {"model": "tiny", "stream": True}
            async with http.post("/v1/completions", json=body) as stream:
                assert stream.headers[REPLICA_HEADER] == "inference-0"
                hanging = asyncio.ensure_future(ask(http, "tiny", hang=True))
                while one.asked < 2:
                    await asyncio.sleep(0.01)
                await router.update([one.status("connected")])
                while not other.asked:
                    await asyncio.sleep(0.01)
                await asyncio.wait_for(one.left.wait(), 10)
                assert await stream.read() == b"firstsecond"
            hanging.cancel()

    asyncio.run(run())


def test_the_only_replica_is_waited_for():
    """While the orchestrator restarts, it may say "connected" for a moment."""

    async def run() -> None:
        async with routed(1) as (router, (one,), http):
            asked = asyncio.ensure_future(ask(http, "tiny", slow=True))
            while not one.asked:
                await asyncio.sleep(0.01)
            await router.update([one.status("connected")])
            assert (await asked)[0] == 200

    asyncio.run(run())


def test_a_stream_passes_as_it_comes_and_breaks_off_as_it_does():
    async def run() -> None:
        async with routed(7) as (_, _, http):
            body = {"model": "tiny", "stream": True}
            async with http.post("/v1/completions", json=body) as answer:
                assert answer.headers["x-splice-version"] == "7"
                assert await asyncio.wait_for(answer.content.readany(), 0.4) == b"first"
                assert await answer.content.read() == b"second"
            body["breaks"] = True
            async with http.post("/v1/completions", json=body) as answer:
                with pytest.raises(ClientPayloadError):
                    await answer.read()

    asyncio.run(run())


def test_requests_are_spread_by_what_is_in_flight():
    async def run() -> None:
        async with routed(1, 1, 1) as (_, replicas, http):
            asked = [asyncio.ensure_future(ask(http, "tiny", hang=True)) for _ in range(9)]
            while sum(replica.asked for replica in replicas) < 9:
                await asyncio.sleep(0.01)
            assert [replica.asked for replica in replicas] == [3, 3, 3]
            for one in asked:
                one.cancel()
            for replica in replicas:
                await asyncio.wait_for(replica.left.wait(), 10)

    asyncio.run(run())


def test_nobody_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replica_router, "WAIT_S", 0.1)

    async def run() -> None:
        async with routed() as (_, _, http):
            code, body, _ = await ask(http)
            assert code == 503 and "no inference node" in body["error"]["message"]
            assert (await http.get("/health")).status == 503
            assert (await (await http.get(STATE_ROUTE)).json())["replicas"] == {}

    asyncio.run(run())


def test_a_replica_that_comes_is_waited_for():
    async def run() -> None:
        async with routed(1) as (router, (one,), http):
            await router.update([one.status("connected")])
            asked = asyncio.ensure_future(ask(http))
            await asyncio.sleep(0.3)
            assert not asked.done()
            await router.update([one.status()])
            assert (await asked)[0] == 200

    asyncio.run(run())


def test_the_secret_of_a_replica_passes_nobody():
    async def run() -> None:
        async with routed(1) as (_, (one,), http):
            headers = {"X-Splice-Secret": "x", "Authorization": "Bearer y"}
            await http.post("/v1/completions", json={"model": "tiny"}, headers=headers)
            assert "X-Splice-Secret" not in one.headers
            assert one.headers["Authorization"] == "Bearer y"

    asyncio.run(run())
