"""The inference node: takes control messages, and drives one vLLM server that it keeps alive.

    OpenRelay          -> every worker listens for the next replica of a chain
    JoinTransferGroup  -> every worker joins the trainer's group
    PrepareUpdate      -> every worker checks the manifest against its placement plan; no pause
    ReceiveWeights     -> pause, [Progress "applying"], receive, digests of the live tensors
    CheckCanary        -> log-probs of a prompt, if nothing is served meanwhile
    CommitUpdate       -> alias, weight version, resume

In shadow mode nothing pauses or changes before the swap:

    PrepareShadow      -> room for a second copy of the weights, or why there is none
    ReceiveWeights     -> receive while generation continues, digests of what arrived
    SwapWeights        -> pause, swap, digests of the live tensors; commits at once with `commit_if`
    CommitUpdate       -> as above

    AbortUpdate        -> at once, through the workers' watchdogs

A failure before any tensor was loaded restores everything, and @N continues. A later failure
poisons the replica: it answers 503 until an update is received whole, verified and committed. A
vLLM that ends is started again without a version, and the node sends `Ready` again.

After `SILENT_S` of silence from the orchestrator, the node gives up an update that keeps
requests waiting: they are answered by @N if nothing was loaded, else with 503. The node serves a
committed version for another `ORPHAN_S`.

Requests run one at a time on the main thread; `AbortUpdate` runs on the link's thread.
"""

from __future__ import annotations

import array
import contextlib
import importlib.metadata
import logging
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inference_node.node.aborts import Aborts
from inference_node.node.served import Served
from inference_node.node.vllm_process import CallFailed, VllmProcess, bind
from inference_node.shared import vllm_version
from inference_node.shared.reports import unpacked
from inference_node.shared.watchdog import AbortSender
from orchestrator.errors import REMEDIES, ConfigError, NodeLost, TransferAborted
from orchestrator.processes.restarts import RestartBudget
from orchestrator.protocol import memory
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
    OpenRelay,
    PrepareShadow,
    PrepareUpdate,
    Ready,
    ReceiveWeights,
    Shutdown,
    SwapWeights,
    TensorSpec,
    Unready,
    UseEdges,
    check_node_id,
)
from orchestrator.protocol.node_link import NodeLink

log = logging.getLogger("splice.inference")

IDLE_POLL_S = 0.2
SILENT_S = 4.0
"""Silence after which the orchestrator, which sends a heartbeat every second, counts as gone."""
ORPHAN_S = 600.0
"""Silence after which the node ends; until then vLLM keeps serving."""


class _Ended(Exception):
    """The node received Shutdown."""


class _Refused(Exception):
    """A request does not fit the node's state; vLLM was not asked."""

    def __init__(self, text: str, remedy: str, *, code: ErrorCode = ErrorCode.NOT_READY) -> None:
        super().__init__(text)
        self.code, self.remedy = code, remedy


@dataclass(slots=True, kw_only=True)
class _UpdateRun:
    """A `ReceiveWeights` or `SwapWeights` under way, and what the orchestrator heard of it."""

    message: ReceiveWeights | SwapWeights
    link: NodeLink
    phase: str = "pausing"
    is_announced: bool = False
    """The orchestrator heard "applying"; from then on it assumes that a failure changed tensors."""
    seconds: dict[str, float] = field(default_factory=dict)

    def announce(self) -> None:
        """Say "applying", once."""
        if not self.is_announced:
            self.is_announced = True
            self.link.progress(self.message.request_id, "applying")

    def take_phases(self, phases: Mapping[str, float]) -> None:
        """Note vLLM's seconds; its pause was part of the update's call."""
        seconds = {k: float(v) for k, v in phases.items()}
        waited_s = seconds.pop("pause", 0.0)
        self.seconds |= seconds
        self.seconds["pause"] += waited_s
        self.seconds["update"] -= waited_s

    def complete(self, answer: dict[str, Any], **more: bool) -> None:
        """Answer with the digests that vLLM returned."""
        digests = unpacked(answer["digests"])
        unverified = answer.get("unverified", {})
        self.link.complete(
            self.message.request_id,
            result={"seconds": self.seconds, "unverified": unverified, **more},
            tensors=[TensorSpec(name="digests", dtype="int64", shape=(len(digests),))],
            buffers=[digests.tobytes()],
        )


class InferenceNode:
    """Supervises one vLLM server; see the module. `run` ends everything started, on every path.

    Raises from `run`:
        ConfigError, NodeLost: the node could not start, or lost its orchestrator for good.
    """

    def __init__(
        self, config: InferenceConfig, *, endpoint: str, node_id: str, run_token: str
    ) -> None:
        node_id = check_node_id(node_id)
        self._config, self._node_id = config, node_id
        self._served = Served()
        self._early: deque[Envelope] = deque()
        """Messages that arrived during an update."""
        self._restarts, self._times_restarted = RestartBudget(config.max_restarts), 0
        self._newest = -1
        """The newest version that was ever committed here."""
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(contextlib.closing(bind(config.host, config.port)))
            sender = stack.enter_context(contextlib.closing(AbortSender()))
            self._aborts = Aborts(sender)
            self._vllm = VllmProcess(config, listener=listener, watchdog_endpoint=sender.endpoint)
            stack.callback(self._vllm.close)
            meter = stack.enter_context(
                contextlib.closing(memory.meter(config.device, config.gpus))
            )
            self._link = NodeLink(
                endpoint=endpoint,
                hello=_hello(config, node_id=node_id, run_token=run_token),
                urgent={"AbortUpdate": self._abort_update, "Hello": self._on_forgotten},
                lost_after_s=SILENT_S,
                meter=meter,
            )
            stack.callback(self._link.close)
            self._stack = stack.pop_all()

    def run(self) -> None:
        """Serve control messages until `Shutdown`, or until `ORPHAN_S` of silence."""
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
                envelope = (
                    self._early.popleft() if self._early else self._link.recv(timeout_s=IDLE_POLL_S)
                )
                last_word = time.monotonic()  # heartbeats count
            except NodeLost as error:
                if time.monotonic() - last_word > ORPHAN_S:
                    raise
                if self._served.received is not None:
                    self._aborts.abort(str(error))
                time.sleep(IDLE_POLL_S)
                continue
            if envelope is not None:
                self._dispatch(envelope.message)

    # ------------------------------------------------------------ vLLM's life

    def _start_vllm(self, *, restarted: bool) -> None:
        """Start vLLM and send `Ready`. Requests that arrive meanwhile are answered `not_ready`."""
        self._vllm.start()
        self._vllm.wait_healthy(
            deadline_s=self._config.startup_timeout_s, on_tick=self._refuse_requests
        )
        workers = self._vllm.call("info")["workers"]
        refuse_unverified(workers, is_allowed=self._config.allow_unverified)
        detail = _ready_detail(self._config, self._vllm.base_url, workers)
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
            remedy = "Send the request again after Ready."
            self._fail(
                envelope.message, ErrorCode.NOT_READY, "starting", "vLLM is starting", remedy
            )

    def _keep_alive(self) -> None:
        """Start vLLM again if it has ended.

        Raises:
            NodeLost: vLLM has ended too often.
        """
        self._vllm.rotate_log()
        if self._vllm.is_running:
            return
        log.error("vLLM has ended; starting it again. %s", self._vllm.log_tail())
        self._say_unready("vLLM has ended")
        self._vllm.stop()
        if not self._restarts.take(time.monotonic()):
            raise NodeLost(
                f"vLLM ended again after {self._config.max_restarts} restarts within an hour, and "
                f"no new version came meanwhile. "
                f"{self._vllm.log_tail()}"
            )
        self._served, self._aborts.running = Served(), None
        self._aborts.settle()
        try:
            self._start_vllm(restarted=True)
        except (NodeLost, CallFailed) as error:  # the loop tries again
            log.error("vLLM could not be started again: %s", error)
            self._vllm.stop()

    def _say_unready(self, reason: str) -> None:
        with contextlib.suppress(NodeLost):
            self._link.send(Unready(node_id=self._node_id, reason=reason[:1000]))

    def _on_lost(self, message: AnyMessage, phase: str, error: NodeLost) -> None:
        """Fail a request under which vLLM ended or stopped answering; the loop restarts vLLM."""
        # Before the answer: else the next attempt would count on this node.
        self._say_unready(str(error))
        remedy = "vLLM is being restarted; publish the version again after Ready."
        self._fail(message, ErrorCode.NODE_LOST, phase, str(error), remedy)
        self._vllm.stop()

    # ------------------------------------------------------------ requests

    def _dispatch(self, message: AnyMessage) -> None:
        if isinstance(message, Shutdown):
            raise _Ended
        handlers: dict[type, tuple[str, Callable[[Any], None]]] = {
            OpenRelay: ("joining", self._open_relay),
            JoinTransferGroup: ("joining", self._pass_on),
            LeaveTransferGroup: ("leaving", self._pass_on),
            PrepareUpdate: ("planning", self._prepare_update),
            UseEdges: ("planning", self._pass_on),
            PrepareShadow: ("making room", self._prepare_shadow),
            ReceiveWeights: ("receiving", self._receive_weights),
            SwapWeights: ("swapping", self._swap_weights),
            CheckCanary: ("checking the canary", self._check_canary),
            CommitUpdate: ("committing", self._commit_update),
            LeaveAlias: ("leaving the alias", self._leave_alias),
        }
        known = handlers.get(type(message))
        if known is None:
            text = f"an inference node does not take {message.kind}"
            self._fail(message, ErrorCode.BAD_INPUT, "reading", text, "Send it to the trainer.")
            return
        phase, handler = known
        try:
            handler(message)
        except CallFailed as error:
            remedy = REMEDIES.get(error.code, REMEDIES[ErrorCode.INTERNAL])
            self._fail(message, error.code, phase, str(error), remedy)
        except _Refused as error:
            self._fail(message, error.code, phase, str(error), error.remedy)
        except NodeLost as error:
            self._on_lost(message, phase, error)

    def _fail(
        self, message: AnyMessage, code: ErrorCode, phase: str, text: str, remedy: str
    ) -> None:
        request_id = getattr(message, "request_id", None)
        log.warning("%s failed while %s: %s: %s", message.kind, phase, code, text)
        if request_id is not None:
            self._link.fail(request_id, code=code, phase=phase, message=text, remedy=remedy)

    def _pass_on(self, message: JoinTransferGroup | LeaveTransferGroup | UseEdges) -> None:
        self._vllm.request(message)
        self._link.complete(message.request_id)

    def _open_relay(self, message: OpenRelay) -> None:
        result = {"rendezvous": self._vllm.request(message)["rendezvous"]}
        self._link.complete(message.request_id, result=result)

    def _prepare_update(self, message: PrepareUpdate) -> None:
        answer = self._vllm.request(message)
        self._served = self._served.planned(has_part=answer["changed"] is not None)
        result = {key: answer[key] for key in ("layout", "changed", "fp8", "keeps")}
        more = {"seconds": {"check": answer["seconds"]}, "serves": self._served.held}
        self._link.complete(message.request_id, result=more | result)

    def _commit_update(self, message: CommitUpdate) -> None:
        version = message.version
        if self._served.received == version:
            try:
                self._vllm.request(message)
            except CallFailed as error:
                self._poison(f"whether version {version} was committed is not known: {error}")
                raise
            self._served = self._served.committed(version)
            if version > self._newest:  # the run makes progress
                self._newest = version
                self._restarts.renew()
        elif not self._served.is_committed(version):
            raise self._not_received(version)
        self._served = self._served.confirmed()
        self._aborts.settle()
        model = f"{self._config.name}@{version}"
        self._link.complete(message.request_id, result={"model": model})

    def _not_received(self, version: int) -> _Refused:
        text = f"version {version} was not received here (received: {self._served.received})"
        return _Refused(text, "Receive and verify the version first.")

    def _check_canary(self, message: CheckCanary) -> None:
        if self._served.received != message.version:
            raise self._not_received(message.version)
        if self._served.is_serving:
            why = f"{self._config.name}@{self._served.version} was being served"
            self._link.complete(message.request_id, result={"skipped": why})
            return
        logprobs = array.array("f", self._vllm.request(message)["logprobs"])
        spec = TensorSpec(name="logprobs", dtype="float32", shape=(len(logprobs),))
        self._link.complete(message.request_id, tensors=[spec], buffers=[logprobs.tobytes()])

    def _leave_alias(self, message: LeaveAlias) -> None:
        if self._served.is_serving:
            version = self._served.version
            log.warning("version %d is no longer served here: %s", version, message.reason)
            self._poison(f"the other replicas continued without this one: {message.reason}")
        self._link.complete(message.request_id)

    # ------------------------------------------------------------ the update

    def _receive_weights(self, message: ReceiveWeights) -> None:
        if not self._served.is_planned:
            raise _Refused("no manifest was planned here", "Send PrepareUpdate first.")
        missing = self._served.why_no_base(message.base_version, is_part=message.is_part)
        if missing is not None:
            code = ErrorCode.BASE_MISSING
            raise _Refused(missing, "Publish the version whole.", code=code)
        is_shadow = message.mode == "shadow"
        run = self._begin(message)
        try:
            answer = self._receive_into_shadow(run) if is_shadow else self._pause_and_update(run)
        except (CallFailed, TransferAborted) as error:
            (self._after_shadow_failure if is_shadow else self._after_failure)(run, error)
            return
        finally:
            self._aborts.running = None
        arrived = self._served.arrived_in_shadow if is_shadow else self._served.arrived
        self._served = arrived(message.version)
        run.complete(answer)

    def _begin(self, message: ReceiveWeights | SwapWeights) -> _UpdateRun:
        self._served = self._served.begun()
        self._aborts.begin(message.request_id)
        return _UpdateRun(message=message, link=self._link)

    def _pause_and_update(self, run: _UpdateRun) -> dict[str, Any]:
        """Pause and change the live tensors, in one call of vLLM; returns its answer."""
        self._aborts.raise_if_any()
        run.phase, began = "pause", time.monotonic()
        self._link.progress(run.message.request_id, "pausing")

        def on_progress(step: dict[str, Any]) -> None:
            run.phase, run.seconds["pause"] = "apply", float(step["seconds"])
            self._link.progress(run.message.request_id, "paused", seconds=run.seconds["pause"])
            if self._aborts.is_empty:  # else the workers hear of the abort before they write
                run.announce()

        try:
            done = self._vllm.request(run.message, on_progress=on_progress, on_poll=self._listen)
        except CallFailed as error:
            run.phase = str(error.answer.get("phase", run.phase))
            raise
        finally:
            run.seconds["update"] = time.monotonic() - began - run.seconds.get("pause", 0.0)
        run.announce()
        run.take_phases(done["phases"])
        return done

    def _listen(self) -> None:
        """Keep messages that arrive during an update; a silent orchestrator ends it."""
        try:
            envelope = self._link.recv(timeout_s=0.0)
            if envelope is not None:
                self._early.append(envelope)
        except NodeLost as error:
            if self._aborts.is_empty:
                self._aborts.abort(str(error))

    def _after_failure(self, run: _UpdateRun, error: CallFailed | TransferAborted) -> None:
        """Resume @N if nothing was loaded; else poison the replica."""
        loaded = isinstance(error, CallFailed) and int(error.answer.get("tensors", 0)) > 0
        reason = f"version {run.message.version} failed while {run.phase}: {error}"
        self._vllm.insist("reset")
        if loaded:
            run.announce()
            self._poison(reason)
            remedy = "This replica holds a mixture of versions; publish a version again, whole."
        else:
            self._vllm.insist("resume")
            self._aborts.settle()
            serving = "nothing, as before"
            if self._served.is_serving:
                serving = f"{self._config.name}@{self._served.version}"
            remedy = (
                f"Nothing was loaded, and this replica still serves {serving}. "
                "Publish the version again."
            )
        is_waiting = not loaded and run.phase == "apply"
        phase = "waiting for the first byte" if is_waiting else run.phase
        self._fail(run.message, _code(error), phase, str(error), remedy)

    def _poison(self, reason: str) -> None:
        self._served = self._served.now_poisoned(reason)
        self._aborts.settle()
        self._vllm.insist("poison", reason=reason[:500])

    # ------------------------------------------------------------ shadow mode

    def _prepare_shadow(self, message: PrepareShadow) -> None:
        why = self._served.why_no_base(message.base_version, is_part=message.is_part)
        if not self._served.is_serving:
            why = "this replica serves nothing that generation could continue with"
        if why is None:
            why = self._vllm.request(message)["why_not"]
        self._link.complete(message.request_id, result={"why_not": why})

    def _receive_into_shadow(self, run: _UpdateRun) -> dict[str, Any]:
        self._aborts.raise_if_any()
        run.phase, began = "shadow", time.monotonic()
        received = self._vllm.request(run.message)
        run.seconds |= {k: float(v) for k, v in received["phases"].items()}
        run.seconds["shadow"] = time.monotonic() - began
        return received

    def _after_shadow_failure(self, run: _UpdateRun, error: CallFailed | TransferAborted) -> None:
        """Drop what arrived; nothing was paused or changed."""
        self._drop_shadow()
        serving = f"{self._config.name}@{self._served.version}"
        remedy = f"Nothing was changed, and {serving} is still served. Publish the version again."
        phase = "receiving into shadow memory"
        self._fail(run.message, _code(error), phase, str(error), remedy)

    def _drop_shadow(self) -> None:
        self._served = self._served.dropped()
        self._aborts.settle()
        with contextlib.suppress(CallFailed):
            self._vllm.call("drop_shadow")

    def _swap_weights(self, message: SwapWeights) -> None:
        if self._served.in_shadow != message.version:
            text = (
                f"version {message.version} is not in shadow memory "
                f"(there: {self._served.in_shadow})"
            )
            raise _Refused(text, "Send PrepareShadow and ReceiveWeights first.")
        run = self._begin(message)
        try:
            swapped = self._pause_and_update(run)
        except (CallFailed, TransferAborted) as error:
            self._drop_shadow()
            self._after_failure(run, error)
            return
        finally:
            self._aborts.running = None
        is_committed = swapped["committed"]
        arrived = self._served.swapped_and_committed if is_committed else self._served.arrived
        self._served = arrived(message.version)
        run.complete(swapped, committed=is_committed)

    # ------------------------------------------------------------ aborts

    def _abort_update(self, message: AnyMessage) -> None:
        """On the link's thread: end the transfer now."""
        assert isinstance(message, AbortUpdate)
        self._aborts.take_message(message)

    def _on_forgotten(self, _: AnyMessage) -> None:
        """On the link's thread: a new orchestrator asks who we are; it may not publish soon."""
        if self._aborts.running is not None or self._served.is_undecided:
            self._aborts.abort("the orchestrator was restarted, or had not heard of this node")

    def _take_idle_aborts(self) -> None:
        """Give up what is not committed, on an abort between the last byte and the commit."""
        reason = self._aborts.take_all()
        if reason is None or not self._vllm.is_running:
            return
        try:
            if self._served.in_shadow is not None:
                version = self._served.in_shadow
                log.warning("version %d in shadow memory is dropped: %s", version, reason)
                self._drop_shadow()
            given_up = self._served.why_given_up(reason)
            if given_up is not None:
                self._poison(given_up)
        except NodeLost as error:
            log.error("vLLM is ended, because what it serves is not known: %s", error)
            self._say_unready(str(error))
            self._vllm.stop()


def _hello(config: InferenceConfig, *, node_id: str, run_token: str) -> Hello:
    packages = {"vllm": vllm_version.installed(), "vllm_dialect": vllm_version.dialect()}
    for package in ("torch", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[package] = importlib.metadata.version(package)
    return Hello(
        role="inference",
        node_id=node_id,
        incarnation=uuid.uuid4().hex,
        run_token=run_token,
        packages=packages,
        gpus=tuple(f"cuda:{n}" for n in config.gpus),
        pid=os.getpid(),
        serves=config.name,
    )


def refuse_unverified(workers: Sequence[dict[str, Any]], *, is_allowed: bool) -> None:
    """End before the first job if vLLM holds what cannot be verified.

    Raises:
        ConfigError: names the quantisation and its layers.
    """
    refused = list(dict.fromkeys(text for w in workers for text in w["refusals"]))
    if not refused:
        return
    text = f"vLLM holds what splice cannot verify: {'; '.join(refused)}"
    if any(w["holds_static_fp8"] for w in workers):
        raise ConfigError(f"{text}. An FP8 checkpoint cannot go without; serve the bf16 model")
    if not is_allowed:
        raise ConfigError(f"{text}. Set allow_unverified to publish without this proof")
    log.warning("%s; splice publishes anyway, because allow_unverified is set", text)


def _ready_detail(
    config: InferenceConfig, base_url: str, workers: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    first = {key: workers[0][key] for key in ("model_dtype", "device", "packages")}
    served = {"base_url": base_url, "model": str(config.model), "name": config.name}
    return {**served, **first, "workers": len(workers)}


def _code(error: CallFailed | TransferAborted) -> ErrorCode:
    return error.code if isinstance(error, CallFailed) else ErrorCode.TRANSFER_ABORTED
