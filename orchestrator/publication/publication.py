"""One attempt to bring one version from the trainer to every replica.

    plan      join groups, check the manifest on every replica, agree on a layout; then durable
    move      in place, or next to the live tensors and swapped in; then finished
              compare the live tensors' digests with the trainer's; then verified
    canary    compare log-probs on replicas that serve nothing yet
    commit    every replica moves its alias and resumes, or the attempt fails

The attempt either returns a report or raises. `Publisher` then decides what the replicas serve.
"""

from __future__ import annotations

import array
import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from orchestrator.control.open_requests import Answer
from orchestrator.errors import JobFailed, NodeLost, SpliceError, VerificationError
from orchestrator.protocol.messages import (
    CANARY,
    CheckCanary,
    CommitUpdate,
    ErrorCode,
    Forward,
    PrepareShadow,
    Progress,
    PublicationMode,
    ReceiveWeights,
    RunJob,
    SendWeights,
    SwapWeights,
    forward_specs,
    new_id,
)
from orchestrator.publication.answers import all_or_first_error, digests_of, seconds_of
from orchestrator.publication.config import PublicationConfig
from orchestrator.publication.elements import Elements
from orchestrator.publication.ledger import Ledger
from orchestrator.publication.members import Members
from orchestrator.publication.planner import Planner, Wire
from orchestrator.publication.report import PublicationReport, Report
from orchestrator.publication.state import State
from orchestrator.publication.verification import (
    canary_difference,
    canary_failures,
    canary_prompt,
    compare,
)

log = logging.getLogger("splice.publisher")


@dataclass(slots=True, kw_only=True)
class Publication:
    """See the module."""

    version: int
    checkpoint_dir: str
    replicas: tuple[str, ...]
    """The replicas that this attempt began with."""
    others: tuple[str, ...]
    """Replicas that serve the version already."""
    holder: str | None
    """Incarnation of the trainer that holds the version. None: not known."""
    keeps_pending: bool = False
    """The holder has gradients that loading the version would drop."""
    chain: bool = False
    """Each replica passes on what it receives."""
    proves: bool = False
    """It suffices to prove that the replicas hold the served version."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Replica that earlier attempts gave up -> the reason."""
    report: Report
    members: Members
    planner: Planner
    ledger: Ledger
    elements: Elements
    config: PublicationConfig

    wire: Wire = field(init=False)
    result: PublicationReport = field(init=False)
    sent: Answer = field(init=False)
    is_beside: bool = field(default=False, init=False)
    """Bytes arrive next to the live tensors, so no failure can have changed those."""
    may_have_committed: bool = field(default=False, init=False)
    """The only replica was told to commit with its swap, and has not answered."""
    _pause_started_s: float = field(default=0.0, init=False)
    _resumed_s: float | None = field(default=None, init=False)
    """When the only replica resumed by itself."""

    @property
    def sends_elements(self) -> bool:
        """Whether changed elements travel; False before it is planned."""
        wire: Wire | None = getattr(self, "wire", None)
        return wire is not None and wire.encoded is not None

    async def run(self) -> PublicationReport:
        """Publish the version; leaves out replicas that fail by themselves, if another remains.

        Raises:
            JobFailed | PublicationError | NodeLost: the attempt failed in the ledger's state.
        """
        started_s = time.monotonic()
        await self._plan()
        self.result.seconds["plan"] = time.monotonic() - started_s
        self._step(State.DURABLE, checkpoint_dir=self.checkpoint_dir)
        moved_s = time.monotonic()
        if await self._makes_no_room():
            await self._move_in_place()
        else:
            await self._move_beside()
            await self._swap()
        # Requests that were let end first say nothing of the link.
        drained_s = self.result.seconds.get("pause_request", 0.0)
        self.elements.note(self.wire, self.version, time.monotonic() - moved_s - drained_s)
        if self._has_canary:
            await self._check_canary()
        self.ledger.verified(
            self.version,
            is_full=not self.wire.is_part,
            unread=self.result.unverified if self.wire.encoded is None else None,
        )
        # A server that restarts from here on holds nothing.
        lives = self.members.lives(self.result.replicas)
        self._step(State.COMMITTED, keep=True)
        await self._commit()
        self.result.seconds["publish"] = time.monotonic() - started_s
        held = {r: life for r, life in self.ledger.holding.items() if r in self.others}
        self.ledger.committed(
            self.version,
            holding=held | {r: lives[r] for r in self.result.replicas},
            trainer=self.members.trainer_process,
            is_full=not self.wire.is_part,
        )
        return self.result

    def _step(self, to: State, *, checkpoint_dir: str | None = None, keep: bool = False) -> None:
        self.ledger.step(to, self.version, checkpoint_dir=checkpoint_dir, keep=keep)
        self.result.states.append(str(to))
        self.report(str(to), {"version": self.version})

    # ------------------------------------------------------------ plan

    async def _plan(self) -> None:
        if self.ledger.state is State.COMMITTED:
            self.ledger.state = State.IDLE
        if self.holder not in (None, self.members.trainer_process):
            raise NodeLost("the trainer was restarted and no longer holds the version to publish")
        await self.members.join(self.replicas, report=self.report, chain=self.chain)
        manifest = await self.planner.plan(self.version, self.replicas)
        self.ledger.expect(manifest)
        self.ledger.step(State.PLANNED, self.version)
        self.report(str(State.PLANNED), {"version": self.version})
        self.wire = Wire(manifest=manifest)
        may_send_part = self.ledger.may_send_part(
            self.version,
            lives=self.members.lives(self.replicas),
            trainer=self.members.trainer_process,
            full_every=self.config.full_every,
        )
        if self.planner.part is not None and may_send_part:
            self.wire = replace(self.planner.part, base=self.ledger.version)
        is_due = self.ledger.is_due(self.config.full_every)
        began = time.monotonic()
        self.wire, why = await self.elements.encode(
            self.wire,
            self.version,
            self.replicas,
            serves=self.planner.serves,
            is_due=is_due,
            proves=self.proves,
        )
        encoded = self.wire.encoded
        self.result = PublicationReport(
            version=self.version,
            sent="elements" if encoded else "changed" if self.wire.is_part else "full",
            why_sent=why,
            changed_elements=encoded.elements if encoded else None,
            bytes_sent=self.wire.nbytes,
            num_tensors=len(self.wire.manifest.tensors),
            replicas=self.replicas,
            left_out=dict(self.left_out),
        )
        if encoded is not None:
            self.result.seconds["encode"] = time.monotonic() - began

    async def _makes_no_room(self) -> bool:
        """Make room for shadow mode. True: there is none, or none is wanted, so move in place.

        Changed elements always want it: they wait in host memory, and few bytes do.
        """
        if self.config.mode == "in_place" and self.wire.encoded is None:
            return True
        answers = await self.members.ask_all(
            self.replicas,
            lambda _: PrepareShadow(
                deadline_s=self.config.plan_timeout_s,
                version=self.version,
                base_version=self.wire.base,
                elements=self.wire.encoded is not None,
                whole=not self.wire.is_part,
                nbytes=self.wire.encoded.nbytes if self.wire.encoded else None,
                budget_bytes=self.config.shadow_bytes,
            ),
            phase="making room next to the live tensors",
        )
        refusals = {r: a.result.get("why_not") for r, (a, _) in answers.items()}
        why = next((f"{r}: {refusal}" for r, refusal in refusals.items() if refusal), None)
        self.result.why_in_place = why
        self.result.mode = "shadow" if why is None else "in_place"
        if why is not None:
            log.info("version %d is published in place, not in shadow mode: %s", self.version, why)
        return why is not None

    # ------------------------------------------------------------ move

    async def _move_in_place(self) -> None:
        """Send and receive into the live tensors. Ends verified."""
        self._pause_started_s = time.monotonic()
        received = await self._transfer("in_place", on_progress=self._on_replica)
        if self.ledger.state is State.APPLYING:
            self._step(State.FINISHED)
        self._take_digests()
        await self._verify_live(received)
        self._step(State.VERIFIED)
        names = {"pause": "pause_request", "wire": "receive_wire"}
        self.result.seconds |= seconds_of([self.sent], {"total": "send"})
        self.result.seconds |= seconds_of(received.values(), names)

    async def _move_beside(self) -> None:
        """Send and receive next to the live tensors of every replica. Ends shadowed."""
        self.is_beside = True
        began = time.monotonic()
        received = await self._transfer("shadow", on_progress=lambda _i, _p: None)
        self._take_digests()
        # Elements have no digests before the swap: checksums cover them, and the live digests then.
        wrong = {} if self.wire.encoded else self._compare(received, "received")
        if wrong:
            raise VerificationError(f"{'; '.join(wrong.values())}; none of it is used")
        self._step(State.SHADOWED)
        names = {"wire": "receive_wire", "digest": "verify_shadow"}
        self.result.seconds |= seconds_of([self.sent], {"total": "send"})
        self.result.seconds |= seconds_of(received.values(), names)
        self.result.seconds["shadow"] = time.monotonic() - began
        self.is_beside = False

    async def _swap(self) -> None:
        """Swap the received tensors in on every replica. Ends verified.

        The only replica waits for nobody: it compares its live tensors with the trainer's digests
        and commits by itself.
        """
        is_alone = len(self.replicas) == 1 and not self._has_canary
        if is_alone:  # the journal must know of the pause before the replica can commit
            self._step(State.PAUSED, keep=True)
        self.may_have_committed = is_alone
        self._pause_started_s = time.monotonic()
        asked = [
            self.members.ask(
                replica,
                SwapWeights(
                    deadline_s=self.config.transfer_timeout_s,
                    version=self.version,
                    pause_mode=self.config.pause_mode,
                    drain_s=self.config.drain_s,
                    commit_if=self.sent[1][0] if is_alone else None,
                ),
                phase="swapping",
                on_progress=self._on_replica,
            )
            for replica in self.replicas
        ]
        answers = await all_or_first_error(asked, on_error=self._abort)
        swapped = dict(zip(self.replicas, answers, strict=True))
        self.may_have_committed = False
        if all(a.result.get("committed") for a, _ in swapped.values()):
            self._resumed_s = time.monotonic()
        if self.ledger.state is State.APPLYING:
            self._step(State.FINISHED)
        await self._verify_live(swapped)
        self._step(State.VERIFIED)
        self.result.seconds |= seconds_of(swapped.values(), {"pause": "pause_request"})

    async def _transfer(
        self, mode: PublicationMode, *, on_progress: Callable[[str, Progress], None]
    ) -> dict[str, Answer]:
        """Send and receive at once; the first failure aborts all. Returns the replicas' answers."""
        timeout_s = self.config.transfer_timeout_s
        receives = [
            self.members.ask(
                replica,
                ReceiveWeights(
                    deadline_s=timeout_s,
                    version=self.version,
                    pause_mode=self.config.pause_mode,
                    drain_s=self.config.drain_s,
                    mode=mode,
                    base_version=self.wire.base,
                    elements=self.wire.encoded is not None,
                    whole=not self.wire.is_part,
                ),
                phase="receiving",
                on_progress=on_progress,
            )
            for replica in self.replicas
        ]
        send = SendWeights(
            deadline_s=timeout_s,
            version=self.version,
            changed_only=self.wire.is_part,
            elements=self.wire.encoded is not None,
            remember=self.elements.remembers(self.wire),
        )
        sending = self.members.ask("trainer", send, phase="sending")
        self.sent, *received = await all_or_first_error([sending, *receives], on_error=self._abort)
        return dict(zip(self.replicas, received, strict=True))

    async def _abort(self, why: str) -> None:
        await self.members.abort(self.replicas, why)

    def _on_replica(self, _: str, progress: Progress) -> None:
        """Step the state when the first replica pauses, and when the first begins to write."""
        state = self.ledger.state
        if progress.phase == "paused" and state in (State.DURABLE, State.SHADOWED):
            self._step(State.PAUSED)
        elif progress.phase == "applying" and state is State.PAUSED:
            self._step(State.APPLYING)

    # ------------------------------------------------------------ verify

    def _take_digests(self) -> None:
        count = len(self.wire.manifest.tensors)
        sent = digests_of("trainer", self.sent, count=count)
        self.ledger.take_digests(self.version, sent, self.wire.indices)

    def _compare(self, received: Mapping[str, Answer], what: str) -> dict[str, str]:
        """Replica -> what is wrong with its tensors."""
        problems, unverified = compare(
            received, manifest=self.wire.manifest, sent=self.sent[1][0], what=what
        )
        self.result.unverified |= unverified
        self.result.num_verified = self.result.num_tensors - len(self.result.unverified)
        return problems

    async def _verify_live(self, received: Mapping[str, Answer]) -> None:
        """Compare the live tensors of every replica with the trainer's.

        Raises:
            VerificationError: no replica has what was sent.
        """
        rest = "it serves nothing until a full resync verifies"
        wrong = self._compare(received, "live")
        await self._leave_out({r: VerificationError(f"{why}; {rest}") for r, why in wrong.items()})

    @property
    def _has_canary(self) -> bool:
        return self.config.canary and self.wire.base is None

    async def _check_canary(self) -> None:
        """Compare log-probs of a fixed prompt: replicas that serve nothing yet against the trainer.

        Raises:
            VerificationError: every replica computes something else than the trainer.
        """
        # The timeout covers an engine's first request, which compiles and warms up.
        began, timeout_s = time.monotonic(), self.config.plan_timeout_s
        prompt = canary_prompt(self.wire.manifest)
        answers = await self.members.ask_all(
            self.result.replicas,
            lambda _: CheckCanary(
                request_id=new_id(CANARY),
                deadline_s=timeout_s,
                version=self.version,
                tokens=prompt,
            ),
            phase="checking the canary",
        )
        asked = {replica: buffers[0] for replica, (_, buffers) in answers.items() if buffers}
        if not asked:
            return
        specs = forward_specs(num_sequences=1, num_tokens=len(prompt))
        forward = RunJob(
            request_id=new_id(CANARY), deadline_s=timeout_s, job=Forward(tensors=specs)
        )
        inputs = [array.array("i", prompt).tobytes(), array.array("i", [len(prompt)]).tobytes()]
        _, own = await self.members.router.request(
            "trainer", forward, buffers=inputs, phase="checking the canary"
        )
        self.result.canary = {r: canary_difference(own[0], theirs) for r, theirs in asked.items()}
        await self._leave_out(canary_failures(self.wire.manifest, self.result.canary))
        self.result.seconds["canary"] = time.monotonic() - began

    # ------------------------------------------------------------ commit

    async def _commit(self) -> None:
        """Have every replica move its alias and resume.

        Leaves out a replica that is lost here, and one that gave up its update because it had lost
        the orchestrator (`not_ready`). A lost one has verified the version and may serve it.

        Raises:
            JobFailed: a replica refused.
            NodeLost: all replicas are lost.
        """
        resumed_s = [self._pause_started_s]

        async def commit(replica: str) -> None:
            timeout_s = self.config.commit_timeout_s
            request = CommitUpdate(deadline_s=timeout_s, version=self.version)
            await self.members.router.request(replica, request, phase="committing")
            resumed_s.append(time.monotonic())

        replicas, began = self.result.replicas, time.monotonic()
        outcomes = await asyncio.gather(*map(commit, replicas), return_exceptions=True)
        self.result.seconds["commit"] = time.monotonic() - began
        left_out: dict[str, SpliceError] = {}
        for replica, error in zip(replicas, outcomes, strict=True):
            gave_up = isinstance(error, JobFailed) and error.code == ErrorCode.NOT_READY
            if isinstance(error, NodeLost | JobFailed) and (gave_up or isinstance(error, NodeLost)):
                left_out[replica] = error
            elif error is not None:
                raise error
        await self._leave_out(left_out)
        pause_s = (self._resumed_s or max(resumed_s)) - self._pause_started_s
        self.report("resumed", {"pause_s": pause_s})

    # ------------------------------------------------------------ who takes part

    async def _leave_out(self, failed: Mapping[str, SpliceError]) -> None:
        """Continue without these replicas.

        Raises:
            SpliceError: the first one's, if no replica remains.
        """
        remaining = tuple(r for r in self.result.replicas if r not in failed)
        if failed and not remaining:
            raise next(iter(failed.values()))
        self.result.left_out |= await self.exclude({r: str(e) for r, e in failed.items()})
        self.result.replicas = remaining

    async def exclude(self, failed: Mapping[str, str]) -> dict[str, str]:
        """Have these replicas drop what they received and serve nothing; returns why, for each."""
        whys = {replica: why[:500] for replica, why in sorted(failed.items())}
        for replica, why in whys.items():
            log.warning("version %d continues without %s: %s", self.version, replica, why)
            self.report("left_out", {"replica": replica, "error": why})
            await self.members.exclude(replica, why)
        return whys
