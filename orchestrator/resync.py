"""Sends the served version again: to replicas that lack it, and around jobs that need it.

The trainer may be ahead of the served version. Its newer state is then set aside in a checkpoint,
and put back after the resync or, if that failed or its orchestrator ended, before the next job.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator

from orchestrator.between_jobs import BetweenJobs
from orchestrator.control.waiting import Report
from orchestrator.errors import JournalError, SpliceError
from orchestrator.protocol.messages import LoadCheckpoint
from orchestrator.run import Run

log = logging.getLogger("splice.orchestrator")
RESYNC_POLL_S, RESYNC_LONGEST_S = 1.0, 600.0
"""Seconds between two looks for bare replicas; longest pause after failures."""


class Resyncer:
    """Owns the set-aside state, and the pauses between attempts."""

    def __init__(self, run: Run, between: BetweenJobs) -> None:
        self._config, self._folder, self._router = run.config, run.folder, run.router
        self._journal, self._facts, self._publisher = run.journal, run.facts, run.publisher
        self._trainer, self._between = run.trainer, between
        self._next_s, self._pause_s = 0.0, RESYNC_POLL_S
        self.failure: Exception | None = None
        """Of the last attempt, until one succeeds."""

    async def bare_replicas(self) -> None:
        """Send the served version to replicas without it, which answer 503; the others continue."""
        bare, version = self._publisher.bare_replicas(), self._publisher.version
        if not bare or version is None or self._trainer.memory.pending:
            return
        has_trainer = "trainer" in self._router.nodes("trainer") or self._between.can_wake
        if time.monotonic() < self._next_s or not has_trainer:
            return
        log.info("%s lack %s@%d; sending it", ", ".join(bare), self._config.name, version)
        try:
            await self._send_to(bare, version)
        except JournalError:
            raise
        except Exception as error:
            self.failure = error.with_traceback(None)
            if not isinstance(error, SpliceError | OSError):
                log.exception("the resync failed because of a defect in the orchestrator")
            log.warning("the resync failed; next attempt in %.0f s: %s", self._pause_s, error)
            await self._between.release_after_failure()
        else:
            self.failure = None
        self._space_attempts()

    async def _send_to(self, bare: list[str], version: int) -> None:
        await self._between.wake(_log_phase)
        async with self.served_state(version, _log_phase) as served_dir:
            done = await self._publisher.publish(
                version,
                checkpoint_dir=served_dir,
                replicas=bare,
                report=_log_phase,
                holder=self._trainer.memory.incarnation,
                others=[r for r in self._publisher.holding if r not in bare],
                proves=True,
            )
        what = f"{done.sent}, {done.bytes_sent} bytes"
        log.info("%s serve %s@%d: %s", ", ".join(done.replicas), self._config.name, version, what)
        await self._between.release(_log_phase)

    def _space_attempts(self) -> None:
        """Double the pause, so that a replica that keeps failing leaves the trainer to the jobs."""
        if not self._publisher.bare_replicas():
            self._next_s, self._pause_s = 0.0, RESYNC_POLL_S
            return
        self._next_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, RESYNC_LONGEST_S)

    @contextlib.asynccontextmanager
    async def served_state(self, version: int, report: Report) -> AsyncIterator[str]:
        """Have the trainer hold the served version inside the block; yields its folder."""
        memory = self._trainer.memory
        served_dir = self._journal.checkpoint_dir(version) or str(self._folder.version_dir(version))
        await self._trainer.ready(report)
        if memory.durable_dir != served_dir or memory.is_ahead:
            # An earlier orchestrator may have ended before it journaled that it put the state back.
            await self.put_back(report)
            await self._set_aside(served_dir, report)
        elif self._facts.set_aside:  # or during the load: the trainer holds either state
            await self._load(served_dir, report)
        yield served_dir
        await self.put_back(report)

    async def _set_aside(self, served_dir: str, report: Report) -> None:
        memory = self._trainer.memory
        kept = memory.free_folder(str(self._config.run_dir.absolute() / "resync" / "state"))
        phase = "saving what is ahead of the served version"
        await self._trainer.save(kept, phase=phase, report=report)
        self._facts.put_aside(kept)
        await self._load(served_dir, report)

    async def put_back(self, report: Report) -> None:
        """Load the state that was set aside, if any. Every job begins with this."""
        kept = self._facts.set_aside
        if kept is not None:
            await self._load(kept, report, is_put_back=True)

    async def _load(self, folder: str, report: Report, *, is_put_back: bool = False) -> None:
        load = LoadCheckpoint(checkpoint_dir=folder)
        completed, _ = await self._trainer.run(load, phase="loading", report=report)
        self._trainer.memory.heard(completed.result)
        self._trainer.memory.loaded(folder)
        if completed.result.get("adapter_changed"):
            self._publisher.forget_plan()
        self._facts.put_aside(None) if is_put_back else self._facts.remember()


def _log_phase(phase: str, detail: dict[str, object]) -> None:
    log.info("resync: %s %s", phase, detail)
