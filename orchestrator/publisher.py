"""Takes one version from the trainer to every replica: plan, make durable, move, verify, commit.

Enters: a version whose parts are durable on disk. Leaves: a `PublicationReport`, or an exception with the replicas either still on
@N or poisoned. The states and which failure leads where are in `orchestrator.publication`.
"""

from __future__ import annotations

import array
import asyncio
import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from pydantic import BaseModel, ValidationError

from orchestrator.content import Content
from orchestrator.errors import (
    ConfigError,
    ContentChanged,
    JobFailed,
    JournalError,
    NodeLost,
    PublicationError,
    SpliceError,
    VerificationError,
)
from orchestrator.journal import Journal
from orchestrator.protocol.frames import briefly
from orchestrator.protocol.messages import (
    AbortSend,
    AbortUpdate,
    CheckCanary,
    CommitUpdate,
    Completed,
    ErrorCode,
    Forward,
    InferenceDetail,
    JoinTransferGroup,
    LeaveAlias,
    LeaveTransferGroup,
    LoadCheckpoint,
    Manifest,
    ManifestPart,
    OpenTransferGroup,
    PauseMode,
    PlanPublication,
    PrepareShadow,
    PrepareUpdate,
    Progress,
    PublicationMode,
    ReceiveWeights,
    Rendezvous,
    SendWeights,
    SwapWeights,
    Transport,
    UseLayout,
    WireLayout,
    forward_specs,
)
from orchestrator.publication import State, advance, after_failure
from orchestrator.router import ControlRouter, new_id

log = logging.getLogger("splice.publisher")
Report = Callable[[str, dict[str, object]], None]
_Answer = tuple[Completed, tuple[bytes, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationConfig:
    """How publications run."""

    transport: Transport
    bucket_bytes: int = 2**30
    pause_mode: PauseMode = "keep"
    join_timeout_s: float = 120.0
    plan_timeout_s: float = 300.0
    transfer_timeout_s: float = 300.0
    commit_timeout_s: float = 30.0
    recovery_timeout_s: float = 300.0
    attempts: int = 3
    full_every: int | None = None
    """Every how many publications all tensors are sent, instead of those with an adapter only. 1: always. None: only where it is needed."""
    mode: PublicationMode = "in_place"
    """in_place: generation stands still while the bytes come; no extra memory. shadow: they come beside the live tensors while generation goes
    on, are verified there and swapped in; what does not fit goes in place, and the result says why."""
    shadow_bytes: int = 4 * 2**30
    """Most bytes that shadow mode may use beside the model on each inference worker, while an update comes."""

    canary: bool = True
    """Before a replica that serves nothing (@0, after a failure) is committed: its log-probs of a fixed prompt against the trainer's own forward
    pass. Digests prove that the weights are the trainer's; this proves that both compute the same model from them."""

    def __post_init__(self) -> None:
        if self.mode not in ("in_place", "shadow"):
            raise ConfigError(f"the publication mode is in_place or shadow, got {self.mode!r}")
        if self.shadow_bytes < 1:
            raise ConfigError(f"shadow_bytes is {self.shadow_bytes}; it must be at least 1; for no shadow use mode in_place")
        if self.full_every is not None and self.full_every < 1:
            raise ConfigError(f"full_every is {self.full_every}; it must be at least 1 (always everything), or None")


@dataclass(slots=True, kw_only=True)
class PublicationReport:
    """What one publication did. `seconds` are wall-clock; `pause` is from the pause request to the resume.

    `nbytes` and `num_tensors` were sent: of all tensors (`sent` "full"), or of those that training changes and what shares a layer with
    them ("changed"). `num_verified` of these were compared by digest. `mode` is the one that was used; `why_in_place` says why it was not shadow,
    if that was wanted. `canary`: each replica's median difference from the trainer, in nats, of those that were asked. In shadow mode `seconds["shadow"]` is what receiving and verifying took beside generation, before the pause.
    """

    version: int
    sent: Literal["full", "changed"]
    nbytes: int
    num_tensors: int
    num_verified: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    unverified: dict[str, str] = field(default_factory=dict)
    states: list[str] = field(default_factory=list)
    attempts: int = 1
    replicas: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    mode: PublicationMode = "in_place"
    why_in_place: str | None = None
    canary: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wire:
    """What an update brings, and whether in the replicas' own order. `base`: the version it goes on top of; None: it brings everything."""

    manifest: Manifest
    is_direct: bool
    base: int | None = None
    indices: tuple[int, ...] | None = None
    """Of its tensors in the whole manifest; None: it is the whole manifest."""


BLAMED_OUT = 2
"""After so many attempts of one publication that failed at the same replica it is left out, if another one is there."""
CANARY_TOKENS = 12
CANARY_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.5}
"""Most nats that the log-probs may differ in the median, by the manifest's coarsest dtype. fp32: the proof's 1e-4, with room for other kernels. bf16:
rounding alone made 0.013 on a tiny MoE, more layers and routers make more; a model that is wrong is off by about a nat or more."""


def canary_prompt(manifest: Manifest) -> tuple[int, ...]:
    """Tokens that every vocabulary of this model has, spread over its lower half; pure."""
    rows = next((t.shape[0] for t in manifest.tensors if t.name.endswith("embed_tokens.weight")), 64)
    return tuple(3 + (7919 * (n + 1)) % max(1, rows // 2 - 3) for n in range(CANARY_TOKENS))


def canary_difference(ours: bytes, theirs: bytes) -> float:
    """Median difference of two float32 log-prob buffers, the first token's left out; infinite where one is not finite."""
    if len(ours) != len(theirs) or len(ours) % 4:
        return math.inf
    a, b = array.array("f", ours), array.array("f", theirs)
    if not all(map(math.isfinite, (*a, *b))):
        return math.inf
    return statistics.median(abs(x - y) for x, y in zip(a[1:], b[1:], strict=True))


def digest_mismatches(*, manifest: Manifest, sent: bytes, live: bytes, unverified: Sequence[str] = ()) -> list[str]:
    """Names of the tensors whose live digest is not the sender's. Both are int64 [N] in manifest order.

    Raises:
        VerificationError: a digest list is not as long as the manifest.
    """
    ours, theirs = array.array("q", sent), array.array("q", live)
    wanted = len(manifest.tensors)
    if len(ours) != wanted or len(theirs) != wanted:
        raise VerificationError(
            f"expected {wanted} digests, got {len(ours)} from the trainer and {len(theirs)} from the replica"
        )
    if sent == live:
        return []
    skip = set(unverified)
    names = [t.name for t in manifest.tensors]
    return [name for name, a, b in zip(names, ours, theirs, strict=True) if a != b and name not in skip]


class Publisher:
    """Drives publications over the control socket. One at a time."""

    def __init__(
        self, *, router: ControlRouter, journal: Journal, config: PublicationConfig, trainer_id: str = "trainer"
    ) -> None:
        self._router, self._journal, self._config, self._trainer = router, journal, config, trainer_id
        self.state = State.IDLE
        self.version: int | None = None
        """What is served; None before @0 and while poisoned."""
        self._joined: dict[str, str] = {}  # peer id -> its life, of those in the transfer groups
        self.holding: dict[str, str] = {}
        """Replica -> its life when it took the version that is served."""
        self._manifest: tuple[str, Manifest] | None = None  # (trainer's incarnation, manifest)
        self._content: Content | None = None  # of what was sent last
        self._sent: tuple[int, str] | None = None  # a version, and the digest of its content when it was first sent
        self._asked: dict[str, str] = {}  # node -> the request that an abort would end
        self._planned: dict[str, str] = {}  # what `_joined` was when the replicas had checked the manifest
        self._is_direct = False
        self._part: _Wire | None = None  # what an update of the changed tensors alone brings; None: there is no such update
        self._full_by: str | None = None  # incarnation of the trainer that sent everything last
        self._since_full = 0
        self._pause_started_s = 0.0
        self._resumed_s: float | None = None  # where the replica resumed by itself
        self._may_have_committed = False  # a single replica was told to, and has not answered
        self._is_beside = False  # what is being sent arrives beside the live tensors: no failure can have changed them
        self._abort_first = False
        self._others: tuple[str, ...] = ()
        self._holder: str | None = None  # incarnation of the trainer that holds what is to be published; None: not known

    async def publish(
        self,
        version: int,
        *,
        checkpoint_dir: str,
        replicas: Sequence[str],
        report: Report,
        holder: str | None = None,
        others: Sequence[str] = (),
    ) -> PublicationReport:
        """Publish `version` to all `replicas`, rolling forward after failures, at most `attempts` times; all healthy ones or none.

        A replica that is gone, or that alone fails its verification, is left out (`left_out` in the report) if another one is left.

        Args:
            holder: incarnation of the trainer that holds the version in memory; another one is first given it from `checkpoint_dir`.
            others: replicas that serve `version` already and go on with it, whatever becomes of the others.

        Raises:
            JobFailed | PublicationError | NodeLost: it could not be done; @N still serves, or the replicas are poisoned
                (`self.state` says which).
        """
        self._holder, self._others = holder, tuple(others)
        if self._abort_first:
            await self._abort(replicas, "the orchestrator was restarted in the middle of a publication")
            self._abort_first = False
        left_out: dict[str, str] = {}
        blamed: Counter[str] = Counter()
        failure: Exception | None = None
        for attempt in range(1, self._config.attempts + 1):
            was_poisoned = self.state is State.POISONED
            try:
                if failure is not None:
                    there = await self._recover(version, checkpoint_dir=checkpoint_dir, replicas=replicas, report=report)
                    there = [r for r in there if blamed[r] < BLAMED_OUT] or there
                    why = f"it was not ready, or was the one that failed, after: {failure}"
                    gone = dict.fromkeys(set(replicas) - set(there), why)
                    left_out |= await self._go_on_without(gone, version=version, report=report)
                    replicas = there
                done = await self._attempt(version, checkpoint_dir=checkpoint_dir, replicas=replicas, report=report)
            except JournalError:
                raise
            except Exception as error:
                failure = _as_ours(error)
                await self._after_failure(failure, version=version, replicas=replicas, was_poisoned=was_poisoned, report=report)
                if attempt == self._config.attempts or not _worth_retrying(failure):
                    raise failure from error
                blamed.update([failure.node] if isinstance(failure, JobFailed) else [])
            else:
                done.attempts, done.left_out = attempt, left_out | done.left_out
                return done
        raise AssertionError("unreachable")

    # ------------------------------------------------------------ one attempt

    async def _attempt(
        self, version: int, *, checkpoint_dir: str, replicas: Sequence[str], report: Report
    ) -> PublicationReport:
        started_s = time.monotonic()
        manifest = await self._plan(version, replicas=replicas, report=report)
        wire = self._choose(version, manifest, replicas)
        result = PublicationReport(
            version=version, sent="full" if wire.base is None else "changed", nbytes=wire.manifest.nbytes,
            num_tensors=len(wire.manifest.tensors), replicas=tuple(replicas),
        )  # fmt: skip
        result.seconds["plan"] = time.monotonic() - started_s
        self._step(State.DURABLE, version, report, result, checkpoint_dir=checkpoint_dir)
        if self._config.mode == "shadow":
            result.why_in_place = await self._why_in_place(version, wire, replicas)
            result.mode = "shadow" if result.why_in_place is None else "in_place"
        move = self._move if result.mode == "in_place" else self._move_beside
        await move(version, wire, replicas=replicas, report=report, result=result)
        if self._has_canary(wire):
            await self._check_canary(version, wire.manifest, report=report, result=result)
        # A server that is started anew from here on holds nothing.
        lives = self._lives(result.replicas)
        with self._journal.together():
            self._step(State.COMMITTED, version, report, result)
            assert self._sent is not None
            self._journal.set_digest(*self._sent)
        await self._commit(version, report=report, result=result)
        result.seconds["publish"] = time.monotonic() - started_s
        self.version, self.state = version, advance(self.state, State.IDLE)
        held = {r: life for r, life in self.holding.items() if r in self._others}
        self.holding = held | {r: lives[r] for r in result.replicas}
        self._since_full = 0 if wire.base is None else self._since_full + 1
        if wire.base is None:
            self._full_by = self._router.peers[self._trainer].hello.incarnation
        return result

    def _choose(self, version: int, manifest: Manifest, replicas: Sequence[str]) -> _Wire:
        """Everything, or what training changes on top of the served version.

        The rest of the model is then what the last full update brought: in LoRA training nothing but the adapters is ever written, whatever
        checkpoint or adapter was loaded since. So every replica must hold the served version in the same life, and the trainer's process be
        the one that sent everything; if one replica needs everything, all get it. The same version again is a resync: everything.
        """
        everything = _Wire(manifest=manifest, is_direct=self._is_direct)
        is_known = self.version is not None and version != self.version and self._part is not None
        is_held = all(self.holding.get(r) == self._router.peers[r].life for r in replicas)
        is_same_trainer = self._full_by == self._router.peers[self._trainer].hello.incarnation
        is_due = self._config.full_every is not None and self._since_full + 1 >= self._config.full_every
        if self._part is None or not is_known or not is_held or not is_same_trainer or is_due:
            return everything
        return replace(self._part, base=self.version)

    def _take_digests(self, version: int, wire: _Wire, sent: _Answer) -> None:
        """Note what the trainer sent, and hold it against what the version was when it was first sent.

        Raises:
            ContentChanged: it is another content.
        """
        assert self._content is not None
        is_now = self._content.take(_digests(self._trainer, sent, count=len(wire.manifest.tensors)), wire.indices)
        was = self._journal.digest(version)
        if was is None and self._sent is not None and self._sent[0] == version:
            was = self._sent[1]
        self._sent = (version, was or is_now)
        if was is not None and was != is_now:
            raise ContentChanged(
                f"version {version} is not what it was when it was first sent: the digest of its tensors was "
                f"{was[:16]} and is {is_now[:16]} now. Its checkpoint has changed on the disk, or the trainer computes otherwise (another device or topology). "
                "It is not served again. Publish the trainer's state as a new version (PublishJob), or load another checkpoint first"
            )

    def resume(self, *, version: int | None, state: State) -> None:
        """Stand where the orchestrator stood that was restarted; a transfer that may be in flight is aborted before the next one."""
        self.version, self.state, self._abort_first = version, state, True

    def bare_replicas(self) -> list[str]:
        """Ready replicas that do not hold the served version: started anew since, or never served it."""
        if self.version is None:
            return []
        return [r for r in self._router.nodes("inference") if self.holding.get(r) != self._router.peers[r].life]

    async def _plan(self, version: int, *, replicas: Sequence[str], report: Report) -> Manifest:
        if self.state is State.COMMITTED:
            self.state = State.IDLE
        await self._join(replicas, report=report)
        manifest = await self._get_manifest()
        if self._planned != self._joined:
            await self._check_and_lay_out(version, manifest, replicas)
            self._planned = dict(self._joined)
        self._step(State.PLANNED, version, report, None)
        return manifest

    async def _check_and_lay_out(self, version: int, manifest: Manifest, replicas: Sequence[str]) -> None:
        """Every replica checks the manifest; if all want the same layout and the trainer can send it, it is used from now on.

        The same for the part that training changes, where all replicas complete it to the same whole layers.
        """
        checked = await _all_or_first_error(
            self._router.request(
                replica,
                PrepareUpdate(
                    request_id=new_id("prepare"), deadline_s=self._config.plan_timeout_s, version=version, manifest=manifest
                ),
                phase="planning",
            )
            for replica in replicas
        )
        plans = [_valid(r, _Planned, answer.result) for r, (answer, _) in zip(replicas, checked, strict=True)]
        layout = plans[0].layout if all(plan.layout == plans[0].layout for plan in plans) else None
        self._is_direct = await self._use_layout(layout)
        parts = [plan.changed for plan in plans if plan.changed is not None]
        tensors = parts[0].tensors if parts else ()
        self._part = None
        if tensors and len(parts) == len(checked) and all(p.tensors == tensors for p in parts):
            part_layout = parts[0].layout if all(p == parts[0] for p in parts) else None
            is_direct = await self._use_layout(part_layout, tensors)
            self._part = _Wire(manifest=manifest.part(tensors), is_direct=is_direct, indices=tensors)

    async def _use_layout(self, layout: WireLayout | None, tensors: tuple[int, ...] | None = None) -> bool:
        """Whether the trainer will send the manifest, or the part of these tensors, in the layout."""
        request = UseLayout(request_id=new_id("layout"), deadline_s=self._config.plan_timeout_s, layout=layout, part=tensors)
        answer, _ = await self._router.request(self._trainer, request, phase="planning the layout")
        is_direct = bool(answer.result.get("direct"))
        what = "layout" if tensors is None else f"layout of the {len(tensors)} tensors that change"
        log.info("%s: direct %s, %s", what, is_direct, answer.result.get("reason") or _summary(layout))
        return is_direct

    async def _get_manifest(self) -> Manifest:
        incarnation = self._router.peers[self._trainer].hello.incarnation
        if self._manifest is not None and self._manifest[0] == incarnation:
            return self._manifest[1]
        request = PlanPublication(request_id=new_id("plan"), deadline_s=self._config.plan_timeout_s)
        completed, _ = await self._router.request(self._trainer, request, phase="planning")
        manifest = _valid(self._trainer, Manifest, completed.result)
        self._manifest = (incarnation, manifest)
        if self._content is None or self._content.manifest != manifest:  # else a part may come on top of what was sent before
            self._content = Content(manifest)
        return manifest

    async def _move(
        self, version: int, wire: _Wire, *, replicas: Sequence[str], report: Report, result: PublicationReport
    ) -> None:
        """Send and receive in place at once; the first failure aborts the other side. Ends verified."""
        self._pause_started_s, self._resumed_s = time.monotonic(), None
        sent, received = await self._transfer(
            version, wire, mode="in_place", replicas=replicas, on_progress=self._on_replica(version, report, result)
        )  # fmt: skip
        if self.state is State.APPLYING:
            self._step(State.FINISHED, version, report, result)
        self._take_digests(version, wire, sent)
        await self._verify_live(wire.manifest, sent=sent, received=received, report=report, result=result)
        self._step(State.VERIFIED, version, report, result)
        result.seconds |= _renamed(_seconds(sent[0]), {"total": "send"})
        result.seconds |= _renamed(
            _slowest([_seconds(r[0]) for r in received]), {"pause": "pause_request", "wire": "receive_wire"}
        )

    async def _move_beside(
        self, version: int, wire: _Wire, *, replicas: Sequence[str], report: Report, result: PublicationReport
    ) -> None:
        """Send beside the live tensors and verify on every replica; only then swap on any, and verify what is live. Ends verified.

        A single replica has nobody to wait for: it compares the live tensors with the trainer's digests and commits by itself.
        """
        self._is_beside = True
        began = time.monotonic()
        sent, received = await self._transfer(version, wire, mode="shadow", replicas=replicas, on_progress=lambda _i, _p: None)
        self._take_digests(version, wire, sent)
        wrong = self._compare(wire.manifest, sent=sent, received=received, result=result, what="received")
        if wrong:
            raise VerificationError("; ".join(wrong.values()) + "; none of it is used")
        self._step(State.SHADOWED, version, report, result)
        result.seconds["shadow"] = time.monotonic() - began
        result.seconds |= _renamed(_seconds(sent[0]), {"total": "send"})
        coming = _renamed(_slowest([_seconds(r[0]) for r in received]), {"wire": "receive_wire", "digest": "verify_shadow"})
        result.seconds |= {k: v for k, v in coming.items() if k != "shadow"}
        self._is_beside = False
        is_alone = len(replicas) == 1 and not self._has_canary(wire)
        if is_alone:  # it may commit as soon as it has this: the journal must not say less
            self._step(State.PAUSED, version, report, result)
        self._may_have_committed = is_alone
        self._pause_started_s = time.monotonic()
        swapped = await _all_or_first_error(
            [
                self._request(
                    replica,
                    SwapWeights(
                        request_id=new_id("swap"), deadline_s=self._config.transfer_timeout_s, version=version,
                        pause_mode=self._config.pause_mode, commit_if=sent[1][0] if is_alone else None,
                    ),
                    phase="swapping",
                    on_progress=self._on_replica(version, report, result),
                )
                for replica in replicas
            ],
            on_error=lambda why: self._abort(replicas, why),
        )  # fmt: skip
        self._may_have_committed = False
        self._resumed_s = time.monotonic() if all(a.result.get("committed") for a, _ in swapped) else None
        if self.state is State.APPLYING:
            self._step(State.FINISHED, version, report, result)
        await self._verify_live(wire.manifest, sent=sent, received=swapped, report=report, result=result)
        self._step(State.VERIFIED, version, report, result)
        result.seconds |= _renamed(_slowest([_seconds(r[0]) for r in swapped]), {"pause": "pause_request"})

    async def _why_in_place(self, version: int, wire: _Wire, replicas: Sequence[str]) -> str | None:
        """Ask every replica for room beside its live tensors; None: all have it. Else the first reason, and all receive in place."""
        answers = await _all_or_first_error(
            self._router.request(
                replica,
                PrepareShadow(
                    request_id=new_id("shadow"),
                    deadline_s=self._config.plan_timeout_s,
                    version=version,
                    direct=wire.is_direct,
                    base_version=wire.base,
                    budget_bytes=self._config.shadow_bytes,
                ),
                phase="making room beside the live tensors",
            )
            for replica in replicas
        )
        reasons = [f"{i}: {why}" for i, (a, _) in zip(replicas, answers, strict=True) if (why := a.result.get("why_not"))]
        if reasons:
            log.info("version %d is published in place, not in shadow mode: %s", version, reasons[0])
        return reasons[0] if reasons else None

    def _on_replica(self, version: int, report: Report, result: PublicationReport) -> Callable[[str, Progress], None]:
        """Steps the state as the first replica pauses, and as the first one begins to write."""

        def on_progress(_: str, progress: Progress) -> None:
            if progress.phase == "paused" and self.state in (State.DURABLE, State.SHADOWED):
                self._step(State.PAUSED, version, report, result)
            elif progress.phase == "applying" and self.state is State.PAUSED:
                self._step(State.APPLYING, version, report, result)

        return on_progress

    async def _transfer(
        self, version: int, wire: _Wire, *, mode: PublicationMode, replicas: Sequence[str], on_progress: Callable[[str, Progress], None]
    ) -> tuple[_Answer, list[_Answer]]:  # fmt: skip
        """Send and receive at once; what the trainer and each replica answered."""
        timeout_s = self._config.transfer_timeout_s
        receives = [
            self._request(
                replica,
                ReceiveWeights(
                    request_id=new_id("receive"),
                    deadline_s=timeout_s,
                    version=version,
                    pause_mode=self._config.pause_mode,
                    mode=mode,
                    direct=wire.is_direct,
                    base_version=wire.base,
                ),
                phase="receiving",
                on_progress=on_progress,
            )
            for replica in replicas
        ]
        send = self._request(
            self._trainer,
            SendWeights(request_id=new_id("send"), deadline_s=timeout_s, version=version, changed_only=wire.base is not None),
            phase="sending",
        )
        sent, *received = await _all_or_first_error([send, *receives], on_error=lambda why: self._abort(replicas, why))
        return sent, received

    async def _verify_live(
        self, manifest: Manifest, *, sent: _Answer, received: Sequence[_Answer], report: Report, result: PublicationReport
    ) -> None:
        """The live tensors of every replica against the trainer's.

        Raises:
            VerificationError: no replica has what was sent.
        """
        wrong = self._compare(manifest, sent=sent, received=received, result=result, what="live")
        await self._leave_out(
            {r: VerificationError(f"{why}; it serves nothing until a full resync verifies") for r, why in wrong.items()},
            report=report,
            result=result,
        )

    @staticmethod
    def _compare(
        manifest: Manifest,
        *,
        sent: _Answer,
        received: Sequence[_Answer],
        result: PublicationReport,
        what: Literal["live", "received"],
    ) -> dict[str, str]:
        """Replica -> what is wrong with its tensors."""
        problems: dict[str, str] = {}
        for replica, answer in zip(result.replicas, received, strict=True):
            try:
                unverified = _valid(replica, _Received, answer[0].result).unverified
                live = _digests(replica, answer, count=len(manifest.tensors))
            except JobFailed as error:
                problems[replica] = str(error)
                continue
            result.unverified |= unverified
            wrong = digest_mismatches(manifest=manifest, sent=sent[1][0], live=live, unverified=list(unverified))
            if wrong:
                problems[replica] = (
                    f"{replica}: {len(wrong)} of {len(manifest.tensors)} {what} tensors are not what the trainer sent, "
                    f"first {', '.join(wrong[:5])}"
                )
        result.num_verified = result.num_tensors - len(result.unverified)
        return problems

    async def _leave_out(self, failed: Mapping[str, SpliceError], *, report: Report, result: PublicationReport) -> None:
        """Go on without these replicas: they are told to drop what they received, which poisons them.

        Raises:
            SpliceError: the first one's, if no replica would be left.
        """
        if not failed:
            return
        left = tuple(r for r in result.replicas if r not in failed)
        if not left:
            raise next(iter(failed.values()))
        result.left_out |= await self._go_on_without(
            {r: str(e) for r, e in failed.items()}, version=result.version, report=report
        )
        result.replicas = left

    async def _check_canary(self, version: int, manifest: Manifest, *, report: Report, result: PublicationReport) -> None:
        """Replicas that serve nothing yet score a fixed prompt; the trainer does too.

        Raises:
            VerificationError: every replica computes something else than the trainer.
        """
        # An engine's first request compiles and warms up, whose it ever is.
        began, timeout_s, prompt = time.monotonic(), self._config.plan_timeout_s, canary_prompt(manifest)
        replicas = result.replicas
        answers = await _all_or_first_error(
            self._router.request(
                replica,
                CheckCanary(request_id=new_id("canary"), deadline_s=timeout_s, version=version, tokens=prompt),
                phase="checking the canary",
            )
            for replica in replicas
        )
        asked = {replica: buffers[0] for replica, (_, buffers) in zip(replicas, answers, strict=True) if buffers}
        if not asked:
            return
        specs = forward_specs(num_sequences=1, num_tokens=len(prompt))
        forward = Forward(request_id=new_id("canary"), deadline_s=timeout_s, tensors=specs)
        inputs = [array.array("i", prompt).tobytes(), array.array("i", [len(prompt)]).tobytes()]
        _, own = await self._router.request(self._trainer, forward, buffers=inputs, phase="checking the canary")
        allowed = max(CANARY_TOLERANCE.get(t.dtype, 0.5) for t in manifest.tensors)
        result.canary = {replica: canary_difference(own[0], logprobs) for replica, logprobs in asked.items()}
        wrong = {
            replica: VerificationError(
                f"{replica}: the served log-probs of a fixed prompt differ from the trainer's by {nats:.2g} nats in the "
                f"median, {allowed:g} are allowed, although every digest agrees: vLLM and Megatron do not compute the same model "
                "(compare their configurations and versions; --no-canary serves it all the same)"
            )
            for replica, nats in result.canary.items()
            if not nats <= allowed
        }
        await self._leave_out(wrong, report=report, result=result)
        result.seconds["canary"] = time.monotonic() - began

    def _has_canary(self, wire: _Wire) -> bool:
        return self._config.canary and wire.base is None

    async def _commit(self, version: int, *, report: Report, result: PublicationReport) -> None:
        """All replicas; one that is lost here has verified, and may or may not serve the version; one that was lost before, and has given up what it
        received, says that it is not ready.

        Raises:
            JobFailed: a replica refused. NodeLost: all of them are gone.
        """
        resumed_s = [self._pause_started_s]

        async def commit(replica: str) -> None:
            request = CommitUpdate(request_id=new_id("commit"), deadline_s=self._config.commit_timeout_s, version=version)
            await self._router.request(replica, request, phase="committing")
            resumed_s.append(time.monotonic())

        outcomes = await asyncio.gather(*(commit(r) for r in result.replicas), return_exceptions=True)
        failed = {r: outcome for r, outcome in zip(result.replicas, outcomes, strict=True) if outcome is not None}
        left_out: dict[str, SpliceError] = {}
        for replica, error in failed.items():
            if not isinstance(error, NodeLost) and not (isinstance(error, JobFailed) and error.code == ErrorCode.NOT_READY):
                raise error
            left_out[replica] = error
        await self._leave_out(left_out, report=report, result=result)
        report("resumed", {"pause_s": (self._resumed_s or max(resumed_s)) - self._pause_started_s})

    # ------------------------------------------------------------ groups

    async def _join(self, replicas: Sequence[str], *, report: Report) -> None:
        """Make sure that trainer and replicas share transfer groups: once per set of processes."""
        members = [self._trainer, *replicas]
        wanted = self._lives(members)
        if self._holder is not None and self._router.peers[self._trainer].hello.incarnation != self._holder:
            raise NodeLost("the trainer was restarted and no longer holds the version to be published")
        if wanted == self._joined:
            return
        self._joined = {}
        report("joining", {"replicas": list(replicas)})
        timeout_s = self._config.join_timeout_s
        listening: asyncio.Future[dict[str, Rendezvous]] = asyncio.get_running_loop().create_future()

        def on_open(_: str, progress: Progress) -> None:
            if progress.phase == "listening" and not listening.done():
                said = progress.detail.get("rendezvous")
                listening.set_result({r: _valid(self._trainer, Rendezvous, (said or {}).get(r)) for r in replicas})

        workers = {r: InferenceDetail.model_validate(self._router.peers[r].detail).workers for r in replicas}
        opened = self._request(
            self._trainer,
            OpenTransferGroup(
                request_id=new_id("open"),
                deadline_s=timeout_s,
                transport=self._config.transport,
                replicas=workers,
                bucket_bytes=self._config.bucket_bytes,
            ),
            phase="opening the transfer group",
            on_progress=on_open,
        )

        async def join_all() -> None:
            try:
                where = await asyncio.wait_for(listening, timeout_s)
            except TimeoutError:
                raise JobFailed(
                    code=ErrorCode.TRANSFER_TIMEOUT, node=self._trainer, phase="opening the transfer group",
                    message=f"the trainer did not say where it listens within {timeout_s:g} s", remedy="look at the trainer's log",
                ) from None  # fmt: skip
            await _all_or_first_error(
                self._router.request(
                    replica,
                    JoinTransferGroup(request_id=new_id("join"), deadline_s=timeout_s, rendezvous=where[replica]),
                    phase="joining the transfer group",
                )
                for replica in replicas
            )

        async def stop_listening(why: str) -> None:
            """Else the trainer would wait for the others until the deadline, and be deaf to everything else."""
            listening.cancel()
            await self._tell(self._trainer, AbortSend(reason=why, request_id=self._asked.get(self._trainer)))

        await _all_or_first_error([opened, join_all()], on_error=stop_listening)
        if self._lives(members) != wanted:
            raise NodeLost("the trainer or a replica was restarted while the transfer group was opened")
        self._joined = wanted

    def _lives(self, node_ids: Sequence[str]) -> dict[str, str]:
        return {i: self._router.peers[i].life for i in node_ids if i in self._router.peers}

    async def leave(self, replicas: Sequence[str]) -> None:
        """Both sides leave the groups; failures are logged, because the processes may be gone."""
        self._joined = {}
        for node_id in [self._trainer, *replicas]:
            try:
                await self._router.request(
                    node_id, LeaveTransferGroup(request_id=new_id("leave"), deadline_s=30.0), phase="leaving the transfer group"
                )
            except SpliceError as error:
                log.warning("%s did not leave the transfer group: %s", node_id, error)

    async def leave_all(self) -> None:
        """Everybody that joined leaves the groups; the next publication joins anew."""
        joined = [i for i in self._joined if i != self._trainer and self._router.is_connected(i)]
        if self._joined:
            await self.leave(joined)

    # ------------------------------------------------------------ failure and recovery

    async def _request(
        self,
        node_id: str,
        request: OpenTransferGroup | SendWeights | ReceiveWeights | SwapWeights,
        *,
        phase: str,
        on_progress: Callable[[str, Progress], None] | None = None,
    ) -> _Answer:
        """A request that an abort can end."""
        self._asked[node_id] = request.request_id
        return await self._router.request(node_id, request, phase=phase, on_progress=on_progress)

    async def _abort(self, replicas: Sequence[str], why: str) -> None:
        """End what is under way. After a restart of ours nobody knows its ids: then whatever is under way."""
        await self._tell(self._trainer, AbortSend(reason=why, request_id=self._asked.get(self._trainer)))
        for replica in replicas:
            await self._tell(replica, AbortUpdate(reason=why, request_id=self._asked.get(replica)))

    async def _tell(self, node_id: str, message: AbortSend | AbortUpdate | LeaveAlias) -> None:
        try:
            await self._router.send(node_id, message)
        except NodeLost as error:
            log.warning("could not send %s to %s: %s", message.kind, node_id, error)

    async def _after_failure(
        self, error: Exception, *, version: int, replicas: Sequence[str], was_poisoned: bool, report: Report
    ) -> None:
        failed_in, was_beside, self._is_beside = self.state, self._is_beside, False
        if self._may_have_committed and not (isinstance(error, JobFailed) and error.is_answer):
            self.state = failed_in = State.APPLYING  # without its word, it may serve either version
        self._may_have_committed = False
        self.state = State.IDLE if self._others else after_failure(self.state, was_poisoned=was_poisoned)
        self._joined, self._planned = {}, {}
        self._manifest = None
        if not was_beside:
            for replica in replicas:
                self.holding.pop(replica, None)
        with self._journal.together():
            self._journal.record_publication(version=version, state=f"failed:{failed_in}", detail=str(error)[:2000])
            if self._sent is not None and self._sent[0] == version:
                self._journal.set_digest(version, self._sent[1])
        if failed_in not in (State.IDLE, State.PLANNED, State.POISONED):
            await self._abort(replicas, f"publication of version {version} failed while {failed_in}: {error}")
        if self.state is State.POISONED:
            self.version = None
        report("failed", {"state": str(failed_in), "left": str(self.state), "error": str(error)[:500]})
        log.warning("publication of version %d failed while %s, now %s: %s", version, failed_in, self.state, error)

    async def _recover(self, version: int, *, checkpoint_dir: str, replicas: Sequence[str], report: Report) -> list[str]:
        """Wait for the trainer (its launcher restarts it) and put `version` back into it; returns the replicas that are there.

        Raises:
            NodeLost: the trainer, or every replica, was not ready in time.
        """
        report("recovering", {"version": version})
        timeout_s = self._config.recovery_timeout_s
        await self._router.wait_heard([self._trainer, *replicas], since_s=time.monotonic())
        await self._router.wait_ready([self._trainer], timeout_s=timeout_s)
        await self._router.wait_ready(replicas, timeout_s=timeout_s, one_is_enough=True)
        request = LoadCheckpoint(
            request_id=new_id("load"), deadline_s=self._config.plan_timeout_s, checkpoint_dir=checkpoint_dir
        )
        holder = self._router.peers[self._trainer].hello.incarnation
        await self._router.request(self._trainer, request, phase="restoring the version to be published")
        self._holder = holder
        deadline_s = time.monotonic() + timeout_s
        # They may have gone while the trainer was loading.
        while not (there := [r for r in self._router.nodes("inference") if r in replicas]):
            await self._router.wait_ready(replicas, timeout_s=max(0.1, deadline_s - time.monotonic()), one_is_enough=True)
        return there

    async def _go_on_without(self, failed: Mapping[str, str], *, version: int, report: Report) -> dict[str, str]:
        """They are to drop what they received and to serve nothing: the alias has one version. Returns why, for each."""
        whys = {replica: why[:500] for replica, why in sorted(failed.items())}
        for replica, why in whys.items():
            log.warning("version %d goes on without %s: %s", version, replica, why)
            report("left_out", {"replica": replica, "error": why})
            await self._tell(replica, AbortUpdate(reason=why, request_id=self._asked.get(replica)))
            leave = LeaveAlias(request_id=new_id("out"), deadline_s=self._config.commit_timeout_s, reason=why)
            await self._tell(replica, leave)  # its answer is not waited for: who is left out must not hold the others up
        return whys

    def _step(
        self, to: State, version: int, report: Report, result: PublicationReport | None, *, checkpoint_dir: str | None = None
    ) -> None:
        self.state = advance(self.state, to)
        self._journal.record_publication(version=version, state=str(to), checkpoint_dir=checkpoint_dir)
        if result is not None:
            result.states.append(str(to))
        report(str(to), {"version": version})


def _summary(layout: WireLayout | None) -> str:
    if layout is None:
        return "manifest order"
    counts = {k: sum(len(c.tensors) for c in layout.chunks if c.kind == k) for k in ("live", "staged", "reload")}
    return f"{len(layout.chunks)} chunks, tensors {counts}, not live: {layout.why_not_live}"


class _Planned(BaseModel):
    """A replica's answer to `PrepareUpdate`."""

    layout: WireLayout | None = None
    changed: ManifestPart | None = None


class _Received(BaseModel):
    """A replica's answer to `ReceiveWeights` and `SwapWeights`."""

    unverified: dict[str, str] = {}


_Model = TypeVar("_Model", bound=BaseModel)


def _valid(node_id: str, model: type[_Model], value: object) -> _Model:
    """A node's answer as what it should be.

    Raises:
        JobFailed: it is something else; blames the node.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _nonsense(node_id, f"is no {model.__name__.strip('_')}: {briefly(error)}") from None


def _digests(node_id: str, answer: _Answer, *, count: int) -> bytes:
    """The int64 digests in a node's answer, one for each tensor.

    Raises:
        JobFailed: there are others, or none; blames the node.
    """
    sizes = [len(buffer) for buffer in answer[1]]
    if sizes != [8 * count]:
        raise _nonsense(node_id, f"has buffers of {sizes} bytes where {count} digests of 8 bytes should be")
    return answer[1][0]


def _nonsense(node_id: str, what: str) -> JobFailed:
    return JobFailed(
        code=ErrorCode.PROTOCOL, node=node_id, phase="publishing", message=f"the answer of {node_id} {what}",
        remedy="install the same splice on all nodes, and restart this one",
    )  # fmt: skip


def _as_ours(error: Exception) -> SpliceError | OSError:
    if isinstance(error, SpliceError | OSError):
        return error
    log.error("a publication failed by a defect of the orchestrator", exc_info=error)
    return PublicationError(f"a defect of the orchestrator: {type(error).__name__}: {error}")


def _worth_retrying(error: Exception) -> bool:
    return not isinstance(error, ContentChanged) and not (
        isinstance(error, JobFailed) and error.code in ("plan_refused", "bad_input")
    )


def _seconds(completed: Completed) -> dict[str, float]:
    """What a node says that it took; what is no number is left out."""
    said = completed.result.get("seconds")
    return {str(k): float(v) for k, v in said.items() if isinstance(v, int | float)} if isinstance(said, dict) else {}


def _slowest(all_seconds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {k: max(s.get(k, 0.0) for s in all_seconds) for k in {k for s in all_seconds for k in s}}


def _renamed(seconds: dict[str, float], names: dict[str, str]) -> dict[str, float]:
    return {names.get(k, k): v for k, v in seconds.items()}


async def _all_or_first_error(coroutines, on_error=None):  # type: ignore[no-untyped-def]
    """Results of all, in order; on the first exception call `on_error(why)`, wait for the others to end, and raise it."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        first = next((t.exception() for t in done if t.exception() is not None), None)
        if first is not None:
            if on_error is not None:
                await on_error(str(first)[:500])
                # The aborted side answers with its own `Failed`; a dead one is found by its heartbeat.
                await asyncio.wait(pending, timeout=30.0) if pending else None
            raise first
        return [t.result() for t in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
