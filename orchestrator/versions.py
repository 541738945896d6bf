"""Jobs that publish: each makes or chooses a version, then moves it to the replicas.

A version is durable in `versions/N` before its publication starts. Every step is noted in the
journal, so a restarted orchestrator repeats neither the training nor the save.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from orchestrator.control.peers import ABSENT
from orchestrator.errors import ConfigError, NodeLost
from orchestrator.facts import steps_taken
from orchestrator.jobs import Job, Outcome
from orchestrator.operations import request_id
from orchestrator.protocol.frames import Envelope
from orchestrator.protocol.messages import (
    InitialSync,
    Publish,
    Resync,
    SaveCheckpoint,
    TrainMerged,
)
from orchestrator.resync import Resyncer
from orchestrator.run import Run
from orchestrator.storage.retention import expired, kept

log = logging.getLogger("splice.orchestrator")

PublishingJob = InitialSync | TrainMerged | Publish | Resync


class Versions:
    """Owns the list of versions on disk, and runs the jobs that publish."""

    def __init__(self, run: Run, resync: Resyncer) -> None:
        self._config, self._folder, self._router = run.config, run.folder, run.router
        self._journal, self._facts, self._publisher = run.journal, run.facts, run.publisher
        self._trainer, self._resync = run.trainer, resync
        self._announced: Envelope | None = None
        """The newest `NextBatch` that the trainer does not have."""
        self._may_pass_on = False
        self._on_disk: list[int] = []
        self._named: Sequence[int] = ()
        """The versions that the last save was told to delete."""

    def restore(self) -> None:
        """Find the versions on disk after a restart."""
        parent = self._folder.version_dir(0).parent
        names = [p.name for p in parent.iterdir()] if parent.is_dir() else []
        self._on_disk = sorted(int(name) for name in names if name.isdigit())

    def without(self, folder: str) -> str:
        """What to do if the trainer's durable state is gone; empty if it is there."""
        if not folder or Path(folder).exists() or not self._on_disk:
            return ""
        newest = self._dir(self._on_disk[-1])
        return f" {folder} is gone. To continue from the newest version, copy {newest} there."

    async def run(self, job: Job, spec: PublishingJob) -> Outcome:
        """Run a job that publishes; returns what its `Completed` carries."""
        if isinstance(spec, InitialSync):
            result = await self._initial_sync(job)
        elif isinstance(spec, TrainMerged):
            result = await self._train_merged(job, spec)
        elif isinstance(spec, Publish):
            result = await self._publish_present_state(job, spec)
        else:
            result = await self._resync_all(job)
        return Outcome(result=result)

    async def _initial_sync(self, job: Job) -> dict[str, object]:
        noted, newest = self._facts.of_job(job.id), self._journal.committed_version()
        if newest is not None and "version" not in noted:
            now = f"{self._config.name}@{newest} is served already"
            if self._publisher.version is None:
                now = (
                    f"this run has served {self._config.name}@{newest}, and a later publication "
                    "failed; submit Resync to serve it again, or Publish for the trainer's state"
                )
            raise ConfigError(f"{now}; InitialSync comes once, first")
        replicas = await self._replicas(job)
        trainer = self._router.peers.get("trainer")  # none yet, if its processes end between jobs
        first = 0 if trainer is None else trainer.detail.get("version", 0)
        version = int(noted.get("version", first))
        if "made" not in noted:
            self._publisher.forget_unserved(version)
        await self._save(job, version)
        return await self._publish(job, version, self._dir(version), replicas, {})

    async def _train_merged(self, job: Job, spec: TrainMerged) -> dict[str, object]:
        self._refuse_before_initial_sync()
        replicas = await self._replicas(job)
        version = self._next_version(job)
        made = self._facts.of_job(job.id).get("made")
        if made is None:
            made = await self._train(job, spec, version)
        else:  # an earlier orchestrator ended before the publication
            await self._trainer.ready(job.report)
        return await self._publish(job, version, self._dir(version), replicas, made)

    async def _publish_present_state(self, job: Job, spec: Publish) -> dict[str, object]:
        self._refuse_before_initial_sync()
        pending = self._trainer.memory.pending
        if spec.refuses_pending and pending and "made" not in self._facts.of_job(job.id):
            raise ConfigError(
                f"gradients of {pending} batches are pending, and the job refuses them "
                "(refuses_pending); submit OptimStep to use them, or LoadCheckpoint to drop them"
            )
        if "version" not in self._facts.of_job(job.id):
            self._refuse_old(spec.version)
        replicas = await self._replicas(job)
        version = self._next_version(job, spec.version)
        await self._save(job, version)
        return await self._publish(job, version, self._dir(version), replicas, {})

    async def _resync_all(self, job: Job) -> dict[str, object]:
        """Send the served version, or the newest one before a publication that failed finally."""
        self._refuse_before_initial_sync()
        version = self._publisher.version
        if version is None:
            version = self._journal.committed_version()
            assert version is not None
        if self._trainer.memory.pending:
            raise ConfigError(
                "gradients are pending, which a resync would lose; "
                "submit OptimStep or LoadCheckpoint first"
            )
        async with self._resync.served_state(version, job.report) as served_dir:
            return await self._publish(job, version, served_dir, await self._replicas(job), {})

    def _refuse_before_initial_sync(self) -> None:
        if self._publisher.version is None and self._journal.committed_version() is None:
            raise ConfigError("no version is served yet; submit InitialSync first")

    def _refuse_old(self, wanted: int | None) -> None:
        trainer = self._router.peers.get("trainer")
        # A number of a followed run is one content, so a publication that failed may be repeated.
        follows = trainer is not None and "follows" in trainer.detail
        made = 0 if follows else self._trainer.memory.version
        newest = max(made, self._journal.committed_version() or 0)
        if wanted is not None and wanted <= newest:
            raise ConfigError(
                f"version {wanted} cannot be published: this run has made {newest}, and versions "
                "never change"
            )

    async def _replicas(self, job: Job) -> list[str]:
        """Wait for replicas: those that the job says for @0, later at least one, so that a loss
        ends no run."""
        spec, wanted = job.spec, 1
        if isinstance(spec, InitialSync):
            wanted = spec.replicas or self._config.replicas
        await self._router.wait(
            lambda: self._missing_replicas(wanted),
            timeout_s=self._config.ready_timeout_s,
            needed=["trainer"],
            report=job.report,
        )
        return self._router.nodes("inference")

    def _missing_replicas(self, wanted: int) -> dict[str, str]:
        """Return the replicas that are not ready, with their states, unless enough are. Others may
        choose the ids."""
        if len(self._router.nodes("inference")) >= wanted:
            return {}
        known = {
            node_id: peer.state
            for node_id, peer in self._router.peers.items()
            if peer.hello.role == "inference"
        }
        ids = (f"inference-{i}" for i in range(self._config.replicas))
        absent = [i for i in ids if i not in known][: self._config.replicas - len(known)]
        not_ready = {node_id: state for node_id, state in known.items() if state != "ready"}
        return not_ready | dict.fromkeys(absent, ABSENT)

    # ------------------------------------------------------------ making a version

    def _dir(self, version: int) -> str:
        return str(self._folder.version_dir(version))

    def _next_version(self, job: Job, wanted: int | None = None) -> int:
        """The version that the job makes; the same one after a restart."""
        noted = self._facts.of_job(job.id).get("version", wanted)
        return self._trainer.memory.version + 1 if noted is None else int(noted)

    async def announce(self, envelope: Envelope) -> None:
        """Keep what the next job will bring, for the trainer. It gets one during each job: a
        batch that came during a publication would be in that one's way."""
        self._announced = envelope
        await self._pass_on()

    async def _pass_on(self) -> None:
        if self._announced is None or not self._may_pass_on:
            return
        frames, self._announced, self._may_pass_on = self._announced.frames, None, False
        with contextlib.suppress(NodeLost):  # nothing depends on it
            await self._router.send_frames("trainer", frames)

    @contextlib.asynccontextmanager
    async def _passing_on(self) -> AsyncIterator[None]:
        self._may_pass_on = True
        try:
            await self._pass_on()
            yield
        finally:
            self._may_pass_on = False

    async def _train(self, job: Job, spec: TrainMerged, version: int) -> dict[str, Any]:
        """Train, durable as `version`; returns metrics, seconds, steps and warnings."""
        going = self._expired(version)
        self._facts.note(job.id, version=version)
        async with self._passing_on():
            completed, _ = await self._trainer.run(
                spec,
                job.buffers,
                request_id=request_id("training", job),
                phase="training",
                report=job.report,
                version=version,
                checkpoint_dir=self._dir(version),
                delete_after=tuple(map(self._dir, going)),
            )
        wanted = ("metrics", "seconds", "steps", "warnings")
        made = {name: completed.result[name] for name in wanted if name in completed.result}
        self._trainer.memory.stepped(steps_taken(made))
        self._made(job, version, going, **made)
        return made

    async def _save(self, job: Job, version: int) -> None:
        """Make the trainer's state durable as `version`, unless an earlier orchestrator did."""
        if "made" in self._facts.of_job(job.id):
            await self._trainer.ready(job.report)
            return
        going = self._expired(version)
        self._facts.note(job.id, version=version)
        job.report("saving", {"checkpoint_dir": self._dir(version)})
        phase = f"saving version {version}"
        completed, _ = await self._trainer.run(
            SaveCheckpoint(checkpoint_dir=self._dir(version)),
            request_id=request_id(phase, job),
            phase=phase,
            report=job.report,
            version=version,
            delete_after=tuple(map(self._dir, going)),
        )
        self._trainer.memory.heard(completed.result)
        self._made(job, version, going)

    def _expired(self, new: int) -> list[int]:
        """Return the versions whose checkpoints go once `new` is durable."""
        memory = self._trainer.memory
        durable = [v for v in self._on_disk if self._dir(v) == memory.durable_dir]
        served = [self._publisher.version, self._journal.committed_version()]
        durable += kept(self._folder.path)
        keep = self._config.keep_versions or None
        return expired(self._on_disk, new=new, keep=keep, protected=[*served, *durable])

    def _made(self, job: Job, version: int, gone: Sequence[int], **result: object) -> None:
        """Note that `version` is durable and in the trainer, and the job's result so far."""
        self._trainer.memory.version = version
        # The trainer deletes after it has answered and may crash first, so each version is listed
        # for deletion in two consecutive saves.
        left = [v for v in self._on_disk if v not in gone or v not in self._named]
        self._on_disk, self._named = [v for v in left if v != version] + [version], gone
        self._trainer.memory.saved(self._dir(version))
        self._facts.note(job.id, made=result)

    # ------------------------------------------------------------ publishing it

    async def _publish(
        self,
        job: Job,
        version: int,
        checkpoint_dir: str,
        replicas: Sequence[str],
        made: dict[str, Any],
    ) -> dict[str, object]:
        """Move the version to the replicas; returns the job's result."""
        pause_s = 0.0

        def report(phase: str, detail: dict[str, object]) -> None:
            nonlocal pause_s
            if phase == "resumed":
                pause_s = float(detail["pause_s"])  # type: ignore[arg-type]
            job.report(phase, detail)

        done = await self._publisher.publish(
            version,
            checkpoint_dir=checkpoint_dir,
            replicas=replicas,
            report=report,
            holder=self._trainer.memory.incarnation,
            keeps_pending=self._trainer.memory.pending > 0,
        )
        log.info(
            "%s@%d is served: %s, %d bytes, pause %.3f s, %d of %d tensors verified, by %s",
            self._config.name,
            version,
            done.mode,
            done.bytes_sent,
            pause_s,
            done.num_verified,
            done.num_tensors,
            ", ".join(done.replicas),
        )
        return {
            **made,
            **asdict(done),
            "alias": f"{self._config.name}@{version}",
            "seconds": {**made.get("seconds", {}), **done.seconds, "pause": pause_s},
            "checkpoint_dir": checkpoint_dir,
        }
