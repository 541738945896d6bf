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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypedDict, Unpack

from orchestrator.control.open_requests import Answer
from orchestrator.control.router import ControlRouter
from orchestrator.control.waiting import Report
from orchestrator.errors import (
    REFUSED,
    JobFailed,
    NodeLost,
    ProcessEnded,
    TrainerKilled,
    WorkLost,
)
from orchestrator.protocol.config import MemoryMode
from orchestrator.protocol.messages import (
    ErrorCode,
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
MESSAGE_CHARS = 2000
"""Longest description of a loss, so that it fits into a `Failed`."""
NOTES_KEPT = 20
COPIES_KEPT = 4
MOST_KILLS = 2
"""Processes of the trainer that may end in one request."""
CHANGES_STATE = (TrainMerged, TrainLora, ForwardBackward, OptimStep, LoadAdapter, NewAdapter)
"""Jobs after which nobody knows what the trainer holds, if they are given up. Their failure
drops pending gradients, and no other's does."""


class Saves(TypedDict, total=False):
    """Fields of `RunJob` for a job that saves. `version`: that of the state, if left out."""

    version: int
    checkpoint_dir: str
    delete_after: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class TrainerMemory:
    """What the trainer's process holds."""

    incarnation: str | None = None
    """The process that was asked last, or None."""
    uncertain: str = ""
    """The process that may still be at work on a request that was given up; empty: none."""
    durable_dir: str = ""
    """The checkpoint last saved or loaded; empty: the base weights."""
    copies: list[str] = field(default_factory=list)
    """Other checkpoints of the same state, the newest first. Some may be deleted by now."""
    steps: int = 0
    """Optimizer steps since that checkpoint."""
    adapter: str = ""
    """The PEFT folder loaded since that checkpoint; empty: none."""
    version: int = 0
    """The newest version made from its state."""
    mode: MemoryMode | None = None
    """Its memory mode between jobs. None: unknown, because no trainer has joined yet."""
    pending: int = 0
    """Number of batches with pending gradients."""
    killed_by: str = ""
    """The request in which a process of the trainer ended last; empty: in none."""
    kills: int = 0
    """Number of processes that ended in that request."""
    saving: str = ""
    """Folder of a client's save in progress. It may be complete although no answer came."""
    unsaid: str = ""
    """Description of lost state, until a failed job reports it."""
    notes: list[str] = field(default_factory=list)
    """Warnings of requests that no job sees, until a job's result has them."""

    def as_dict(self) -> dict[str, Any]:
        """Return its fields. `dataclasses.asdict` would copy them."""
        return {name: getattr(self, name) for name in _REMEMBERED}

    def free_folder(self, folder: str) -> str:
        """Return `folder` or its alternative: the one that is not the last durable state."""
        return folder if folder != self.durable_dir else f"{folder}-2"

    def saved(self, folder: str) -> None:
        """Note a save to `folder`. Pending gradients stay, because no checkpoint contains them."""
        same = [] if self.is_ahead or not self.durable_dir else [self.durable_dir, *self.copies]
        self.copies = [other for other in same if other != folder][:COPIES_KEPT]
        self.durable_dir, self.steps, self.adapter, self.saving = folder, 0, "", ""

    def loaded(self, folder: str) -> None:
        """Note that the state came from `folder`."""
        self.durable_dir, self.steps, self.pending, self.adapter, self.saving = folder, 0, 0, "", ""
        self.copies = []

    def find_durable(self) -> str | None:
        """Take a copy of the state whose folder is gone, if there is one; returns the lost folder.
        None: the folder is there, or is nowhere to be seen from here."""
        lost = self.durable_dir
        found = [other for other in self.copies if Path(other).is_dir()]
        if not lost or Path(lost).exists() or not found:
            return None
        self.durable_dir, self.copies = found[0], found[1:]
        return lost

    def moved(self, before: str, after: str) -> None:
        """Note that the run's folder has another place."""
        self.durable_dir, self.saving = (
            moved(folder, before, after) for folder in (self.durable_dir, self.saving)
        )
        self.copies = [moved(folder, before, after) for folder in self.copies]

    def heard(self, result: Mapping[str, Any]) -> None:
        """Keep the warnings of a request whose result no job sees."""
        for text in result.get("warnings") or ():
            log.warning("the trainer: %s", text)
            if len(self.notes) < NOTES_KEPT:
                self.notes.append(str(text)[:MESSAGE_CHARS])

    def take_notes(self) -> list[str]:
        """Return `notes` for a job's result, and forget them."""
        notes, self.notes = self.notes, []
        return notes

    def took_adapter(self, folder: str) -> None:
        """Note that the adapters came from `folder`, which drops the pending gradients."""
        self.adapter, self.pending = folder, 0

    @property
    def is_ahead(self) -> bool:
        """Whether it has steps or adapters that no checkpoint has."""
        return bool(self.steps or self.adapter)

    def stepped(self, count: int = 1) -> None:
        """Note optimizer steps, which use the pending gradients."""
        self.steps, self.pending, self.saving = self.steps + count, 0, ""

    def failed(self, code: str, *, steps_taken: int) -> None:
        """Note a failed request that may change the state.

        A refused request changed nothing. A later failure dropped the pending gradients. Earlier
        steps remain, also those that could not be saved.
        """
        if steps_taken:
            self.stepped(steps_taken)
        elif code == ErrorCode.CHECKPOINT_FAILED:
            return
        elif code not in REFUSED:
            self.pending = 0

    def was_killed(self, request_id: str) -> int:
        """Note that the process ended in a request. Returns how many processes have."""
        self.kills = self.kills + 1 if self.killed_by == request_id else 1
        self.killed_by = request_id
        return self.kills

    def take_loss(self) -> str | None:
        """Describe what a lost process took with it, or None, and keep it in `unsaid`."""
        saving, self.saving = self.saving, ""
        if not self.is_ahead and not self.pending:
            return None
        where = self.durable_dir or "the base weights"
        loaded = f"the adapter {self.adapter}, " if self.adapter else ""
        said = (
            f"{loaded}{self.steps} optimizer steps and the gradients of {self.pending} batches "
            f"since {where} are lost with it"
        )
        if saving and saving == self.durable_dir and self.is_ahead:
            said += ", unless the last save to that folder had come to its end"
        self.steps = self.pending = 0
        self.adapter, self.unsaid = "", said[:MESSAGE_CHARS]
        return self.unsaid

    def was_said(self, message: str) -> None:
        """Forget `unsaid` if this message of a failed job reported it to the user."""
        if self.unsaid in message:
            self.unsaid = ""


def moved(folder: str, before: str, after: str) -> str:
    """The folder's place after what was in `before` went to `after`."""
    is_within = folder == before or folder.startswith(f"{before}/")
    return after + folder.removeprefix(before) if is_within else folder


_REMEMBERED = tuple(one.name for one in fields(TrainerMemory))


class TrainerRequests:
    """Sends requests to the trainer, one at a time."""

    def __init__(
        self,
        *,
        router: ControlRouter,
        attempts: int,
        ready_timeout_s: float,
        job_timeout_s: float,
        memory: TrainerMemory,
        remember: Callable[[], None],
    ) -> None:
        self._router, self._attempts = router, attempts
        self._ready_timeout_s, self._job_timeout_s = ready_timeout_s, job_timeout_s
        self.memory, self._remember = memory, remember

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
        request_id: str,
        phase: str,
        report: Report,
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
        completed, _ = await self.run(job, request_id=new_id("save"), phase=phase, report=report)
        self.memory.heard(completed.result)
        self.memory.saved(folder)

    async def restore(self, folder: str, phase: str) -> None:
        """Have the process that is there load a checkpoint, whatever it holds."""
        load = self._run_job(LoadCheckpoint(checkpoint_dir=folder), request_id=new_id("load"))
        answer, _ = await self._router.request("trainer", load, phase=phase)
        self.memory.heard(answer.result)

    def _run_job(
        self, job: TrainMerged | Operation, *, request_id: str, **saves: Unpack[Saves]
    ) -> RunJob:
        saves.setdefault("version", self.memory.version)
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
        """Have a process load the last durable state, if it is new, or nobody knows what it holds.

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
