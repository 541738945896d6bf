"""The process of one trainer rank: requests come in over the control socket, outcomes go out.

    rank 0    NodeLink (a thread) -> Lockstep.broadcast -> handler -> Lockstep.compare -> answer
    others    Lockstep.broadcast -> handler -> Lockstep.compare

`jobs` and `publication` hold the handlers. Every request ends in one terminal message. After a
failed request the node continues, with two exceptions. If the ranks are out of step, all exit with
`EXIT_DIVERGED`. If memory did not come back, or nobody knows the state (`aftermath`), all exit with
`EXIT_AFRESH`. Their launcher starts them again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from orchestrator.errors import ConfigError, NodeLost
from orchestrator.processes.interfaces import gloo_variables, refuse_loopback_name
from orchestrator.processes.logs import log_to_stderr
from orchestrator.processes.restarts import EXIT_AFRESH, EXIT_CONFIG, EXIT_LINK_LOST, START_ID
from orchestrator.protocol.config import TrainerConfig
from orchestrator.protocol.frames import Envelope
from orchestrator.protocol.messages import (
    AbortSend,
    AnyMessage,
    ErrorCode,
    Hello,
    LeaveTransferGroup,
    OpenTransferGroup,
    Ready,
    ReleaseMemory,
    check_node_id,
)
from orchestrator.protocol.messages.mistakes import read_json
from orchestrator.protocol.node_link import NodeLink
from trainer_node.ranks import gpu, heap
from trainer_node.ranks.lockstep import Failure, Lockstep, has_diverged
from trainer_node.request import Outcome, Request, classify
from trainer_node.tools import admission
from trainer_node.training.registry import loss_names
from weight_transfer.nccl_group import nccl_version

log = logging.getLogger("splice.trainer")

DEADLINE_GRACE_S = 30.0
"""A request that runs this long past its deadline is stuck, and the node ends, in seconds."""
KEEPALIVE_S = 5.0
"""Pause between two keepalives that rank 0 broadcasts while idle, in seconds."""
SAVE_END_S = 15.0
"""Longest wait for a save in the background at the end, in seconds. A launcher waits 20 s."""
EXIT_DIVERGED, EXIT_STUCK = 3, 4
_PACKAGES = (
    "torch", "megatron-core", "megatron-bridge", "transformer-engine", "transformers",
    "cupy-cuda13x", "splice",
)  # fmt: skip # a short list
_REFUSALS = {
    ErrorCode.BAD_INPUT,
    ErrorCode.TOO_LONG,
    ErrorCode.NOT_READY,
    ErrorCode.PLAN_REFUSED,
    ErrorCode.LOGPROB_GAP,
    ErrorCode.NON_FINITE_GRADIENT,
}
"""Their messages say all: no stack is logged with them."""
_KEEPS_OFFLOADED = (ReleaseMemory, OpenTransferGroup, LeaveTransferGroup)
"""Requests that need no weights on the device."""


class Node:
    """One rank of the trainer node. Rank 0 has the link to the orchestrator."""

    def __init__(self, config: TrainerConfig, link: NodeLink | None) -> None:
        from trainer_node.training.start import start

        self.link = link
        self.trainer = start(config)
        # Late: on a CPU, Megatron can be imported only after `start` has applied the shims.
        from trainer_node.aftermath import Aftermath
        from trainer_node.export.merged import Exporter
        from trainer_node.jobs import Jobs
        from trainer_node.publication import Publication
        from trainer_node.transfer import Transfer

        model, exporter = self.trainer.model, Exporter(self.trainer.model)
        self.lockstep = Lockstep(model.control_group)
        self.transfer = Transfer(host=config.host, device=model.device)
        publication = Publication(self.trainer, exporter, self.transfer, self.lockstep)
        self.trainer.when_adapted = publication.forget_plans
        self.trainer.before_save = self.transfer.prepare
        self._jobs = Jobs(self.trainer, exporter, self.lockstep)
        self._may_change_weights = frozenset(self._jobs.handlers)
        self._handlers = self._jobs.handlers | publication.handlers
        self._request_id = ""
        """The request that runs now."""
        self._aborts: dict[str, str] = {}
        """Open request to abort -> reason. The link's thread adds entries."""
        heap.freeze()
        self._aftermath = Aftermath(self.trainer)

    # ------------------------------------------------------------ the loop

    def serve(self) -> int:
        """Handle requests until told to stop, or until the link is lost.

        Returns the exit code, the same on every rank.
        """
        if self.link is not None:
            self.link.send(Ready(node_id=self.link.node_id, detail=self._detail()))
        while True:
            try:
                envelope, received_s = self._next()
            except StopIteration as stop:
                return int(stop.value)
            code = None if envelope is None else self._handle(envelope, received_s)
            if code is not None:
                return code

    def _detail(self) -> dict[str, object]:
        model, config = self.trainer.model, self.trainer.model.config
        return {
            "model": str(config.model),
            "parallel": config.parallel.model_dump(),
            "ranks": dist.get_world_size(),
            "trainable_parameters": model.num_parameters,
            "dtype": config.dtype,
            "device": config.device,
            "memory": config.memory,
            "micro_batch_tokens": self.trainer.micro_batch_tokens,
            "fallbacks": model.fallbacks,
            "shared_prefixes": model.sharing_obstacle or "computed once",
            "losses": loss_names(),
        }

    def _next(self) -> tuple[Envelope | None, float]:
        """The next request, or None, and the time at which this process received it."""
        if self.link is None:
            return self.lockstep.broadcast(None), time.monotonic()
        try:
            envelope = self.link.recv(timeout_s=KEEPALIVE_S)
        except NodeLost as error:
            log.warning("%s; the trainer ends", error)
            return self.lockstep.broadcast(None, stop=EXIT_LINK_LOST), time.monotonic()
        received_s = time.monotonic()
        if envelope is not None and envelope.message.kind == "Shutdown":
            return self.lockstep.broadcast(None, stop=0), received_s
        return self.lockstep.broadcast(envelope), received_s

    def _handle(self, envelope: Envelope, received_s: float) -> int | None:
        """Run one request to its terminal message. Returns the code with which all ranks must exit
        now, or None."""
        request: Request[Any] = Request(
            sent=envelope.message,
            buffers=envelope.buffers,
            received_s=received_s,
            link=self.link,
            aborts=self._aborts,
        )
        request.phase = kind = request.message.kind
        self._request_id, self.trainer.first_forward_s = request.id, 0.0
        outcome, error, why = Outcome(), None, ""
        with self._watch(request):
            try:
                outcome = self._dispatch(request)
            except Exception as caught:  # the boundary: an error ends the request, not the node
                code, _ = classify(caught, phase=request.phase)
                stack = None if code in _REFUSALS else caught
                log.error("%s failed while %s: %s", kind, request.phase, caught, exc_info=stack)
                error = gpu.without_frames(caught, self.trainer.model.device)
            failures = self.lockstep.compare(error)
            diverged = has_diverged(failures, world_size=dist.get_world_size())
            diverged |= self._jobs.ahead.has_diverged
            if diverged:
                why = "the ranks are no longer in step"
            elif failures:
                why = self.lockstep.first(self._aftermath.why_not())
        if self.link is not None and not failures:
            self.link.complete(
                request.id, result=outcome.result, tensors=outcome.tensors, buffers=outcome.buffers
            )
        elif self.link is not None:
            self._fail(self.link, request, error, failures[0], why_ends=why)
        self._aborts.pop(request.id, None)
        if not why:
            return None
        log.error("the trainer ends and is started again: %s", why)
        return EXIT_DIVERGED if diverged else EXIT_AFRESH

    def _dispatch(self, request: Request[Any]) -> Outcome:
        handler = self._handlers.get(type(request.message))
        if handler is None:
            raise ConfigError(f"the trainer does not know {request.message.kind}")
        if self.trainer.is_offloaded and not isinstance(request.message, _KEEPS_OFFLOADED):
            request.progress("reloading")
            self.trainer.reload()
        if type(request.message) in self._may_change_weights:
            self.transfer.forget_prepared()
        return handler(request)

    def _fail(
        self,
        link: NodeLink,
        request: Request[Any],
        error: Exception | None,
        first: Failure,
        *,
        why_ends: str,
    ) -> None:
        code, remedy = classify(error, phase=request.phase)
        if why_ends:
            remedy = (
                f"See the trainer's log. The trainer starts again from its last durable state, "
                f"because {why_ends}."
            )
        where = f"rank {first.rank}: " if dist.get_world_size() > 1 else ""
        link.fail(
            request.id,
            code=code,
            phase=request.phase,
            message=f"{where}{first}",
            remedy=remedy,
            steps_taken=request.steps_taken,
        )

    @contextlib.contextmanager
    def _watch(self, request: Request[Any]) -> Iterator[None]:
        """End the process if a request is stuck: nothing can interrupt a hung collective."""
        limit_s = request.sent.deadline_s + DEADLINE_GRACE_S

        def stuck() -> None:
            log.error(
                "%s is stuck while %s, %.0f s after its receipt",
                request.message.kind,
                request.phase,
                limit_s,
            )
            if self.link is not None:
                self.link.fail(
                    request.id,
                    code=ErrorCode.INTERNAL,
                    phase=request.phase,
                    message=f"stuck: no end within {limit_s:.0f} s",
                    remedy="The trainer ends and is started again; LoadCheckpoint the last "
                    "durable version.",
                )
                self.link.close()
            os._exit(EXIT_STUCK)

        timer = threading.Timer(limit_s, stuck)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    # ------------------------------------------------------------ aborts and the end

    def abort_send(self, message: AbortSend) -> None:
        """Abort a join or send, now or when its turn comes. The link's thread calls it.

        The entry in `_aborts` comes first, so a request that starts meanwhile finds it.
        """
        assert self.link is not None
        if message.request_id is not None:
            if not self.link.is_open(message.request_id):
                log.info("no open request %s to abort (%s)", message.request_id, message.reason)
                return
            self._aborts[message.request_id] = message.reason
            if message.request_id != self._request_id:
                return
        self.transfer.abort(message.reason)

    def close(self) -> bool:
        """End communicators and process groups. Returns whether that was possible: a save in the
        background uses them, and has `SAVE_END_S` to end."""
        self.transfer.close()
        until = time.monotonic() + SAVE_END_S
        if not self.trainer.behind.wait(timeout_s=SAVE_END_S):
            log.warning(
                "the moments of the last version were not written within %.0f s; the next load "
                "makes its step again",
                SAVE_END_S,
            )
            return False
        # What is left is deleted after a later save.
        self._jobs.removal.wait(timeout_s=max(0.0, until - time.monotonic()))
        self.trainer.model.close()
        return True


# ---------------------------------------------------------------- the process


def hello(node_id: str, token: str, device: str) -> Hello:
    """Describe this process to the orchestrator."""
    packages = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    gpus: tuple[str, ...] = ()
    if device == "cuda":
        packages["nccl"] = nccl_version()
        gpus = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return Hello(
        role="trainer",
        node_id=check_node_id(node_id),
        incarnation=uuid.uuid4().hex,
        run_token=token,
        packages=packages,
        gpus=gpus,
        pid=os.getpid(),
        start_id=os.environ.get(START_ID, ""),
    )


def run(
    *, endpoint: str, node_id: str, config: TrainerConfig, token: str, nodes: dict[str, Node]
) -> int:
    """Run one rank. Returns its exit code.

    Args:
        nodes: gets the node. A caller that leaves by `os._exit` keeps it until then: to free it
            after a CUDA fault would end the process with SIGABRT.
    """
    if int(os.environ.get("RANK", "0")) != 0:
        return _serve(config, None, nodes)

    def on_abort(message: AnyMessage) -> None:
        if "node" in nodes and isinstance(message, AbortSend):
            nodes["node"].abort_send(message)

    link = NodeLink(
        endpoint=endpoint,
        hello=hello(node_id, token, config.device),
        urgent={"AbortSend": on_abort},
    )
    with link.start():
        return _serve(config, link, nodes)


def _serve(config: TrainerConfig, link: NodeLink | None, nodes: dict[str, Node]) -> int:
    from trainer_node.hf.hub import with_local_model

    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        refuse_loopback_name(master, what="the address of rank 0")
    os.environ.update(gloo_variables(master))
    config = with_local_model(config)
    if config.admission == "check":
        admission.require_once(config)
    node = nodes["node"] = Node(config, link)
    code = EXIT_DIVERGED
    try:
        code = node.serve()
    finally:
        if code in (0, EXIT_LINK_LOST):
            if not node.close():
                _leave(code)
        else:
            # Process groups that are out of step block when they are destroyed.
            node.transfer.close()
            if code == EXIT_AFRESH and gpu.works(node.trainer.model.device):
                node.trainer.behind.wait(timeout_s=SAVE_END_S)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. The run's token comes from SPLICE_RUN_TOKEN."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer_node",
        description="One rank of the trainer; trainer_node.launcher.ranks starts it.",
    )
    parser.add_argument(
        "--endpoint", required=True, help="the orchestrator's address, tcp://host:port"
    )
    parser.add_argument("--node-id", default="trainer")
    parser.add_argument("--config", type=Path, required=True, help="TrainerConfig as JSON")
    arguments = parser.parse_args(argv)
    rank = os.environ.get("RANK", "0")
    with contextlib.suppress(OSError):
        # The name in ps and top: a forked rank has the command line of its template.
        Path("/proc/self/comm").write_text(f"splice-rank-{rank}"[:15])
    log_to_stderr(f"rank {rank}")
    nodes: dict[str, Node] = {}
    try:
        config = read_json(arguments.config, TrainerConfig)
        if config.device == "cuda":
            gpu.use_expandable_segments()  # the greeting to the orchestrator initialises CUDA
        code = run(
            endpoint=arguments.endpoint,
            node_id=arguments.node_id,
            config=config,
            token=os.environ.get("SPLICE_RUN_TOKEN", ""),
            nodes=nodes,
        )
    except NodeLost as error:
        log.error("%s; this trainer can be started again", error)
        code = EXIT_LINK_LOST
    except ConfigError as error:
        log.error("%s", error)
        code = EXIT_CONFIG
    except Exception:
        log.exception("the trainer ends")
        _leave(EXIT_DIVERGED)  # with the error's frames, as with the node
    if code != 0:
        _leave(code)
    return code


def _leave(code: int) -> NoReturn:
    """End without the interpreter's shutdown: process groups out of step, or used by a thread, can
    hang there."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
