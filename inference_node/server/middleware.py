"""The only door to vLLM's server: `--middleware inference_node.server.middleware.SpliceMiddleware`.

In this order:

1. `/splice/v1/*` is for the inference node: loopback and the secret in `x-splice-secret`, or 403
   (`actions`).
2. Everything that is not on the list of public routes is 403, even if vLLM has registered
   it: development routes, run-time LoRA and others.
3. The alias judges requests that name a model (`alias`). They are then watched until their last
   byte (`flights`), because a swap may happen under them.

Every response carries `x-splice-version`. A stream names the version of its first token, any other
answer that of its last.
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

from starlette.requests import Request

from inference_node.server.actions import Actions
from inference_node.server.alias import Alias, Refusal, Refused
from inference_node.server.bodies import (
    Bodies,
    fields_of,
    model_of,
    names_tokens_by_id,
    stream_interval_of,
)
from inference_node.server.flights import (
    END_GRACE_S,
    FLIGHT,
    VERSION_HEADER,
    VERSIONED_ROUTES,
    Answer,
    Flight,
    Message,
    Receive,
    Send,
    send_json,
    send_refusal,
    version_header,
)
from inference_node.server.traffic import Traffic
from inference_node.shared.names import (
    CONTROL_PREFIX,
    MAX_BODY_BYTES,
    MODEL_NAME,
    SECRET,
    SECRET_HEADER,
)

Scope = dict[str, Any]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

DEFAULT_BODY_BYTES = 16 * 2**20
CONTROL_BODY_BYTES = 256 * 2**20
"""Largest body of the node's requests: a manifest names every tensor."""

GENERATION_ROUTES = frozenset({
    "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses",
    "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings", "/v1/rerank", "/v2/rerank",
    "/rerank", "/v1/score", "/score", "/pooling", "/classify", "/inference/v1/generate",
    "/tokenize", "/detokenize",
})  # fmt: skip # a table
"""POST routes whose JSON body may name a model."""
OPEN_ROUTES = frozenset({
    "/v1/models", "/health", "/ping", "/version", "/metrics", "/metrics/", "/load", "/docs",
    "/docs/oauth2-redirect", "/openapi.json",
})  # fmt: skip # a table
"""Routes that any method may reach without a model."""
HEALTH_ROUTES = frozenset({"/health", "/ping"})
"""Open routes that answer 503 while the replica is poisoned."""


class SpliceMiddleware:
    """The middleware of one server; see the module. A server has one API process."""

    def __init__(self, app: App, *, name: str | None = None, secret: str | None = None) -> None:
        self._app = app
        self._secret = secret if secret is not None else os.environ.get(SECRET, "")
        self.alias = Alias(name=name or os.environ.get(MODEL_NAME, "model"))
        self.flights: set[Flight] = set()
        self.traffic = Traffic(self.alias, self.flights)
        self.actions = Actions(self.traffic)
        self._bodies = Bodies(max_bytes=int(os.environ.get(MAX_BODY_BYTES, DEFAULT_BODY_BYTES)))
        self._control_bodies = Bodies(max_bytes=CONTROL_BODY_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "not served"})
        else:
            await self._with_header(scope, receive, send)

    async def _with_header(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; add the version to answers that do not name one yet."""
        is_started = False

        async def sender(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                headers = list(message.get("headers", ()))
                if all(name.lower() != VERSION_HEADER for name, _ in headers):
                    message = {**message, "headers": [*headers, version_header(self.alias.version)]}
            await send(message)

        try:
            await self._http(scope, receive, sender)
        except Refused as error:
            await send_refusal(sender, error.refusal, version=self.alias.version)
        except Exception as error:
            # Starlette answers unhandled exceptions outside every middleware, without our header.
            answer = scope["app"].exception_handlers.get(Exception)
            if answer is not None and not is_started:
                response = await answer(Request(scope), error)
                await response(scope, receive, sender)
            raise

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path.startswith(CONTROL_PREFIX):
            await self._on_control(scope, receive, send)
        elif path in GENERATION_ROUTES and scope["method"] == "POST":
            await self._on_generation(scope, receive, send)
        elif path in HEALTH_ROUTES and self.alias.poisoned is not None:
            raise Refused(self.alias.not_served())
        elif path in OPEN_ROUTES or (scope["method"] == "OPTIONS" and path in GENERATION_ROUTES):
            await self._app(scope, receive, send)
        else:
            text = f"{scope['method']} {path} is not open to API users of this server"
            raise Refused(Refusal(status=403, message=text))

    # ------------------------------------------------------------ the node

    async def _on_control(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_node(scope):
            text = "control routes are for the inference node"
            raise Refused(Refusal(status=403, message=text))
        body = await self._control_bodies.read(scope["headers"], receive)
        if body is None:
            return
        action = scope["path"].removeprefix(CONTROL_PREFIX)
        is_streaming = False

        async def say(line: dict[str, Any]) -> None:
            nonlocal is_streaming
            if not is_streaming:
                headers = [
                    (b"content-type", b"application/x-ndjson"),
                    version_header(self.alias.version),
                ]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            is_streaming = True
            await send(
                {
                    "type": "http.response.body",
                    "body": json.dumps(line).encode() + b"\n",
                    "more_body": True,
                }
            )

        status, answer = await self.actions.run(action, body, scope["app"], say)
        if not is_streaming:
            await send_json(send, status, answer, version=self.alias.version)
            return
        last = json.dumps(
            {"status": status, "answer": answer}
        ).encode()  # the status line has been sent
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _is_node(self, scope: Scope) -> bool:
        given = dict(scope.get("headers", ())).get(SECRET_HEADER.encode(), b"")
        return (
            bool(self._secret)
            and _is_loopback(scope)
            and hmac.compare_digest(given, self._secret.encode())
        )

    # ------------------------------------------------------------ generation

    async def _on_generation(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._bodies.read(scope["headers"], receive)
        if body is None:
            return
        fields = fields_of(body)
        model = model_of(fields)
        refusal = self.alias.refuse(model)
        if refusal is not None:
            raise Refused(refusal)
        flight = Flight(
            self.alias,
            pinned=self.alias.is_pinned(model),
            says_versions=scope["path"] in VERSIONED_ROUTES,
            stream_interval=stream_interval_of(fields),
            names_tokens_by_id=names_tokens_by_id(fields),
        )
        self.flights.add(flight)
        FLIGHT.set(flight)
        try:
            await self._fly(flight, scope, body, receive, send)
        finally:
            self.flights.discard(flight)
            flight.landed.set()

    async def _fly(
        self, flight: Flight, scope: Scope, body: bytes, receive: Receive, send: Send
    ) -> None:
        """Run vLLM's handler.

        If the flight is ended, vLLM sees a client that left, and the client hears why.
        """
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
                # An ended request may fail inside vLLM in any way; its client has an answer.
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


def _replay(body: bytes, receive: Receive, flight: Flight) -> Receive:
    """Give vLLM the body, then what the client does.

    An ended flight looks like a client that left, so that vLLM frees its request.
    """
    given = [body]

    async def replay() -> Message:
        if given:
            return {"type": "http.request", "body": given.pop(), "more_body": False}
        client = asyncio.ensure_future(receive())
        ended = asyncio.ensure_future(flight.wait_end())
        try:
            await asyncio.wait({client, ended}, return_when=asyncio.FIRST_COMPLETED)
            return client.result() if client.done() else {"type": "http.disconnect"}
        finally:
            client.cancel()
            ended.cancel()

    return replay
