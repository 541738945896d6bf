"""ASGI middleware that vLLM's server is started with (`--middleware inference_node.middleware.SpliceMiddleware`): the only door.

In this order:

1. `/splice/v1/*` is for the supervisor: loopback and the secret in `x-splice-secret`, or 403 (`inference_node.control`).
2. Everything that is not on the list of public routes is 403, whatever vLLM has registered: development routes, run-time LoRA, the rest.
3. Requests that name a model are judged by the alias (`inference_node.alias`), then watched until their last byte
   (`inference_node.flights`), because a swap may happen under them.

Every response carries `x-splice-version`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

from inference_node.alias import Alias, Refusal
from inference_node.control import Control
from inference_node.flights import END_GRACE_S, Answer, Flight, Message, Receive, Send, send_json, send_refusal, version_header
from inference_node.names import CONTROL_PREFIX, MODEL_NAME, SECRET, SECRET_HEADER

Scope = dict[str, Any]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 256 * 2**20

GENERATION_ROUTES = frozenset({
    "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/pooling", "/classify",
    "/inference/v1/generate", "/tokenize", "/detokenize",
})  # fmt: skip
"""POST routes whose JSON body may name a model."""
OPEN_ROUTES = frozenset({
    "/v1/models", "/health", "/ping", "/version", "/metrics", "/metrics/", "/load", "/docs", "/docs/oauth2-redirect", "/openapi.json",
})  # fmt: skip
"""Routes that any method may reach without a model."""


class SpliceMiddleware:
    """See the module. One instance per API process; there is one API process per server."""

    def __init__(self, app: App, *, name: str | None = None, secret: str | None = None) -> None:
        self._app = app
        self._secret = secret if secret is not None else os.environ.get(SECRET, "")
        self.alias = Alias(name=name or os.environ.get(MODEL_NAME, "model"))
        self.flights: set[Flight] = set()
        self.control = Control(self.alias, self.flights)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "not served"})
        else:
            await self._http(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path.startswith(CONTROL_PREFIX):
            await self._on_control(scope, receive, send)
        elif path in GENERATION_ROUTES and scope["method"] == "POST":
            await self._on_generation(scope, receive, send)
        elif path in OPEN_ROUTES or (scope["method"] == "OPTIONS" and path in GENERATION_ROUTES):
            await self._app(scope, receive, self._with_header(send))
        else:
            await self._refuse(send, Refusal(
                status=403, kind="PermissionDeniedError", message=f"{scope['method']} {path} is not open to API users of this server",
            ))  # fmt: skip

    async def _refuse(self, send: Send, refusal: Refusal) -> None:
        await send_refusal(send, refusal, version=self.alias.version)

    def _with_header(self, send: Send) -> Send:
        async def sender(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), version_header(self.alias.version)]}
            await send(message)

        return sender

    # ------------------------------------------------------------ the supervisor

    async def _on_control(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_supervisor(scope):
            await self._refuse(
                send, Refusal(status=403, kind="PermissionDeniedError", message="control routes are for the supervisor")
            )
            return
        body = await _read_body(receive)
        try:
            arguments = json.loads(body) if body else {}
        except ValueError:
            await self._refuse(send, Refusal(status=400, kind="BadRequestError", message="the body is not JSON"))
            return
        action = scope["path"].removeprefix(CONTROL_PREFIX)
        said = False

        async def say(line: dict[str, Any]) -> None:
            nonlocal said
            if not said:
                headers = [(b"content-type", b"application/x-ndjson"), version_header(self.alias.version)]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            said = True
            await send({"type": "http.response.body", "body": json.dumps(line).encode() + b"\n", "more_body": True})

        status, answer = await self.control.run(action, arguments, scope["app"], say)
        if not said:
            await send_json(send, status, answer, version=self.alias.version)
            return
        last = json.dumps({"status": status, "answer": answer}).encode()  # the status line is gone
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _is_supervisor(self, scope: Scope) -> bool:
        given = dict(scope.get("headers", ())).get(SECRET_HEADER.encode(), b"")
        return bool(self._secret) and _is_loopback(scope) and hmac.compare_digest(given, self._secret.encode())

    # ------------------------------------------------------------ generation

    async def _on_generation(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read_body(receive)
        if body is None:
            return
        if len(body) > MAX_BODY_BYTES:
            await self._refuse(
                send, Refusal(status=413, kind="BadRequestError", message=f"the body exceeds {MAX_BODY_BYTES} bytes")
            )
            return
        model = _model_of(body)
        refusal = self.alias.refuse(model)
        if refusal is not None:
            await self._refuse(send, refusal)
            return
        flight = Flight(self.alias, pinned=self.alias.is_pinned(model), paused=self.control.is_standing)
        self.flights.add(flight)
        try:
            await self._fly(flight, scope, body, receive, send)
        finally:
            self.flights.discard(flight)
            flight.landed.set()

    async def _fly(self, flight: Flight, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Run vLLM's handler; should the flight be ended, tell vLLM that the client is gone and the client why."""
        answer = Answer(flight, send)
        inner = asyncio.ensure_future(self._app(scope, _replay(body, receive, flight), answer.send))
        ended = asyncio.ensure_future(flight.wait_end())
        try:
            await asyncio.wait({inner, ended}, return_when=asyncio.FIRST_COMPLETED)
            if flight.ended_with is not None and not answer.finished:
                await answer.fail(flight.ended_with)
                await asyncio.wait({inner}, timeout=END_GRACE_S)
            else:
                await inner
        finally:
            ended.cancel()
            if not inner.done():
                inner.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                # An ended request may fail inside vLLM in its own ways; the client has had its answer.
                if flight.ended_with is not None:
                    await inner


def _is_loopback(scope: Scope) -> bool:
    client = scope.get("client")
    if not client:
        return False
    try:
        address = ipaddress.ip_address(client[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


async def _read_body(receive: Receive) -> bytes | None:
    """The whole body, up to a little over the limit; None when the client left."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if not message.get("more_body", False) or size > MAX_BODY_BYTES:
            return b"".join(parts)


def _model_of(body: bytes) -> str | None:
    """The request's model; None where it names none, or is nothing we can read (vLLM will say so)."""
    try:
        fields = json.loads(body)
    except ValueError:
        return None
    model = fields.get("model") if isinstance(fields, dict) else None
    return model if isinstance(model, str) and model else None


def _replay(body: bytes, receive: Receive, flight: Flight) -> Receive:
    """The body again, then what the client does; an ended flight looks like a client that left, which frees vLLM's request."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        client = asyncio.ensure_future(receive())
        ended = asyncio.ensure_future(flight.wait_end())
        try:
            await asyncio.wait({client, ended}, return_when=asyncio.FIRST_COMPLETED)
            return client.result() if client.done() else {"type": "http.disconnect"}
        finally:
            client.cancel()
            ended.cancel()

    return replay
