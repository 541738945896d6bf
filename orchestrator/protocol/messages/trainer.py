"""Requests to the trainer and its launchers, in addition to `RunJob`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from orchestrator.protocol.messages.base import Message, Request, Transport
from orchestrator.protocol.messages.manifest import Fp8Weights, WireLayout


class ReleaseMemory(Request):
    """Move weights, adapters, optimizer state and pending gradients to host memory.

    Transfer groups stay joined. The next request that needs the state moves it back.
    `Completed.result` has rank 0's `offloaded_bytes`, and `resident_bytes`, which is 0.
    """

    kind: Literal["ReleaseMemory"] = "ReleaseMemory"


class PlanPublication(Request):
    """Return the `Manifest` as a dict in `Completed.result`. No data moves."""

    kind: Literal["PlanPublication"] = "PlanPublication"


class OpenTransferGroup(Request):
    """Close existing transfer groups, open one for each replica, and join all before the deadline.

    Before joining, the trainer reports
    `Progress(phase="listening", detail={"rendezvous": {node_id: ...}})`.
    """

    kind: Literal["OpenTransferGroup"] = "OpenTransferGroup"
    transport: Transport
    replicas: dict[str, int]
    """Inference node id -> its number of workers."""


class UseLayout(Request):
    """Plan to send the manifest in this order and in these pieces. No data moves.

    `Completed.result["why_not"]` is None, or why the trainer cannot send in this order. Every
    trainer can send in manifest order.
    """

    kind: Literal["UseLayout"] = "UseLayout"
    layout: WireLayout
    part: tuple[int, ...] | None = None
    """Indices of the tensors that an update of changed tensors sends; `layout` then refers to them.
    None: the whole manifest, which also discards an earlier part."""
    keeps: tuple[str, ...] | None = None
    """What each worker of a replica keeps of the whole manifest (`weight_transfer.edges`), as text:
    every rank sends to each worker what it keeps. `Completed.result["tables"]` then has one table
    for each worker, for `UseEdges`. None: rank 0 sends whole chunks to all."""
    fp8: Fp8Weights | None = None
    """Which tensors travel as FP8. The layout and the part then count in `fp8_manifest`."""


class EncodeChanges(Request):
    """Encode the elements of an update that differ from an earlier version. Nothing is sent.

    `Completed.result` has `nbytes` and `elements`, which all ranks send to a replica. Or `why_not`:
    why whole tensors must be sent. If the base version was read from `base_dir`, or `prove` is
    true, one int64 buffer [N] has the digests of its tensors, as `SendWeights` has those of the
    new ones.
    """

    kind: Literal["EncodeChanges"] = "EncodeChanges"
    version: int = Field(ge=0)
    base_version: int = Field(ge=0)
    """What every replica holds."""
    base_dir: str | None = None
    """Checkpoint of that version, for a trainer process that did not send it."""
    prove: bool = False
    """The orchestrator does not know the digests of the base version's tensors."""
    changed_only: bool = False
    """As in `SendWeights`."""
    unread: tuple[int, ...] = ()
    """Indices of the update's tensors that a replica cannot read back, so it cannot change
    elements of them."""
    most_bytes: int = Field(ge=0)
    """More encoded bytes are not worth it; the trainer then stops."""


class SendWeights(Request):
    """Export, merge and send every tensor of the manifest to every group, in the order of
    `UseLayout`.

    `Completed` carries one int64 buffer [N]: the digest of each of the N tensors, in manifest
    order.
    """

    kind: Literal["SendWeights"] = "SendWeights"
    version: int = Field(ge=0)
    changed_only: bool = False
    """Send the part that `UseLayout.part` named."""
    elements: bool = False
    """Send what `EncodeChanges` encoded."""
    remember: bool = False
    """Keep what was sent, so that the next update can be one of changed elements."""


class AbortSend(Message):
    """Abort a transfer at once; the aborted request answers with its own `Failed`. Not a
    request."""

    kind: Literal["AbortSend"] = "AbortSend"
    reason: str
    request_id: str | None = None
    """The `OpenTransferGroup` or `SendWeights` to abort; any other continues. None: the present
    one."""


class StartTrainer(Request):
    """Launcher: start the trainer's processes of this host unless they run.

    `Completed` means that they were started; `Ready` follows later.
    """

    kind: Literal["StartTrainer"] = "StartTrainer"


class StopTrainer(Request):
    """Launcher: `Completed` means that this host has no trainer process any more."""

    kind: Literal["StopTrainer"] = "StopTrainer"
    grace_s: float = Field(ge=0)
    """Seconds after `Shutdown` within which they may end by themselves; signals follow."""
