"""The middleware in front of a tiny ASGI app and a scripted engine, and requests to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine, Iterable
from types import SimpleNamespace
from typing import Any

from inference_node.server.middleware import SpliceMiddleware
from orchestrator.protocol import messages as m

SECRET = "s3cret"


class Engine:
    """Stands in for vLLM's engine client: remembers what it was asked to do. It is its own renderer
    and engine core.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.weight_version = ""
        self.broken: dict[str, Exception] = {}
        self.renderer = self.engine_core = self
        self.entered: list[Any] = []
        self.output_processor = SimpleNamespace(request_states={}, abort_requests=self._forget)

    async def add_request_async(self, request: Any) -> None:
        self.entered.append(request)

    def _forget(self, request_ids: tuple[str, ...], *, internal: bool) -> None:
        for request_id in request_ids:
            del self.output_processor.request_states[request_id]

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
        self.calls.append(method)
        if method in self.broken:
            raise self.broken[method]
        return [{"seconds": 0.0, "layers": 1}]

    async def clear_mm_cache_async(self) -> None:
        """What else vLLM drops with its caches."""

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause {mode} {clear_cache}")

    async def resume_generation(self) -> None:
        self.calls.append("resume")

    async def update_weight_version(self, version: str) -> None:
        if "update_weight_version" in self.broken:
            raise self.broken["update_weight_version"]
        self.weight_version = version


class Backend:
    """The wrapped app: answers like vLLM, from the same list of names, and lets a test hold an
    answer back.
    """

    def __init__(self, paths: list[Any]) -> None:
        self.paths = paths
        self.release = asyncio.Event()
        self.disconnected = False
        self.asked: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append(scope["path"])
        if scope["method"] == "GET":
            await _json(send, {"data": [{"id": p.name} for p in self.paths]})
            return
        body = json.loads((await receive())["body"])
        if body.get("breaks"):
            raise OSError("a handler that breaks")
        model = self.paths[0].name
        states, request = (
            scope["app"].state.engine_client.output_processor.request_states,
            _request(len(self.asked), body),
        )
        unread = SimpleNamespace(output="tokens" if body.get("unread") else None)
        states[request.request_id] = SimpleNamespace(is_prefilling=True, queue=unread)
        if body.get("prelude"):
            await _start_stream(send)
            await _event(send, {"response": {"model": model}}, kind="response.created")
        await scope["app"].state.engine_client.engine_core.add_request_async(request)
        states[request.request_id].is_prefilling = body.get("queued", False)
        if body.get("done"):
            del states[request.request_id]
        await self._answer(body, model, receive, send)
        states.pop(request.request_id, None)

    async def _answer(self, body: Any, model: str, receive: Any, send: Any) -> None:
        watching = asyncio.ensure_future(receive())
        released = asyncio.ensure_future(self.release.wait())
        if body.get("stream"):
            await _start_stream(send)
            await _event(send, {"model": model, "n": 0})
        if body.get("prelude"):
            await _event(send, {"delta": "w3"}, kind="response.output_text.delta")
        if body.get("hold"):
            await asyncio.wait({watching, released}, return_when=asyncio.FIRST_COMPLETED)
            self.disconnected = watching.done()
        watching.cancel()
        released.cancel()
        if self.disconnected:
            return
        if body.get("prelude"):
            await _event(send, {"response": {"model": model}}, kind="response.completed")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        elif body.get("stream"):
            await _event(send, {"model": model, "n": 1})
            await send(
                {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}
            )
        else:
            await _json(send, {"model": model, "choices": []})


async def _json(send: Any, body: Any) -> None:
    raw = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": raw})


def _request(number: int, body: Any) -> Any:
    """What vLLM sends to its engine."""
    return SimpleNamespace(request_id=f"request-{number}", cache_salt=body.get("cache_salt"))


async def _start_stream(send: Any) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _event(send: Any, body: Any, *, kind: str | None = None) -> None:
    named = "" if kind is None else f"event: {kind}\n"
    await send(
        {
            "type": "http.response.body",
            "body": f"{named}data: {json.dumps(body)}\n\n".encode(),
            "more_body": True,
        }
    )


async def _say_500(_: Any, error: Exception) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse({"error": str(error)}, status_code=500)


class Server:
    """Middleware, backend, engine; and requests as plain calls."""

    def __init__(self, version: int | None = 0) -> None:
        self.engine = Engine()
        self.paths = [SimpleNamespace(name="tiny", model_path="/m")]
        self.backend = Backend(self.paths)
        self.middleware = SpliceMiddleware(self.backend, name="tiny", secret=SECRET)
        models = SimpleNamespace(base_model_paths=self.paths)
        state = SimpleNamespace(engine_client=self.engine, openai_serving_models=models)
        self.app = SimpleNamespace(state=state, exception_handlers={Exception: _say_500})
        if version is not None:
            self.middleware.alias.commit(version)
            self.paths[:] = [
                SimpleNamespace(name=n, model_path="/m") for n in (f"tiny@{version}", "tiny")
            ]

    async def ask(
        self,
        path: str,
        body: Any = None,
        *,
        method: str = "POST",
        client: str = "127.0.0.1",
        headers: dict[str, str] | None = None,
        pieces: Iterable[bytes] | None = None,
        ends: bool = False,
        leaves: asyncio.Event | None = None,
    ) -> SimpleNamespace:
        """`pieces`: of a body, which `ends` or does not. `leaves`: the client does when
        it is set.
        """
        self.middleware.traffic.put_up_gates(self.app)  # as the node's first action does
        sent: list[Any] = []
        raw = b"" if body is None else json.dumps(body).encode()
        given = iter([raw] if pieces is None else pieces)

        async def receive() -> Any:
            for piece in given:
                return {
                    "type": "http.request",
                    "body": piece,
                    "more_body": pieces is not None and not ends,
                }
            await (leaves or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "path": path,
            "method": method,
            "client": (client, 1),
            "app": self.app,
            "headers": [(k.encode(), v.encode()) for k, v in (headers or {}).items()],
        }
        with contextlib.suppress(
            OSError
        ):  # what breaks in a handler reaches the server, which logs it
            await asyncio.wait_for(self.middleware(scope, receive, send), 10)
        if leaves is not None and leaves.is_set():
            return SimpleNamespace()
        answer = b"".join(m.get("body", b"") for m in sent[1:])
        headers_out = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
        return SimpleNamespace(
            status=sent[0]["status"],
            headers=headers_out,
            raw=answer,
            more=sent[-1].get("more_body", False),
        )

    async def control(self, action: str, **arguments: Any) -> SimpleNamespace:
        if action[0].isupper():  # a message
            arguments |= {"request_id": "r", "deadline_s": 5.0}
        answer = await self.ask(
            f"/splice/v1/{action}", arguments, headers={"x-splice-secret": SECRET}
        )
        return SimpleNamespace(status=answer.status, json=json.loads(answer.raw))

    async def pause(
        self, version: int = 1, *, mode: m.PauseMode = "keep", drain_s: float = 0.0
    ) -> None:
        self.middleware.traffic.put_up_gates(self.app)
        await self.middleware.traffic.pause(
            m.ReceiveWeights(
                request_id="r", deadline_s=5.0, version=version, pause_mode=mode, drain_s=drain_s
            )
        )

    async def swap(
        self, version: int, *, mode: m.PauseMode = "keep", drain_s: float = 0.05
    ) -> None:
        await self.pause(version, mode=mode, drain_s=drain_s)
        committed = await self.control("CommitUpdate", version=version)
        assert committed.status == 200, committed.json


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def events(raw: bytes) -> list[Any]:
    return [
        json.loads(line.removeprefix("data: "))
        for line in raw.decode().splitlines()
        if line.startswith("data: {")
    ]


async def soon(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("did not happen")
