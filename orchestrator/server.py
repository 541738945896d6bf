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
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from orchestrator.errors import ConfigError, JobFailed, NodeLost, PublicationError, SpliceError, VerificationError
from orchestrator.journal import Journal
from orchestrator.protocol.frames import Envelope, decode, encode
from orchestrator.protocol.messages import (
    AnyMessage,
    CancelJob,
    Cancelled,
    Completed,
    ErrorCode,
    Failed,
    GetStatus,
    InitialSyncJob,
    LoadCheckpoint,
    NodeStatus,
    Progress,
    ResyncJob,
    SaveCheckpoint,
    Shutdown,
    Status,
    StopRun,
    SubmitJob,
    Subscribe,
    Terminal,
    TrainLora,
    TrainLoraJob,
    TrainMerged,
    TrainMergedJob,
)
from orchestrator.publisher import PublicationConfig, Publisher
from orchestrator.router import ControlRouter, new_id

log = logging.getLogger("splice.orchestrator")
RESYNC_POLL_S = 1.0


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


@dataclasses.dataclass(slots=True, kw_only=True)
class _Job:
    submit: SubmitJob
    buffers: tuple[bytes, ...]
    clients: set[str]
    sequence: int = 0
    running: bool = False


class Orchestrator:
    """Runs jobs until `StopRun`; `serve()` is the whole life."""

    def __init__(self, config: OrchestratorConfig) -> None:
        self._config = config
        config.run_dir.mkdir(parents=True, exist_ok=True)
        self._journal = Journal(config.run_dir / "journal.sqlite", run_token=config.run_token, name=config.name)
        self._router = ControlRouter(
            endpoint=config.endpoint, run_token=config.run_token, on_client=self._on_client, curve_dir=config.curve_dir
        )
        self._publisher = Publisher(router=self._router, journal=self._journal, config=config.publication)
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self._jobs: dict[str, _Job] = {}
        self._subscribers: set[str] = set()
        self._stopping = asyncio.Event()
        self._trained_version = 0
        self._trained_dir = ""
        self._is_ahead = False
        """The trainer's state is past the last durable version (by a TrainLora job, or a version that was not published)."""

    async def serve(self) -> None:
        """Bind, write `endpoint` into the run folder, run jobs until `StopRun`, then shut the nodes down."""
        if self._journal.unfinished_jobs() or self._journal.committed_version() is not None:
            self._journal.close()
            raise ConfigError(f"{self._config.run_dir} holds an earlier run; choose a new run folder")
        await self._router.start()
        endpoint_file = self._config.run_dir / "endpoint"
        part = endpoint_file.with_suffix(".part")
        part.write_text(self._router.endpoint)
        part.replace(endpoint_file)
        worker = asyncio.create_task(self._work())
        stop = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([worker, stop], return_when=asyncio.FIRST_COMPLETED)
            if worker.done():
                worker.result()
        finally:
            for task in (worker, stop):
                task.cancel()
            await asyncio.gather(worker, stop, return_exceptions=True)
            await self._shut_nodes_down()
            await self._router.close()
            self._journal.close()
            endpoint_file.unlink(missing_ok=True)

    def stop(self) -> None:
        """End `serve`; callable from a signal handler of the loop."""
        self._stopping.set()

    # ------------------------------------------------------------ clients

    async def _on_client(self, client: str, envelope: Envelope) -> None:
        message = envelope.message
        if isinstance(message, SubmitJob):
            await self._on_submit(client, message, envelope.buffers)
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

    async def _on_submit(self, client: str, submit: SubmitJob, buffers: tuple[bytes, ...]) -> None:
        known = self._journal.job(submit.job_id)
        if known is not None:
            if known.outcome is not None:
                envelope = decode(known.outcome)
                await self._tell(client, envelope.message)
            elif submit.job_id in self._jobs:
                self._jobs[submit.job_id].clients.add(client)
            return
        self._journal.add_job(job_id=submit.job_id, kind=submit.job.kind, frames=encode(submit, buffers))
        self._jobs[submit.job_id] = _Job(submit=submit, buffers=buffers, clients={client})
        self._queue.put_nowait(submit.job_id)
        self._progress(submit.job_id, "queued", {})

    async def _on_cancel(self, message: CancelJob) -> None:
        job = self._jobs.get(message.job_id)
        if job is not None and not job.running:
            await self._end(message.job_id, Cancelled(request_id=message.job_id, reason="cancelled before it started"))

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
            queued_jobs=self._queue.qsize(),
        )

    def _progress(self, job_id: str, phase: str, detail: dict[str, object]) -> None:
        job = self._jobs.get(job_id)
        if job is None:
            return
        message = Progress(request_id=job_id, sequence=job.sequence, phase=phase, detail=detail)
        job.sequence += 1
        for client in job.clients | self._subscribers:
            task = asyncio.ensure_future(self._tell(client, message))
            task.add_done_callback(lambda t: t.exception())

    async def _tell(self, client: str, message: AnyMessage) -> None:
        try:
            await self._router.send(client, message)
        except NodeLost:
            # The outcome stays in the journal; a client that comes back asks again with the same job id.
            self._subscribers.discard(client)

    async def _end(self, job_id: str, message: Terminal) -> None:
        job = self._jobs.pop(job_id)
        self._journal.end_job(job_id, state=message.kind.lower(), frames=encode(message))
        for client in job.clients | self._subscribers:
            await self._tell(client, message)

    # ------------------------------------------------------------ jobs

    async def _work(self) -> None:
        while True:
            try:
                job_id = await asyncio.wait_for(self._queue.get(), RESYNC_POLL_S)
            except TimeoutError:
                await self._resync_bare_replicas()
                continue
            if job_id in self._jobs:  # else it was cancelled
                await self._run_job(job_id)

    async def _resync_bare_replicas(self) -> None:
        """Give the served version to replicas that were started anew; they answer 503 until then."""
        bare = self._publisher.bare_replicas()
        version = self._publisher.version
        if not bare or version is None or "trainer" not in self._router.nodes("trainer"):
            return
        log.info("%s was started anew; sending %s@%d to it", ", ".join(bare), self._config.name, version)
        served_dir = self._journal.checkpoint_dir(version) or self._trained_dir
        try:
            async with self._served_state(version, served_dir):
                await self._publisher.publish(
                    version, checkpoint_dir=served_dir, replicas=self._router.nodes("inference"), report=_log_phase
                )
        except (SpliceError, OSError) as error:
            log.warning("the resync failed and will be tried again: %s", error)

    async def _ask_trainer(self, message: SaveCheckpoint | LoadCheckpoint) -> None:
        await self._router.request("trainer", message, phase=message.kind)

    async def _run_job(self, job_id: str) -> None:
        job = self._jobs[job_id]
        job.running = True
        self._journal.set_job_state(job_id, "running")
        started_s = time.monotonic()
        try:
            result = await self._dispatch(job_id, job)
        except (SpliceError, OSError) as error:
            await self._end(job_id, _failed(job_id, error, serving=self._serving()))
            return
        except Exception as error:
            log.exception("job %s failed by a defect of the orchestrator", job_id)
            await self._end(job_id, _failed(job_id, error, serving=self._serving()))
            return
        result["seconds"] = {**result.get("seconds", {}), "total": time.monotonic() - started_s}  # type: ignore[dict-item]
        await self._end(job_id, Completed(request_id=job_id, result=result))

    def _serving(self) -> str:
        version = self._publisher.version
        return "nothing is served" if version is None else f"{self._config.name}@{version} goes on being served"

    async def _dispatch(self, job_id: str, job: _Job) -> dict[str, object]:
        spec = job.submit.job
        self._progress(job_id, "waiting for nodes", {})
        if isinstance(spec, InitialSyncJob):
            return await self._initial_sync(job_id)
        if isinstance(spec, ResyncJob):
            return await self._resync_all(job_id)
        if isinstance(spec, TrainLoraJob):
            return await self._train_lora(job_id, spec, job.buffers)
        return await self._train_merged(job_id, spec, job.buffers)

    async def _replicas(self) -> list[str]:
        deadline_s = time.monotonic() + self._config.ready_timeout_s
        while len(self._router.nodes("inference")) < self._config.replicas:
            if time.monotonic() > deadline_s:
                raise NodeLost(f"{len(self._router.nodes('inference'))} of {self._config.replicas} inference nodes are ready")
            await asyncio.sleep(0.05)
        return self._router.nodes("inference")

    async def _initial_sync(self, job_id: str) -> dict[str, object]:
        if self._publisher.version is not None:
            raise ConfigError(f"{self._config.name}@{self._publisher.version} is served already; InitialSync comes once, first")
        replicas = await self._replicas()
        await self._router.wait_ready(["trainer"], timeout_s=self._config.ready_timeout_s)
        checkpoint_dir = str(self._version_dir(0))
        self._progress(job_id, "saving", {"checkpoint_dir": checkpoint_dir})
        save = SaveCheckpoint(
            request_id=new_id("save"), deadline_s=self._config.train_timeout_s, version=0, checkpoint_dir=checkpoint_dir
        )
        await self._router.request("trainer", save, phase="saving version 0")
        self._trained_version, self._trained_dir = 0, checkpoint_dir
        return await self._publish(job_id, 0, checkpoint_dir, replicas, metrics={}, seconds={})

    async def _resync_all(self, job_id: str) -> dict[str, object]:
        version = self._publisher.version
        if version is None:
            raise ConfigError("no version is served; submit InitialSync, or wait for the recovery under way")
        served_dir = self._journal.checkpoint_dir(version) or self._trained_dir
        async with self._served_state(version, served_dir):
            return await self._publish(job_id, version, served_dir, await self._replicas(), metrics={}, seconds={})

    @contextlib.asynccontextmanager
    async def _served_state(self, version: int, served_dir: str) -> AsyncIterator[None]:
        """Inside, the trainer holds the served version's state; outside, what it held before, which may be further on."""
        if not self._is_ahead:
            yield
            return
        kept = str(self._config.run_dir.absolute() / "resync" / new_id("state"))
        timeout_s = self._config.train_timeout_s
        await self._ask_trainer(
            SaveCheckpoint(request_id=new_id("save"), deadline_s=timeout_s, version=version, checkpoint_dir=kept)
        )
        await self._ask_trainer(LoadCheckpoint(request_id=new_id("load"), deadline_s=timeout_s, checkpoint_dir=served_dir))
        yield
        await self._ask_trainer(LoadCheckpoint(request_id=new_id("load"), deadline_s=timeout_s, checkpoint_dir=kept))
        self._is_ahead = True

    async def _train_merged(self, job_id: str, spec: TrainMergedJob, buffers: Sequence[bytes]) -> dict[str, object]:
        if self._publisher.version is None and self._journal.committed_version() is None:
            raise ConfigError("no version is served yet; submit InitialSync first")
        replicas = await self._replicas()
        version = self._trained_version + 1
        checkpoint_dir = str(self._version_dir(version))
        completed = await self._train(
            job_id,
            lambda: TrainMerged(
                request_id=new_id("train"),
                deadline_s=self._config.train_timeout_s,
                version=version,
                checkpoint_dir=checkpoint_dir,
                loss=spec.loss,
                optim=spec.optim,
                tensors=spec.tensors,
            ),
            buffers,
        )
        self._trained_version, self._trained_dir, self._is_ahead = version, checkpoint_dir, True
        metrics, seconds = completed.result.get("metrics", {}), completed.result.get("seconds", {})
        return await self._publish(job_id, version, checkpoint_dir, replicas, metrics=metrics, seconds=seconds)

    async def _train_lora(self, job_id: str, spec: TrainLoraJob, buffers: Sequence[bytes]) -> dict[str, object]:
        completed = await self._train(
            job_id,
            lambda: TrainLora(
                request_id=new_id("train"),
                deadline_s=self._config.train_timeout_s,
                output_dir=spec.output_dir,
                loss=spec.loss,
                optim=spec.optim,
                tensors=spec.tensors,
            ),
            buffers,
        )
        self._is_ahead = True
        return dict(completed.result)

    async def _train(self, job_id: str, make_request, buffers: Sequence[bytes]) -> Completed:  # type: ignore[no-untyped-def]
        """Run one training request; a trainer that dies in it is waited for, put back to the last durable state, and asked again."""
        attempts = self._config.publication.attempts
        for attempt in range(1, attempts + 1):
            await self._router.wait_ready(["trainer"], timeout_s=self._config.ready_timeout_s)
            incarnation = self._router.peers["trainer"].hello.incarnation
            try:
                if self._trained_dir and attempt > 1:
                    self._progress(job_id, "restoring", {"checkpoint_dir": self._trained_dir})
                    load = LoadCheckpoint(
                        request_id=new_id("load"),
                        deadline_s=self._config.publication.plan_timeout_s,
                        checkpoint_dir=self._trained_dir,
                    )
                    await self._router.request("trainer", load, phase="restoring the last durable state")
                completed, _ = await self._router.request(
                    "trainer",
                    make_request(),
                    buffers,
                    phase="training",
                    on_progress=lambda _, p: self._progress(job_id, p.phase, p.detail),
                )
            except NodeLost as error:
                if attempt == attempts:
                    raise
                log.warning("the trainer was lost in a training step, waiting for it: %s", error)
                self._progress(job_id, "trainer lost", {"error": str(error)})
                await self._router.wait_ready(
                    ["trainer"], timeout_s=self._config.ready_timeout_s, not_incarnation={"trainer": incarnation}
                )
            else:
                return completed
        raise AssertionError("unreachable")

    async def _publish(
        self,
        job_id: str,
        version: int,
        checkpoint_dir: str,
        replicas: Sequence[str],
        *,
        metrics: object,
        seconds: dict[str, float],
    ) -> dict[str, object]:
        pause_s = 0.0

        def report(phase: str, detail: dict[str, object]) -> None:
            nonlocal pause_s
            if phase == "resumed":
                pause_s = float(detail["pause_s"])  # type: ignore[arg-type]
            self._progress(job_id, phase, detail)

        done = await self._publisher.publish(version, checkpoint_dir=checkpoint_dir, replicas=replicas, report=report)
        self._is_ahead = False
        return {
            "version": version,
            "alias": f"{self._config.name}@{version}",
            "metrics": metrics,
            "seconds": {**seconds, **done.seconds, "pause": pause_s},
            "bytes_sent": done.nbytes,
            "num_tensors": done.num_tensors,
            "unverified": done.unverified,
            "states": done.states,
            "attempts": done.attempts,
            "replicas": list(done.replicas),
            "checkpoint_dir": checkpoint_dir,
        }

    def _version_dir(self, version: int) -> Path:
        return (self._config.run_dir / "versions" / str(version)).absolute()

    async def _shut_nodes_down(self) -> None:
        for node_id, peer in list(self._router.peers.items()):
            if peer.hello.role != "client" and peer.state != "lost":
                await self._tell(node_id, Shutdown())


def _log_phase(phase: str, detail: dict[str, object]) -> None:
    log.info("resync: %s %s", phase, detail)


def _failed(job_id: str, error: Exception, *, serving: str) -> Failed:
    """The job's `Failed` for an exception; one place where exceptions become error codes."""
    if isinstance(error, JobFailed):
        return Failed(
            request_id=job_id, code=ErrorCode(error.code), node=error.node, phase=error.phase, message=error.message,
            remedy=f"{error.remedy} ({serving})",
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
