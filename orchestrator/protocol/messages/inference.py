"""Requests to the inference nodes, in the order of a publication."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from orchestrator.protocol.messages.base import (
    LayoutOrder,
    Message,
    PauseMode,
    PublicationMode,
    Request,
    Transport,
)
from orchestrator.protocol.messages.manifest import Manifest, Rendezvous


class JoinTransferGroup(Request):
    """All workers join the trainer's group, and leave any earlier one first.

    In a chain of replicas only the first one does. Each worker of another joins the worker of the
    same position in the replica before it.
    """

    kind: Literal["JoinTransferGroup"] = "JoinTransferGroup"
    rendezvous: Rendezvous
    before: tuple[Rendezvous, ...] = ()
    """By position, where the workers of the replica before this one listen. Empty: join the
    trainer at `rendezvous`."""
    relays: bool = False
    """Whether each worker passes on what arrives, to the worker that joins where `OpenRelay` has it
    listen."""


class OpenRelay(Request):
    """Each worker listens for the worker of the same position in the next replica of a chain.

    `Completed.result["rendezvous"]` has a `Rendezvous` as JSON for each worker, by position.
    """

    kind: Literal["OpenRelay"] = "OpenRelay"
    transport: Transport
    towards: str
    """tcp: the trainer's host. Workers listen at their own address on the route to it."""


class LeaveTransferGroup(Request):
    """Both sides: abort and destroy the communicators."""

    kind: Literal["LeaveTransferGroup"] = "LeaveTransferGroup"


class PrepareUpdate(Request):
    """Check the manifest against the model's placement plan. Nothing pauses and nothing changes.

    `Completed.result["layout"]` is the `WireLayout` in which this replica receives. `["changed"]`
    is the `ManifestPart` for `manifest.changed`, or None if that is everything. `["fp8"]` is None,
    or the `Fp8Weights` of this replica; layout and part then count in `fp8_manifest`. `["keeps"]`
    is None, or in the order "edges" what each worker keeps. It ends in
    `Failed(code="plan_refused")` if a name, dtype or shape does not fit, or if a weight of the
    model would get no data. The message names the tensors.
    """

    kind: Literal["PrepareUpdate"] = "PrepareUpdate"
    version: int = Field(ge=0)
    manifest: Manifest
    order: LayoutOrder = "own"
    """edges: each worker receives only what it keeps, from each rank of the trainer; `UseEdges`
    follows. own: the fastest for this replica. shared: without `live` chunks, the same for any
    number of workers. manifest: `reload` chunks in manifest order, which every trainer can send."""


class UseEdges(Request):
    """Receive updates from the trainer's ranks as the planned layout's tables say. Nothing pauses
    and nothing changes. It follows `PrepareUpdate` with the order "edges".

    It ends in `Failed(code="plan_refused")` if a worker would not receive what it keeps, each
    element once.
    """

    kind: Literal["UseEdges"] = "UseEdges"
    changed_only: bool
    """Whether the tables are those of the changed part."""
    tables: tuple[str, ...] = Field(min_length=1)
    """For each worker `weight_transfer.edges.table_of`, as text."""


class ReceiveWeights(Request):
    """Pause, receive, finish, then digest the live tensors. Generation stays paused.

    In mode "shadow", generation continues: the replica receives next to the live tensors, digests
    what came, and changes nothing, whatever fails. `SwapWeights` follows.

    In place, `Progress(phase="paused")` and `Progress(phase="applying")` come once generation has
    paused, before the first receive. Until then a failure leaves @N serving. `Completed` carries
    one int64 buffer [N] of digests in manifest order, and `result = {"seconds": {...},
    "unverified": {name: reason}, "spans": ...}`.
    """

    kind: Literal["ReceiveWeights"] = "ReceiveWeights"
    version: int = Field(ge=0)
    pause_mode: PauseMode = "keep"
    drain_s: float = Field(default=2.0, ge=0)
    """How long requests for `name@N` may take to finish before they are ended, in seconds."""
    mode: PublicationMode = "in_place"
    """"shadow": into the memory that `PrepareShadow` allocated."""
    base_version: int | None = Field(default=None, ge=0)
    """None: the whole manifest comes. Else only the changed part comes, on top of this version. A
    replica that serves another version answers `Failed(code="base_missing")` and pauses nothing."""
    elements: bool = False
    """Only changed elements come, on top of `base_version`."""
    whole: bool = False
    """They are of the whole manifest, not only of its changed part."""

    @property
    def is_part(self) -> bool:
        """Whether the update is of the changed part."""
        return self.base_version is not None and not self.whole


class PrepareShadow(Request):
    """Allocate memory for a `ReceiveWeights(mode="shadow")`. Generation continues.

    `Completed.result["why_not"]` is None, or why the replica must receive in place: the update does
    not fit, or the replica serves nothing.
    """

    kind: Literal["PrepareShadow"] = "PrepareShadow"
    version: int = Field(ge=0)
    base_version: int | None = Field(default=None, ge=0)
    """As in `ReceiveWeights`."""
    elements: bool = False
    """As in `ReceiveWeights`."""
    whole: bool = False
    """As in `ReceiveWeights`."""
    nbytes: int | None = Field(default=None, ge=0)
    """Bytes of the changed elements; no worker receives more."""
    budget_bytes: int = Field(ge=0)
    """Most bytes that each worker may use in addition to its model."""

    @property
    def is_part(self) -> bool:
        """See `ReceiveWeights.is_part`."""
        return self.base_version is not None and not self.whole


class SwapWeights(Request):
    """Pause, copy what was received into the live tensors, then digest them.

    Generation stays paused, except as `commit_if` says. `Progress` is as in
    `ReceiveWeights(mode="in_place")`: before "applying" a failure leaves @N serving; afterwards it
    poisons the replica. "paused" may come before vLLM's queued step has ended; the swap waits for
    it. `Completed` carries the digests of the live tensors, and `result["committed"]`.
    """

    kind: Literal["SwapWeights"] = "SwapWeights"
    version: int = Field(ge=0)
    pause_mode: PauseMode = "keep"
    drain_s: float = Field(default=2.0, ge=0)
    """How long requests for `name@N` may take to finish before they are ended, in seconds."""
    commit_if: bytes | None = None
    """For the only replica: the trainer's digests, int64 in manifest order. If the live tensors
    have exactly these, the replica moves its alias and resumes at once. `CommitUpdate` is then a
    no-op."""


class CheckCanary(Request):
    """Score these tokens with the received weights, before anybody is served by them.

    `Completed` carries one float32 buffer [T], the log-prob of each token given those before it, 0
    for the first. A replica that was serving does not run its engine between two versions: it
    returns no buffer, and `result["skipped"]` says why.
    """

    kind: Literal["CheckCanary"] = "CheckCanary"
    version: int = Field(ge=0)
    tokens: tuple[int, ...] = Field(min_length=2)


class CommitUpdate(Request):
    """Move the alias to `version` and resume."""

    kind: Literal["CommitUpdate"] = "CommitUpdate"
    version: int = Field(ge=0)


class AbortUpdate(Message):
    """Abort the update in flight at once; its request answers with its own terminal message.

    Before the first byte, @N continues. Afterwards the replica is poisoned: it serves nothing until
    a full resync. Not a request.
    """

    kind: Literal["AbortUpdate"] = "AbortUpdate"
    reason: str
    request_id: str | None = None
    """The `ReceiveWeights` or `SwapWeights` to abort; any other update continues. If it has not
    arrived yet, it fails on arrival. None: the update in flight."""


class LeaveAlias(Request):
    """Stop serving (503) until the next commit: the other replicas moved on."""

    kind: Literal["LeaveAlias"] = "LeaveAlias"
    reason: str
