"""The transfer groups and the layouts of every rank, and the sender of rank 0."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.processes.interfaces import address_towards
from orchestrator.protocol.messages import Manifest, OpenTransferGroup, Rendezvous
from trainer_node.export.changes import Encoded, Export
from trainer_node.export.fp8_export import Fp8Export
from trainer_node.export.fp8_steps import Fp8Steps
from trainer_node.export.wire_export import WireExport
from trainer_node.ranks import gpu, objects
from trainer_node.ranks.abort_signal import AbortSignal
from trainer_node.ranks.lockstep import agree, send_error
from weight_transfer.changes import send_changes
from weight_transfer.chunks import ChunkSender, Fill, SendReport
from weight_transfer.edges import Step, Table, in_turn
from weight_transfer.groups import GroupListener, TransferGroup, open_listener

log = logging.getLogger("splice.trainer")
OTHERS_S = 5.0
"""Seconds that the other ranks wait longer for workers than rank 0. Workers join rank 0 first, so
its error names the one that is missing, and ends the others' joins. It is less than the
orchestrator's `open_requests.DEADLINE_GRACE_S`."""
NO_GROUP = "no transfer group is open; send OpenTransferGroup first"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """A planned layout: the manifest indices of each chunk, and the export that fills them."""

    manifest: Manifest
    order: Sequence[Sequence[int]]
    export: Export
    reloaded: frozenset[int] = frozenset()
    """Tensors of the manifest that a replica's own loaders take."""

    @property
    def steps(self) -> Sequence[Step] | None:
        """What every rank sends to each worker. None: rank 0 sends whole chunks."""
        return self.export.steps if isinstance(self.export, WireExport | Fp8Steps) else None

    @property
    def tables(self) -> Sequence[Table]:
        """What each worker receives, if every rank sends."""
        return self.export.tables if isinstance(self.export, WireExport | Fp8Steps) else ()


class Transfer:
    """The transfer groups, the sender and the planned layouts.

    A failed send closes the groups. The next send then refuses and names the request to send first.
    """

    def __init__(self, *, host: str, device: torch.device) -> None:
        self._host, self._device = host, device
        self.signal = AbortSignal()
        self._lock = threading.Lock()
        self._listeners: dict[str, GroupListener] = {}
        self._groups: dict[str, TransferGroup] = {}
        self._sender: ChunkSender | None = None
        self._chunks: dict[bool, Chunks] = {}
        """Whether an update is partial (`changed_only`) -> its chunks."""
        self._changed_only = False
        self._has_sent = False
        """Whether everything was sent since the layouts were planned."""
        self._why_not = NO_GROUP
        self.encoded: Encoded | None = None
        """What `EncodeChanges` left for the next send."""

    # ------------------------------------------------------------ groups

    def open(
        self,
        message: OpenTransferGroup,
        *,
        on_listening: Callable[[dict[str, Any]], None],
        group: Any = None,
    ) -> None:
        """Listen, report the addresses, and join every replica before the deadline; all or none.

        A collective of all ranks, each of which is a sender of every replica's group.

        Args:
            on_listening: gets the rendezvous of each replica's workers.
            group: the gloo control group of all ranks.

        Raises:
            TransferError, ConfigError: see `weight_transfer.groups`.
            SendFailed: another rank failed.
        """
        self.close()
        rank, _ = _rank_and_world_size()
        deadline = time.monotonic() + message.deadline_s + (OTHERS_S if rank else 0.0)
        joined: dict[str, TransferGroup] = {}
        try:
            with _agreed(group):
                listeners = self._listen(message)
            everyones = _everyones(listeners, group)
            with _agreed(group), self.signal.watching(lambda _: self._close_listeners()):
                addresses = {r: x.meet(everyones[r]) for r, x in listeners.items()}
                on_listening({r: x.model_dump(mode="python") for r, x in addresses.items()})
                for replica, listener in listeners.items():
                    joined[replica] = listener.join(max(0.001, deadline - time.monotonic()))
        except BaseException as error:
            for one in joined.values():
                one.close()
            self._why_not = (
                f"opening the transfer group failed ({error}); send OpenTransferGroup again"
            )
            raise
        finally:
            self._close_listeners()
        with self._lock:
            self._groups = joined

    def _listen(self, message: OpenTransferGroup) -> dict[str, GroupListener]:
        """Open this rank's listener of every replica."""
        listeners: dict[str, GroupListener] = {}  # an abort empties `_listeners`
        rank, senders = _rank_and_world_size()
        for replica, workers in message.replicas.items():
            listeners[replica] = open_listener(
                transport=message.transport,
                host=self._host if rank == 0 else _own_host(self._host),
                world_size=senders + workers,
                device=self._device,
                senders=senders,
                rank=rank,
            )
            with self._lock:
                self._listeners[replica] = listeners[replica]
        return listeners

    def problem(self) -> str | None:
        """Why nothing can be sent now; None if it can."""
        return None if self._groups or self._sender is not None else self._why_not

    def abort(self, reason: str) -> None:
        """End a join or send, on every rank. Callable from any thread."""
        self.signal.raise_(reason)
        self._abort_here(reason)

    def _abort_here(self, reason: str) -> None:
        self._close_listeners()
        with self._lock:
            sender, groups = self._sender, list(self._groups.values())
        if sender is not None:
            sender.abort(reason)
        else:
            for group in groups:
                group.abort(reason)

    def close(self) -> None:
        """Leave every group. Safe to call twice. After a CUDA fault the process's end does it."""
        self._close_listeners()
        if not gpu.works(self._device):
            return
        with self._lock:
            sender, self._sender = self._sender, None
            groups, self._groups = self._groups, {}
        if sender is not None:
            sender.close()  # closes the groups too
        else:
            for group in groups.values():
                group.close()
        self._why_not = NO_GROUP

    def _close_listeners(self) -> None:
        with self._lock:
            listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.close()

    # ------------------------------------------------------------ layouts

    def use_chunks(self, chunks: Chunks | None, *, changed_only: bool) -> None:
        """Send these chunks from now on, for full or for partial updates; None forgets them."""
        self.free_buffers()
        self._has_sent = False
        self._chunks.pop(changed_only, None)
        if chunks is not None:
            self._chunks[changed_only] = chunks

    @property
    def has_part(self) -> bool:
        """Whether a partial update is planned."""
        return True in self._chunks

    def choose(self, *, changed_only: bool) -> Chunks | None:
        """Return the planned chunks of this kind of update. Frees the buffers of the other kind."""
        if changed_only != self._changed_only:
            self.free_buffers()
        self._changed_only = changed_only
        return self._chunks.get(changed_only)

    def prepare(self) -> None:
        """Make what the next send needs, so that no pause waits for it: the sender with its tables,
        and an FP8 export's magnitudes of the new weights. After a full send, the next one is
        expected to be of the changed part.
        """
        chunks = self.choose(
            changed_only=self._changed_only or (self._has_sent and True in self._chunks)
        )
        if chunks is None:
            return
        sends = chunks.steps is not None or _rank_and_world_size()[0] == 0
        try:
            if sends and self._groups:
                self._sender_of(chunks)
            if isinstance(chunks.export, Fp8Export | Fp8Steps):
                chunks.export.prepare()
        except (RuntimeError, MemoryError) as error:  # a save must not fail for it; the send tries
            log.warning("the send is not prepared: %s", error)
            if isinstance(chunks.export, Fp8Export | Fp8Steps):
                chunks.export.forget_prepared()

    def forget_prepared(self) -> None:
        """Trust nothing that was prepared, because the weights may change now."""
        self.encoded = None
        for chunks in self._chunks.values():
            if isinstance(chunks.export, Fp8Export | Fp8Steps):
                chunks.export.forget_prepared()

    def free_buffers(self) -> None:
        """Free the buffers of the sender and of the exchange between ranks; groups stay joined."""
        for chunks in self._chunks.values():
            chunks.export.release()
        with self._lock:
            if self._sender is not None:
                self._sender.release()
            self._sender = None

    # ------------------------------------------------------------ a send

    def send(
        self,
        chunks: Chunks,
        *,
        deadline: float,
        agreement: AbstractContextManager[None],
        on_filled: Fill | None = None,
    ) -> SendReport:
        """Send the chunks to every group, and receive all that the other ranks contribute.

        After a failure on any rank, the groups are closed.

        Args:
            on_filled: as in `ChunkSender.send`.
            deadline: `time.monotonic()` at which the last chunk must have left.
            agreement: `Lockstep.agree`, so that every rank learns of a failure.
        """
        try:
            with agreement, self._watching(chunks):
                try:
                    sender = self._sender_of(chunks)
                    report = sender.send(
                        deadline_s=deadline - time.monotonic(), on_filled=on_filled
                    )
                finally:
                    chunks.export.drain()
        except BaseException as error:
            self.forget_prepared()  # its work may still be queued on its own streams
            self.close()
            self._why_not = f"the last transfer failed ({error}); send OpenTransferGroup first"
            raise
        self._has_sent = True
        return report

    def send_changes(
        self,
        chunks: Chunks,
        encoded: Encoded,
        *,
        deadline: float,
        agreement: AbstractContextManager[None],
    ) -> SendReport:
        """Send what was encoded to every group; otherwise as `send`. On ranks that send whole
        chunks to nobody it only waits for the others."""
        began = time.monotonic()
        rank, _ = _rank_and_world_size()
        try:
            with agreement, self._watching(chunks):
                send_changes(
                    in_turn(self._groups, rank) if chunks.steps is not None or rank == 0 else {},
                    encoded.buffers,
                    fill=encoded.fill,
                    device=self._device,
                    deadline=deadline,
                )
        except BaseException as error:
            self.close()
            self._why_not = f"the last transfer failed ({error}); send OpenTransferGroup first"
            raise
        seconds = {"total": time.monotonic() - began}
        return SendReport(digests_N=encoded.digests_N, nbytes=encoded.nbytes, seconds=seconds)

    def _watching(self, chunks: Chunks) -> AbstractContextManager[None]:
        """If every rank sends, a rank that fails or is aborted ends the others' sends."""
        return nullcontext() if chunks.steps is None else self.signal.watching(self._abort_here)

    def _sender_of(self, chunks: Chunks) -> ChunkSender:
        with self._lock:
            if self._sender is None:
                self._sender = ChunkSender(
                    groups=self._groups
                    if self._device.type == "cuda"
                    else in_turn(self._groups, _rank_and_world_size()[0]),
                    manifest=chunks.manifest,
                    chunks=chunks.order,
                    fill=chunks.export.fill,
                    resident=chunks.export.resident,
                    steps=chunks.steps,
                    device=self._device,
                )
            return self._sender


# ---------------------------------------------------------------- several ranks


def _rank_and_world_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _own_host(host: str) -> str:
    """Address at which workers reach a rank other than 0; `host` on rank 0's host, where the route
    to MASTER_ADDR may be the loopback interface."""
    if os.environ["RANK"] == os.environ["LOCAL_RANK"]:
        return host
    return address_towards(os.environ["MASTER_ADDR"])


def _everyones(listeners: Mapping[str, GroupListener], group: Any) -> dict[str, list[Rendezvous]]:
    """Replica -> every rank's rendezvous, by rank. A collective."""
    mine = {r: x.rendezvous for r, x in listeners.items()}
    if _rank_and_world_size()[1] == 1:
        return {r: [x] for r, x in mine.items()}
    dumped = {r: x.model_dump(mode="python") for r, x in mine.items()}
    gathered = objects.all_gather(dumped, group=group)
    return {r: [Rendezvous.model_validate(one[r]) for one in gathered] for r in mine}


def _agreed(group: Any) -> AbstractContextManager[None]:
    """Run a block of `open` on every rank; see `lockstep.agree`."""
    return nullcontext() if _rank_and_world_size()[1] == 1 else agree(group, send_error)
