"""What the inference node can have done inside vLLM's API process: to engine, workers and alias.

    status   info   join   leave   plan   pause   update   commit   resume   poison   reset
    shadow_open   shadow_receive   shadow_swap   shadow_drop   canary

An action that serves a request of the orchestrator takes that request itself, as JSON of the same
model. The actions run in vLLM's process, so that pause and commit touch the engine client and the
alias in one event loop. No request under the old name can then slip in between "the last pinned
request has landed" and "the engine is paused".
"""

from __future__ import annotations

import array
import asyncio
import base64
import functools
import json
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inference_node.server import all_workers, dialect
from inference_node.server.entrance import free_pass
from inference_node.server.traffic import ENGINE_PAUSE, ActionFailed, Traffic
from inference_node.shared.reports import Findings, PartDigest, WorkerDigests
from orchestrator.errors import ManifestError, VerificationError
from orchestrator.protocol.messages import (
    CheckCanary,
    CommitUpdate,
    ErrorCode,
    Fp8Group,
    JoinTransferGroup,
    LeaveTransferGroup,
    Manifest,
    Message,
    PrepareShadow,
    PrepareUpdate,
    ReceiveWeights,
    SwapWeights,
    WireChunk,
    WireLayout,
    fp8_manifest,
)

Answer = dict[str, Any]
Say = Callable[[Answer], Awaitable[None]]
MESSAGES: dict[str, type[Message]] = {
    "join": JoinTransferGroup,
    "leave": LeaveTransferGroup,
    "plan": PrepareUpdate,
    "update": ReceiveWeights,
    "shadow_open": PrepareShadow,
    "shadow_receive": ReceiveWeights,
    "shadow_swap": SwapWeights,
    "canary": CheckCanary,
    "commit": CommitUpdate,
}
"""Action -> the request that it takes. Other actions take a JSON object of arguments."""


MANIFEST_ORDER = "manifest order was asked for"
FP8_ORDER = "FP8 weights cannot be reloaded in manifest order; serve this model in bf16"
DEATH_POLL_S = 0.5
"""Seconds between two questions whether the engine still lives."""
SHADOW_POLL_S = 0.02
"""Seconds between two questions whether an update has arrived beside the live tensors."""
SHADOW_GRACE_S = 5.0
"""Added to the workers' own deadline, so that their watchdogs speak first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedUpdate:
    """What each update of a manifest, or of a part of one, brings, and in which layout."""

    manifest: Manifest
    layout: WireLayout
    arrivals: all_workers.Arrivals

    def combine(self, answers: Sequence[Answer]) -> tuple[Sequence[int], dict[str, str]]:
        """Digests of the live tensors, summed over all workers, and what could not be read back."""
        return all_workers.combine(
            self.manifest, [_worker_digests(a) for a in answers], self.arrivals
        )


class Actions:
    """The planned updates, and the actions on them. One action runs at a time, except `status`."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._whole: PlannedUpdate | None = None
        self._part: PlannedUpdate | None = None
        self._receiving: PlannedUpdate | None = None
        """The planned update that the one under way brings."""
        self._lock = asyncio.Lock()
        self._say: Say
        """Sends a line to the node that waits for the action under way."""

    async def run(self, action: str, body: bytes, app: Any, say: Say) -> tuple[int, Answer]:
        """Run an action; (HTTP status, JSON).

        Args:
            body: the JSON that the action takes, see `MESSAGES`.
            say: takes what the node must know before the end, {"progress": ..., ...}.
        """
        if action == "status":
            return 200, self._traffic.status()
        method: Callable[..., Coroutine[Any, Any, Answer]] | None = (
            getattr(self, f"_do_{action}", None) if action.isidentifier() else None
        )
        if method is None:
            return 404, _error(ErrorCode.PROTOCOL, f"no control action {action!r}")
        try:
            model = MESSAGES.get(action)
            arguments = json.loads(body or b"{}") if model is None else {}
            request = () if model is None else (model.model_validate_json(body),)
        except ValueError as error:
            return 400, _error(ErrorCode.PROTOCOL, f"the body of {action!r} is malformed: {error}")
        from vllm.v1.engine.exceptions import EngineDeadError

        began = time.monotonic()
        async with self._lock:
            self._say = say
            self._traffic.put_up_gates(app.state.engine_client)
            try:
                work = method(app.state.engine_client, app, *request, **arguments)
                answer = await _while_alive(work, app.state.engine_client)
            except ActionFailed as error:
                return 409, {**_error(error.code, str(error)), **error.detail}
            except (ManifestError, VerificationError) as error:
                code = (
                    ErrorCode.PLAN_REFUSED
                    if isinstance(error, ManifestError)
                    else ErrorCode.VERIFICATION_FAILED
                )
                return 409, _error(code, str(error))
            except EngineDeadError as error:
                return 500, _error(ErrorCode.NODE_LOST, f"vLLM's engine died: {error}")
            except (TypeError, ValueError, KeyError, RuntimeError, TimeoutError) as error:
                return 500, _error(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")
        return 200, {**answer, "seconds": time.monotonic() - began}

    # ------------------------------------------------------------ workers

    async def _workers(self, engine: Any, method: str, *args: Any) -> list[Answer]:
        """Call a method of every worker; the first error raises."""
        return self._checked(await dialect.collective_rpc(engine, method, args))

    @staticmethod
    def _checked(answers: list[Answer]) -> list[Answer]:
        for answer in answers:
            if "error" in answer:
                rest = {k: v for k, v in answer.items() if k != "error"}
                if "tensors" in rest:  # whatever any worker has written counts
                    rest["tensors"] = max(int(a.get("tensors", 0)) for a in answers)
                raise ActionFailed(answer["error"]["code"], answer["error"]["message"], **rest)
        return answers

    async def _do_info(self, engine: Any, app: Any) -> Answer:
        return {"workers": await self._workers(engine, "splice_info")}

    async def _do_join(self, engine: Any, app: Any, message: JoinTransferGroup) -> Answer:
        await self._workers(engine, "splice_join", message.model_dump_json())
        return {}

    async def _do_leave(self, engine: Any, app: Any, _: LeaveTransferGroup) -> Answer:
        await self._workers(engine, "splice_leave")
        return {}

    async def _do_plan(self, engine: Any, app: Any, message: PrepareUpdate) -> Answer:
        """Check a manifest against all workers' placement; lay out it and its changed part."""
        self._whole = self._part = self._receiving = None
        manifest = message.manifest
        answers, findings = await self._check(engine, manifest, "splice_plan_check", manifest)
        groups = [[Fp8Group.model_validate(g) for g in a["fp8"]] for a in answers]
        weights = all_workers.merged_groups(groups)
        if weights is not None:
            if message.order == "manifest":
                raise ManifestError(FP8_ORDER)
            manifest = fp8_manifest(manifest, weights)
            answers, findings = await self._check(engine, manifest, "splice_use_fp8", weights)
        reasons: dict[str, set[int]] = {}
        for why, indices in (pair for a in answers for pair in a["obstacles"].items()):
            reasons.setdefault(why, set()).update(indices)
        if message.order == "manifest":
            reasons = {MANIFEST_ORDER: set(range(len(manifest.tensors)))}
        reloaded = await self._whole_layers(engine, set().union(*reasons.values()), len(answers))
        all_workers.refuse_reload(manifest, reloaded, reasons)
        changed = await self._whole_layers(engine, manifest.changed or (), len(answers))
        lay_out = functools.partial(
            self._lay_out,
            engine,
            manifest,
            findings,
            reasons,
            reloaded,
            is_own=message.order == "own",
        )
        self._whole = await lay_out(None)
        planned: Answer = {
            "layout": self._whole.layout.model_dump(mode="json"),
            "changed": None,
            "fp8": None if weights is None else weights.model_dump(mode="json"),
        }
        if changed and len(changed) < len(manifest.tensors):
            self._part = await lay_out(changed)
            layout = self._part.layout.model_dump(mode="json")
            planned["changed"] = {"tensors": changed, "layout": layout}
        return planned

    async def _check(
        self, engine: Any, manifest: Manifest, method: str, argument: Message
    ) -> tuple[list[Answer], list[Findings]]:
        """All workers' answers about a manifest; refuses one that the replica cannot load whole."""
        answers = await self._workers(engine, method, argument.model_dump_json())
        findings = [Findings(**a["findings"]) for a in answers]
        all_workers.judge(manifest, findings)
        return answers, findings

    async def _whole_layers(self, engine: Any, indices: Collection[int], workers: int) -> list[int]:
        """The indices, with all tensors that share a layer with any of them on any worker."""
        found = sorted(indices)
        while found:
            answers = await self._workers(engine, "splice_whole_layers", found)
            more = sorted({i for a in answers for i in a["indices"]})
            if workers == 1 or more == found:
                return more
            found = more
        return found

    async def _lay_out(
        self,
        engine: Any,
        manifest: Manifest,
        findings: Sequence[Findings],
        reasons: Mapping[str, Collection[int]],
        reloaded: Sequence[int],
        part: Sequence[int] | None,
        *,
        is_own: bool,
    ) -> PlannedUpdate:
        """Have every worker plan an update; all must plan the same."""
        answers = await self._workers(engine, "splice_lay_out", reloaded, part, is_own)
        rows = answers[0]["chunks"]
        if any(a["chunks"] != rows for a in answers):
            raise ActionFailed(
                ErrorCode.INTERNAL,
                "the workers of this replica planned different layouts; do all run one release?",
            )
        brought = manifest if part is None else manifest.part(part)
        within = range(len(manifest.tensors)) if part is None else part
        chunks = tuple(WireChunk(kind=kind, tensors=tuple(indices)) for kind, indices in rows)
        why = all_workers.explain(manifest, reasons, reloaded, within=within)
        arriving = [i for c in chunks if c.kind != "reload" for i in c.tensors]
        arrivals = all_workers.Arrivals(brought, arriving, [f.loaded for f in findings])
        return PlannedUpdate(
            manifest=brought, layout=WireLayout(chunks=chunks, why_not_live=why), arrivals=arrivals
        )

    async def _do_update(self, engine: Any, app: Any, message: ReceiveWeights) -> Answer:
        """Pause and receive an update into the live tensors; returns their digests."""
        update = self._receiving = self._planned(message)
        if update is None:
            raise ActionFailed(ErrorCode.NOT_READY, "this update was not planned here")
        return await self._pause_and(engine, update, message, "splice_update")

    def _planned(self, message: ReceiveWeights | PrepareShadow) -> PlannedUpdate | None:
        return self._whole if message.base_version is None else self._part

    async def _pause_and(
        self,
        engine: Any,
        update: PlannedUpdate,
        message: ReceiveWeights | SwapWeights,
        method: str,
    ) -> Answer:
        """Pause, and have every worker bring the update into the live tensors by its `method`.

        Pause and update are one call of this process, because each call into it waits until it has
        handed out the last step's tokens. They are one call of the engine too if vLLM keeps the
        order of calls. The last step's tokens then wait for the commit.
        """
        began = time.monotonic()
        engine_mode, clear_cache = ENGINE_PAUSE[message.pause_mode]
        is_one_call = engine_mode == "keep" and dialect.keeps_order(engine)
        if is_one_call:
            await self._traffic.make_way(message.version, message.drain_s, clear_cache=clear_cache)
        else:
            await self._traffic.pause(
                engine,
                mode=message.pause_mode,
                version=message.version,
                drain_s=message.drain_s,
                deadline_s=message.deadline_s,
            )
        paused_s = time.monotonic() - began
        await self._say({"progress": "paused", "seconds": paused_s})
        left_s = max(1.0, message.deadline_s - paused_s)
        rest = message.model_copy(update={"deadline_s": left_s}).model_dump_json()
        try:
            if is_one_call:
                asked = self._paused_workers(engine, method, rest, clear_cache=clear_cache)
            else:
                asked = self._workers(engine, method, rest)
            return await self._bring(update, asked)
        except BaseException:
            self._traffic.open_gate()
            raise

    async def _paused_workers(
        self, engine: Any, method: str, request: str, *, clear_cache: bool
    ) -> list[Answer]:
        """Pause and call a method of every worker in one go; the first error raises."""
        began = time.monotonic()
        asked = dialect.pause_and_call(
            engine,
            clear_cache=clear_cache,
            method=method,
            args=(request,),
            gate=self._traffic.gate,
            on_send=self._traffic.note_pause,
        )
        answers = self._checked(await asked)
        for answer in answers:  # the rest was the wait for the step under way
            answer["phases"]["pause"] = time.monotonic() - began - float(answer["seconds"])
        return answers

    async def _bring(self, update: PlannedUpdate, asked: Awaitable[list[Answer]]) -> Answer:
        """Await the workers' answers, which come once the update is in the live tensors.

        Raises:
            ActionFailed: says how many tensors may have been written.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return self._updated(update, await asked)
        except (ActionFailed, EngineDeadError):
            raise
        except VerificationError as error:
            raise _written(update, "verify", ErrorCode.VERIFICATION_FAILED, str(error)) from error
        except Exception as error:  # nobody knows what the workers had done by then
            raise _written(
                update, "apply", ErrorCode.INTERNAL, f"{type(error).__name__}: {error}"
            ) from error

    @staticmethod
    def _updated(update: PlannedUpdate, answers: Sequence[Answer]) -> Answer:
        """Digests of the live tensors, in manifest order, and the slowest worker's phases."""
        began = time.monotonic()
        digests, unverified = update.combine(answers)
        packed = base64.b64encode(array.array("q", digests).tobytes()).decode()
        phases = {k: max(float(a["phases"][k]) for a in answers) for k in answers[0]["phases"]}
        phases["verify_worker"] = phases["verify"]
        phases["verify"] += time.monotonic() - began
        return {"digests": packed, "unverified": unverified, "phases": phases}

    # ------------------------------------------------------------ shadow mode

    async def _do_shadow_open(self, engine: Any, app: Any, message: PrepareShadow) -> Answer:
        """Make room beside every worker's live tensors; or say why one worker has none."""
        self._receiving = self._planned(message)
        answers = await self._workers(engine, "splice_shadow_open", message.model_dump_json())
        refusal = next((a["why_not"] for a in answers if a["why_not"] is not None), None)
        if refusal is not None:
            await self._workers(engine, "splice_shadow_drop")
        return {"why_not": refusal}

    async def _do_shadow_receive(self, engine: Any, app: Any, message: ReceiveWeights) -> Answer:
        """Receive beside the live tensors while the engine steps.

        Returns the digests of what arrived, on which all workers must agree.
        """
        until = time.monotonic() + message.deadline_s + SHADOW_GRACE_S
        await self._workers(engine, "splice_shadow_start", message.model_dump_json())
        while True:
            await asyncio.sleep(SHADOW_POLL_S)
            answers = await self._workers(engine, "splice_shadow_poll")
            if all(a["digests"] is not None for a in answers):
                break
            if time.monotonic() > until:
                raise ActionFailed(
                    ErrorCode.TRANSFER_TIMEOUT,
                    f"not all workers had the update after {message.deadline_s:.0f} s",
                )
        if len({a["digests"] for a in answers}) != 1:
            raise VerificationError("the workers did not receive the same bytes")
        slowest = max(answers, key=lambda a: float(a["phases"]["wire"]))
        return {"digests": answers[0]["digests"], "phases": slowest["phases"]}

    async def _do_shadow_swap(self, engine: Any, app: Any, message: SwapWeights) -> Answer:
        """Pause and swap in what arrived; returns the digests of the live tensors.

        Commits if the digests are exactly `commit_if`.
        """
        update = self._receiving
        if update is None:
            raise ActionFailed(ErrorCode.NOT_READY, "nothing was received beside the live tensors")
        from vllm.v1.engine.exceptions import EngineDeadError

        answer = await self._pause_and(
            engine, update, message.model_copy(update={"commit_if": None}), "splice_shadow_swap"
        )
        digests = base64.b64decode(answer["digests"])
        answer["committed"] = message.commit_if is not None and digests == message.commit_if
        if answer["committed"]:
            try:
                await self._traffic.commit(engine, app, message.version)
            except EngineDeadError:
                raise
            except Exception as error:  # the new weights are live all the same
                raise _written(
                    update, "commit", ErrorCode.INTERNAL, f"{type(error).__name__}: {error}"
                ) from error
        return answer

    async def _do_shadow_drop(self, engine: Any, app: Any) -> Answer:
        await self._workers(engine, "splice_shadow_drop")
        return {}

    async def _do_reset(self, engine: Any, app: Any) -> Answer:
        answers = await self._workers(engine, "splice_reset")
        return {"layers": max(int(a["layers"]) for a in answers)}

    # ------------------------------------------------------------ pause and commit

    async def _do_pause(
        self, engine: Any, app: Any, *, mode: str, version: int, drain_s: float, deadline_s: float
    ) -> Answer:
        await self._traffic.pause(
            engine, mode=mode, version=version, drain_s=drain_s, deadline_s=deadline_s
        )
        return {}

    async def _do_canary(self, engine: Any, app: Any, message: CheckCanary) -> Answer:
        """Log-probs of a prompt under weights that nobody is served yet.

        The engine runs for the prompt alone, then pauses again.
        """
        deadline_s = message.deadline_s
        if not self._traffic.is_paused or self._traffic.alias.refuse(None) is None:
            raise ActionFailed(
                ErrorCode.NOT_READY,
                "a canary runs between receiving and commit, where nothing is served meanwhile",
            )
        self._traffic.open_gate()
        await engine.resume_generation()
        try:
            asked = dialect.prompt_logprobs(
                engine, list(message.tokens), request_id=f"splice-canary-{time.monotonic_ns()}"
            )
            with free_pass():
                logprobs = await asyncio.wait_for(asked, deadline_s)
        finally:
            await asyncio.wait_for(
                dialect.pause(engine, mode="abort", clear_cache=True), deadline_s
            )
        return {"logprobs": logprobs}

    async def _do_commit(self, engine: Any, app: Any, message: CommitUpdate) -> Answer:
        await self._traffic.commit(engine, app, message.version)
        return {"model": self._traffic.alias.current}

    async def _do_resume(self, engine: Any, app: Any) -> Answer:
        await self._traffic.resume(engine)
        return {}

    async def _do_poison(self, engine: Any, app: Any, *, reason: str) -> Answer:
        return {"ended": self._traffic.poison(app, reason)}


def _error(code: str, message: str) -> Answer:
    return {"error": {"code": code, "message": message}}


async def _while_alive(work: Coroutine[Any, Any, Answer], engine: Any) -> Answer:
    """Run the work as long as the engine lives.

    vLLM leaves a call without an answer if its engine ends meanwhile. Its server ends only after
    the requests that are open, and this work is one.

    Raises:
        EngineDeadError: the engine ended first.
    """
    task = asyncio.create_task(work)
    try:
        while not (await asyncio.wait({task}, timeout=DEATH_POLL_S))[0]:
            if engine.errored:
                raise engine.dead_error
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait({task})


def _written(update: PlannedUpdate, phase: str, code: ErrorCode, message: str) -> ActionFailed:
    """A failure after which the whole update may have been written."""
    return ActionFailed(code, message, phase=phase, tensors=len(update.manifest.tensors))


def _worker_digests(answer: Answer) -> WorkerDigests:
    parts = {
        name: [
            PartDigest(key=(p[0], tuple(p[1]), tuple(p[2])), numel=p[3], digest=p[4]) for p in rows
        ]
        for name, rows in answer["parts"]
    }
    packed = answer["arrived"]
    arrived = None if packed is None else array.array("q", base64.b64decode(packed))
    return WorkerDigests(parts=parts, unverified=answer["unverified"], arrived=arrived)
