"""Actions of the inference node inside vLLM's API process: on engine, workers and alias.

A request of the orchestrator arrives here under its message's name, as JSON of that message. The
node's own actions are `info`, `resume`, `poison`, `reset` and `drop_shadow`.

The actions run in vLLM's process, so that pause and commit touch the engine client and the alias in
one event loop. No request under the old name can then slip in between "the last pinned request has
ended" and "the engine is paused".
"""

from __future__ import annotations

import array
import asyncio
import dataclasses
import functools
import json
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from inference_node.server import all_workers, dialect
from inference_node.server.entrance import free_pass
from inference_node.server.traffic import ENGINE_PAUSE, ActionFailed, Traffic
from inference_node.shared.reports import Findings, WorkerDigests, packed, unpacked
from orchestrator.errors import ManifestError, VerificationError
from orchestrator.protocol.messages import (
    CheckCanary,
    CommitUpdate,
    ErrorCode,
    Fp8Group,
    JoinTransferGroup,
    LayoutOrder,
    LeaveTransferGroup,
    Manifest,
    Message,
    OpenRelay,
    PrepareShadow,
    PrepareUpdate,
    ReceiveWeights,
    SwapWeights,
    UseEdges,
    WireChunk,
    WireLayout,
    fp8_manifest,
)

Answer = dict[str, Any]
Say = Callable[[Answer], Awaitable[None]]
Work = Callable[..., Coroutine[Any, Any, Answer]]

MANIFEST_ORDER = "manifest order was asked for"
FP8_ORDER = "FP8 weights cannot be reloaded in manifest order; serve this model in bf16"
DEATH_POLL_S = 0.5
"""Seconds between two questions whether the engine still lives."""
SHADOW_POLL_S = 0.02
"""Seconds between two questions whether the workers have received an update into their shadows."""
SHADOW_GRACE_S = 5.0
"""Seconds added to the workers' own deadline, so that their watchdogs answer first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedUpdate:
    """The tensors and the layout of each update of a manifest, or of a part of one."""

    manifest: Manifest
    layout: WireLayout
    arrivals: all_workers.Arrivals
    pieces: all_workers.Arrivals | None = None
    """What each worker receives from the trainer's ranks. None: all receive everything."""

    def may_be_written(self, phase: str, code: ErrorCode, message: str) -> ActionFailed:
        """A failure after which the whole update may have been written."""
        return ActionFailed(code, message, phase=phase, tensors=len(self.manifest.tensors))


class Actions:
    """The planned updates, and the actions on them. One action runs at a time."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._whole: PlannedUpdate | None = None
        self._part: PlannedUpdate | None = None
        self._positions: list[int] = []
        """The number of each worker, in the order of their answers."""
        self._receiving: PlannedUpdate | None = None
        """The planned update that is being received."""
        self._lock = asyncio.Lock()
        self._say: Say
        """Sends a line to the node that waits for the running action."""
        self._requests: dict[type[Message], Work] = {
            OpenRelay: self._open_relay,
            JoinTransferGroup: self._join_transfer_group,
            LeaveTransferGroup: self._leave_transfer_group,
            PrepareUpdate: self._prepare_update,
            UseEdges: self._use_edges,
            PrepareShadow: self._prepare_shadow,
            ReceiveWeights: self._receive_weights,
            SwapWeights: self._swap_weights,
            CheckCanary: self._check_canary,
            CommitUpdate: self._commit_update,
        }
        self._own_actions: dict[str, Work] = {
            "info": self._info,
            "resume": self._resume,
            "poison": self._poison,
            "reset": self._reset,
            "drop_shadow": self._drop_shadow,
        }

    async def run(self, action: str, body: bytes, app: Any, say: Say) -> tuple[int, Answer]:
        """Run an action; (HTTP status, JSON).

        Args:
            action: the name of a message, or of an action of the node's own.
            body: the message, or an object of arguments, as JSON.
            say: takes what the node must know before the end, {"progress": ..., ...}.
        """
        try:
            work = self._work(action, body)
        except (TypeError, ValueError) as error:
            return 400, _error(ErrorCode.PROTOCOL, f"the body of {action!r} is malformed: {error}")
        if work is None:
            return 404, _error(ErrorCode.PROTOCOL, f"no control action {action!r}")
        began = time.monotonic()
        async with self._lock:
            self._say = say
            self._traffic.put_up_gates(app)
            try:
                answer = await _while_alive(work(), self._traffic.engine)
            except ActionFailed as error:
                return 409, {**_error(error.code, str(error)), **error.detail}
            except ManifestError as error:
                return 409, _error(ErrorCode.PLAN_REFUSED, str(error))
            except VerificationError as error:
                return 409, _error(ErrorCode.VERIFICATION_FAILED, str(error))
            except EngineDeadError as error:
                return 500, _error(ErrorCode.NODE_LOST, f"vLLM's engine died: {error}")
            except (TypeError, ValueError, KeyError, RuntimeError, TimeoutError) as error:
                return 500, _error(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")
        return 200, {**answer, "seconds": time.monotonic() - began}

    def _work(self, action: str, body: bytes) -> Work | None:
        """The action with its arguments. None: there is no such action."""
        for kind, method in self._requests.items():
            if kind.__name__ == action:
                return functools.partial(method, kind.model_validate_json(body))
        own = self._own_actions.get(action)
        return None if own is None else functools.partial(own, **json.loads(body or b"{}"))

    async def _workers(self, method: str, *args: Any) -> list[Answer]:
        """Call a method of every worker; the first error raises."""
        return _checked(await dialect.collective_rpc(self._traffic.engine, method, args))

    async def _info(self) -> Answer:
        return {"workers": await self._workers("splice_info")}

    async def _open_relay(self, message: OpenRelay) -> Answer:
        answers = await self._workers("splice_open_relay", message.model_dump_json())
        answers.sort(key=lambda answer: answer["position"])
        return {"rendezvous": [answer["rendezvous"] for answer in answers]}

    async def _join_transfer_group(self, message: JoinTransferGroup) -> Answer:
        await self._workers("splice_join_transfer_group", message.model_dump_json())
        return {}

    async def _leave_transfer_group(self, _: LeaveTransferGroup) -> Answer:
        await self._workers("splice_leave_transfer_group")
        return {}

    # ------------------------------------------------------------ the plan

    async def _prepare_update(self, message: PrepareUpdate) -> Answer:
        """Check a manifest against all workers' placement; lay out it and its changed part."""
        self._whole = self._part = self._receiving = None
        manifest = message.manifest
        answers, findings = await self._check(manifest, "splice_prepare_update", manifest)
        groups = [[Fp8Group.model_validate(g) for g in a["fp8"]] for a in answers]
        weights = all_workers.merged_groups(groups)
        if weights is not None:
            if message.order == "manifest":
                raise ManifestError(FP8_ORDER)
            manifest = fp8_manifest(manifest, weights)
            answers, findings = await self._check(manifest, "splice_use_fp8", weights)
        reasons: dict[str, set[int]] = {}
        for why, indices in (pair for a in answers for pair in a["obstacles"].items()):
            reasons.setdefault(why, set()).update(indices)
        if message.order == "manifest":
            reasons = {MANIFEST_ORDER: set(range(len(manifest.tensors)))}
        reloaded = await self._whole_layers(set().union(*reasons.values()), len(answers))
        all_workers.refuse_reload(manifest, reloaded, reasons)
        changed = await self._whole_layers(manifest.changed or (), len(answers))
        lay_out = functools.partial(
            self._lay_out, manifest, findings, reasons, reloaded, order=message.order
        )
        self._whole = await lay_out(None)
        planned: Answer = {
            "layout": self._whole.layout.model_dump(mode="json"),
            "changed": None,
            "fp8": None if weights is None else weights.model_dump(mode="json"),
            "keeps": None,
        }
        if changed and len(changed) < len(manifest.tensors):
            self._part = await lay_out(changed)
            layout = self._part.layout.model_dump(mode="json")
            planned["changed"] = {"tensors": changed, "layout": layout}
        if message.order == "edges":
            kept = await self._workers("splice_keeps")
            self._positions = [int(a["position"]) for a in kept]
            if all(a["keeps"] is not None for a in kept):
                by_position = sorted(kept, key=lambda answer: int(answer["position"]))
                planned["keeps"] = [a["keeps"] for a in by_position]
        return planned

    async def _use_edges(self, message: UseEdges) -> Answer:
        """Have every worker receive only what it keeps, from each of the trainer's ranks."""
        update = self._part if message.changed_only else self._whole
        if update is None:
            raise ActionFailed(ErrorCode.NOT_READY, "this update was not planned here")
        tables = list(message.tables)
        await self._workers("splice_use_edges", tables, message.changed_only)
        received = [tables[position] for position in self._positions]
        pieces = all_workers.Arrivals.of_pieces(update.manifest, received)
        update = dataclasses.replace(update, pieces=pieces)
        if message.changed_only:
            self._part = update
        else:
            self._whole = update
        return {}

    async def _check(
        self, manifest: Manifest, method: str, argument: Message
    ) -> tuple[list[Answer], list[Findings]]:
        """All workers' answers about a manifest; refuses one that the replica cannot load whole."""
        answers = await self._workers(method, argument.model_dump_json())
        findings = [Findings(**a["findings"]) for a in answers]
        all_workers.judge(manifest, findings)
        return answers, findings

    async def _whole_layers(self, indices: Collection[int], workers: int) -> list[int]:
        """The indices, with all tensors that share a layer with any of them on any worker."""
        found = sorted(indices)
        while found:
            answers = await self._workers("splice_whole_layers", found)
            more = sorted({i for a in answers for i in a["indices"]})
            if workers == 1 or more == found:
                return more
            found = more
        return found

    async def _lay_out(
        self,
        manifest: Manifest,
        findings: Sequence[Findings],
        reasons: Mapping[str, Collection[int]],
        reloaded: Sequence[int],
        part: Sequence[int] | None,
        *,
        order: LayoutOrder,
    ) -> PlannedUpdate:
        """Have every worker plan an update; all must plan the same."""
        answers = await self._workers("splice_lay_out", reloaded, part, order)
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

    def _planned(self, message: ReceiveWeights | PrepareShadow) -> PlannedUpdate | None:
        return self._part if message.is_part else self._whole

    # ------------------------------------------------------------ the update

    async def _receive_weights(self, message: ReceiveWeights) -> Answer:
        """Pause and receive an update into the live tensors; returns their digests.

        In shadow mode, receive without a pause.
        """
        if message.mode == "shadow":
            return await self._receive_into_shadow(message)
        update = self._receiving = self._planned(message)
        if update is None:
            raise ActionFailed(ErrorCode.NOT_READY, "this update was not planned here")
        return await self._pause_and(update, message, "splice_receive_weights")

    async def _swap_weights(self, message: SwapWeights) -> Answer:
        """Pause and swap in what the shadow holds; returns the digests of the live tensors.

        Commits if the digests are exactly `commit_if`.
        """
        update = self._receiving
        if update is None:
            raise ActionFailed(ErrorCode.NOT_READY, "nothing was received into shadow memory")
        rest = message.model_copy(update={"commit_if": None})
        answer = await self._pause_and(update, rest, "splice_swap_weights")
        digests = unpacked(answer["digests"]).tobytes()
        answer["committed"] = message.commit_if is not None and digests == message.commit_if
        if answer["committed"]:
            try:
                await self._traffic.commit_update(message.version)
            except EngineDeadError:
                raise
            except Exception as error:  # the new weights are live by now
                why = f"{type(error).__name__}: {error}"
                raise update.may_be_written("commit", ErrorCode.INTERNAL, why) from error
        return answer

    async def _pause_and(
        self, update: PlannedUpdate, message: ReceiveWeights | SwapWeights, method: str
    ) -> Answer:
        """Pause, and have every worker bring the update into the live tensors by its `method`.

        Pause and update are one call of this process, because each call into it waits until it has
        handed out the last step's tokens. They are one call of the engine too if vLLM keeps the
        order of calls. The last step's tokens then wait for the commit.

        Raises:
            ActionFailed: says how many tensors may have been written.
        """
        began = time.monotonic()
        engine_mode, _ = ENGINE_PAUSE[message.pause_mode]
        is_one_call = engine_mode == "keep" and dialect.keeps_order(self._traffic.engine)
        await (self._traffic.make_way if is_one_call else self._traffic.pause)(message)
        paused_s = time.monotonic() - began
        await self._say({"progress": "paused", "seconds": paused_s})
        left_s = max(1.0, message.deadline_s - paused_s)
        rest = message.model_copy(update={"deadline_s": left_s})
        ask = self._pause_and_call if is_one_call else self._workers
        try:
            return _updated(update, await ask(method, rest.model_dump_json()))
        except BaseException as error:
            self._traffic.open_gate()
            if isinstance(error, VerificationError):
                code = ErrorCode.VERIFICATION_FAILED
                raise update.may_be_written("verify", code, str(error)) from error
            if not isinstance(error, Exception) or isinstance(
                error, (ActionFailed, EngineDeadError)
            ):
                raise
            # Nobody knows what the workers had done by then.
            why = f"{type(error).__name__}: {error}"
            raise update.may_be_written("apply", ErrorCode.INTERNAL, why) from error

    async def _pause_and_call(self, method: str, request: str) -> list[Answer]:
        """Pause and call a method of every worker in one go; the first error raises."""
        began = time.monotonic()
        asked = dialect.pause_and_call(
            self._traffic.engine,
            clear_cache=not self._traffic.keeps_kv,
            method=method,
            args=(request,),
            gate=self._traffic.gate,
            on_send=self._traffic.note_pause,
        )
        answers = _checked(await asked)
        for answer in answers:  # the remaining time was the wait for the current step
            answer["phases"]["pause"] = time.monotonic() - began - float(answer["seconds"])
        return answers

    async def _reset(self) -> Answer:
        answers = await self._workers("splice_reset")
        return {"layers": max(int(a["layers"]) for a in answers)}

    # ------------------------------------------------------------ shadow mode

    async def _prepare_shadow(self, message: PrepareShadow) -> Answer:
        """Make room in every worker for a second copy; or say why one worker has none."""
        self._receiving = self._planned(message)
        answers = await self._workers("splice_prepare_shadow", message.model_dump_json())
        refusal = next((a["why_not"] for a in answers if a["why_not"] is not None), None)
        if refusal is not None:
            await self._drop_shadow()
        return {"why_not": refusal}

    async def _receive_into_shadow(self, message: ReceiveWeights) -> Answer:
        """Receive while the engine steps.

        Returns the digests of what arrived, on which all workers must agree.
        """
        until = time.monotonic() + message.deadline_s + SHADOW_GRACE_S
        await self._workers("splice_receive_weights", message.model_dump_json())
        while True:
            await asyncio.sleep(SHADOW_POLL_S)
            answers = await self._workers("splice_poll_shadow")
            if all(a["digests"] is not None for a in answers):
                break
            if time.monotonic() > until:
                raise ActionFailed(
                    ErrorCode.TRANSFER_TIMEOUT,
                    f"not all workers had the update after {message.deadline_s:.0f} s",
                )
        slowest = max(answers, key=lambda a: float(a["phases"]["wire"]))
        if message.elements:  # checksums cover them, and later the live tensors' digests
            return {"digests": packed([]), "phases": slowest["phases"]}
        update, found = self._receiving, [a["digests"] for a in answers]
        digests = found[0]
        if update is not None and update.pieces is not None:
            total_N, differing = update.pieces.add_up([unpacked(text) for text in found])
            digests = packed(array.array("q", total_N.tobytes()))
        else:
            differing = set(found[1:]) - {digests}
        if differing:
            raise VerificationError("the workers did not receive the same bytes")
        return {"digests": digests, "phases": slowest["phases"]}

    async def _drop_shadow(self) -> Answer:
        await self._workers("splice_drop_shadow")
        return {}

    # ------------------------------------------------------------ canary and commit

    async def _check_canary(self, message: CheckCanary) -> Answer:
        """Log-probs of a prompt under weights that nobody is served yet.

        The engine runs for this prompt only, then pauses again.
        """
        engine, deadline_s = self._traffic.engine, message.deadline_s
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

    async def _commit_update(self, message: CommitUpdate) -> Answer:
        await self._traffic.commit_update(message.version)
        return {"model": self._traffic.alias.current}

    async def _resume(self) -> Answer:
        await self._traffic.resume()
        return {}

    async def _poison(self, *, reason: str) -> Answer:
        return {"ended": self._traffic.poison(reason)}


def _error(code: str, message: str) -> Answer:
    return {"error": {"code": code, "message": message}}


def _checked(answers: list[Answer]) -> list[Answer]:
    """The workers' answers; the first error raises."""
    for answer in answers:
        if "error" in answer:
            rest = {k: v for k, v in answer.items() if k != "error"}
            if "tensors" in rest:  # whatever any worker has written counts
                rest["tensors"] = max(int(a.get("tensors", 0)) for a in answers)
            raise ActionFailed(answer["error"]["code"], answer["error"]["message"], **rest)
    return answers


def _updated(update: PlannedUpdate, answers: Sequence[Answer]) -> Answer:
    """Digests of the live tensors, in manifest order, and the slowest worker's phases."""
    began = time.monotonic()
    found = [WorkerDigests.of(a) for a in answers]
    digests, unverified = all_workers.combine(update.manifest, found, update.arrivals)
    phases = {k: max(float(a["phases"][k]) for a in answers) for k in answers[0]["phases"]}
    phases["verify_worker"] = phases["verify"]
    phases["verify"] += time.monotonic() - began
    return {"digests": packed(digests), "unverified": unverified, "phases": phases}


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
