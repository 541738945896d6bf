"""Requests in flight: which versions each one ran on, how one is ended or its answer corrected.

An answer's `model` is vLLM's until a swap happens under it. From then on JSON bodies and SSE events
are rewritten to `model: name@N+1` and `versions: [N, N+1]`. Where vLLM's answers name no model
(`VERSIONED_ROUTES`), each of them gets its versions.

A stream begins with its first token. Headers and earlier events wait for that token, because a swap
may come first.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from inference_node.server.alias import Alias, Refusal

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]

VERSION_HEADER = b"x-splice-version"
VERSIONS_HEADER = b"x-splice-versions"
MAX_EVENT_BYTES = 16 * 2**20
VERSIONED_ROUTES = frozenset({"/v1/responses", "/v1/messages", "/inference/v1/generate"})
"""Routes whose events do not all name the model."""
BEFORE_FIRST_TOKEN = (b"event: response.created\n", b"event: response.in_progress\n", b":")
"""Prefixes of events before the first token; ":" is a comment that keeps a connection alive."""
END_GRACE_S = 2.0
"""Seconds for vLLM to end a request whose client has been answered."""


class Flight:
    """One request between admission and its last byte.

    Args:
        says_versions: each JSON object of its answer gets its versions, even a single one.
        stream_interval: tokens of each event of its stream.
        names_tokens_by_id: its log-probs name tokens by id.
    """

    def __init__(
        self,
        alias: Alias,
        *,
        pinned: bool,
        says_versions: bool = False,
        stream_interval: int = 1,
        names_tokens_by_id: bool = False,
    ) -> None:
        self.alias, self.pinned, self.says_versions = alias, pinned, says_versions
        self.stream_interval, self.names_tokens_by_id = stream_interval, names_tokens_by_id
        self.admitted_version = alias.version
        self.requests: list[str] = []
        """vLLM's ids of the requests that entered the engine."""
        self.versions: list[int] = []
        """The versions that ran it, in order; empty until it enters the engine."""
        self.ended_with: Refusal | None = None
        self._end = asyncio.Event()
        self.landed = asyncio.Event()

    def entered(self, request_id: str) -> None:
        """One of its requests enters the engine, under the version that is served now."""
        version = self.alias.version
        assert version is not None
        self.requests.append(request_id)
        if self.versions[-1:] != [version]:
            self.versions.append(version)

    def moved(self, version: int, *, is_new: bool) -> None:
        """`version` serves it now; `is_new`: that version makes all of its answer."""
        self.versions = [version] if is_new else [*self.versions, version]

    def end(self, refusal: Refusal) -> None:
        """Answer with an error, now."""
        if self.ended_with is None:
            self.ended_with = refusal
            self._end.set()

    async def wait_end(self) -> None:
        """Wait until `end`."""
        await self._end.wait()

    @property
    def is_rewritten(self) -> bool:
        """Whether vLLM's answer names a wrong model or lacks versions."""
        return bool(self.versions) and (
            self.says_versions or self.versions != [self.admitted_version]
        )

    def correct(self, body: Any) -> Any:
        """The body with the true model and versions."""
        if not isinstance(body, dict) or not self.versions:
            return body
        model = self.alias.versioned(self.versions[-1])
        for holder in (body, body.get("response"), body.get("message")):
            if isinstance(holder, dict) and "model" in holder:
                holder["model"] = model
        if (self.says_versions or len(self.versions) > 1) and "error" not in body:
            body["versions"] = list(self.versions)
        return body

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Version headers of a response that starts now."""
        current = self.versions[-1] if self.versions else self.alias.version
        headers = [version_header(current)]
        if len(self.versions) > 1:
            headers.append((VERSIONS_HEADER, ",".join(map(str, self.versions)).encode()))
        return headers


FLIGHT: contextvars.ContextVar[Flight | None] = contextvars.ContextVar(
    "splice_flight", default=None
)
"""The flight that vLLM's handler, and all tasks that it starts, serve."""


def version_header(version: int | None) -> tuple[bytes, bytes]:
    """`x-splice-version: N`, "none" before @0."""
    return VERSION_HEADER, b"none" if version is None else str(version).encode()


class Answer:
    """Corrects and passes on what vLLM sends for one flight.

    JSON is held until complete. Streams are held until their first token, then go through event by
    event.
    """

    def __init__(self, flight: Flight, send: Send) -> None:
        self._flight, self._send = flight, send
        self._start: Message | None = None
        self._kind = ""
        self._pending = bytearray()
        self.started = self.finished = False

    async def send(self, message: Message) -> None:
        """vLLM's `send`."""
        if self.finished:
            return
        if message["type"] == "http.response.start":
            await self._on_start(message)
        elif message["type"] == "http.response.body":
            await self._on_body(message.get("body", b""), bool(message.get("more_body", False)))
        else:
            await self._send(message)

    async def _on_start(self, message: Message) -> None:
        content_type = dict(message.get("headers", ())).get(b"content-type", b"")
        self._kind = (
            "json"
            if b"application/json" in content_type
            else "sse"
            if b"text/event-stream" in content_type
            else "raw"
        )
        self._start = dict(message)

    async def _send_start(self, length: int | None = None) -> None:
        assert self._start is not None
        drop = {VERSION_HEADER, VERSIONS_HEADER} | (
            set() if length is None else {b"content-length"}
        )
        headers = [(k, v) for k, v in self._start.get("headers", ()) if k.lower() not in drop]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        self.started = True
        await self._send({**self._start, "headers": [*headers, *self._flight.headers()]})

    async def _on_body(self, chunk: bytes, more: bool) -> None:
        if self._kind == "json":
            self._pending += chunk
            if not more:
                await self._send_json()
            return
        if (
            self._kind == "sse"
            and more
            and not self.started
            and (not chunk or chunk.startswith(BEFORE_FIRST_TOKEN))
        ):
            self._pending += chunk
            return
        if not self.started:
            await self._send_start()
        if self._kind == "sse" and (self._flight.is_rewritten or self._pending):
            chunk = self._rewrite_events(chunk, more)
        self.finished = not more
        await self._send({"type": "http.response.body", "body": chunk, "more_body": more})

    async def _send_json(self) -> None:
        body = bytes(self._pending)
        if self._flight.is_rewritten:
            try:
                body = json.dumps(
                    self._flight.correct(json.loads(body)), ensure_ascii=False
                ).encode()
            except ValueError:
                pass
        await self._send_start(len(body))
        self.finished = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _rewrite_events(self, chunk: bytes, more: bool) -> bytes:
        """The complete events so far, corrected; an incomplete one waits for its end."""
        self._pending += chunk
        cut = (
            len(self._pending)
            if not more or len(self._pending) > MAX_EVENT_BYTES
            else self._pending.rfind(b"\n\n") + 2
        )
        if cut < 2:
            return b""
        ready = bytes(self._pending[:cut])
        del self._pending[:cut]
        return b"\n".join(self._rewrite_line(line) for line in ready.split(b"\n"))

    def _rewrite_line(self, line: bytes) -> bytes:
        if not line.startswith(b"data: {"):
            return line
        try:
            return (
                b"data: "
                + json.dumps(
                    self._flight.correct(json.loads(line[6:])), ensure_ascii=False
                ).encode()
            )
        except ValueError:
            return line

    async def fail(self, refusal: Refusal) -> None:
        """End the response with an error.

        Before the headers it sends an error status, in a stream an SSE event, else it only ends.
        """
        if self.finished:
            return
        self.finished = True
        if not self.started:
            await send_refusal(self._send, refusal, version=self._flight.alias.version)
            return
        body = b""
        if self._kind == "sse":
            body = b"data: " + json.dumps(refusal.body()).encode() + b"\n\ndata: [DONE]\n\n"
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


async def send_json(
    send: Send,
    status: int,
    body: Any,
    *,
    version: int | None,
    headers: tuple[tuple[bytes, bytes], ...] = (),
) -> None:
    """A whole JSON response."""
    raw = json.dumps(body).encode()
    base = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(raw)).encode()),
        version_header(version),
    ]
    await send({"type": "http.response.start", "status": status, "headers": [*base, *headers]})
    await send({"type": "http.response.body", "body": raw, "more_body": False})


async def send_refusal(send: Send, refusal: Refusal, *, version: int | None) -> None:
    """A refusal as a whole response."""
    retry = (
        ()
        if refusal.retry_after_s is None
        else ((b"retry-after", str(refusal.retry_after_s).encode()),)
    )
    await send_json(send, refusal.status, refusal.body(), version=version, headers=retry)
