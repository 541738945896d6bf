"""Requests to the trainer, and what it holds in memory that the disk does not.

A restarted trainer has its base weights. Before every request, the orchestrator therefore compares
the process with the one that it asked last. A new process first loads the last durable state.

The old process may have held more: optimizer steps without a checkpoint, or pending gradients. The
job then fails and says so. It is never repeated on a state that the client does not know. If the
loss is found between jobs, the next job fails with it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TypedDict, Unpack

from orchestrator.config import OrchestratorConfig
from orchestrator.control.open_requests import Answer
from orchestrator.control.router import ControlRouter
from orchestrator.control.waiting import Report
from orchestrator.errors import (
    JobFailed,
    NodeLost,
    ProcessEnded,
    TrainerKilled,
    WorkLost,
)
from orchestrator.facts import Facts
from orchestrator.protocol.messages import (
    ForwardBackward,
    LoadAdapter,
    LoadCheckpoint,
    NewAdapter,
    Operation,
    OptimStep,
    Progress,
    ReleaseMemory,
    Request,
    RunJob,
    SaveCheckpoint,
    TrainLora,
    TrainMerged,
    new_id,
)

log = logging.getLogger("splice.orchestrator")
MOST_KILLS = 2
"""Processes of the trainer that may end in one request."""
CHANGES_STATE = (TrainMerged, TrainLora, ForwardBackward, OptimStep, LoadAdapter, NewAdapter)
"""Jobs that leave the trainer's state unknown if they are given up. Their failure drops pending
gradients, and no other's does."""


class Saves(TypedDict, total=False):
    """Fields of `RunJob` for a job that saves. `version`: that of the state, if left out."""

    version: int
    checkpoint_dir: str
    delete_after: tuple[str, ...]


class TrainerRequests:
    """Sends requests to the trainer, one at a time."""

    def __init__(self, router: ControlRouter, config: OrchestratorConfig, facts: Facts) -> None:
        self._router, self._attempts = router, config.publication.attempts
        self._ready_timeout_s, self._job_timeout_s = config.ready_timeout_s, config.train_timeout_s
        self.memory, self._remember = facts.memory, facts.remember

    async def ready(self, report: Report) -> None:
        """Wait for the trainer. A new process first loads the last durable state.

        Raises:
            NodeLost: the trainer is not ready in time, or state was lost with the old process.
        """
        await self._wait_ready(report)
        await self._settle(report)

    async def _wait_ready(self, report: Report) -> None:
        timeout_s = self._ready_timeout_s
        await self._router.wait_ready(["trainer"], timeout_s=timeout_s, report=report)

    def _incarnation(self) -> str:
        return self._router.peers["trainer"].hello.incarnation

    async def run(
        self,
        job: TrainMerged | Operation,
        buffers: Sequence[bytes] = (),
        *,
        phase: str,
        report: Report,
        request_id: str = "",
        replaces_state: bool = False,
        **saves: Unpack[Saves],
    ) -> Answer:
        """Run a job on the trainer; see `ask`."""
        request = self._run_job(job, request_id=request_id, **saves)
        return await self.ask(
            request, buffers, phase=phase, report=report, replaces_state=replaces_state
        )

    async def save(self, folder: str, *, phase: str, report: Report) -> None:
        """Have the state saved to a folder of the orchestrator's."""
        job = SaveCheckpoint(checkpoint_dir=folder)
        completed, _ = await self.run(job, phase=phase, report=report)
        self.memory.heard(completed.result)
        self.memory.saved(folder)

    async def restore(self, folder: str, phase: str) -> None:
        """Have the process that is there load a checkpoint, whatever it holds."""
        load = self._run_job(LoadCheckpoint(checkpoint_dir=folder))
        answer, _ = await self._router.request("trainer", load, phase=phase)
        self.memory.heard(answer.result)

    def _run_job(
        self, job: TrainMerged | Operation, *, request_id: str = "", **saves: Unpack[Saves]
    ) -> RunJob:
        saves.setdefault("version", self.memory.version)
        request_id = request_id or new_id("request")
        return RunJob(request_id=request_id, deadline_s=self._job_timeout_s, job=job, **saves)

    async def ask(
        self,
        request: RunJob | ReleaseMemory,
        buffers: Sequence[bytes] = (),
        *,
        phase: str,
        report: Report,
        replaces_state: bool = False,
    ) -> Answer:
        """Run one request, at most once in each of the trainer's processes.

        The process's id becomes part of the request's. A process that a restarted orchestrator asks
        again therefore repeats its answer. If the trainer is lost, this method waits for it. The
        same process is asked again. A new one first loads the last durable state, if the old one
        held no more than that.

        Args:
            replaces_state: success makes up for whatever the process held before.

        Raises:
            JobFailed: the trainer answered `Failed`.
            TrainerKilled: the trainer's process ended in this request for the second time.
            NodeLost: the trainer did not come back, or work was lost that cannot be repeated.
        """
        has_begun = False
        changes_state = isinstance(request, RunJob) and isinstance(request.job, CHANGES_STATE)

        def on_progress(_: str, progress: Progress) -> None:
            nonlocal has_begun
            has_begun = True
            report(progress.phase, progress.detail)

        for attempt in range(1, self._attempts + 1):
            await self._wait_ready(report)
            incarnation, is_sent, has_begun = self._incarnation(), False, False
            try:
                if not replaces_state:
                    await self._settle(report)
                self._remember()
                incarnation = self._incarnation()
                own_id = f"{request.request_id}-{incarnation[:12]}"
                is_sent = True
                answer = await self._router.request(
                    "trainer",
                    request.model_copy(update={"request_id": own_id}),
                    buffers,
                    phase=phase,
                    on_progress=on_progress,
                )
            except JobFailed as error:
                if error.is_answer:
                    self.memory.saving = ""
                elif changes_state:
                    self.memory.uncertain = incarnation
                if changes_state and self.memory.incarnation == incarnation:
                    self.memory.failed(error.code, steps_taken=error.steps_taken)
                raise
            except NodeLost as error:
                if has_begun and isinstance(error, ProcessEnded):
                    self._count_kill(request, phase, error)
                # Its state is lost only if a new process joins. This one may be silent and at work.
                if attempt == self._attempts or (self.memory.unsaid and not replaces_state):
                    if is_sent and changes_state:
                        self.memory.uncertain = incarnation
                        self._remember()
                    raise
                log.warning("the trainer was lost while %s; waiting for it: %s", phase, error)
                report("trainer lost", {"error": str(error)})
                # The connection may end before the process. Immediate retries would use up the
                # attempts.
                await self._router.wait_heard(["trainer"], since_s=time.monotonic())
            else:
                self.memory.uncertain = ""
                if replaces_state:
                    self.memory.incarnation, self.memory.unsaid = incarnation, ""
                return answer
        raise AssertionError("unreachable")

    def _count_kill(self, request: Request, phase: str, error: ProcessEnded) -> None:
        """Journal that a process ended in a request.

        Raises:
            TrainerKilled: it was not the first one.
        """
        kills = self.memory.was_killed(request.request_id)
        self._remember()
        if kills >= MOST_KILLS:
            raise TrainerKilled(
                f"{kills} processes of the trainer have ended while {phase}, so the job is not "
                f"sent again; the last one: {error}"
            ) from error

    async def _settle(self, report: Report) -> None:
        """Have a process load the last durable state, if the process is new or its state is
        unknown.

        It works in order: whatever it was still doing is undone.
        """
        memory, incarnation = self.memory, self._incarnation()
        is_new = memory.incarnation not in (None, incarnation)
        how = "restarted" if is_new else "out of reach in the middle of a request"
        if is_new or (memory.uncertain == incarnation and memory.durable_dir):
            if memory.durable_dir:
                report("restoring", {"checkpoint_dir": memory.durable_dir})
                await self.restore(memory.durable_dir, "restoring the last durable state")
            # After the load, so that a restarted orchestrator still finds the loss.
            lost = memory.take_loss()
            memory.incarnation, memory.uncertain = incarnation, ""
            if lost is not None:
                who = "the new process" if is_new else "it"
                raise WorkLost(f"the trainer was {how}; {lost}; {who} has loaded that state")
        memory.incarnation = incarnation
