"""Requests to the trainer, and what it holds in memory that the disk does not.

A trainer that was restarted stands at its base weights. So before every request the process is compared with the one that was
asked last: another one is first put back to the last durable state. Where the old one held more than that (optimizer steps
that no checkpoint has, gradients of batches that no step has used), it is lost, and the job fails and says so: it is never
repeated on a state that the client does not know of. Found out between jobs, it is what the next one fails with.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from orchestrator.errors import JobFailed, NodeLost
from orchestrator.protocol.config import MemoryMode
from orchestrator.protocol.messages import AnyMessage, Completed, ErrorCode, LoadCheckpoint, Progress
from orchestrator.router import ControlRouter, OnProgress, new_id

log = logging.getLogger("splice.orchestrator")
MESSAGE_CHARS = 2000
"""Of what is lost: a job's failure has room for it."""
Report = Callable[[str, dict[str, object]], None]
Staged = Callable[[str | None], str | None]
"""A process of the trainer -> the id under which it was sent the batch ahead."""


@dataclass(slots=True, kw_only=True)
class TrainerMemory:
    """What the trainer's process holds."""

    incarnation: str | None = None
    """The process that was asked last; None: none yet."""
    durable_dir: str = ""
    """The checkpoint that its state came from or went to last; empty: the base weights."""
    steps: int = 0
    """Optimizer steps since then."""
    adapter: str = ""
    """The PEFT folder that its adapters came from since then; empty: from none."""
    version: int = 0
    """The newest version that was made of its state."""
    mode: MemoryMode | None = None
    """What becomes of it between jobs; None: it was never there yet."""
    pending: int = 0
    """Batches whose gradients wait for a step."""
    saving: str = ""
    """The folder that a client's save last went to; whether it was written whole is not known before the answer."""
    unsaid: str = ""
    """What was lost with an earlier process, in words, as long as no job has said so."""

    def as_dict(self) -> dict[str, Any]:
        """Its fields; `dataclasses.asdict` without the copies."""
        return {name: getattr(self, name) for name in _REMEMBERED}

    def free_folder(self, folder: str) -> str:
        """This one or the one beside it: that which is not the last durable state, and may be written over."""
        return folder if folder != self.durable_dir else f"{folder}-2"

    def saved(self, folder: str) -> None:
        """The state is in `folder`; pending gradients are in no checkpoint."""
        self.durable_dir, self.steps, self.adapter, self.saving = folder, 0, "", ""

    def loaded(self, folder: str) -> None:
        """The state came from `folder`."""
        self.durable_dir, self.steps, self.pending, self.adapter, self.saving = folder, 0, 0, "", ""

    def took_adapter(self, folder: str) -> None:
        """Its adapters came from `folder`; what was pending is gone."""
        self.adapter, self.pending = folder, 0

    @property
    def is_ahead(self) -> bool:
        """Whether it holds what no checkpoint has, pending gradients aside."""
        return bool(self.steps or self.adapter)

    def stepped(self, count: int = 1) -> None:
        """Optimizer steps used up what was pending."""
        self.steps, self.pending, self.saving = self.steps + count, 0, ""

    def failed(self, code: str, *, steps_taken: int) -> None:
        """A request failed: a refused one changed nothing, a later failure dropped what was pending; steps that were taken before, or could
        not be saved, stand all the same."""
        if steps_taken:
            self.stepped(steps_taken)
        elif code == ErrorCode.CHECKPOINT_FAILED:
            return
        elif code not in (ErrorCode.BAD_INPUT, ErrorCode.NOT_READY):
            self.pending = 0

    def take_loss(self) -> str | None:
        """What is lost if the process is gone, in words, or None; asked once, and kept in `unsaid`."""
        saving, self.saving = self.saving, ""
        if not self.is_ahead and not self.pending:
            return None
        where = self.durable_dir or "the base weights"
        loaded = f"the adapter {self.adapter}, " if self.adapter else ""
        said = (
            f"{loaded}{self.steps} optimizer steps and the gradients of {self.pending} batches since {where} are lost with it"
        )
        if saving and saving == self.durable_dir and self.is_ahead:
            said += ", unless the last save to that folder had come to its end"
        self.steps = self.pending = 0
        self.adapter, self.unsaid = "", said[:MESSAGE_CHARS]
        return self.unsaid

    def was_said(self, message: str) -> None:
        """A job failed with this message."""
        if self.unsaid in message:
            self.unsaid = ""


_REMEMBERED = tuple(field.name for field in fields(TrainerMemory))


class TrainerRequests:
    """Sends requests to the trainer; one at a time.

    Args:
        on_working: called whenever the trainer says that it works on one.
    """

    def __init__(
        self,
        *,
        router: ControlRouter,
        attempts: int,
        ready_timeout_s: float,
        load_timeout_s: float,
        remember: Callable[[], None] = lambda: None,
        on_working: Callable[[], None] = lambda: None,
    ) -> None:
        self._router, self._attempts = router, attempts
        self._ready_timeout_s, self._load_timeout_s = ready_timeout_s, load_timeout_s
        self._remember, self._on_working = remember, on_working
        self.memory = TrainerMemory()

    async def ready(self, report: Report) -> None:
        """Wait for the trainer; another process than the last one is put back to the last durable state.

        Raises:
            NodeLost: it is not ready in time, or something was lost with the old one.
        """
        await self._router.wait_ready(["trainer"], timeout_s=self._ready_timeout_s)
        await self._settle(report)

    def _incarnation(self) -> str:
        return self._router.peers["trainer"].hello.incarnation

    async def ask(
        self,
        make_request: Callable[[], AnyMessage],
        buffers: Sequence[bytes] = (),
        *,
        phase: str,
        report: Report,
        key: str | None = None,
        staged: Staged | None = None,
        replaces_state: bool = False,
    ) -> tuple[Completed, tuple[bytes, ...]]:
        """Run one request, once in each of the trainer's processes if it has a `key`: a node that is asked the same again, by an
        orchestrator that was restarted meanwhile, repeats its answer. A trainer that is lost in it is waited for: the same process is asked again, another
        one is put back to the last durable state first, if that is all that the old one held. `staged` says whether a process of it was sent the batch ahead,
        and under which id. `replaces_state`: what it held and where it stands does not matter to the request, whose success makes up for both.

        Raises:
            JobFailed: the trainer answered `Failed`.
            NodeLost: the trainer was lost, and something with it that cannot be repeated, or it did not come back.
        """

        def on_progress(_: str, progress: Progress) -> None:
            report(progress.phase, progress.detail)
            self._on_working()

        for attempt in range(1, self._attempts + 1):
            await self._router.wait_ready(["trainer"], timeout_s=self._ready_timeout_s)
            incarnation = self._incarnation()
            try:
                if not replaces_state:
                    await self._settle(report)
                self._remember()
                request, incarnation = make_request(), self._incarnation()
                if key is not None:
                    request = request.model_copy(update={"request_id": f"{key}-{incarnation[:12]}"})
                id_there = None if staged is None else staged(incarnation)
                answer = await self._request(request, buffers, staged=id_there, phase=phase, on_progress=on_progress)
            except JobFailed as error:
                if error.is_answer:
                    self.memory.saving = ""
                if self.memory.incarnation == incarnation:
                    self.memory.failed(error.code, steps_taken=error.steps_taken)
                raise
            except NodeLost as error:
                # What it held is lost only if another process comes back: this one may have been silent, and be at work.
                if attempt == self._attempts or (self.memory.unsaid and not replaces_state):
                    raise
                log.warning("the trainer was lost while %s, waiting for it: %s", phase, error)
                report("trainer lost", {"error": str(error)})
                # Its connection may be known to be gone before the process is: asked again at once it would be lost as often as there are attempts.
                await self._router.wait_heard(["trainer"], since_s=time.monotonic())
            else:
                if replaces_state:
                    self.memory.incarnation, self.memory.unsaid = incarnation, ""
                return answer
        raise AssertionError("unreachable")

    async def _request(
        self,
        request: AnyMessage,
        buffers: Sequence[bytes],
        *,
        staged: str | None,
        phase: str,
        on_progress: OnProgress,
    ) -> tuple[Completed, tuple[bytes, ...]]:
        """With the batch that was sent ahead; where the trainer does not have it, with the batch.

        That may be the answer to an orchestrator that ended meanwhile, so it counts whether or not this one named a batch.
        """
        named = request if staged is None else request.model_copy(update={"staged": staged})
        try:
            return await self._router.request(
                "trainer", named, buffers if staged is None else (), phase=phase, on_progress=on_progress
            )
        except JobFailed as error:
            if error.code != ErrorCode.NOT_STAGED:
                raise
            log.info("%s; the job is sent with its batch", error)
        # The trainer repeats what it answered under an id: this one is another request.
        whole = request.model_copy(update={"request_id": f"{request.request_id}-whole"})  # type: ignore[union-attr]
        return await self._router.request("trainer", whole, buffers, phase=phase, on_progress=on_progress)

    async def _settle(self, report: Report) -> None:
        """Put another process than the last one back to the last durable state."""
        memory, incarnation = self.memory, self._incarnation()
        if memory.incarnation not in (None, incarnation):
            if memory.durable_dir:
                report("restoring", {"checkpoint_dir": memory.durable_dir})
                load = LoadCheckpoint(
                    request_id=new_id("load"), deadline_s=self._load_timeout_s, checkpoint_dir=memory.durable_dir
                )
                await self._router.request("trainer", load, phase="restoring the last durable state")
            # Only now: until the load is done the loss is still to be said, by this orchestrator or the next.
            lost = memory.take_loss()
            memory.incarnation = incarnation
            if lost is not None:
                raise NodeLost(f"the trainer was restarted; {lost}; it stands there again")
        memory.incarnation = incarnation
