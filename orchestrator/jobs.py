"""The open jobs: admission, queue, listeners and outcomes.

A job's road is SubmitJob -> admitted -> journaled -> queued -> run by `server.py` -> outcome
journaled -> outcome sent. The same id submitted again gets the first one's outcome.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from orchestrator.control.waiting import Report
from orchestrator.errors import ErrorCode, JobFailed, NodeLost, ProtocolError, code_and_remedy
from orchestrator.facts import steps_taken
from orchestrator.protocol.frames import Envelope, decode, encode
from orchestrator.protocol.messages import (
    WAITING,
    CancelJob,
    Cancelled,
    Failed,
    JobSpec,
    Progress,
    SubmitJob,
    TensorSpec,
    Terminal,
)
from orchestrator.run import Run

log = logging.getLogger("splice.orchestrator")
SENDING_S = 10.0
"""Longest wait for a job's `Progress` to leave before its outcome."""
BUFFERS_KEPT = 16
"""Outcomes with buffers, such as log-probs, that are kept for a client that asks again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a job's `Completed` carries."""

    result: dict[str, object]
    tensors: tuple[TensorSpec, ...] = ()
    buffers: tuple[bytes, ...] = ()


@dataclass(slots=True, kw_only=True)
class Job:
    """An open job."""

    submit: SubmitJob
    buffers: tuple[bytes, ...]
    clients: dict[str, bool]
    """Who gets the outcome -> whether `Progress` too."""
    report: Report
    """Sends the job's next `Progress`."""
    sequence: int = 0
    sending: list[asyncio.Task[None]] = field(default_factory=list)
    """`Progress` messages that have not left yet."""
    running: bool = False

    @property
    def id(self) -> str:
        """The client's id of the job."""
        return self.submit.job_id

    @property
    def spec(self) -> JobSpec:
        """What the client wants done."""
        return self.submit.job


class Jobs:
    """Owns the open jobs, their queue and those who listen.

    Args:
        serving: tells which version is served, for the remedy of a failure.
        on_end: called with each job's kind and outcome.
    """

    def __init__(
        self, run: Run, *, serving: Callable[[], str], on_end: Callable[[str, Terminal], None]
    ) -> None:
        self._on_end = on_end
        self._config, self._router, self._journal = run.config, run.router, run.journal
        self._facts, self._serving = run.facts, serving
        self._open: dict[str, Job] = {}
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self._mail: deque[tuple[str, Envelope]] = deque()
        """Submissions and cancellations; `take_mail` is handling the first one."""
        self._mail_came = asyncio.Event()
        self._subscribers: set[str] = set()
        self._with_buffers: deque[str] = deque()

    # ------------------------------------------------------------ in

    async def on_mail(self, client: str, envelope: Envelope) -> None:
        """Take a `CancelJob`, or a `SubmitJob` for which there is room."""
        message = envelope.message
        if isinstance(message, SubmitJob) and not await self._is_admitted(
            client, message, envelope
        ):
            return
        self._mail.append((client, envelope))
        self._mail_came.set()

    def subscribe(self, client: str) -> None:
        """Send the client every `Progress` and outcome from now on."""
        self._subscribers.add(client)

    async def _is_admitted(self, client: str, submit: SubmitJob, envelope: Envelope) -> bool:
        """Whether to take the job; a refusal is sent to the client."""
        if any(c == client and e.message == submit for c, e in self._mail):
            return False  # repeated over a new connection
        if self._journal.job(submit.job_id) is not None:
            return True
        why = self._no_room(sum(map(len, envelope.buffers)))
        if why is not None:
            refused = Failed(
                request_id=submit.job_id,
                code=ErrorCode.TOO_MANY_JOBS,
                node="orchestrator",
                phase="submitting",
                message=why,
                remedy="Wait for some of them, then submit it again under the same id.",
            )
            await self.tell(client, encode(refused))
        return why is None

    def _no_room(self, nbytes: int) -> str | None:
        """Why one more job with a batch of this size is refused, or None."""
        batches = [job.buffers for job in self._open.values()]
        batches += [envelope.buffers for _, envelope in self._mail]
        if len(batches) >= self._config.max_jobs:
            return f"{len(batches)} jobs are open, which is the most"
        held = sum(len(buffer) for buffers in batches for buffer in buffers)
        if batches and held + nbytes > self._config.max_job_bytes:
            return (
                f"the open jobs' batches have {held:,} bytes; "
                f"with {nbytes:,} more they exceed {self._config.max_job_bytes:,}"
            )
        return None

    async def take_mail(self) -> None:
        """Handle submissions and cancellations in order. Large writes do not stop heartbeats."""
        while True:
            await self._mail_came.wait()
            while self._mail:
                client, envelope = self._mail[0]
                if isinstance(envelope.message, SubmitJob):
                    await self._on_submit(client, envelope.message, envelope)
                elif isinstance(envelope.message, CancelJob):
                    await self._on_cancel(envelope.message)
                self._mail.popleft()
            self._mail_came.clear()

    async def _on_submit(self, client: str, submit: SubmitJob, envelope: Envelope) -> None:
        known = self._journal.job(submit.job_id)
        if known is not None:
            if known.outcome is not None:
                await self.tell(client, known.outcome)
            elif submit.job_id in self._open:
                self._open[submit.job_id].clients[client] = submit.progress
            return
        await asyncio.to_thread(self._journal.keep_batch, submit.job_id, envelope.buffers)
        self._journal.add_job(
            job_id=submit.job_id, kind=submit.job.kind, client=client, frames=envelope.frames
        )
        self._add(submit, envelope.buffers, client).report("queued", {})

    def _add(self, submit: SubmitJob, buffers: tuple[bytes, ...], client: str) -> Job:
        job = Job(
            submit=submit,
            buffers=buffers,
            clients={client: submit.progress},
            report=functools.partial(self._progress, submit.job_id),
        )
        self._open[job.id] = job
        self._queue.put_nowait(job.id)
        return job

    def restore(self) -> list[str]:
        """Queue the journal's open jobs after a restart; returns their ids."""
        for job_id in self._journal.unfinished_jobs():
            row = self._journal.job(job_id)
            assert row is not None
            envelope = decode(self._journal.request(job_id))
            assert isinstance(envelope.message, SubmitJob)
            self._add(envelope.message, envelope.buffers, row.client)
        return list(self._open)

    async def _on_cancel(self, message: CancelJob) -> None:
        job = self._open.get(message.job_id)
        if job is not None and not job.running:
            await self.end(
                job.id, Cancelled(request_id=job.id, reason="cancelled before it started")
            )

    async def next(self) -> Job:
        """Wait for the next job that was not cancelled."""
        while True:
            job = self._open.get(await self._queue.get())
            if job is not None:
                return job

    @property
    def num_waiting(self) -> int:
        """Number of jobs that have not started."""
        return sum(not job.running for job in self._open.values())

    # ------------------------------------------------------------ out

    def _progress(self, job_id: str, phase: str, detail: dict[str, object]) -> None:
        job = self._open.get(job_id)
        if job is None:
            return
        listening = {c for c, wants in job.clients.items() if wants or phase == WAITING}
        listening |= self._subscribers
        if not listening:
            return
        frames = encode(
            Progress(request_id=job_id, sequence=job.sequence, phase=phase, detail=detail)
        )
        job.sequence += 1
        job.sending = [task for task in job.sending if not task.done()]
        job.sending += [asyncio.ensure_future(self.tell(c, frames)) for c in listening]

    async def tell(self, client: str, frames: Sequence[bytes | memoryview]) -> None:
        """Send to a client if it is there. A client that returns asks again by the job's id."""
        try:
            await self._router.send_frames(client, frames)
        except NodeLost:
            self._subscribers.discard(client)

    async def end(self, job_id: str, message: Terminal, buffers: Sequence[bytes] = ()) -> None:
        """Journal the outcome, then send it to everybody who waits for it."""
        try:
            frames = encode(message, buffers)
        except ProtocolError as error:  # the outcome exceeds its largest size
            message, buffers = self.failure(job_id, error), ()
            frames = encode(message)
        job = self._open.pop(job_id)
        self._on_end(job.spec.kind, message)
        log.info("%s %s: %s", job.spec.kind, job_id, message.kind.lower())
        if isinstance(message, Failed):
            log.warning("%s failed while %s: %s", message.node, message.phase, message.message)
            self._facts.memory.was_said(message.message)
        with self._journal.together():
            self._journal.end_job(job_id, state=message.kind.lower(), frames=frames)
            self._facts.forget_job(job_id)
            if buffers:
                self._forget_buffers(job_id)
        if job.sending:  # progress arrives before the outcome
            await asyncio.wait(job.sending, timeout=SENDING_S)
        for client in job.clients.keys() | self._subscribers:
            await self.tell(client, frames)

    def failure(self, job_id: str, error: Exception) -> Failed:
        """Return the job's `Failed` for an exception."""
        code, remedy = code_and_remedy(error)
        node, phase, message, taken = "orchestrator", "job", str(error), 0
        if isinstance(error, JobFailed):
            node, phase, message = error.node, error.phase[:200], error.message
            taken = error.steps_taken
        return Failed(
            request_id=job_id,
            code=code,
            node=node,
            phase=phase,
            message=message[:4000],
            remedy=f"{remedy[:2000]} ({self._serving()})",
            steps_taken=max(taken, self._durable_steps(job_id)),
        )

    def _durable_steps(self, job_id: str) -> int:
        """Return the steps of a job whose version is trained and durable, though not published."""
        made = self._facts.of_job(job_id).get("made")
        return steps_taken(made) if made else 0

    def _forget_buffers(self, newest: str) -> None:
        """Drop the oldest outcomes with buffers. Their ids get `Failed` and never run again."""
        self._with_buffers.append(newest)
        while len(self._with_buffers) > BUFFERS_KEPT:
            job_id = self._with_buffers.popleft()
            gone = Failed(
                request_id=job_id,
                code=ErrorCode.NOT_READY,
                node="orchestrator",
                phase="done",
                message=f"the job is done, but only the newest {BUFFERS_KEPT} results with buffers "
                "are kept",
                remedy="Submit it again under a new id.",
            )
            self._journal.end_job(job_id, state="completed", frames=encode(gone))

    async def end_all(self, *, versions_dir: str) -> None:
        """Tell everybody who waits for a job that the run is over."""
        reason = "the run was stopped before it started"
        for client, envelope in self._mail:
            if isinstance(envelope.message, SubmitJob):
                gone = Cancelled(request_id=envelope.message.job_id, reason=reason)
                await self.tell(client, encode(gone))
        for job_id, job in list(self._open.items()):
            if not job.running:
                await self.end(job_id, Cancelled(request_id=job_id, reason=reason))
                continue
            stopped = Failed(
                request_id=job_id,
                code=ErrorCode.STOPPED,
                node="orchestrator",
                phase="job",
                message="the run was stopped while the job ran",
                remedy=f"Continue the run (`splice up --resume`); its versions are in "
                f"{versions_dir}. Then submit the job again under a new id.",
                steps_taken=self._durable_steps(job_id),
            )
            await self.end(job_id, stopped)
