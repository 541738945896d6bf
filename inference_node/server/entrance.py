"""The entrance to vLLM's engine: holds requests during a pause, and tells them apart by version.

Every generation route of every vLLM ends in `add_request_async` of the engine client. `Entrance`
replaces that method on the object.

    entrance.shut()      from here on nothing enters; called before the pause is sent
    entrance.open_as(n)  version n is served: waiting requests enter, under a new salt
    entrance.open()      the update was dropped: waiting requests enter as before

Requests that enter before `shut` are in the engine before the pause. Later ones run on the version
that is served then.

vLLM hashes a request's salt into the first block of its prefix, so requests with different salts
share no cached keys and values. Each commit draws a new random salt. A request therefore never
starts from a prefix that other weights computed, even if the cache survives the swap (pause mode
`keep_kv`). A client's own `cache_salt` follows ours.
"""

from __future__ import annotations

import asyncio
import contextvars
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from inference_node.server import dialect
from inference_node.server.alias import Alias
from inference_node.server.flights import FLIGHT, Flight

_PASSES: contextvars.ContextVar[bool] = contextvars.ContextVar("splice_passes", default=False)


class Entrance:
    """One per engine client, for the life of the process.

    Args:
        engine: vLLM's engine client.

    Raises:
        AttributeError: this vLLM has no `add_request_async`, so versions cannot be told apart.
    """

    def __init__(self, engine: Any, alias: Alias) -> None:
        self._engine, self._alias = engine, alias
        self._enter = engine.engine_core.add_request_async
        self._adapter = dialect.adapter(engine)
        self._salt = uuid.uuid4().hex
        self._opened = asyncio.Event()
        self._opened.set()
        engine.engine_core.add_request_async = self._add

    def shut(self) -> None:
        """Hold every request that arrives from now on."""
        self._opened.clear()

    def open(self) -> None:
        """Let requests in; waiting ones first."""
        self._opened.set()

    def open_as(self, version: int) -> None:
        """Let requests in under `version`; they share no cached prefix with earlier ones."""
        assert self._alias.version == version
        self._salt = uuid.uuid4().hex
        self.open()

    async def _add(self, request: Any) -> None:
        if self._adapter is not None:
            request.lora_request = self._adapter
        if not _PASSES.get():
            await self._wait(request)
            # No await before the send: else a pause could be sent in between.
            request.cache_salt = (
                self._salt if not request.cache_salt else f"{self._salt}:{request.cache_salt}"
            )
            dialect.keep_logprobs_flat(self._engine, request.request_id)
            flight = FLIGHT.get()
            if flight is not None:
                flight.entered(request.request_id)
                if flight.names_tokens_by_id:
                    dialect.leave_logprobs_undecoded(self._engine, request.request_id)
                dialect.stream_every(self._engine, request.request_id, flight.stream_interval)
        await self._enter(request)

    async def _wait(self, request: Any) -> None:
        """Wait until the entrance is open; forget a request whose client leaves meanwhile."""
        try:
            while not self._opened.is_set():
                await self._opened.wait()
        except (asyncio.CancelledError, GeneratorExit):
            dialect.forget_request(self._engine, request.request_id)
            raise

    def moved(self, flight: Flight, version: int, *, keeps_kv: bool) -> None:
        """Note that `version` now serves a flight, if tokens of it are still to come.

        A stream whose client does not read is ended, because its next event would mix tokens of
        both versions.

        Args:
            keeps_kv: the engine keeps what it has computed of the prompt.
        """
        if any(dialect.is_behind(self._engine, request_id) for request_id in flight.requests):
            flight.end(self._alias.unread())
            return
        inside = [dialect.has_output(self._engine, request_id) for request_id in flight.requests]
        running = [has_output for has_output in inside if has_output is not None]
        if running:
            flight.moved(
                version, is_new=not keeps_kv and len(running) == len(inside) and not any(running)
            )


@contextmanager
def free_pass() -> Iterator[None]:
    """Requests made inside enter immediately and unsalted; the cache keeps nothing of them."""
    token = _PASSES.set(True)
    try:
        yield
    finally:
        _PASSES.reset(token)
