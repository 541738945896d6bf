"""The supervisor's routes inside vLLM's API process: what each one does to the engine, the workers and the alias.

    status   info   join   leave   plan   pause   update   commit   resume   poison   reset
    shadow_open   shadow_receive   shadow_swap   shadow_drop   canary

They run in vLLM's process, so that pause and commit touch the engine client and the alias in one event loop: between "the last pinned
request has landed" and "the engine stands still" no other request slips in under the old name.
"""

from __future__ import annotations

import array
import asyncio
import base64
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inference_node import dialect, placement, verify
from inference_node import direct as direct_path
from inference_node.alias import Alias, Refusal
from inference_node.entrance import Entrance, free_pass
from inference_node.flights import Flight
from inference_node.output_gate import OutputGate
from orchestrator.errors import ManifestError, SpliceError, VerificationError
from orchestrator.protocol.messages import ErrorCode, Manifest, WireChunk, WireLayout

Answer = dict[str, Any]
Say = Callable[[Answer], Awaitable[None]]
ENGINE_PAUSE: dict[str, tuple[str, bool]] = {
    "keep": ("keep", True),
    "keep_kv": ("keep", False),
    "wait": ("wait", True),
    "abort": ("abort", True),
}
"""Our pause mode -> vLLM's mode, and whether its KV and prefix caches are dropped."""


SHADOW_POLL_S = 0.02
"""How often the workers are asked whether an update has come beside the live tensors: a call between two steps of the engine."""
SHADOW_GRACE_S = 5.0
"""Beyond the workers' own deadline, so that their watchdogs speak first."""


class ControlFailed(SpliceError):
    """A control action failed; carries the protocol's code."""

    def __init__(self, code: str, message: str, **detail: Any) -> None:
        super().__init__(message)
        self.code, self.detail = code, detail


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    """What updates of a manifest, or of a part of one, bring, and how."""

    manifest: Manifest
    layout: WireLayout | None = None
    arrivals: verify.Arrivals | None = None

    @property
    def layout_json(self) -> str | None:
        """For the supervisor."""
        return None if self.layout is None else self.layout.model_dump_json()

    def combine(self, answers: Sequence[Answer]) -> tuple[list[int], dict[str, str]]:
        """Digests of the live tensors in manifest order, all workers together, and what could not be read back."""
        return verify.combine(self.manifest, [_worker_digests(a) for a in answers], self.arrivals)


class Control:
    """State of the update under way, and the actions on it. One action runs at a time, save `status`."""

    def __init__(self, alias: Alias, flights: set[Flight]) -> None:
        self._alias, self._flights = alias, flights
        self._whole: _Update | None = None
        self._part: _Update | None = None
        self._receiving: _Update | None = None
        """The one of them that the update under way brings."""
        self._lock = asyncio.Lock()
        self._say: Say
        """To the supervisor that waits for the action under way."""
        self.is_standing = False
        """The engine stands still for an update."""
        self._gate: OutputGate | None = None
        """Of an engine whose outputs can be held back."""
        self._entrance: Entrance
        self._keeps_kv = False
        """The engine stands still with its KV cache as it was."""

    async def run(self, action: str, arguments: Answer, app: Any, say: Say) -> tuple[int, Answer]:
        """Run an action; (HTTP status, JSON). `say`: what the supervisor is to know before the end, {"progress": ..., ...}."""
        if action == "status":
            return 200, self.status()
        method: Callable[..., Awaitable[Answer]] | None = (
            getattr(self, f"_do_{action}", None) if action.isidentifier() else None
        )
        if method is None:
            return 404, {"error": {"code": ErrorCode.PROTOCOL, "message": f"no control action {action!r}"}}
        from vllm.v1.engine.exceptions import EngineDeadError

        began = time.monotonic()
        async with self._lock:
            self._say = say
            self._put_up_gates(app.state.engine_client)
            try:
                answer = await method(app.state.engine_client, app, **arguments)
            except ControlFailed as error:
                return 409, {"error": {"code": error.code, "message": str(error)}, **error.detail}
            except (ManifestError, VerificationError) as error:
                code = ErrorCode.PLAN_REFUSED if isinstance(error, ManifestError) else ErrorCode.VERIFICATION_FAILED
                return 409, {"error": {"code": code, "message": str(error)}}
            except EngineDeadError as error:
                return 500, {"error": {"code": ErrorCode.NODE_LOST, "message": f"vLLM's engine died: {error}"}}
            except (TypeError, ValueError, KeyError, RuntimeError, TimeoutError) as error:
                return 500, {"error": {"code": ErrorCode.INTERNAL, "message": f"{type(error).__name__}: {error}"}}
        return 200, {**answer, "seconds": time.monotonic() - began}

    def _put_up_gates(self, engine: Any) -> None:
        """With the first action, which comes before anything is served."""
        if not hasattr(self, "_entrance"):
            self._entrance = Entrance(engine, self._alias)
        if self._gate is None:
            with contextlib.suppress(AttributeError):
                self._gate = OutputGate(engine.engine_core)

    @property
    def _sure_gate(self) -> OutputGate | None:
        return self._gate if self._gate is not None and self._gate.is_sure else None

    def status(self) -> Answer:
        """What is served and what is in flight."""
        alias = self._alias
        return {
            "name": alias.name, "version": alias.version, "poisoned": alias.poisoned, "moving_to": alias.moving_to,
            "in_flight": len(self._flights), "paused": self.is_standing,
        }  # fmt: skip

    # ------------------------------------------------------------ workers

    async def _workers(self, engine: Any, method: str, *args: Any) -> list[Answer]:
        """Call a method of every worker; the first error ends it."""
        return self._checked(await dialect.collective_rpc(engine, method, args))

    @staticmethod
    def _checked(answers: list[Answer]) -> list[Answer]:
        for answer in answers:
            if "error" in answer:
                rest = {k: v for k, v in answer.items() if k != "error"}
                if "tensors" in rest:  # what any of the workers has written counts
                    rest["tensors"] = max(int(a.get("tensors", 0)) for a in answers)
                raise ControlFailed(answer["error"]["code"], answer["error"]["message"], **rest)
        return answers

    async def _do_info(self, engine: Any, app: Any) -> Answer:
        return {"workers": await self._workers(engine, "splice_info")}

    async def _do_join(self, engine: Any, app: Any, *, rendezvous: str, deadline_s: float) -> Answer:
        await self._workers(engine, "splice_join", rendezvous, deadline_s)
        return {}

    async def _do_leave(self, engine: Any, app: Any) -> Answer:
        await self._workers(engine, "splice_leave")
        return {}

    async def _do_plan(self, engine: Any, app: Any, *, manifest: str) -> Answer:
        """Check a manifest against all workers' placement, and lay out it and the part of it that training changes. Keeps both."""
        self._whole = self._part = self._receiving = None
        parsed = Manifest.model_validate_json(manifest)
        answers = await self._workers(engine, "splice_plan_check", manifest)
        findings = [placement.Findings(**a["findings"]) for a in answers]
        placement.judge(parsed, findings)
        reasons: dict[str, set[int]] = {}
        for why, indices in (pair for a in answers for pair in a["obstacles"].items()):
            reasons.setdefault(why, set()).update(indices)
        reloaded = await self._whole_layers(engine, set().union(*reasons.values()), len(answers))
        changed = await self._whole_layers(engine, parsed.changed or (), len(answers))
        self._whole = await self._lay_out(engine, parsed, findings, reasons, reloaded, None)
        layout = self._whole.layout_json
        if not changed or len(changed) == len(parsed.tensors):
            return {"layout": layout, "changed": None}
        self._part = await self._lay_out(engine, parsed, findings, reasons, reloaded, changed)
        return {"layout": layout, "changed": {"tensors": changed, "layout": self._part.layout_json}}

    async def _whole_layers(self, engine: Any, indices: Collection[int], workers: int) -> list[int]:
        """The indices, with all that shares a layer with any of them on any worker; asked again until no worker adds one."""
        found = sorted(indices)
        while found:
            answers = await self._workers(engine, "splice_whole_layers", found)
            more = sorted({i for a in answers for i in a["indices"]})
            if workers == 1 or more == found:
                return more
            found = more
        return found

    async def _lay_out(
        self, engine: Any, manifest: Manifest, findings: Sequence[placement.Findings], reasons: Mapping[str, Collection[int]],
        reloaded: Sequence[int], part: Sequence[int] | None,
    ) -> _Update:  # fmt: skip
        """Every worker plans for itself, and all must come to the same."""
        answers = await self._workers(engine, "splice_lay_out", reloaded, part)
        rows = answers[0]["chunks"]
        if any(a["chunks"] != rows for a in answers):
            raise ControlFailed(
                ErrorCode.INTERNAL, "the workers of this replica planned different layouts; do all run one release?"
            )
        brought = manifest if part is None else manifest.part(part)
        if rows is None:
            return _Update(manifest=brought)
        within = range(len(manifest.tensors)) if part is None else part
        chunks = tuple(WireChunk(kind=kind, tensors=tuple(indices)) for kind, indices in rows)
        why = direct_path.explain(manifest, reasons, reloaded, within=within)
        arriving = [i for c in chunks if c.kind != "reload" for i in c.tensors]
        arrivals = verify.Arrivals(brought, arriving, [f.loaded for f in findings])
        return _Update(manifest=brought, layout=WireLayout(chunks=chunks, why_not_live=why), arrivals=arrivals)

    async def _do_update(
        self, engine: Any, app: Any, *, update_id: str, deadline_s: float, direct: bool, changed_only: bool, pause: Answer
    ) -> Answer:  # fmt: skip
        """Stand still and receive an update into the live tensors; their digests."""
        self._receiving = self._part if changed_only else self._whole
        if self._receiving is None:
            raise ControlFailed(ErrorCode.NOT_READY, "this update was not planned here")
        began = time.monotonic()
        await self._stand_still(engine, app, pause)
        left_s = max(1.0, deadline_s - (time.monotonic() - began))
        arguments = (update_id, left_s, direct, changed_only)
        return await self._bring(self._receiving, self._workers(engine, "splice_update", *arguments))

    async def _stand_still(self, engine: Any, app: Any, pause: Answer) -> None:
        """Pause, and say so. What follows is the same call, because every way into this process waits until it has handed out the last step's tokens."""
        began = time.monotonic()
        await self._do_pause(engine, app, **pause)
        await self._say({"progress": "paused", "seconds": time.monotonic() - began})

    async def _bring(self, update: _Update, asked: Awaitable[list[Answer]]) -> Answer:
        """What comes of asking the workers to bring an update into the live tensors; see `_updated`.

        Raises:
            ControlFailed: whatever failed, with how many tensors may have been written.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return self._updated(update, await asked)
        except (ControlFailed, EngineDeadError):
            raise
        except VerificationError as error:
            raise _written(update, "verify", ErrorCode.VERIFICATION_FAILED, str(error)) from error
        except Exception as error:  # what the workers had done by then is not known
            raise _written(update, "apply", ErrorCode.INTERNAL, f"{type(error).__name__}: {error}") from error

    @staticmethod
    def _updated(update: _Update, answers: Sequence[Answer]) -> Answer:
        """Digests of the live tensors that the update brought, in manifest order, all workers together; the slowest worker's phases."""
        began = time.monotonic()
        digests, unverified = update.combine(answers)
        packed = base64.b64encode(array.array("q", digests).tobytes()).decode()
        phases = {k: max(float(a["phases"][k]) for a in answers) for k in answers[0]["phases"]}
        phases["verify_worker"] = phases["verify"]
        phases["verify"] += time.monotonic() - began
        return {"digests": packed, "unverified": unverified, "phases": phases}

    # ------------------------------------------------------------ shadow mode

    async def _do_shadow_open(
        self, engine: Any, app: Any, *, direct: bool, changed_only: bool, budget_bytes: int
    ) -> Answer:  # fmt: skip
        """Room for an update beside every worker's live tensors, or why one of them has none (then none has)."""
        self._receiving = self._part if changed_only else self._whole
        answers = await self._workers(engine, "splice_shadow_open", direct, changed_only, budget_bytes)
        refusal = next((a["why_not"] for a in answers if a["why_not"] is not None), None)
        if refusal is not None:
            await self._workers(engine, "splice_shadow_drop")
        return {"why_not": refusal}

    async def _do_shadow_receive(self, engine: Any, app: Any, *, update_id: str, deadline_s: float) -> Answer:
        """Receive beside the live tensors while the engine steps; the digests of what came, on which all workers must agree."""
        until = time.monotonic() + deadline_s + SHADOW_GRACE_S
        await self._workers(engine, "splice_shadow_start", update_id, deadline_s)
        while True:
            await asyncio.sleep(SHADOW_POLL_S)
            answers = await self._workers(engine, "splice_shadow_poll")
            if all(a["digests"] is not None for a in answers):
                break
            if time.monotonic() > until:
                raise ControlFailed(ErrorCode.TRANSFER_TIMEOUT, f"not all workers had the update after {deadline_s:.0f} s")
        if len({a["digests"] for a in answers}) != 1:
            raise VerificationError("the workers did not receive the same bytes")
        slowest = max(answers, key=lambda a: float(a["phases"]["wire"]))
        return {"digests": answers[0]["digests"], "phases": slowest["phases"]}

    async def _do_shadow_swap(
        self, engine: Any, app: Any, *, update_id: str, commit_if: str | None, pause: Answer
    ) -> Answer:  # fmt: skip
        """Stand still and swap what came in; digests of the live tensors that it brought. With exactly the digests `commit_if`, commit."""
        update = self._receiving
        if update is None:
            raise ControlFailed(ErrorCode.NOT_READY, "nothing was received beside the live tensors")
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            answer = await self._swap(engine, app, update, update_id, pause)
            answer["committed"] = commit_if is not None and answer["digests"] == commit_if
            if answer["committed"]:
                try:
                    await self._do_commit(engine, app, version=pause["version"])
                except EngineDeadError:
                    raise
                except Exception as error:  # whatever it is, the new weights are live
                    raise _written(update, "commit", ErrorCode.INTERNAL, f"{type(error).__name__}: {error}") from error
            return answer
        finally:
            if self._gate is not None:
                self._gate.open()

    async def _swap(self, engine: Any, app: Any, update: _Update, update_id: str, pause: Answer) -> Answer:
        """Stand still and swap. Where vLLM's order allows it, in one go: else the swap waits until this process, busy with the last step's
        tokens, has heard that the engine stands still, and tells it to go on."""
        engine_mode, clear_cache = ENGINE_PAUSE[pause["mode"]]
        if engine_mode != "keep" or not dialect.keeps_order(engine):
            await self._stand_still(engine, app, pause)
            return await self._bring(update, self._workers(engine, "splice_shadow_swap", update_id))
        began = time.monotonic()
        await self._make_way(pause["version"], pause["drain_s"])
        self._shut(clear_cache)
        await self._say({"progress": "paused", "seconds": time.monotonic() - began})
        return await self._bring(update, self._pause_and_swap(engine, update_id, clear_cache, pause["deadline_s"]))

    async def _pause_and_swap(self, engine: Any, update_id: str, clear_cache: bool, deadline_s: float) -> list[Answer]:
        began = time.monotonic()
        asked = dialect.pause_and_call(
            engine, clear_cache=clear_cache, method="splice_shadow_swap", args=(update_id,), gate=self._sure_gate, on_send=self._stand
        )  # fmt: skip
        answers = await asyncio.wait_for(asked, deadline_s)
        for answer in self._checked(answers):  # what was not the swap was the wait for the step under way
            answer["phases"]["pause"] = time.monotonic() - began - float(answer["seconds"])
        return answers

    async def _do_shadow_drop(self, engine: Any, app: Any) -> Answer:
        await self._workers(engine, "splice_shadow_drop")
        return {}

    async def _do_reset(self, engine: Any, app: Any) -> Answer:
        answers = await self._workers(engine, "splice_reset")
        return {"layers": max(int(a["layers"]) for a in answers)}

    # ------------------------------------------------------------ pause and commit

    async def _do_pause(self, engine: Any, app: Any, *, mode: str, version: int, drain_s: float, deadline_s: float) -> Answer:
        """Let pinned requests land or end them, then stop the engine."""
        engine_mode, clear_cache = ENGINE_PAUSE[mode]
        try:
            await self._make_way(version, drain_s)
            self._shut(clear_cache)
            await asyncio.wait_for(dialect.pause(engine, mode=engine_mode, clear_cache=clear_cache), deadline_s)
        except TimeoutError as error:
            await self._do_resume(engine, app)
            raise ControlFailed(
                ErrorCode.TRANSFER_TIMEOUT, f"vLLM was not paused within {deadline_s:.0f} s (mode {mode})"
            ) from error
        self._stand()
        return {}

    def _stand(self) -> None:
        self.is_standing = True

    def _shut(self, clear_cache: bool) -> None:
        """What comes from now on enters the engine under the next version."""
        self._keeps_kv = not clear_cache
        self._entrance.shut()

    async def _make_way(self, version: int, drain_s: float) -> None:
        """Nothing pinned is admitted any more, and nothing pinned is left."""
        self._alias.moving_to = version
        await self._drain_pinned(drain_s)
        self._check_no_pinned()

    async def _drain_pinned(self, drain_s: float) -> None:
        """Wait for pinned requests; those still there are told 409."""
        pinned = [f for f in self._flights if f.pinned]
        landing = [asyncio.ensure_future(f.landed.wait()) for f in pinned]
        if landing:
            _, late = await asyncio.wait(landing, timeout=drain_s)
            for flight in pinned:
                if not flight.landed.is_set():
                    flight.end(self._alias.moving())
            if late:
                await asyncio.wait(late, timeout=drain_s + 5.0)
            for waiting in landing:
                waiting.cancel()

    def _check_no_pinned(self) -> None:
        if any(f.pinned and f.ended_with is None for f in self._flights):
            raise ControlFailed(ErrorCode.INTERNAL, "a pinned request is still in flight after the drain")

    async def _do_canary(self, engine: Any, app: Any, *, tokens: list[int], deadline_s: float) -> Answer:
        """Log-probs of a prompt under weights that nobody is served yet: the engine runs for it alone, then stands still again."""
        if not self.is_standing or self._alias.refuse(None) is None:
            raise ControlFailed(
                ErrorCode.NOT_READY, "a canary runs between receiving and commit, where nothing is served meanwhile"
            )
        await engine.resume_generation()
        try:
            asked = dialect.prompt_logprobs(engine, tokens, request_id=f"splice-canary-{time.monotonic_ns()}")
            with free_pass():
                logprobs = await asyncio.wait_for(asked, deadline_s)
        finally:
            await asyncio.wait_for(dialect.pause(engine, mode="abort", clear_cache=True), deadline_s)
        return {"logprobs": logprobs}

    async def _do_commit(self, engine: Any, app: Any, *, version: int) -> Answer:
        """Alias and weight version to `version`, and resume: no answer under the new name comes from old weights, none under the old from new ones."""
        if not self.is_standing:
            raise ControlFailed(ErrorCode.NOT_READY, "nothing was received that could be committed")
        gate = self._sure_gate
        if gate is None:
            await dialect.settle(engine)
            self._move(app, version)
            await dialect.resume_as(engine, version)
        else:
            made = gate.waiting  # by the old weights
            gate.hold()
            try:
                resuming = dialect.resume_as(engine, version)
                await asyncio.sleep(0)  # it is on its way before the old tokens take this process's time
                gate.pass_on(made)
                await dialect.settle(engine, gate=gate)
                await resuming
                self._move(app, version)
            except BaseException as error:  # the engine may run on; nothing that it makes goes out under the old name
                await self._do_poison(engine, app, reason=f"version {version} could not be committed: {error}")
                raise
            finally:
                gate.open()
        self.is_standing = False
        self._entrance.open_as(version)
        return {"model": self._alias.current}

    def _move(self, app: Any, version: int) -> None:
        """From here on tokens leave under the new name."""
        self._alias.commit(version)
        for flight in self._flights:
            self._entrance.moved(flight, version, keeps_kv=self._keeps_kv)
        _rename(app, self._alias.current, self._alias.name)

    async def _do_resume(self, engine: Any, app: Any) -> Answer:
        """Go on with the version that was."""
        self._alias.moving_to = None
        await engine.resume_generation()
        self.is_standing = False
        self._entrance.open()
        return {}

    async def _do_poison(self, engine: Any, app: Any, *, reason: str) -> Answer:
        """Serve nothing: in-flight requests are ended, new ones get 503, until a commit."""
        self._alias.poison(reason)
        _rename(app, self._alias.name)
        refusal = self._alias.refuse(None)
        assert refusal is not None
        ended = list(self._flights)
        for flight in ended:
            flight.end(Refusal(status=503, kind=refusal.kind, message=refusal.message, retry_after_s=refusal.retry_after_s))
        return {"ended": len(ended)}


def _written(update: _Update, phase: str, code: ErrorCode, message: str) -> ControlFailed:
    """A failure by which all of the update may have been written."""
    return ControlFailed(code, message, phase=phase, tensors=len(update.manifest.tensors))


def _rename(app: Any, *names: str) -> None:
    """Change the names that vLLM itself lists and answers under; the first is the `model` of its answers."""
    paths = dialect.base_model_paths(app)
    root = paths[0].model_path
    paths[:] = [dialect.base_model_path(model_name=n, model_path=root) for n in names]


def _worker_digests(answer: Answer) -> verify.WorkerDigests:
    parts = {
        name: [verify.PartDigest(key=(p[0], tuple(p[1]), tuple(p[2])), numel=p[3], digest=p[4]) for p in rows]
        for name, rows in answer["parts"]
    }
    packed = answer["arrived"]
    arrived = None if packed is None else array.array("q", base64.b64decode(packed))
    return verify.WorkerDigests(parts=parts, unverified=answer["unverified"], arrived=arrived)
