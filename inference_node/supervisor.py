"""The inference node: takes control messages, drives one vLLM server through them, and keeps that server alive.

    JoinTransferGroup  -> every worker joins the trainer's group
    PrepareUpdate      -> the manifest against every worker's placement plan; nothing pauses
    ReceiveWeights     -> pause, [Progress "applying"], start, receive, finish, digests of the live tensors; still paused
    CheckCanary        -> log-probs of a prompt, where nothing is served meanwhile
    CommitUpdate       -> alias, weight version, resume

or, in shadow mode, with nothing paused and nothing changed until the swap:

    PrepareShadow      -> room beside the live tensors, or why there is none
    ReceiveWeights     -> receive there while generation goes on, digests of what came
    SwapWeights        -> pause, swap, digests of the live tensors; still paused, or committed at once (`commit_if`)
    CommitUpdate       -> as above

    AbortUpdate        -> at once, through the workers' watchdogs

A failure before any tensor was loaded puts everything back and @N goes on; after it the replica is poisoned: it answers 503 until
an update is received whole, verified and committed. A vLLM that dies is started again, with no version, and says `Ready` anew.

Without a word from the orchestrator for `SILENT_S`, an update that keeps requests waiting is given up: they are answered 503, or by @N where
nothing was loaded. What is committed goes on being served, for `ORPHAN_S`.

Requests run on the main thread, one at a time; `AbortUpdate` runs on the link's thread, because the main one is then inside a call.
"""

from __future__ import annotations

import array
import base64
import contextlib
import importlib.metadata
import json
import logging
import os
import queue
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from inference_node import dialect
from inference_node.vllm_process import CallFailed, VllmProcess, bind
from inference_node.watchdog import AbortSender
from orchestrator.errors import NodeLost, TransferAborted
from orchestrator.protocol.config import InferenceConfig
from orchestrator.protocol.frames import Envelope
from orchestrator.protocol.messages import (
    AbortUpdate,
    AnyMessage,
    CheckCanary,
    CommitUpdate,
    ErrorCode,
    Hello,
    JoinTransferGroup,
    LeaveAlias,
    LeaveTransferGroup,
    Manifest,
    PrepareShadow,
    PrepareUpdate,
    Ready,
    ReceiveWeights,
    Shutdown,
    SwapWeights,
    TensorSpec,
    Unready,
)
from orchestrator.protocol.node_link import NodeLink
from orchestrator.protocol.restarts import RestartBudget

log = logging.getLogger("splice.inference")

IDLE_POLL_S = 0.2
CALL_GRACE_S = 10.0
"""Longer than the worker's own deadline, so that the worker's watchdog speaks first."""
DRAIN_S = 2.0
"""How long requests pinned to the old version may take to finish before they are ended."""
QUICK_S = 60.0
SILENT_S = 4.0
"""Without a word from an orchestrator, which beats every second, for this long, it is taken for gone."""
ABORTS_KEPT = 32
ORPHAN_S = 600.0
"""Without a word from an orchestrator for this long, the node ends; until then vLLM goes on serving."""
MAX_RESTARTS = 5
"""Of vLLM, within an hour."""


class _Ended(Exception):
    """Shutdown came."""


@dataclass(slots=True)
class _Update:
    """The update under way, and how far it is."""

    request_id: str
    version: int
    phase: str = "pausing"
    is_announced: bool = False
    """The orchestrator has heard "applying": from there on it takes a failure for one that may have written."""
    seconds: dict[str, float] = field(default_factory=dict)


class InferenceNode:
    """See the module. `run` until `Shutdown`; everything started is ended on every path.

    Raises from `run`:
        ConfigError, NodeLost: the node could not start, or lost its orchestrator for good.
    """

    def __init__(self, config: InferenceConfig, *, endpoint: str, node_id: str, run_token: str) -> None:
        self._config, self._node_id = config, node_id
        self._manifest: Manifest | None = None
        self._has_part = False
        """Updates of the changed tensors alone are planned."""
        self._update: _Update | None = None
        self._received: int | None = None
        """Version received and verified here, waiting for its commit."""
        self._shadowed: int | None = None
        """Version received beside the live tensors, waiting for its swap."""
        self._served: int | None = None
        self._poisoned: str | None = None
        self._unconfirmed: int | None = None
        """Committed here with its swap; the orchestrator has not said that it knows."""
        self._aborts: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._abort_lock = threading.Lock()
        self._abortable: str | None = None
        """Request that the uncommitted update came with."""
        self._aborted: OrderedDict[str, str] = OrderedDict()
        """Why requests are aborted that have not come yet."""
        self._early: deque[Envelope] = deque()
        """What came while an update was under way."""
        self._restarts, self._times_restarted = RestartBudget(MAX_RESTARTS), 0
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            self._listener = stack.enter_context(contextlib.closing(bind(config.host, config.port)))
            self._abort_sender = stack.enter_context(contextlib.closing(AbortSender()))
            self._vllm = VllmProcess(config, listener=self._listener, watchdog_endpoint=self._abort_sender.endpoint)
            stack.callback(self._vllm.close)
            hello = self._hello(run_token)
            self._link = NodeLink(
                endpoint=endpoint, hello=hello, urgent={"AbortUpdate": self._on_abort, "Hello": self._on_forgotten},
                lost_after_s=SILENT_S,
            )  # fmt: skip
            stack.callback(self._link.close)
            self._stack = stack.pop_all()

    def _hello(self, run_token: str) -> Hello:
        packages = {"vllm": dialect.installed_version(), "vllm_dialect": dialect.name()}
        for package in ("torch", "transformers"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                packages[package] = importlib.metadata.version(package)
        return Hello(
            role="inference", node_id=self._node_id, incarnation=uuid.uuid4().hex, run_token=run_token, packages=packages,
            gpus=tuple(f"cuda:{n}" for n in self._config.gpus), pid=os.getpid(),
        )  # fmt: skip

    def run(self) -> None:
        """Serve control messages until `Shutdown`, or until the orchestrator has been gone for `ORPHAN_S`."""
        with self._stack:
            try:
                self._link.start()
                self._start_vllm(restarted=False)
                self._loop()
            except _Ended:
                log.info("shutdown")

    def _loop(self) -> None:
        last_word = time.monotonic()
        while True:
            self._take_idle_aborts()
            self._keep_alive()
            try:
                envelope = self._early.popleft() if self._early else self._link.recv(timeout_s=IDLE_POLL_S)
                last_word = time.monotonic()  # a heartbeat is one
            except NodeLost as error:
                if time.monotonic() - last_word > ORPHAN_S:
                    raise
                if self._received is not None:
                    self._abort(str(error))
                time.sleep(IDLE_POLL_S)
                continue
            if envelope is not None:
                self._dispatch(envelope.message)

    # ------------------------------------------------------------ vLLM's life

    def _start_vllm(self, *, restarted: bool) -> None:
        """Start vLLM and say `Ready`. Requests that come meanwhile are answered `not_ready`."""
        self._vllm.start()
        self._vllm.wait_healthy(deadline_s=self._config.startup_timeout_s, on_tick=self._refuse_requests)
        workers = self._vllm.call("info", timeout_s=QUICK_S)["workers"]
        detail = {
            "base_url": self._vllm.base_url, "workers": len(workers), "model": str(self._config.model), "name": self._config.name,
            "model_dtype": workers[0]["model_dtype"], "device": workers[0]["device"], "packages": workers[0]["packages"],
        }  # fmt: skip
        if restarted:
            self._times_restarted += 1
            detail["restarted"] = self._times_restarted
        self._link.send(Ready(node_id=self._node_id, detail=detail))

    def _refuse_requests(self) -> None:
        with contextlib.suppress(NodeLost):
            envelope = self._link.recv(timeout_s=0.0)
            if envelope is None:
                return
            if isinstance(envelope.message, Shutdown):
                raise _Ended
            self._fail(envelope.message, ErrorCode.NOT_READY, "starting", "vLLM is starting", "Send it again after Ready.")

    def _keep_alive(self) -> None:
        """Start vLLM again if it has ended.

        Raises:
            NodeLost: it has ended too often.
        """
        if self._vllm.is_running:
            return
        log.error("vLLM has ended; starting it again. %s", self._vllm.log_tail())
        self._say_unready("vLLM has ended")
        self._vllm.stop()
        if not self._restarts.take(time.monotonic()):
            raise NodeLost(f"vLLM ended again after {MAX_RESTARTS} starts within an hour; giving up. {self._vllm.log_tail()}")
        self._manifest = self._update = self._received = self._shadowed = self._served = self._poisoned = None
        self._unconfirmed = self._abortable = None
        self._has_part = False
        try:
            self._start_vllm(restarted=True)
        except (NodeLost, CallFailed) as error:  # the loop takes the next start
            log.error("vLLM could not be started again: %s", error)
            self._vllm.stop()

    def _say_unready(self, reason: str) -> None:
        with contextlib.suppress(NodeLost):
            self._link.send(Unready(node_id=self._node_id, reason=reason[:1000]))

    def _on_lost(self, message: AnyMessage, phase: str, error: NodeLost) -> None:
        """vLLM died or stopped answering under a request: fail it, end vLLM; the loop starts it again."""
        self._say_unready(str(error))  # before the answer, or the next attempt would count on this node
        self._fail(
            message, ErrorCode.NODE_LOST, phase, str(error), "vLLM is being restarted; publish the version again after Ready."
        )
        self._vllm.stop()

    # ------------------------------------------------------------ requests

    def _dispatch(self, message: AnyMessage) -> None:
        if isinstance(message, Shutdown):
            raise _Ended
        handlers: dict[type, tuple[str, Callable[[Any], None]]] = {
            JoinTransferGroup: ("joining", self._join),
            LeaveTransferGroup: ("leaving", self._leave),
            PrepareUpdate: ("planning", self._prepare),
            PrepareShadow: ("making room", self._prepare_shadow),
            ReceiveWeights: ("receiving", self._receive),
            SwapWeights: ("swapping", self._swap),
            CheckCanary: ("checking the canary", self._canary),
            CommitUpdate: ("committing", self._commit),
            LeaveAlias: ("leaving the alias", self._leave_alias),
        }
        known = handlers.get(type(message))
        if known is None:
            self._fail(
                message,
                ErrorCode.BAD_INPUT,
                "reading",
                f"an inference node does not do {message.kind}",
                "Send it to the trainer.",
            )
            return
        phase, handler = known
        try:
            handler(message)
        except CallFailed as error:
            self._fail(message, error.code, phase, str(error), _REMEDIES.get(error.code, "See the node's log."))
        except NodeLost as error:
            self._on_lost(message, phase, error)

    def _fail(self, message: AnyMessage, code: ErrorCode, phase: str, text: str, remedy: str) -> None:
        request_id = getattr(message, "request_id", None)
        log.warning("%s failed while %s: %s: %s", message.kind, phase, code, text)
        if request_id is not None:
            self._link.fail(request_id, code=code, phase=phase, message=text, remedy=remedy)

    def _join(self, message: JoinTransferGroup) -> None:
        self._vllm.call(
            "join", timeout_s=message.deadline_s + CALL_GRACE_S, deadline_s=message.deadline_s,
            rendezvous=message.rendezvous.model_dump_json(),
        )  # fmt: skip
        self._link.complete(message.request_id)

    def _leave(self, message: LeaveTransferGroup) -> None:
        self._vllm.call("leave", timeout_s=message.deadline_s + CALL_GRACE_S)
        self._link.complete(message.request_id)

    def _prepare(self, message: PrepareUpdate) -> None:
        answer = self._vllm.call(
            "plan", timeout_s=message.deadline_s + CALL_GRACE_S, manifest=message.manifest.model_dump_json()
        )
        self._manifest, self._has_part = message.manifest, answer["changed"] is not None
        result: dict[str, Any] = {"seconds": {"check": answer["seconds"]}}
        if answer["layout"] is not None:
            result["layout"] = json.loads(answer["layout"])
        if answer["changed"] is not None:
            layout = answer["changed"]["layout"]
            result["changed"] = {**answer["changed"], "layout": None if layout is None else json.loads(layout)}
        self._link.complete(message.request_id, result=result)

    def _commit(self, message: CommitUpdate) -> None:
        is_served = self._served == message.version and self._poisoned is None
        if self._received != message.version and not is_served:
            self._fail(
                message, ErrorCode.NOT_READY, "committing", f"version {message.version} was not received here (received: {self._received})",
                "Receive and verify the version first.",
            )  # fmt: skip
            return
        if self._received == message.version:
            try:
                self._vllm.call("commit", timeout_s=message.deadline_s + CALL_GRACE_S, version=message.version)
            except CallFailed as error:
                self._poison(f"whether version {message.version} was committed is not known: {error}")
                raise
            self._served, self._received, self._poisoned = message.version, None, None
        self._unconfirmed = self._abortable = None
        self._link.complete(message.request_id, result={"model": f"{self._config.name}@{message.version}"})

    def _canary(self, message: CheckCanary) -> None:
        if self._received != message.version:
            text = f"version {message.version} was not received here (received: {self._received})"
            self._fail(message, ErrorCode.NOT_READY, "checking the canary", text, "Receive and verify the version first.")
            return
        if self._served is not None and self._poisoned is None:
            self._link.complete(message.request_id, result={"skipped": f"{self._config.name}@{self._served} was being served"})
            return
        timeout_s = message.deadline_s + CALL_GRACE_S
        answer = self._vllm.call("canary", timeout_s=timeout_s, tokens=list(message.tokens), deadline_s=message.deadline_s)
        logprobs = array.array("f", answer["logprobs"])
        spec = TensorSpec(name="logprobs", dtype="float32", shape=(len(logprobs),))
        self._link.complete(message.request_id, tensors=[spec], buffers=[logprobs.tobytes()])

    # ------------------------------------------------------------ the update

    def _receive(self, message: ReceiveWeights) -> None:
        if self._manifest is None:
            self._fail(message, ErrorCode.NOT_READY, "receiving", "no manifest was planned here", "Send PrepareUpdate first.")
            return
        missing = self._why_no_base(message.base_version)
        if missing is not None:
            self._fail(message, ErrorCode.BASE_MISSING, "receiving", missing, "Publish the version whole.")
            return
        update = self._begin(message)
        is_shadow = message.mode == "shadow"
        try:
            digests, unverified = (self._receive_beside if is_shadow else self._run_update)(message, update)
        except (CallFailed, TransferAborted) as error:
            (self._drop_after_failure if is_shadow else self._after_failure)(message, update, error)
            return
        finally:
            self._update = None
        if is_shadow:
            self._shadowed = message.version
        else:
            self._received = message.version
        self._complete_with(digests, unverified, message, update)

    def _begin(self, message: ReceiveWeights | SwapWeights) -> _Update:
        """The update that a request is for takes the place of the one before; it may be aborted already."""
        update = _Update(request_id=message.request_id, version=message.version)
        self._received = self._shadowed = None
        with self._abort_lock:
            self._update, self._abortable = update, message.request_id
            why = self._aborted.pop(message.request_id, None)
        if why is not None:
            self._aborts.put(why)
        return update

    def _complete_with(
        self, digests: bytes, unverified: dict[str, str], message: ReceiveWeights | SwapWeights, update: _Update, **more: bool
    ) -> None:  # fmt: skip
        count = len(digests) // 8
        self._link.complete(
            message.request_id,
            result={"seconds": update.seconds, "unverified": unverified, **more},
            tensors=[TensorSpec(name="digests", dtype="int64", shape=(count,))],
            buffers=[digests],
        )

    def _why_no_base(self, base: int | None) -> str | None:
        """Why an update of the changed tensors alone cannot go on top of `base` here; None if it can, or if all tensors come."""
        if base is None:
            return None
        if self._poisoned is not None:
            return f"version {base} is wanted below the changed tensors, but this replica is poisoned: {self._poisoned}"
        if self._served != base:
            return f"version {base} is wanted below the changed tensors, but this replica serves {self._served}"
        return None if self._has_part else "no update of changed tensors alone is planned here; send PrepareUpdate first"

    def _stand_still_and(
        self, action: str, message: ReceiveWeights | SwapWeights, update: _Update, **arguments: Any
    ) -> dict[str, Any]:
        """Pause and an action on the live tensors, in one call of vLLM; its answer. `update` gets the seconds of its phases."""
        self._raise_if_aborted()
        update.phase, began = "pause", time.monotonic()
        self._link.progress(message.request_id, "pausing")

        def on_progress(said: dict[str, Any]) -> None:
            update.phase, update.seconds["pause"] = "apply", float(said["seconds"])
            self._link.progress(message.request_id, "paused", seconds=update.seconds["pause"])
            if self._aborts.empty():  # else the workers hear of it before they write
                self._announce(message, update)

        pause = {
            "mode": message.pause_mode, "version": message.version, "drain_s": min(DRAIN_S, message.deadline_s / 4), "deadline_s": message.deadline_s,
        }  # fmt: skip
        arguments |= {"update_id": message.request_id, "pause": pause}
        try:
            timeout_s = message.deadline_s + CALL_GRACE_S
            done = self._vllm.call(action, timeout_s=timeout_s, on_progress=on_progress, on_poll=self._listen, **arguments)
        except CallFailed as error:
            update.phase = str(error.answer.get("phase", update.phase))
            raise
        finally:
            update.seconds["update"] = time.monotonic() - began - update.seconds.get("pause", 0.0)
        self._announce(message, update)
        phases = {k: float(v) for k, v in done["phases"].items()}
        waited_s = phases.pop("pause", 0.0)  # within the update's call
        update.seconds |= phases | {"pause": update.seconds["pause"] + waited_s, "update": update.seconds["update"] - waited_s}
        return done

    def _listen(self) -> None:
        """While the engine stands still: what comes waits for its turn, and a silent orchestrator ends the update."""
        try:
            envelope = self._link.recv(timeout_s=0.0)
            if envelope is not None:
                self._early.append(envelope)
        except NodeLost as error:
            if self._aborts.empty():
                self._abort(str(error))

    def _announce(self, message: ReceiveWeights | SwapWeights, update: _Update) -> None:
        if not update.is_announced:
            update.is_announced = True
            self._link.progress(message.request_id, "applying")

    def _run_update(self, message: ReceiveWeights, update: _Update) -> tuple[bytes, dict[str, str]]:
        arguments = {
            "deadline_s": message.deadline_s,
            "direct": message.direct,
            "changed_only": message.base_version is not None,
        }
        done = self._stand_still_and("update", message, update, **arguments)
        return base64.b64decode(done["digests"]), done["unverified"]

    # ------------------------------------------------------------ shadow mode

    def _prepare_shadow(self, message: PrepareShadow) -> None:
        why = self._why_no_base(message.base_version)
        if self._served is None or self._poisoned is not None:
            why = "nothing is served here that would go on meanwhile"
        if why is None:
            arguments: dict[str, Any] = {"direct": message.direct, "changed_only": message.base_version is not None}
            timeout_s = message.deadline_s + CALL_GRACE_S
            why = self._vllm.call("shadow_open", timeout_s=timeout_s, budget_bytes=message.budget_bytes, **arguments)["why_not"]
        self._link.complete(message.request_id, result={"why_not": why})

    def _receive_beside(self, message: ReceiveWeights, update: _Update) -> tuple[bytes, dict[str, str]]:
        self._raise_if_aborted()
        update.phase, began = "shadow", time.monotonic()
        arguments: dict[str, Any] = {"update_id": message.request_id, "deadline_s": message.deadline_s}
        received = self._vllm.call("shadow_receive", timeout_s=message.deadline_s + CALL_GRACE_S, **arguments)
        update.seconds |= {k: float(v) for k, v in received["phases"].items()} | {"shadow": time.monotonic() - began}
        return base64.b64decode(received["digests"]), {}

    def _drop_after_failure(self, message: ReceiveWeights, update: _Update, error: CallFailed | TransferAborted) -> None:
        """Nothing was paused, nothing has changed: @N was never in danger."""
        code = error.code if isinstance(error, CallFailed) else ErrorCode.TRANSFER_ABORTED
        self._drop_shadow()
        remedy = f"Nothing was changed; {self._config.name}@{self._served} goes on being served. Publish the version again."
        self._fail(message, code, "receiving beside the live tensors", str(error), remedy)

    def _drop_shadow(self) -> None:
        self._shadowed = self._abortable = None
        with contextlib.suppress(CallFailed):
            self._vllm.call("shadow_drop", timeout_s=QUICK_S)

    def _swap(self, message: SwapWeights) -> None:
        if self._shadowed != message.version:
            text = f"version {message.version} does not lie beside the live tensors (there is: {self._shadowed})"
            self._fail(message, ErrorCode.NOT_READY, "swapping", text, "Send PrepareShadow and ReceiveWeights first.")
            return
        update = self._begin(message)
        commit_if = None if message.commit_if is None else base64.b64encode(message.commit_if).decode()
        try:
            swapped = self._stand_still_and("shadow_swap", message, update, commit_if=commit_if)
        except (CallFailed, TransferAborted) as error:
            self._drop_shadow()
            self._after_failure(message, update, error)
            return
        finally:
            self._update = None
        if swapped["committed"]:
            self._served = self._unconfirmed = message.version
        else:
            self._received = message.version
        digests = base64.b64decode(swapped["digests"])
        self._complete_with(digests, swapped["unverified"], message, update, committed=swapped["committed"])

    def _after_failure(
        self, message: ReceiveWeights | SwapWeights, update: _Update, error: CallFailed | TransferAborted
    ) -> None:  # fmt: skip
        """Nothing loaded: @N goes on. Something loaded: poisoned."""
        code = error.code if isinstance(error, CallFailed) else ErrorCode.TRANSFER_ABORTED
        loaded = isinstance(error, CallFailed) and int(error.answer.get("tensors", 0)) > 0
        reason = f"version {update.version} failed while {update.phase}: {error}"
        self._insist("reset")
        if loaded:
            self._announce(message, update)
            self._poison(reason)
            remedy = "This replica holds a mixture of versions and serves nothing: publish a version again, whole."
        else:
            self._insist("resume")
            self._abortable = None
            serving = "nothing, as before" if self._served is None or self._poisoned else f"{self._config.name}@{self._served}"
            remedy = f"Nothing was loaded; this replica goes on serving {serving}. Publish the version again."
        phase = update.phase if loaded or update.phase != "apply" else "waiting for the first byte"
        self._fail(message, code, phase, str(error), remedy)

    def _leave_alias(self, message: LeaveAlias) -> None:
        if self._served is not None and self._poisoned is None:
            log.warning("version %d is no longer served here: %s", self._served, message.reason)
            self._poison(f"the other replicas went on without this one: {message.reason}")
        self._link.complete(message.request_id)

    def _poison(self, reason: str) -> None:
        self._poisoned, self._received, self._unconfirmed, self._abortable = reason, None, None, None
        self._insist("poison", reason=reason[:500])

    def _insist(self, action: str, **arguments: Any) -> None:
        """A call without which it is not known what vLLM serves.

        Raises:
            NodeLost: it did not answer, or could not; only ending it is safe.
        """
        try:
            self._vllm.call(action, timeout_s=QUICK_S, **arguments)
        except CallFailed as error:
            raise NodeLost(f"vLLM could not do what it has to: {error}") from error

    # ------------------------------------------------------------ aborts

    def _on_abort(self, message: AnyMessage) -> None:
        """On the link's thread: end the transfer now; the main thread finds the reason when its call returns."""
        assert isinstance(message, AbortUpdate)
        with self._abort_lock:
            if message.request_id not in (None, self._abortable):
                self._aborted[message.request_id] = message.reason
                while len(self._aborted) > ABORTS_KEPT:
                    self._aborted.popitem(last=False)
                return
        self._abort(message.reason)

    def _on_forgotten(self, _: AnyMessage) -> None:
        """On the link's thread: an orchestrator that asks who we are has given up what was under way here, and may not come to publish for long."""
        if self._update is not None or (self._received, self._shadowed, self._unconfirmed) != (None, None, None):
            self._abort("the orchestrator was restarted, or had not heard of this node")

    def _abort(self, reason: str) -> None:
        self._aborts.put(reason)
        update = self._update
        if update is not None:
            self._abort_sender.abort(update_id=update.request_id, reason=reason)

    def _raise_if_aborted(self) -> None:
        with contextlib.suppress(queue.Empty):
            raise TransferAborted(f"aborted: {self._aborts.get_nowait()}")

    def _take_idle_aborts(self) -> None:
        """An abort after the last byte and before the commit: what was received is not to be served."""
        reason = None
        with contextlib.suppress(queue.Empty):
            while True:
                reason = self._aborts.get_nowait()
        if reason is None or not self._vllm.is_running:
            return
        try:
            self._give_up(reason)
        except NodeLost as error:
            log.error("vLLM is ended, because what it serves is not known: %s", error)
            self._say_unready(str(error))
            self._vllm.stop()

    def _give_up(self, reason: str) -> None:
        if self._shadowed is not None:
            log.warning("version %d, received beside the live tensors, is dropped: %s", self._shadowed, reason)
            self._drop_shadow()
        if self._received is not None:
            self._poison(f"version {self._received} was received but not committed: {reason}")
        elif self._unconfirmed is not None:
            self._poison(f"version {self._unconfirmed} was committed with its swap, but then given up: {reason}")


_REMEDIES: dict[ErrorCode, str] = {
    ErrorCode.PLAN_REFUSED: "The trainer's model and the served one differ; start both from the same checkpoint and dtype.",
    ErrorCode.TRANSFER_TIMEOUT: "See whether the trainer lives; leave the transfer group, join again and publish again.",
    ErrorCode.TRANSFER_FAILED: "Join the transfer group again and publish again.",
    ErrorCode.NOT_READY: "Send the requests in order: join, prepare, receive, commit.",
    ErrorCode.INTERNAL: "See the node's and vLLM's logs; this is a fault in splice or vLLM.",
}
