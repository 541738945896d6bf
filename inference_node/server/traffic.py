"""What requests see of an update: where generation stops, which name moves, how it resumes.

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
from orchestrator.protocol.messages import ErrorCode

ENGINE_PAUSE: dict[str, tuple[str, bool]] = {
    "keep": ("keep", True),
    "keep_kv": ("keep", False),
    "wait": ("wait", True),
    "abort": ("abort", True),
}
"""Our pause mode -> vLLM's mode, and whether vLLM drops its KV and prefix caches."""
BEHIND = 8
"""Outputs that wait at a commit before the log says so; the engine makes one in each step."""
log = logging.getLogger("vllm.splice")
LATE_S = 5.0
"""How much longer requests that were ended may take to finish."""


class ActionFailed(SpliceError):
    """An action inside vLLM failed; carries the protocol's code."""

    def __init__(self, code: str, message: str, **detail: Any) -> None:
        super().__init__(message)
        self.code, self.detail = ErrorCode(code), detail


class Traffic:
    """The alias, the requests in flight, and the engine that serves them."""

    def __init__(self, alias: Alias, flights: set[Flight]) -> None:
        self.alias, self._flights = alias, flights
        self._entrance: Entrance
        self._gate: OutputGate | None = None
        """None: this engine's outputs cannot be held back."""
        self.is_paused = False
        """The engine is paused for an update."""
        self._keeps_kv = False
        """The engine keeps its KV cache over the update."""

    def put_up_gates(self, engine: Any) -> None:
        """With the first action, before anything is served."""
        if not hasattr(self, "_entrance"):
            self._entrance = Entrance(engine, self.alias)
        if self._gate is None:
            with contextlib.suppress(AttributeError):
                self._gate = OutputGate(engine.engine_core)

    @property
    def gate(self) -> OutputGate | None:
        """The gate, if all outputs are certain to pass through it."""
        return self._gate if self._gate is not None and self._gate.is_sure else None

    def open_gate(self) -> None:
        """Let all outputs pass."""
        if self._gate is not None:
            self._gate.open()

    def status(self) -> dict[str, Any]:
        """What is served and what is in flight."""
        return {
            "name": self.alias.name,
            "version": self.alias.version,
            "poisoned": self.alias.poisoned,
            "moving_to": self.alias.moving_to,
            "in_flight": len(self._flights),
            "paused": self.is_paused,
        }

    # ------------------------------------------------------------ pause

    async def pause(
        self, engine: Any, *, mode: str, version: int, drain_s: float, deadline_s: float
    ) -> None:
        """Finish or end pinned requests, then stop the engine.

        Raises:
            ActionFailed: the engine did not stop in time; it continues with the old version.
        """
        engine_mode, clear_cache = ENGINE_PAUSE[mode]
        try:
            await self.make_way(version, drain_s, clear_cache=clear_cache)
            pausing = dialect.pause(engine, mode=engine_mode, clear_cache=clear_cache)
            await asyncio.wait_for(pausing, deadline_s)
        except TimeoutError as error:
            await self.resume(engine)
            raise ActionFailed(
                ErrorCode.TRANSFER_TIMEOUT,
                f"vLLM was not paused within {deadline_s:.0f} s (mode {mode})",
            ) from error
        self.note_pause()

    def note_pause(self) -> None:
        """The engine is paused from now on."""
        self.is_paused = True

    async def make_way(self, version: int, drain_s: float, *, clear_cache: bool) -> None:
        """Refuse new requests for `name@N`, wait for those that run, and let nothing new start.

        Requests that arrive later enter the engine under the next version.
        """
        self.alias.moving_to = version
        await self._drain_pinned(drain_s)
        if any(f.pinned and f.ended_with is None for f in self._flights):
            raise ActionFailed(
                ErrorCode.INTERNAL, "a pinned request is still in flight after the drain"
            )
        self._keeps_kv = not clear_cache
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

    async def commit(self, engine: Any, app: Any, version: int) -> None:
        """Move alias and weight version to `version`, and resume.

        No answer under the new name comes from old weights, and none under the old name from new
        ones.

        Raises:
            ActionFailed: the engine is not paused.
        """
        if not self.is_paused:
            raise ActionFailed(ErrorCode.NOT_READY, "nothing was received that could be committed")
        if self.gate is None:
            await dialect.settle(engine)
            self._move(app, version)
            await dialect.resume_as(engine, version)
        else:
            await self._commit_behind(self.gate, engine, app, version)
        self.is_paused = False
        self._entrance.open_as(version)

    async def _commit_behind(self, gate: OutputGate, engine: Any, app: Any, version: int) -> None:
        """Resume first, and hold the new tokens back until the old ones have left."""
        made = gate.waiting  # by the old weights
        if made >= BEHIND:
            log.warning(
                "vLLM's API process is %d steps behind its engine, so it limits this replica's "
                "tokens/s; the commit of version %d waits for it while the engine goes on. More "
                "replicas help, or fewer requests at once",
                made,
                version,
            )
        gate.hold()
        try:
            resuming = dialect.resume_as(engine, version)
            # Let the request leave before the old tokens take this process's time.
            await asyncio.sleep(0)
            gate.pass_on(made)
            await dialect.settle(engine, gate=gate)
            await resuming
            self._move(app, version)
        except BaseException as error:
            # The engine may run; none of its tokens may leave under the old name.
            self.poison(app, f"version {version} could not be committed: {error}")
            raise
        finally:
            gate.open()

    def _move(self, app: Any, version: int) -> None:
        """From here on tokens leave under the new name."""
        self.alias.commit(version)
        for flight in self._flights:
            self._entrance.moved(flight, version, keeps_kv=self._keeps_kv)
        _rename(app, self.alias.current, self.alias.name)

    async def resume(self, engine: Any) -> None:
        """Continue with the old version."""
        self.open_gate()
        self.alias.moving_to = None
        await engine.resume_generation()
        self.is_paused = False
        self._entrance.open()

    def poison(self, app: Any, reason: str) -> int:
        """End all requests with 503, and admit none until a commit; returns how many ended."""
        self.open_gate()
        self.alias.poison(reason)
        _rename(app, self.alias.name)
        ended = list(self._flights)
        for flight in ended:
            flight.end(self.alias.not_served())
        return len(ended)


def _rename(app: Any, *names: str) -> None:
    """Change the names that vLLM lists and answers under; the first is its answers' `model`."""
    paths = dialect.base_model_paths(app)
    root = paths[0].model_path
    paths[:] = [dialect.base_model_path(model_name=n, model_path=root) for n in names]
