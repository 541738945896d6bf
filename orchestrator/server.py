"""The orchestrator process: runs jobs one at a time, in the order of arrival.

The road of a job:

    SubmitJob -> jobs.py (journal, queue) -> here -> versions.py or operations.py
    -> trainer_requests.py (the trainer's steps)
    -> publication/publisher.py (attempts) -> publication/publication.py (one attempt)
       -> inference_node/node/node.py -> inference_node/server/actions.py (in vLLM's process)
       -> inference_node/server/traffic.py (pause, and the alias moves)
    -> between_jobs.py (memory mode) -> jobs.py (journal, outcome)
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Future
from pathlib import Path

from orchestrator.between_jobs import BetweenJobs
from orchestrator.config import OrchestratorConfig
from orchestrator.control.router import ControlRouter
from orchestrator.errors import ConfigError, JournalError, SpliceError, WorkLost, is_final
from orchestrator.facts import Facts
from orchestrator.jobs import SENDING_S, Job, Jobs, Outcome
from orchestrator.metrics import Metrics
from orchestrator.operations import Operations
from orchestrator.processes.interfaces import reachable_url
from orchestrator.protocol.frames import Envelope, encode
from orchestrator.protocol.messages import (
    CancelJob,
    Completed,
    Failed,
    ForwardBackward,
    GetStatus,
    LoadCheckpoint,
    NextBatch,
    NodeStatus,
    Shutdown,
    Status,
    StopRun,
    SubmitJob,
    Subscribe,
)
from orchestrator.publication.publisher import Publisher
from orchestrator.publication.state import after_restart
from orchestrator.resync import RESYNC_POLL_S, Resyncer
from orchestrator.run import Run
from orchestrator.storage import layout
from orchestrator.storage.files import replace_file
from orchestrator.storage.journal import Journal
from orchestrator.storage.run_folder import RunFolder
from orchestrator.trainer_memory import TrainerMemory
from orchestrator.trainer_requests import TrainerRequests
from orchestrator.versions import PublishingJob, Versions

log = logging.getLogger("splice.orchestrator")
STATUS_S = 5.0
"""Longest wait of a scrape for the event loop."""


class Orchestrator:
    """Runs jobs until `StopRun`; `serve()` is the whole life."""

    def __init__(self, config: OrchestratorConfig) -> None:
        self._config = config
        self._router = ControlRouter(
            endpoint=config.endpoint,
            run_token=config.run_token,
            name=config.name,
            on_client=self._on_client,
            curve_dir=config.curve_dir,
        )
        self._folder = RunFolder(config.run_dir)
        try:
            if self._folder.holds_run and not config.resume:
                raise ConfigError(
                    f"{config.run_dir} holds an earlier run; "
                    "choose a new run folder, or continue that run with --resume"
                )
            self._journal = Journal(
                self._folder.journal, run_token=config.run_token, name=config.name
            )
            layout.claim(config.run_dir)
            self._journal.drop_stray_batches()
        except BaseException:
            self._folder.close()
            raise
        self._stopping = asyncio.Event()
        self._is_leaving = False
        self._lost = ""
        """What to do about a durable state that is gone."""
        self._facts = Facts(self._journal, TrainerMemory())
        self._metrics = Metrics(self._status_aside, config.run_dir)
        self._trainer = TrainerRequests(self._router, config, self._facts)
        self._publisher = Publisher(
            router=self._router,
            journal=self._journal,
            config=config.publication,
            on_phase=self._metrics.published,
            restore=self._trainer.restore,
        )
        run = Run(
            config=config,
            folder=self._folder,
            journal=self._journal,
            facts=self._facts,
            router=self._router,
            trainer=self._trainer,
            publisher=self._publisher,
        )
        self._between = BetweenJobs(run)
        self._resync = Resyncer(run, self._between)
        self._versions = Versions(run, self._resync)
        self._operations = Operations(run)
        self._jobs = Jobs(run, serving=self._serving, on_end=self._metrics.job_ended)

    # ------------------------------------------------------------ life

    async def serve(self) -> None:
        """Bind, write `endpoint` into the run folder, run jobs until `StopRun`, shut the nodes
        down.

        After an exception the nodes and `endpoint` stay, as after a crash or `leave`: another
        orchestrator may resume.
        """
        has_begun = False
        try:
            if self._config.resume:
                self._restore()
            else:
                self._facts.moved_to(str(self._config.run_dir.absolute()))
            await self._router.start()
            has_begun = True
            self._loop = asyncio.get_running_loop()
            if self._config.metrics_port is not None:
                self._metrics.serve(self._config.metrics_host, self._config.metrics_port)
            await self._serve_until_stopped()
        finally:
            self._metrics.close()
            await self._router.close()
            self._journal.close()
            if not has_begun:
                self._folder.discard()
            self._folder.close()

    def _restore(self) -> None:
        """Take the state of the run from its journal."""
        version, state = after_restart(self._journal.publication_steps())
        self._publisher.resume(version=version, state=state)
        self._facts.restore()
        if before := self._facts.moved_to(str(self._config.run_dir.absolute())):
            log.warning("the run was in %s and is in %s now", before, self._config.run_dir)
        if lost := self._facts.memory.find_durable():
            now = self._facts.memory.durable_dir
            log.warning("%s is gone; %s has the same state and takes its place", lost, now)
        self._versions.restore()
        self._lost = self._versions.without(self._facts.memory.durable_dir)
        log.info(
            "resuming: version %s, publication %s, trained version %d, open jobs %s",
            version,
            state,
            self._facts.memory.version,
            self._jobs.restore(),
        )

    async def _serve_until_stopped(self) -> None:
        endpoint_file = self._write_endpoint()
        work = [asyncio.create_task(self._work()), asyncio.create_task(self._jobs.take_mail())]
        rest = [
            asyncio.create_task(self._router.fail()),
            asyncio.create_task(self._until_stopped()),
        ]
        try:
            done, _ = await asyncio.wait([*work, *rest], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            for task in work:
                task.cancel()
            await asyncio.wait(work, timeout=SENDING_S)
            if self._is_leaving:
                log.warning(
                    "ended by SIGTERM; nodes and served version stay as they are. Restart with "
                    "--resume within a minute, or the trainer ends too. To end the whole run by "
                    "SIGTERM, use --stop-on-term"
                )
                return
            await self._jobs.end_all(versions_dir=f"{self._folder.path}/versions")
            await self._shut_nodes_down()
            endpoint_file.unlink(missing_ok=True)
            endpoint_file.with_name("bound").unlink(missing_ok=True)
            log.info("the run has ended; its versions are in %s", self._folder.path / "versions")
        finally:
            for task in (*work, *rest):
                task.cancel()
            await asyncio.gather(*work, *rest, return_exceptions=True)

    def _write_endpoint(self) -> Path:
        path, bound = self._config.run_dir / "endpoint", self._router.endpoint
        endpoint = reachable_url(bound)
        token = self._config.run_token
        for name, text in (("token", token), ("bound", bound), ("endpoint", endpoint)):
            replace_file(path.with_name(name), text, mode=0o600)
        log.info(
            "run %s listens at %s (also in %s)%s; waiting for the trainer and %d inference node(s)",
            self._config.name,
            endpoint,
            path,
            "" if bound == endpoint else f", bound to {bound}",
            self._config.replicas,
        )
        return path

    async def _until_stopped(self) -> None:
        await self._stopping.wait()

    async def _shut_nodes_down(self) -> None:
        for node_id, peer in list(self._router.peers.items()):
            if peer.hello.role != "client" and peer.state != "lost":
                await self._jobs.tell(node_id, encode(Shutdown()))

    def stop(self) -> None:
        """End the run; callable from a signal handler of the loop."""
        self._stopping.set()

    def leave(self) -> None:
        """End `serve` but not the run: another orchestrator may resume."""
        self._is_leaving = self._is_leaving or not self._stopping.is_set()
        self._stopping.set()

    # ------------------------------------------------------------ clients

    async def _on_client(self, client: str, envelope: Envelope) -> None:
        message = envelope.message
        if isinstance(message, SubmitJob | CancelJob):
            await self._jobs.on_mail(client, envelope)
        elif isinstance(message, GetStatus):
            await self._router.send(client, self._status())
        elif isinstance(message, Subscribe):
            self._jobs.subscribe(client)
        elif isinstance(message, NextBatch):
            await self._versions.announce(envelope)
        elif isinstance(message, StopRun):
            self.stop()
        else:
            log.warning("client %s sent %s, which is not a client's message", client, message.kind)

    def _status(self) -> Status:
        trouble = self._resync.failure
        nodes = tuple(
            NodeStatus(
                node_id=peer_id,
                role=peer.hello.role,
                state=peer.state,  # type: ignore[arg-type]
                packages=peer.hello.packages,
                gpus=peer.hello.gpus,
                host=peer.hello.host,
                memory=peer.memory,
                detail=peer.detail | self._notes(peer_id),
            )
            for peer_id, peer in self._router.peers.items()
            if peer.hello.role != "client"
        )
        return Status(
            name=self._config.name,
            version=self._publisher.version,
            publication=str(self._publisher.state),
            nodes=nodes,
            queued_jobs=self._jobs.num_waiting,
            trouble=f"{trouble}{self._lost}" if trouble else "",
            is_final=trouble is not None and is_final(trouble),
            apart=self._apart(),
            dropped=dict(self._router.dropped.most_common(100)),
        )

    def _apart(self) -> str:
        version, memory = self._publisher.version, self._trainer.memory
        served = None if version is None else self._journal.checkpoint_dir(version)
        if served is None or not memory.durable_dir:
            return ""
        is_served = served in (memory.durable_dir, *memory.copies)
        steps = f"{memory.steps} optimizer steps after " if memory.is_ahead else ""
        if is_served and not steps:
            return ""
        return f"the trainer holds {steps}{'it' if is_served else memory.durable_dir}"

    def _status_aside(self) -> Status:
        """Ask the event loop for the status, from another thread.

        Raises:
            TimeoutError: it is busy.
            RuntimeError: it has ended.
        """
        found: Future[Status] = Future()
        self._loop.call_soon_threadsafe(lambda: found.set_result(self._status()))
        return found.result(STATUS_S)

    def _notes(self, peer_id: str) -> dict[str, object]:
        notes = self._trainer.memory.notes
        return {"warnings": list(notes)} if notes and peer_id == "trainer" else {}

    def _serving(self) -> str:
        version = self._publisher.version
        is_served = self._publisher.is_served_by(self._router.nodes("inference"))
        if version is None or is_served is False:
            return "nothing is served"
        how = "is still served" if is_served else "was served before the restart"
        return f"{self._config.name}@{version} {how}"

    # ------------------------------------------------------------ the road of a job

    async def _work(self) -> None:
        while True:
            try:
                async with asyncio.timeout(RESYNC_POLL_S):
                    job = await self._jobs.next()
            except TimeoutError:
                await self._resync.bare_replicas()
            else:
                await self._run(job)

    async def _run(self, job: Job) -> None:
        """Do the work, reach the memory mode, then send the outcome; the journal has each step."""
        job.running = True
        noted = self._facts.of_job(job.id)
        if "failed" in noted:  # an earlier orchestrator ended before it sent the outcome
            await self._end_failed(job, Failed.model_validate(noted["failed"]))
            return
        started_s = time.monotonic()
        try:
            if isinstance(job.spec, ForwardBackward):
                await self._between.refuse_pending()
            if "result" in noted:
                outcome = Outcome(result=noted["result"])
            else:
                outcome = await self._do(job)
            if self._between.has_to_release and not outcome.buffers:
                # A restarted orchestrator then does not repeat the work.
                self._facts.note(job.id, result=outcome.result)
        except JournalError:
            raise
        except Exception as error:
            if not isinstance(error, SpliceError | OSError):
                log.exception("job %s failed because of a defect in the orchestrator", job.id)
            await self._end_failed(job, self._jobs.failure(job.id, error))
            return
        await self._end_done(job, outcome, started_s=started_s)

    async def _do(self, job: Job) -> Outcome:
        """Have the trainer there and in its own state, then run the job."""
        replaces_state = isinstance(job.spec, LoadCheckpoint)
        if (unsaid := self._trainer.memory.unsaid) and not replaces_state:
            raise WorkLost(f"the trainer was lost since the last job; {unsaid}")
        await self._between.wake(job.report)
        if not replaces_state:
            await self._resync.put_back(job.report)
        job.report("started", {})
        if isinstance(job.spec, PublishingJob):
            return await self._versions.run(job, job.spec)
        return await self._operations.run(job, job.spec)

    async def _end_done(self, job: Job, outcome: Outcome, *, started_s: float) -> None:
        working_s = time.monotonic() - started_s
        try:
            await self._between.release(job.report)
        except (SpliceError, OSError) as error:
            failed = self._jobs.failure(job.id, error)
            text = (
                "The job succeeded, but the trainer could not enter memory mode "
                f'"{self._between.mode}": {failed.message}'
            )
            await self._jobs.end(job.id, failed.model_copy(update={"message": text[:4000]}))
            return
        took = outcome.result.get("seconds")
        seconds = {
            **(took if isinstance(took, dict) else {}),
            "total": working_s,
            "release": time.monotonic() - started_s - working_s,
        }
        result = {**outcome.result, "seconds": seconds}
        if notes := self._trainer.memory.take_notes():  # journaled with the outcome
            result["warnings"] = [*outcome.result.get("warnings", ()), *notes]  # type: ignore[misc]
        completed = Completed(request_id=job.id, result=result, tensors=outcome.tensors)
        await self._jobs.end(job.id, completed, outcome.buffers)

    async def _end_failed(self, job: Job, failed: Failed) -> None:
        """Journal the failure, reach the memory mode, then send the failure."""
        if self._between.has_to_release:
            self._facts.note(job.id, failed=failed.model_dump(mode="json"))
            await self._between.release_after_failure()
        await self._jobs.end(job.id, failed)
