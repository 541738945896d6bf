"""The orchestrator process: job queue, version counter, publications, journal.

A job's way: client `SubmitJob` -> journaled -> queued -> `TrainMerged` to the trainer -> publication -> one terminal message, journaled
before it is sent. Jobs run one at a time in the order they came; the same id twice gets the first one's outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.between_jobs import BetweenJobs
from orchestrator.errors import (
    ConfigError,
    JobFailed,
    JournalError,
    NodeLost,
    ProtocolError,
    PublicationError,
    SpliceError,
    VerificationError,
)
from orchestrator.journal import Journal
from orchestrator.protocol.config import check_alias_name
from orchestrator.protocol.frames import Envelope, decode, encode
from orchestrator.protocol.messages import (
    AnyMessage,
    CancelJob,
    Cancelled,
    Completed,
    ErrorCode,
    ExportHf,
    ExportHfJob,
    Failed,
    Forward,
    ForwardBackward,
    ForwardBackwardJob,
    ForwardJob,
    GetStatus,
    InitialSyncJob,
    JobSpec,
    LoadAdapter,
    LoadAdapterJob,
    LoadCheckpoint,
    LoadCheckpointJob,
    NodeStatus,
    OptimStep,
    OptimStepJob,
    Progress,
    PublishJob,
    ResyncJob,
    SaveCheckpoint,
    SaveCheckpointJob,
    Shutdown,
    Status,
    StopRun,
    SubmitJob,
    Subscribe,
    TensorSpec,
    Terminal,
    TrainLora,
    TrainLoraJob,
    TrainMerged,
    TrainMergedJob,
)
from orchestrator.publication import after_restart
from orchestrator.publisher import PublicationConfig, Publisher
from orchestrator.retention import expired
from orchestrator.router import ControlRouter, new_id
from orchestrator.run_folder import RunFolder
from orchestrator.staging import STAGE_BYTES, BatchAhead
from orchestrator.trainer_requests import TrainerRequests

log = logging.getLogger("splice.orchestrator")
RESYNC_POLL_S, RESYNC_LONGEST_S = 1.0, 600.0
SENDING_S = 10.0
_TRAINER, _SET_ASIDE = "trainer", "set aside"
"""Facts in the journal: what the trainer holds; the folder with its state while it holds the served version for a resync."""
BUFFERS_KEPT = 16
"""Outcomes with buffers (log-probs of forward passes) that are kept for a client that asks again with the same job id."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OrchestratorConfig:
    """One run."""

    run_dir: Path
    run_token: str
    name: str
    endpoint: str = "tcp://127.0.0.1:0"
    publication: PublicationConfig
    replicas: int = 1
    ready_timeout_s: float = 600.0
    train_timeout_s: float = 3600.0
    curve_dir: Path | None = None
    resume: bool = False
    """Go on with the run in `run_dir`, if there is one, where an orchestrator that ended left it."""
    keep_versions: int | None = None
    """How many versions' checkpoints stay on disk, the newest included; at least 2. What is served is never deleted. None: all."""

    stage_bytes: int = STAGE_BYTES
    """Largest batch that is sent to the trainer while the job before it runs. 0: none is."""

    max_jobs: int = 1024
    """Jobs that may be open, the running one included."""
    max_job_bytes: int = 4 * 2**30
    """Bytes of all open jobs' batches, which the orchestrator keeps in memory and in its journal."""
    stop_on_term: bool = False
    """SIGTERM ends the run, as StopRun does. False: it ends the orchestrator alone, and another one may resume."""

    def __post_init__(self) -> None:
        try:
            check_alias_name(self.name)
        except ValueError as error:
            raise ConfigError(f"--name: {error}") from None
        if self.stage_bytes < 0:
            raise ConfigError(f"stage_bytes is {self.stage_bytes}; it must be at least 0: no batch is then sent ahead")
        if self.keep_versions is not None and self.keep_versions < 2:
            raise ConfigError(f"keep_versions is {self.keep_versions}; it must be at least 2: the version served and the next")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What a job's `Completed` carries."""

    result: dict[str, object]
    tensors: tuple[TensorSpec, ...] = ()
    buffers: tuple[bytes, ...] = ()


@dataclasses.dataclass(slots=True, kw_only=True)
class _Job:
    submit: SubmitJob
    buffers: tuple[bytes, ...]
    clients: dict[str, bool]
    """Who is sent the outcome -> whether `Progress` too."""
    sequence: int = 0
    sending: list[asyncio.Task[None]] = dataclasses.field(default_factory=list)
    """`Progress` that has not left yet."""
    running: bool = False
    is_at_trainer: bool = False
    """The trainer works on it, so its own batch is there."""


class Orchestrator:
    """Runs jobs until `StopRun`; `serve()` is the whole life."""

    def __init__(self, config: OrchestratorConfig) -> None:
        self._config = config
        self._router = ControlRouter(
            endpoint=config.endpoint, run_token=config.run_token, name=config.name, on_client=self._on_client,
            curve_dir=config.curve_dir,
        )  # fmt: skip
        self._folder = RunFolder(config.run_dir)
        try:
            self._journal = Journal(self._folder.path / "journal.sqlite", run_token=config.run_token, name=config.name)
        except BaseException:
            self._folder.close()
            raise
        self._publisher = Publisher(router=self._router, journal=self._journal, config=config.publication)
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self._jobs: dict[str, _Job] = {}
        self._subscribers: set[str] = set()
        self._stopping = asyncio.Event()
        self._is_leaving = False
        self._trained_version = 0
        self._versions: list[int] = []  # whose checkpoints are on disk
        self._with_buffers: deque[str] = deque()
        self._next_resync_s, self._resync_pause_s = 0.0, RESYNC_POLL_S
        self._trainer = TrainerRequests(
            router=self._router,
            attempts=config.publication.attempts,
            ready_timeout_s=config.ready_timeout_s,
            load_timeout_s=config.publication.plan_timeout_s,
            remember=self._remember,
            on_working=self._on_working,
        )
        self._ahead = BatchAhead(router=self._router, most_bytes=config.stage_bytes)
        self._between = BetweenJobs(
            router=self._router,
            trainer=self._trainer,
            publisher=self._publisher,
            state_dir=config.run_dir / "trainer_state",
            timeout_s=config.train_timeout_s,
            remember=self._remember,
        )

    async def serve(self) -> None:
        """Bind, write `endpoint` into the run folder, run jobs until `StopRun`, then shut the nodes down.

        What raises here leaves the nodes as they are and `endpoint` where it is, as a crash and `leave` do: another orchestrator may resume.
        """
        try:
            if self._config.resume:
                self._resume()
            elif self._journal.unfinished_jobs() or self._journal.committed_version() is not None:
                raise ConfigError(
                    f"{self._config.run_dir} holds an earlier run; choose a new run folder, or go on with it: --resume"
                )
            await self._router.start()
            await self._serve_until_stopped()
        finally:
            await self._router.close()
            self._journal.close()
            self._folder.close()

    async def _serve_until_stopped(self) -> None:
        endpoint_file = self._config.run_dir / "endpoint"
        part = endpoint_file.with_suffix(".part")
        part.write_text(self._router.endpoint)
        part.replace(endpoint_file)
        stop = asyncio.create_task(self._stopping.wait())
        tasks = [asyncio.create_task(self._work()), asyncio.create_task(self._router.fail()), stop]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            tasks[0].cancel()
            await asyncio.wait(tasks[:1], timeout=SENDING_S)
            if self._is_leaving:
                log.warning(
                    "ended by SIGTERM; nodes and served version stay as they are. Start again with --resume within a minute, or the "
                    "trainer ends too; to end the whole run by SIGTERM use --stop-on-term"
                )
                return
            await self._end_open_jobs()
            await self._shut_nodes_down()
            endpoint_file.unlink(missing_ok=True)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _end_open_jobs(self) -> None:
        """The run is over: whoever waits for a job is told so."""
        for job_id, job in list(self._jobs.items()):
            if not job.running:
                await self._end(job_id, Cancelled(request_id=job_id, reason="the run was stopped before it started"))
                continue
            stopped = Failed(
                request_id=job_id, code=ErrorCode.STOPPED, node="orchestrator", phase="job",
                message="the run was stopped while the job ran", remedy=f"start a new run; versions are in {self._folder.path}/versions",
            )  # fmt: skip
            await self._end(job_id, stopped)

    def _resume(self) -> None:
        """Version counter, what the trainer holds, the publication's state and the open jobs, as the journal has them."""
        version, state = after_restart(self._journal.all_publication_steps())
        self._publisher.resume(version=version, state=state)
        said = self._journal.fact(_TRAINER)
        self._trained_version = int(said.pop("trained_version", 0))
        for name, value in said.items():
            setattr(self._trainer.memory, name, value)
        folders = self._version_dir(0).parent
        self._versions = sorted(int(p.name) for p in folders.iterdir() if p.name.isdigit()) if folders.is_dir() else []
        for job_id in self._journal.unfinished_jobs():
            row = self._journal.job(job_id)
            assert row is not None
            envelope = decode(row.request)
            assert isinstance(envelope.message, SubmitJob)
            self._jobs[job_id] = _Job(
                submit=envelope.message, buffers=envelope.buffers, clients={row.client: envelope.message.progress}
            )
            self._queue.put_nowait(job_id)
        log.info(
            "resuming: version %s, publication %s, trained version %d, open jobs %s",
            version, state, self._trained_version, list(self._jobs),
        )  # fmt: skip

    def _remember(self, more: dict[str, dict[str, Any] | None] | None = None) -> None:
        """Journal what the trainer holds, and with it, all or nothing, more facts."""
        held = self._trainer.memory.as_dict() | {"trained_version": self._trained_version}
        self._journal.set_facts({_TRAINER: held, **(more or {})})

    def _note(self, job_id: str, **facts: object) -> None:
        """How far a job has come, together with what the trainer holds then."""
        self._remember({_job_key(job_id): self._journal.fact(_job_key(job_id)) | facts})

    def stop(self) -> None:
        """End the run; callable from a signal handler of the loop."""
        self._stopping.set()

    def leave(self) -> None:
        """End `serve`, but not the run: nodes, jobs and the served version stay, and another orchestrator may resume."""
        self._is_leaving = self._is_leaving or not self._stopping.is_set()
        self._stopping.set()

    # ------------------------------------------------------------ clients

    async def _on_client(self, client: str, envelope: Envelope) -> None:
        message = envelope.message
        if isinstance(message, SubmitJob):
            await self._on_submit(client, message, envelope)
        elif isinstance(message, CancelJob):
            await self._on_cancel(message)
        elif isinstance(message, GetStatus):
            await self._router.send(client, self._status())
        elif isinstance(message, Subscribe):
            self._subscribers.add(client)
        elif isinstance(message, StopRun):
            self.stop()
        else:
            log.warning("client %s sent %s, which is not a client's message", client, message.kind)

    async def _on_submit(self, client: str, submit: SubmitJob, envelope: Envelope) -> None:
        known = self._journal.job(submit.job_id)
        if known is not None:
            if known.outcome is not None:
                await self._tell(client, known.outcome)
            elif submit.job_id in self._jobs:
                self._jobs[submit.job_id].clients[client] = submit.progress
            return
        why = self._no_room(sum(map(len, envelope.buffers)))
        if why is not None:
            refused = Failed(
                request_id=submit.job_id, code=ErrorCode.TOO_MANY_JOBS, node="orchestrator", phase="submitting", message=why,
                remedy="wait for some of them, then submit it again under the same id",
            )  # fmt: skip
            await self._tell(client, encode(refused))
            return
        self._journal.add_job(job_id=submit.job_id, kind=submit.job.kind, client=client, frames=envelope.frames)
        self._jobs[submit.job_id] = _Job(submit=submit, buffers=envelope.buffers, clients={client: submit.progress})
        self._queue.put_nowait(submit.job_id)
        self._progress(submit.job_id, "queued", {})
        await self._stage_next()

    def _no_room(self, nbytes: int) -> str | None:
        """Why one more job with a batch of this size is refused."""
        if len(self._jobs) >= self._config.max_jobs:
            return f"{len(self._jobs)} jobs are open, which is the most"
        held = sum(len(buffer) for job in self._jobs.values() for buffer in job.buffers)
        if self._jobs and held + nbytes > self._config.max_job_bytes:
            return (
                f"the open jobs' batches have {held:,} bytes; with {nbytes:,} more they exceed {self._config.max_job_bytes:,}"
            )
        return None

    async def _on_cancel(self, message: CancelJob) -> None:
        job = self._jobs.get(message.job_id)
        if job is not None and not job.running:
            await self._ahead.drop(message.job_id)
            await self._end(message.job_id, Cancelled(request_id=message.job_id, reason="cancelled before it started"))
            await self._stage_next()

    async def _stage_next(self) -> None:
        """Send the first waiting batch to the trainer, if it works on a job and will be there for the next one."""
        if not any(job.is_at_trainer for job in self._jobs.values()) or self._between.mode == "exit":
            return
        for job_id, job in self._jobs.items():
            if not job.running and self._ahead.wants(job.submit.job):
                await self._ahead.stage(job_id, job.submit.job, job.buffers)
                return

    def _on_working(self) -> None:
        """The trainer works on the running job."""
        for job in self._jobs.values():
            job.is_at_trainer = job.is_at_trainer or job.running
        task = asyncio.ensure_future(self._stage_next())
        task.add_done_callback(lambda t: t.exception())

    def _status(self) -> Status:
        nodes = tuple(
            NodeStatus(
                node_id=i, role=p.hello.role, state=p.state, packages=p.hello.packages, gpus=p.hello.gpus, detail=p.detail  # type: ignore[arg-type]
            )
            for i, p in self._router.peers.items()
            if p.hello.role != "client"
        )  # fmt: skip
        return Status(
            name=self._config.name,
            version=self._publisher.version,
            publication=str(self._publisher.state),
            nodes=nodes,
            queued_jobs=sum(not job.running for job in self._jobs.values()),
            dropped=dict(self._router.dropped.most_common(100)),
        )

    def _progress(self, job_id: str, phase: str, detail: dict[str, object]) -> None:
        job = self._jobs.get(job_id)
        if job is None:
            return
        listening = {client for client, wants_progress in job.clients.items() if wants_progress} | self._subscribers
        if not listening:
            return
        frames = encode(Progress(request_id=job_id, sequence=job.sequence, phase=phase, detail=detail))
        job.sequence += 1
        job.sending = [task for task in job.sending if not task.done()]
        job.sending += [asyncio.ensure_future(self._tell(client, frames)) for client in listening]

    async def _tell(self, client: str, frames: Sequence[bytes | memoryview]) -> None:
        try:
            await self._router.send_frames(client, frames)
        except NodeLost:
            # The outcome stays in the journal; a client that comes back asks again with the same job id.
            self._subscribers.discard(client)

    async def _end(self, job_id: str, message: Terminal, buffers: Sequence[bytes] = ()) -> None:
        try:
            frames = encode(message, buffers)
        except ProtocolError as error:  # larger than it may be
            message, buffers = _failed(job_id, error, serving=self._serving()), ()
            frames = encode(message)
        job = self._jobs.pop(job_id)
        if isinstance(message, Failed):
            self._trainer.memory.was_said(message.message)
        with self._journal.together():
            self._journal.end_job(job_id, state=message.kind.lower(), frames=frames)
            self._remember({_job_key(job_id): None})
            if buffers:
                self._forget_buffers(job_id)
        if job.sending:  # comes before the outcome
            await asyncio.wait(job.sending, timeout=SENDING_S)
        for client in job.clients.keys() | self._subscribers:
            await self._tell(client, frames)

    def _forget_buffers(self, newest: str) -> None:
        """Keep the newest outcomes with buffers only; an older one's id is then answered with `Failed`, not run again."""
        self._with_buffers.append(newest)
        while len(self._with_buffers) > BUFFERS_KEPT:
            job_id = self._with_buffers.popleft()
            gone = Failed(
                request_id=job_id,
                code=ErrorCode.NOT_READY,
                node="orchestrator",
                phase="done",
                message=f"the job is done, but only the newest {BUFFERS_KEPT} results with buffers are kept",
                remedy="submit it again under a new id",
            )
            self._journal.end_job(job_id, state="completed", frames=encode(gone))

    # ------------------------------------------------------------ jobs

    async def _work(self) -> None:
        while True:
            try:
                async with asyncio.timeout(RESYNC_POLL_S):
                    job_id = await self._queue.get()
            except TimeoutError:
                await self._resync_bare_replicas()
                continue
            if job_id in self._jobs:  # else it was cancelled
                await self._run_job(job_id)

    async def _resync_bare_replicas(self) -> None:
        """Give the served version to replicas that have it not (started anew, left out); they answer 503 until then, the others go on."""
        bare, version = self._publisher.bare_replicas(), self._publisher.version
        if not bare or version is None or self._trainer.memory.pending or time.monotonic() < self._next_resync_s:
            return
        if "trainer" not in self._router.nodes("trainer") and not self._between.can_wake:
            return
        log.info("%s lack %s@%d; sending it", ", ".join(bare), self._config.name, version)
        try:
            await self._between.wake(_log_phase)
            async with self._served_state(version, _log_phase) as served_dir:
                await self._publisher.publish(
                    version,
                    checkpoint_dir=served_dir,
                    replicas=bare,
                    report=_log_phase,
                    holder=self._trainer.memory.incarnation,
                    others=[r for r in self._publisher.holding if r not in bare],
                )
            await self._between.release(_log_phase)
        except JournalError:
            raise
        except Exception as error:
            if not isinstance(error, SpliceError | OSError):
                log.exception("the resync failed by a defect of the orchestrator")
            log.warning("the resync failed and will be tried again in %.0f s: %s", self._resync_pause_s, error)
            await self._between.release_after_failure()
        self._space_resyncs()

    def _space_resyncs(self) -> None:
        """A replica that fails again and again must not keep the trainer busy: from one second the pauses double up to `RESYNC_LONGEST_S`."""
        if not self._publisher.bare_replicas():
            self._next_resync_s, self._resync_pause_s = 0.0, RESYNC_POLL_S
            return
        self._next_resync_s = time.monotonic() + self._resync_pause_s
        self._resync_pause_s = min(2 * self._resync_pause_s, RESYNC_LONGEST_S)

    @contextlib.asynccontextmanager
    async def _served_state(self, version: int, report: Callable[[str, dict[str, object]], None]) -> AsyncIterator[str]:
        """Inside, the trainer holds the served version, whose folder is given; outside, what it held before, which may be further on."""
        memory = self._trainer.memory
        served_dir = self._journal.checkpoint_dir(version) or str(self._version_dir(version))
        await self._trainer.ready(report)
        if memory.durable_dir != served_dir or memory.is_ahead:
            await self._put_back(report)  # an orchestrator may have ended before it could journal that the trainer stood here
            await self._set_aside(served_dir, report)
        elif self._journal.fact(_SET_ASIDE):  # or while it was put back: it stands here or there
            await self._load(served_dir, report)
        yield served_dir
        await self._put_back(report)

    async def _set_aside(self, served_dir: str, report: Callable[[str, dict[str, object]], None]) -> None:
        memory = self._trainer.memory
        kept = memory.free_folder(str(self._config.run_dir.absolute() / "resync" / "state"))
        save = SaveCheckpoint(
            request_id=new_id("save"), deadline_s=self._config.train_timeout_s, version=self._trained_version, checkpoint_dir=kept
        )  # fmt: skip
        await self._trainer.ask(lambda: save, phase="saving what is ahead of the served version", report=report)
        memory.saved(kept)
        self._remember({_SET_ASIDE: {"folder": kept}})
        await self._load(served_dir, report)

    async def _put_back(self, report: Callable[[str, dict[str, object]], None]) -> None:
        """What was set aside, if anything was. Every job begins with it: the resync may have failed, or its orchestrator ended."""
        kept = self._journal.fact(_SET_ASIDE).get("folder")
        if kept is not None:
            await self._load(kept, report, {_SET_ASIDE: None})

    async def _load(
        self,
        folder: str,
        report: Callable[[str, dict[str, object]], None],
        facts: dict[str, dict[str, Any] | None] | None = None,
    ) -> None:
        """The trainer's state from `folder`; `facts` are journaled with where it stands then."""
        load = LoadCheckpoint(request_id=new_id("load"), deadline_s=self._config.train_timeout_s, checkpoint_dir=folder)
        await self._trainer.ask(lambda: load, phase="loading", report=report)
        self._trainer.memory.loaded(folder)
        self._remember(facts)

    async def _run_job(self, job_id: str) -> None:
        job = self._jobs[job_id]
        job.running = True
        noted = self._journal.fact(_job_key(job_id))
        if "failed" in noted:  # an orchestrator ended in the release after it
            await self._end_failed(job_id, Failed.model_validate(noted["failed"]))
            return
        started_s = time.monotonic()
        try:
            if isinstance(job.submit.job, ForwardBackwardJob):
                await self._between.refuse_pending()
            if "result" not in noted:
                replaces_state = isinstance(job.submit.job, LoadCheckpointJob)
                if (unsaid := self._trainer.memory.unsaid) and not replaces_state:
                    raise NodeLost(f"the trainer was lost since the last job; {unsaid}")
                await self._between.wake(lambda phase, detail: self._progress(job_id, phase, detail))
                if not replaces_state:
                    await self._put_back(lambda phase, detail: self._progress(job_id, phase, detail))
                outcome = await self._dispatch(job_id, job)
            else:  # an orchestrator ended after the work and before the outcome
                outcome = _Outcome(result=noted["result"])
            if self._between.has_to_release and not outcome.buffers:
                # An orchestrator that ends in the release does not do the work again. Without one `_end` follows at once and says it all.
                self._note(job_id, result=outcome.result)
        except JournalError:
            raise
        except Exception as error:
            if not isinstance(error, SpliceError | OSError):
                log.exception("job %s failed by a defect of the orchestrator", job_id)
            await self._end_failed(job_id, _failed(job_id, error, serving=self._serving()))
            return
        working_s = time.monotonic() - started_s
        try:
            await self._between.release(lambda phase, detail: self._progress(job_id, phase, detail))
        except (SpliceError, OSError) as error:
            await self._end(job_id, _failed(job_id, _unreleased(error, self._between.mode), serving=self._serving()))
            return
        said = outcome.result.get("seconds")
        took: dict[str, object] = dict(said) if isinstance(said, dict) else {}
        seconds = {**took, "total": working_s, "release": time.monotonic() - started_s - working_s}
        result = {**outcome.result, "seconds": seconds}
        await self._end(job_id, Completed(request_id=job_id, result=result, tensors=outcome.tensors), outcome.buffers)

    async def _end_failed(self, job_id: str, failed: Failed) -> None:
        """Release, then say it. It is noted first: an orchestrator that ends in the release does not do the work again."""
        if self._between.has_to_release:
            self._note(job_id, failed=failed.model_dump(mode="json"))
            await self._between.release_after_failure()
        await self._end(job_id, failed)

    def _serving(self) -> str:
        version = self._publisher.version
        return "nothing is served" if version is None else f"{self._config.name}@{version} goes on being served"

    async def _dispatch(self, job_id: str, job: _Job) -> _Outcome:
        spec = job.submit.job
        self._progress(job_id, "waiting for nodes", {})
        if isinstance(spec, InitialSyncJob):
            return _Outcome(result=await self._initial_sync(job_id))
        if isinstance(spec, TrainMergedJob):
            return _Outcome(result=await self._train_merged(job_id, spec, job.buffers))
        if isinstance(spec, PublishJob):
            return _Outcome(result=await self._publish_as_it_is(job_id))
        if isinstance(spec, ResyncJob):
            return _Outcome(result=await self._resync_all(job_id))
        if isinstance(spec, ForwardJob):
            return await self._forward(job_id, spec, job.buffers)
        return _Outcome(result=await self._operate(job_id, spec, job.buffers))

    async def _replicas(self) -> list[str]:
        """For @0 as many as there should be; later those that are there, because one that is gone must not end the run."""
        wanted = self._config.replicas if self._journal.committed_version() is None else 1
        deadline_s = time.monotonic() + self._config.ready_timeout_s
        while len(self._router.nodes("inference")) < wanted:
            if time.monotonic() > deadline_s:
                raise NodeLost(f"{len(self._router.nodes('inference'))} of {self._config.replicas} inference nodes are ready")
            await asyncio.sleep(0.05)
        return self._router.nodes("inference")

    async def _initial_sync(self, job_id: str) -> dict[str, object]:
        if self._publisher.version is not None and "version" not in self._journal.fact(_job_key(job_id)):
            raise ConfigError(f"{self._config.name}@{self._publisher.version} is served already; InitialSync comes once, first")
        replicas = await self._replicas()
        checkpoint_dir = await self._save_version(job_id, 0)
        return await self._publish(job_id, 0, checkpoint_dir, replicas, metrics={}, seconds={})

    async def _save_version(self, job_id: str, version: int) -> str:
        """The trainer's state, durable as `version`; what an earlier orchestrator had done of it is not done again."""
        if "made" in self._journal.fact(_job_key(job_id)):
            await self._trainer.ready(lambda phase, detail: self._progress(job_id, phase, detail))
            return str(self._version_dir(version))
        if self._trainer.memory.pending:
            # They are in no checkpoint, and a publication that has to be repeated starts from one.
            raise ConfigError(
                f"gradients of {self._trainer.memory.pending} batches are pending, which a publication could lose; "
                "submit OptimStep to use them, or LoadCheckpoint to drop them, first"
            )
        checkpoint_dir = str(self._version_dir(version))
        going = self._expired(version)
        self._note(job_id, version=version)
        self._progress(job_id, "saving", {"checkpoint_dir": checkpoint_dir})
        await self._ask(
            job_id,
            lambda: SaveCheckpoint(
                request_id=new_id("save"),
                deadline_s=self._config.train_timeout_s,
                version=version,
                checkpoint_dir=checkpoint_dir,
                delete_after=tuple(str(self._version_dir(v)) for v in going),
            ),
            phase=f"saving version {version}",
        )
        self._made(job_id, version, checkpoint_dir, going)
        return checkpoint_dir

    def _expired(self, new: int) -> list[int]:
        """Versions whose checkpoints go once `new` is durable."""
        durable = [v for v in self._versions if str(self._version_dir(v)) == self._trainer.memory.durable_dir]
        # The version a restarted trainer would be put back to changes to `new` with the save itself, except for one that serves.
        served = [self._publisher.version, self._journal.committed_version()]
        return expired(self._versions, new=new, keep=self._config.keep_versions, protected=[*served, *durable])

    def _next_version(self, job_id: str) -> int:
        """The version that the job makes; the same again after a restart."""
        said = self._journal.fact(_job_key(job_id)).get("version")
        return self._trained_version + 1 if said is None else int(said)

    def _made(self, job_id: str, version: int, checkpoint_dir: str, gone: Sequence[int], **result: object) -> None:
        """`version` is durable and the trainer stands at it; `result` is what the job says of it."""
        self._trained_version = self._trainer.memory.version = version
        self._versions = [v for v in self._versions if v not in gone and v != version] + [version]
        self._trainer.memory.saved(checkpoint_dir)
        self._note(job_id, made=result)

    async def _publish_as_it_is(self, job_id: str) -> dict[str, object]:
        self._refuse_before_initial_sync()
        replicas = await self._replicas()
        version = self._next_version(job_id)
        checkpoint_dir = await self._save_version(job_id, version)
        return await self._publish(job_id, version, checkpoint_dir, replicas, metrics={}, seconds={})

    async def _resync_all(self, job_id: str) -> dict[str, object]:
        """After a publication that failed for good it is the way back to the version before."""
        self._refuse_before_initial_sync()
        version = self._publisher.version
        if version is None:
            version = self._journal.committed_version()
            assert version is not None
        if self._trainer.memory.pending:
            raise ConfigError("gradients are pending, which a resync would lose; submit OptimStep or LoadCheckpoint first")
        async with self._served_state(version, lambda step, detail: self._progress(job_id, step, detail)) as served_dir:
            return await self._publish(job_id, version, served_dir, await self._replicas(), metrics={}, seconds={})

    def _refuse_before_initial_sync(self) -> None:
        if self._publisher.version is None and self._journal.committed_version() is None:
            raise ConfigError("no version is served yet; submit InitialSync first")

    async def _train_merged(self, job_id: str, spec: TrainMergedJob, buffers: Sequence[bytes]) -> dict[str, object]:
        self._refuse_before_initial_sync()
        replicas = await self._replicas()
        version = self._next_version(job_id)
        checkpoint_dir = str(self._version_dir(version))
        made = self._journal.fact(_job_key(job_id)).get("made")
        if made is None:
            made = await self._train_version(job_id, spec, buffers, version=version, checkpoint_dir=checkpoint_dir)
        else:  # by an orchestrator that ended before it was published
            await self._trainer.ready(lambda step, detail: self._progress(job_id, step, detail))
        return await self._publish(
            job_id,
            version,
            checkpoint_dir,
            replicas,
            metrics=made["metrics"],
            seconds=dict(made["seconds"]),
            steps=made.get("steps", []),
            warnings=made.get("warnings", []),
        )

    async def _train_version(
        self, job_id: str, spec: TrainMergedJob, buffers: Sequence[bytes], *, version: int, checkpoint_dir: str
    ) -> dict[str, Any]:
        """One step, durable as `version`; returns its metrics and seconds."""
        going = self._expired(version)
        self._note(job_id, version=version)
        completed, _ = await self._ask(
            job_id,
            lambda: TrainMerged(
                request_id=new_id("train"),
                deadline_s=self._config.train_timeout_s,
                version=version,
                checkpoint_dir=checkpoint_dir,
                delete_after=tuple(str(self._version_dir(v)) for v in going),
                **_fields(spec),
            ),
            buffers,
            phase="training",
        )
        made = {
            name: completed.result.get(name, empty)
            for name, empty in (("metrics", {}), ("seconds", {}), ("steps", []), ("warnings", []))
        }
        self._trainer.memory.stepped(_steps_taken(made))
        self._made(job_id, version, checkpoint_dir, going, **made)
        return made

    async def _forward(self, job_id: str, spec: ForwardJob, buffers: Sequence[bytes]) -> _Outcome:
        deadline_s = self._config.train_timeout_s
        completed, results = await self._ask(
            job_id,
            lambda: Forward(request_id=new_id("forward"), deadline_s=deadline_s, **_fields(spec)),
            buffers,
            phase="forward",
        )
        return _Outcome(result=dict(completed.result), tensors=completed.tensors, buffers=results)

    async def _operate(
        self,
        job_id: str,
        spec: TrainLoraJob
        | ForwardBackwardJob
        | OptimStepJob
        | SaveCheckpointJob
        | LoadCheckpointJob
        | LoadAdapterJob
        | ExportHfJob,
        buffers: Sequence[bytes],
    ) -> dict[str, object]:
        """A job that is one request to the trainer."""
        kind, phase = _REQUESTS[type(spec)]
        fields = _fields(spec)
        for field in ("checkpoint_dir", "output_dir"):
            if field in fields and not isinstance(spec, LoadCheckpointJob):
                self._folder.refuse_own(fields[field], field=field)
        if isinstance(spec, SaveCheckpointJob):
            fields["version"] = self._trained_version
            self._trainer.memory.saving = spec.checkpoint_dir
        completed, _ = await self._ask(
            job_id,
            lambda: kind(request_id=new_id(phase.replace(" ", "-")), deadline_s=self._config.train_timeout_s, **fields),
            buffers,
            phase=phase,
            replaces_state=isinstance(spec, LoadCheckpointJob),
        )
        memory, result = self._trainer.memory, dict(completed.result)
        if isinstance(spec, TrainLoraJob | OptimStepJob):
            memory.stepped(_steps_taken(result))
        elif isinstance(spec, LoadAdapterJob):
            memory.took_adapter(spec.adapter_dir)
        elif isinstance(spec, ForwardBackwardJob):
            memory.pending = int(result.get("pending_batches", memory.pending + 1))
        elif isinstance(spec, SaveCheckpointJob):
            memory.saved(spec.checkpoint_dir)
        elif isinstance(spec, LoadCheckpointJob):
            memory.loaded(spec.checkpoint_dir)
            self._remember({_SET_ASIDE: None})
        return result

    async def _ask(
        self,
        job_id: str,
        make_request: Callable[[], AnyMessage],
        buffers: Sequence[bytes] = (),
        *,
        phase: str,
        replaces_state: bool = False,
    ) -> tuple[Completed, tuple[bytes, ...]]:
        return await self._trainer.ask(
            make_request,
            buffers,
            phase=phase,
            report=lambda step, detail: self._progress(job_id, step, detail),
            key=f"{phase.replace(' ', '-')}-{job_id}",
            staged=lambda incarnation: self._ahead.take(job_id, incarnation),
            replaces_state=replaces_state,
        )

    async def _publish(
        self,
        job_id: str,
        version: int,
        checkpoint_dir: str,
        replicas: Sequence[str],
        *,
        metrics: object,
        seconds: dict[str, float],
        steps: Sequence[object] = (),
        warnings: Sequence[str] = (),
    ) -> dict[str, object]:
        pause_s = 0.0

        def report(phase: str, detail: dict[str, object]) -> None:
            nonlocal pause_s
            if phase == "resumed":
                pause_s = float(detail["pause_s"])  # type: ignore[arg-type]
            self._progress(job_id, phase, detail)

        done = await self._publisher.publish(
            version,
            checkpoint_dir=checkpoint_dir,
            replicas=replicas,
            report=report,
            holder=self._trainer.memory.incarnation,
        )
        return {
            "version": version,
            "alias": f"{self._config.name}@{version}",
            "metrics": metrics,
            "steps": list(steps),
            "warnings": list(warnings),
            "seconds": {**seconds, **done.seconds, "pause": pause_s},
            "mode": done.mode,
            "why_in_place": done.why_in_place,
            "sent": done.sent,
            "bytes_sent": done.nbytes,
            "num_tensors": done.num_tensors,
            "num_verified": done.num_verified,
            "unverified": done.unverified,
            "canary": done.canary,
            "states": done.states,
            "attempts": done.attempts,
            "replicas": list(done.replicas),
            "left_out": done.left_out,
            "checkpoint_dir": checkpoint_dir,
        }

    def _version_dir(self, version: int) -> Path:
        return self._folder.version_dir(version)

    async def _shut_nodes_down(self) -> None:
        for node_id, peer in list(self._router.peers.items()):
            if peer.hello.role != "client" and peer.state != "lost":
                await self._tell(node_id, encode(Shutdown()))


_REQUESTS: dict[type, tuple[type[Any], str]] = {
    TrainLoraJob: (TrainLora, "training"),
    ForwardBackwardJob: (ForwardBackward, "forward and backward"),
    OptimStepJob: (OptimStep, "optimizer step"),
    SaveCheckpointJob: (SaveCheckpoint, "saving"),
    LoadCheckpointJob: (LoadCheckpoint, "loading"),
    LoadAdapterJob: (LoadAdapter, "loading an adapter"),
    ExportHfJob: (ExportHf, "exporting"),
}
"""A job's request, whose fields are the job's own, and its phase."""


def _job_key(job_id: str) -> str:
    """Fact in the journal: how far the job has come."""
    return f"job:{job_id}"


def _steps_taken(result: Mapping[str, Any]) -> int:
    """Optimizer steps that a training request's result speaks of."""
    return sum("skipped" not in metrics for metrics in result.get("steps") or [{}])


def _fields(spec: JobSpec) -> dict[str, Any]:
    """A job's fields, for the request of the same fields."""
    return {name: getattr(spec, name) for name in type(spec).model_fields if name != "kind"}


def _log_phase(phase: str, detail: dict[str, object]) -> None:
    log.info("resync: %s %s", phase, detail)


def _unreleased(error: Exception, mode: object) -> Exception:
    """A job whose work is done, but not what the memory mode promises of the time after it."""
    if isinstance(error, JobFailed):
        return JobFailed(
            code=error.code, node=error.node, phase=error.phase, remedy=error.remedy, steps_taken=error.steps_taken,
            message=f"the job itself is done, but the trainer did not come to memory mode {mode}: {error}",
        )  # fmt: skip
    return type(error)(f"the job itself is done, but the trainer did not come to memory mode {mode}: {error}")


def _failed(job_id: str, error: Exception, *, serving: str) -> Failed:
    """The job's `Failed` for an exception; one place where exceptions become error codes."""
    if isinstance(error, JobFailed):
        return Failed(
            request_id=job_id, code=ErrorCode(error.code), node=error.node, phase=error.phase[:200], message=error.message[:4000],
            remedy=f"{error.remedy[:2000]} ({serving})", steps_taken=error.steps_taken,
        )  # fmt: skip
    code, remedy = ErrorCode.INTERNAL, "report this with the orchestrator's log"
    if isinstance(error, VerificationError):
        code, remedy = (
            ErrorCode.VERIFICATION_FAILED,
            "look at the inference node's log; resubmit with a new job id to roll forward",
        )
    elif isinstance(error, NodeLost):
        code, remedy = ErrorCode.NODE_LOST, "restart the node, then submit the job again under a new id"
    elif isinstance(error, ConfigError):
        code, remedy = ErrorCode.BAD_INPUT, "correct the request"
    elif isinstance(error, PublicationError):
        code, remedy = ErrorCode.APPLY_FAILED, "look at the nodes' logs; a new job rolls forward"
    message = str(error)[:4000]
    return Failed(
        request_id=job_id, code=code, node="orchestrator", phase="job", message=message, remedy=f"{remedy} ({serving})"
    )
