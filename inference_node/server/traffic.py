"""An update as requests see it: where generation stops, which name moves, how it resumes.

    make way     pinned requests finish or end with 409
    pause        the engine schedules nothing; new requests wait at the entrance
    commit       the alias moves, and the engine resumes
    resume       the engine resumes with the old version
    poison       every request ends with 503

The steps run in one event loop with the requests. At a commit, tokens of the old weights leave
under the old name before the first token of the new weights leaves. An `OutputGate` lets the engine
resume before that; without one, the engine waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from inference_node.server import dialect
from inference_node.server.alias import Alias
from inference_node.server.entrance import Entrance
from inference_node.server.flights import Flight
from inference_node.server.output_gate import OutputGate
from orchestrator.errors import SpliceError
from orchestrator.protocol.messages import ErrorCode, ReceiveWeights, SwapWeights

ENGINE_PAUSE: dict[str, tuple[str, bool]] = {
    "keep": ("keep", True),
    "keep_kv": ("keep", False),
    "wait": ("wait", True),
    "abort": ("abort", True),
}
"""Our pause mode -> vLLM's mode, and whether vLLM drops its KV and prefix caches."""
BEHIND = 8
"""Number of outputs waiting at a commit that makes the log warn; each engine step makes one."""
log = logging.getLogger("vllm.splice")
LATE_S = 5.0
"""Seconds that requests which were ended may take to finish, in addition to the drain."""


class ActionFailed(SpliceError):
    """An action inside vLLM failed; carries the protocol's code."""

    def __init__(self, code: str, message: str, **detail: Any) -> None:
        super().__init__(message)
        self.code, self.detail = ErrorCode(code), detail


class Traffic:
    """The alias, the requests in flight, and the engine that serves them."""

    def __init__(self, alias: Alias, flights: set[Flight]) -> None:
        self.alias, self._flights = alias, flights
        self._app: Any
        self.engine: Any
        """vLLM's engine client."""
        self._entrance: Entrance
        self._gate: OutputGate | None = None
        """Holds outputs back. None: this engine's outputs cannot be held back."""
        self.is_paused = False
        """The engine is paused for an update."""
        self.keeps_kv = False
        """The engine keeps its KV cache over the update."""

    def put_up_gates(self, app: Any) -> None:
        """Take hold of vLLM's server. The first action does so, before anything is served."""
        self._app, self.engine = app, app.state.engine_client
        if not hasattr(self, "_entrance"):
            self._entrance = Entrance(self.engine, self.alias)
        if self._gate is None:
            with contextlib.suppress(AttributeError):
                self._gate = OutputGate(self.engine.engine_core)

    @property
    def gate(self) -> OutputGate | None:
        """The gate, if all outputs are certain to pass through it."""
        return self._gate if self._gate is not None and self._gate.is_sure else None

    def open_gate(self) -> None:
        """Let all outputs pass."""
        if self._gate is not None:
            self._gate.open()

    # ------------------------------------------------------------ pause

    async def pause(self, message: ReceiveWeights | SwapWeights) -> None:
        """Finish or end pinned requests, then stop the engine.

        Raises:
            ActionFailed: the engine did not stop in time; it continues with the old version.
        """
        engine_mode, clear_cache = ENGINE_PAUSE[message.pause_mode]
        try:
            await self.make_way(message)
            pausing = dialect.pause(self.engine, mode=engine_mode, clear_cache=clear_cache)
            await asyncio.wait_for(pausing, message.deadline_s)
        except TimeoutError as error:
            await self.resume()
            raise ActionFailed(
                ErrorCode.TRANSFER_TIMEOUT,
                f"vLLM was not paused within {message.deadline_s:.0f} s "
                f"(mode {message.pause_mode})",
            ) from error
        self.note_pause()

    def note_pause(self) -> None:
        """The engine is paused from now on."""
        self.is_paused = True

    async def make_way(self, message: ReceiveWeights | SwapWeights) -> None:
        """Refuse new requests for `name@N`, wait for those that run, and let nothing new start.

        Requests that arrive later enter the engine under the next version.
        """
        self.alias.moving_to = message.version
        await self._drain_pinned(message.drain_s)
        if any(f.pinned and f.ended_with is None for f in self._flights):
            raise ActionFailed(
                ErrorCode.INTERNAL, "a pinned request is still in flight after the drain"
            )
        self.keeps_kv = not ENGINE_PAUSE[message.pause_mode][1]
        self._entrance.shut()

    async def _drain_pinned(self, drain_s: float) -> None:
        """Wait for pinned requests; end those that take too long with 409."""
        pinned = [f for f in self._flights if f.pinned]
        landing = [asyncio.ensure_future(f.landed.wait()) for f in pinned]
        if landing:
            _, late = await asyncio.wait(landing, timeout=drain_s)
            for flight in pinned:
                if not flight.landed.is_set():
                    flight.end(self.alias.moving())
            if late:
                await asyncio.wait(late, timeout=drain_s + LATE_S)
            for waiting in landing:
                waiting.cancel()

    # ------------------------------------------------------------ resume

    async def commit_update(self, version: int) -> None:
        """Move alias and weight version to `version`, and resume.

        No answer under the new name comes from old weights, and none under the old name from new
        ones.

        Raises:
            ActionFailed: the engine is not paused.
        """
        if not self.is_paused:
            raise ActionFailed(ErrorCode.NOT_READY, "nothing was received that could be committed")
        if self.gate is None:
            await dialect.settle(self.engine)
            self._move(version)
            await dialect.resume_as(self.engine, version)
        else:
            await self._resume_then_move(self.gate, version)
        self.is_paused = False
        self._entrance.open_as(version)

    async def _resume_then_move(self, gate: OutputGate, version: int) -> None:
        """Resume first, and hold the new tokens back until the old ones have left."""
        made = gate.waiting  # by the old weights
        if made >= BEHIND:
            log.warning(
                "vLLM's API process is %d steps behind its engine, so it limits this replica's "
                "tokens/s; the commit of version %d waits for it while the engine continues. Use "
                "more replicas, or fewer concurrent requests",
                made,
                version,
            )
        gate.hold()
        try:
            resuming = dialect.resume_as(self.engine, version)
            # Let the request leave before the old tokens take this process's time.
            await asyncio.sleep(0)
            gate.pass_on(made)
            await dialect.settle(self.engine, gate=gate)
            await resuming
            self._move(version)
        except BaseException as error:
            # The engine may run; none of its tokens may leave under the old name.
            self.poison(f"version {version} could not be committed: {error}")
            raise
        finally:
            gate.open()

    def _move(self, version: int) -> None:
        """Let tokens leave under the new name from here on."""
        self.alias.commit(version)
        for flight in self._flights:
            self._entrance.moved(flight, version, keeps_kv=self.keeps_kv)
        self._rename(self.alias.current, self.alias.name)

    async def resume(self) -> None:
        """Continue with the old version."""
        self.open_gate()
        self.alias.moving_to = None
        await self.engine.resume_generation()
        self.is_paused = False
        self._entrance.open()

    def poison(self, reason: str) -> int:
        """End all requests with 503, and admit none until a commit; returns how many ended."""
        self.open_gate()
        self.alias.poison(reason)
        self._rename(self.alias.name)
        ended = list(self._flights)
        for flight in ended:
            flight.end(self.alias.not_served())
        return len(ended)

    def _rename(self, *names: str) -> None:
        """Change the names that vLLM lists and answers under; answers have the first as `model`."""
        paths = dialect.base_model_paths(self._app)
        root = paths[0].model_path
        paths[:] = [dialect.base_model_path(model_name=n, model_path=root) for n in names]
