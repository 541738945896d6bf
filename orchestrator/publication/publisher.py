"""Publishes versions: one attempt after another, until one succeeds or rolling forward is hopeless.

Enters: a version whose parts are durable on disk. Leaves: a `PublicationReport` or an exception.
After an exception the replicas either still serve @N or are poisoned: see `publication.state`.
`publication.publication` is one attempt.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from orchestrator.control.router import ControlRouter
from orchestrator.errors import (
    ContentChanged,
    JobFailed,
    JournalError,
    ManifestError,
    PublicationError,
    SpliceError,
)
from orchestrator.publication.config import PublicationConfig
from orchestrator.publication.elements import Elements
from orchestrator.publication.ledger import Ledger
from orchestrator.publication.members import Members
from orchestrator.publication.planner import Planner
from orchestrator.publication.publication import Publication
from orchestrator.publication.report import PublicationReport, Report
from orchestrator.publication.rests import Rests
from orchestrator.publication.state import State, after_failure
from orchestrator.storage.journal import Journal

log = logging.getLogger("splice.publisher")

BLAMED_OUT = 2
"""Exclude a replica after this many failed attempts, provided another remains."""


class Publisher:
    """Drives publications over the control socket, one at a time.

    Args:
        restore: has the trainer load a checkpoint (its folder, and the phase of the request).
    """

    def __init__(
        self,
        *,
        router: ControlRouter,
        journal: Journal,
        config: PublicationConfig,
        on_phase: Report = lambda phase, detail: None,
        restore: Callable[[str, str], Awaitable[None]],
    ) -> None:
        self._config, self._on_phase, self._restore = config, on_phase, restore
        self._members = Members(router=router, config=config)
        self._planner = Planner(self._members, config)
        self._ledger = Ledger(journal)
        self._elements = Elements(members=self._members, ledger=self._ledger, config=config)
        self._chain_rests = Rests()
        self._abort_first = False
        self.forget_unserved = self._ledger.forget_unserved
        self.leave_all = self._members.leave_all
        self.forget_plan = self._planner.forget

    @property
    def state(self) -> State:
        """Where the present publication is, or where the last one left the replicas."""
        return self._ledger.state

    @property
    def version(self) -> int | None:
        """The served version; None before @0 and while poisoned."""
        return self._ledger.version

    @property
    def holding(self) -> dict[str, str]:
        """Replica -> its life when it took the served version."""
        return self._ledger.holding

    def is_served_by(self, replicas: Sequence[str]) -> bool | None:
        """Whether one of these replicas serves the version. None: not known after a restart."""
        if self._ledger.serving is None:
            return None
        lives = self._members.lives(replicas)
        return any(self._ledger.serving.get(replica) == life for replica, life in lives.items())

    def resume(self, *, version: int | None, state: State) -> None:
        """Continue where the last orchestrator was; the next publication aborts its transfers."""
        self._ledger.resume(version=version, state=state)
        self._elements.resume()
        self._abort_first = True

    def bare_replicas(self) -> list[str]:
        """Ready replicas that do not hold the served version: restarted since, or left out."""
        if self.version is None:
            return []
        lives = self._members.lives(self._members.router.nodes("inference"))
        return [replica for replica, life in lives.items() if self.holding.get(replica) != life]

    async def publish(
        self,
        version: int,
        *,
        checkpoint_dir: str,
        replicas: Sequence[str],
        report: Report,
        holder: str | None = None,
        others: Sequence[str] = (),
        keeps_pending: bool = False,
        proves: bool = False,
    ) -> PublicationReport:
        """Publish `version` to all healthy `replicas` or to none, with at most `attempts` attempts.

        Leaves out a replica that is gone or fails its verification, if another one does not.

        Args:
            holder: incarnation of the trainer that holds the version in memory. Another trainer
                first loads `checkpoint_dir`.
            others: replicas that serve `version` already, when it is published again for a joiner.
                    They continue even if this publication fails.
            keeps_pending: the holder has gradients that no checkpoint has, so a further attempt
                does not load the version again while that process lives.
            proves: after a restart of the orchestrator, replicas that say that they serve the
                version need only prove it.

        Raises:
            JobFailed | PublicationError | NodeLost: the publication failed; `self.state` says
                whether @N is still served or the replicas are poisoned.
        """
        tell, report = report, lambda phase, detail: self._tell(tell, phase, detail)
        if self._abort_first:
            why = "the orchestrator was restarted in the middle of a publication"
            await self._members.abort(replicas, why)
            self._abort_first = False
        may_chain = self._config.chain and len(replicas) > 1
        publication = Publication(
            version=version,
            checkpoint_dir=checkpoint_dir,
            replicas=tuple(replicas),
            others=tuple(others),
            holder=holder,
            keeps_pending=keeps_pending,
            chain=may_chain and not self._chain_rests.take(),
            proves=proves,
            report=report,
            members=self._members,
            planner=self._planner,
            ledger=self._ledger,
            elements=self._elements,
            config=self._config,
        )
        blamed: Counter[str] = Counter()
        failure: SpliceError | OSError | None = None
        attempts = self._config.attempts + publication.chain
        for attempt in range(1, attempts + 1):
            was_poisoned = self.state is State.POISONED
            try:
                if failure is not None:
                    publication = replace(publication, chain=False)
                    await self._roll_forward(publication, failure, blamed)
                result = await publication.run()
            except JournalError:
                raise
            except Exception as error:
                failure = _as_ours(error)
                await self._after_failure(publication, failure, was_poisoned=was_poisoned)
                if attempt == attempts or not _is_worth_retrying(failure):
                    raise failure from error
                # In a chain, the replica after the one that failed may be the first to say so.
                if isinstance(failure, JobFailed) and not publication.chain:
                    blamed.update([failure.node])
            else:
                if publication.chain:
                    self._chain_rests.succeeded()
                result.attempts = attempt
                self._on_phase("served", {"version": version, "bytes_sent": result.bytes_sent})
                return result
        raise AssertionError("unreachable")

    def _tell(self, report: Report, phase: str, detail: dict[str, object]) -> None:
        self._on_phase(phase, detail)
        report(phase, detail)

    async def _after_failure(
        self, publication: Publication, error: Exception, *, was_poisoned: bool
    ) -> None:
        """Note what the replicas serve now, and end what is under way."""
        failed_in = self.state
        is_answer = isinstance(error, JobFailed) and error.is_answer
        if publication.may_have_committed and not is_answer:
            failed_in = State.APPLYING  # without its answer, the replica may serve either version
        if publication.sends_elements:
            self._elements.rests.failed()
        if publication.chain:
            self._chain_rests.failed()
        left = after_failure(failed_in, was_poisoned=was_poisoned)
        if publication.others:
            left = State.IDLE
        self._members.joined = {}
        self._planner.forget()
        lost = () if publication.is_beside else publication.replicas
        version = publication.version
        self._ledger.failed(version, error, failed_in=failed_in, left=left, lost=lost)
        if failed_in not in (State.IDLE, State.PLANNED, State.POISONED):
            why = f"publication of version {version} failed while {failed_in}: {error}"
            await self._members.abort(publication.replicas, why)
        detail: dict[str, object] = {
            "state": str(failed_in),
            "left": str(left),
            "error": str(error)[:500],
        }
        publication.report("failed", detail)
        log.warning(
            "publication of version %d failed while %s, now %s: %s", version, failed_in, left, error
        )

    async def _roll_forward(
        self, publication: Publication, failure: Exception, blamed: Counter[str]
    ) -> None:
        """Prepare the next attempt: restore the trainer, and leave out absent replicas."""
        there = await self._recover(publication)
        there = [r for r in there if blamed[r] < BLAMED_OUT] or there
        why = f"it was not ready, or was the one that failed, after: {failure}"
        absent = dict.fromkeys(set(publication.replicas) - set(there), why)
        publication.left_out |= await publication.exclude(absent)
        publication.replicas = tuple(there)

    async def _recover(self, publication: Publication) -> list[str]:
        """Wait for the trainer (its launcher restarts it) and load the version into it, unless it
        kept both the version and pending gradients.

        Returns: the replicas that are ready.

        Raises:
            NodeLost: the trainer, or every replica, was not ready in time.
        """
        publication.report("recovering", {"version": publication.version})
        router = self._members.router
        replicas, timeout_s = publication.replicas, self._config.recovery_timeout_s
        await router.wait_heard(["trainer", *replicas], since_s=time.monotonic())
        report = publication.report
        await router.wait_ready(["trainer"], timeout_s=timeout_s, report=report)
        holder = self._members.trainer_process
        if not (publication.keeps_pending and publication.holder == holder):
            what = "restoring the version to be published"
            await self._restore(publication.checkpoint_dir, what)
        publication.holder = holder
        await router.wait_ready(replicas, timeout_s=timeout_s, one_is_enough=True, report=report)
        return [r for r in router.nodes("inference") if r in replicas]


def _as_ours(error: Exception) -> SpliceError | OSError:
    if isinstance(error, SpliceError | OSError):
        return error
    log.error("a publication failed by a defect of the orchestrator", exc_info=error)
    return PublicationError(f"a defect of the orchestrator: {type(error).__name__}: {error}")


def _is_worth_retrying(error: Exception) -> bool:
    is_refused = isinstance(error, JobFailed) and error.code in ("plan_refused", "bad_input")
    return not is_refused and not isinstance(error, ContentChanged | ManifestError)
