"""The worker's end of the NCCL transport: vLLM's own PyNcclCommunicator.

PyNcclCommunicator fetches its unique id from a process group. `_SharedId` stands in for one and
already has the id from the control message, in vLLM 0.26 and 0.32 alike. The communicator issues
its own one-element warm-up all-reduce; the trainer issues the same. With more than one sender or
worker, a byte from each sender follows, which connects the two.

Hazards: ncclCommInitRank and the warm-up cannot be interrupted, so they run in a daemon thread with
a deadline. A communicator that exists by then is aborted. NCCL kernels of a dead peer never end, so
`synchronize` polls its event and `abort` frees the kernels. Axes: B = bytes, S = senders.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary, ncclUniqueId
from vllm.distributed.utils import StatelessProcessGroup

from orchestrator.errors import ConfigError, TransferError, TransferTimeout, without_frames
from orchestrator.protocol.messages import Rendezvous
from weight_transfer.nccl_group import NcclGroup, version_text

UNIQUE_ID_BYTES = 128
ABORT_WAIT_S = 2.0


class _SharedId(StatelessProcessGroup):
    """Answers PyNcclCommunicator's one question to a group: the unique id."""

    def __init__(self, *, unique_id: bytes, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self._unique_id = rank, world_size, unique_id

    def broadcast_obj(self, obj: Any, src: int) -> Any:
        """The unique id; ignores the offered one."""
        shared = ncclUniqueId()
        for n, byte in enumerate(self._unique_id):
            shared.internal[n] = byte if byte < 128 else byte - 256
        return shared


class NcclWorkerGroup(NcclGroup):
    """A `weight_transfer.groups.TransferGroup` of an inference worker."""

    def __init__(
        self,
        *,
        communicator: PyNcclCommunicator,
        device: torch.device,
        senders: int,
        other_end: str = "the trainer",
    ) -> None:
        """Takes ownership of the communicator."""
        super().__init__(device=device, other_end=other_end)
        self._communicator, self._senders = communicator, senders

    def broadcast(self, buffer_B: torch.Tensor, *, deadline_s: float) -> torch.cuda.Event | None:
        """Queue the receipt of a buffer; as rank 0, its sending. See `TransferGroup.broadcast`."""
        if self._senders > 1:
            messages = [(0, buffer_B)] if buffer_B.numel() else []
            return self.receive(messages, deadline_s=deadline_s)
        with self._queueing("broadcast", [buffer_B]):
            self._communicator.broadcast(buffer_B, src=0, stream=self._stream)
            return self._recorded()

    def send(
        self, messages: Sequence[tuple[int, torch.Tensor]], *, deadline_s: float
    ) -> torch.cuda.Event | None:
        """Queue the sending, in a chain of replicas; see `TransferGroup.send`."""
        return self._queue("send", [(self._senders + p, buffer_B) for p, buffer_B in messages])

    def receive(
        self, messages: Sequence[tuple[int, torch.Tensor]], *, deadline_s: float
    ) -> torch.cuda.Event | None:
        """Queue the receipts as one group of NCCL calls; see `TransferGroup.receive`."""
        return self._queue("receive", messages)

    def _queue(
        self, call: Literal["send", "receive"], messages: Sequence[tuple[int, torch.Tensor]]
    ) -> torch.cuda.Event | None:
        """Queue the messages to or from these ranks."""
        if not messages:
            self._raise_if_aborted()
            return None
        with self._queueing(call, [buffer_B for _, buffer_B in messages]):
            _move(self._communicator, call, messages, self._stream)
            return self._recorded()

    @contextlib.contextmanager
    def _queueing(self, what: str, buffers: Sequence[torch.Tensor]) -> Iterator[None]:
        """Calls for the group's stream, after the current stream's work; errors become ours."""
        with self._lock, torch.cuda.device(self._device):
            self._raise_if_aborted()
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            try:
                yield
            except RuntimeError as error:
                self._raise_if_aborted()
                raise TransferError(
                    f"NCCL {what}: {error}; {self._other_end} is gone or a GPU failed"
                ) from error
            finally:
                # After an abort the owner may free a buffer too early: nobody else may get it.
                for buffer_B in buffers:
                    buffer_B.record_stream(self._stream)

    def abort(self, reason: str) -> None:
        """End the communicator and its kernels, from any thread; the first reason counts."""
        with self._abort_lock:
            first, self._reason = self._reason is None, self._reason or reason
        if first:
            with self._without_calls():
                _abort(self._communicator, self._device)

    def close(self) -> None:
        """Abort the communicator: ncclCommDestroy waits for peers. Safe to call twice."""
        self.abort("the transfer group is closed")


def _move(
    communicator: PyNcclCommunicator,
    call: Literal["send", "receive"],
    messages: Sequence[tuple[int, torch.Tensor]],
    stream: torch.cuda.Stream,
) -> None:
    move = communicator.send if call == "send" else communicator.recv
    communicator.group_start()
    try:
        for rank, buffer_B in messages:
            move(buffer_B, rank, stream=stream)
    finally:
        communicator.group_end()


def _abort(communicator: PyNcclCommunicator, device: torch.device) -> None:
    """ncclCommAbort in a thread, because it can wait for CUDA graphs that hold the communicator."""
    if getattr(communicator, "comm", None) is None or getattr(communicator, "disabled", True):
        return
    communicator.disabled, communicator.available = True, False

    def run() -> None:
        with torch.cuda.device(device), contextlib.suppress(RuntimeError):
            communicator.nccl.ncclCommAbort(communicator.comm)

    thread = threading.Thread(target=run, name="splice-nccl-abort", daemon=True)
    thread.start()
    thread.join(timeout=ABORT_WAIT_S)


def nccl_version() -> str:
    """Version of the NCCL that vLLM's groups use, such as 2.28.9; empty without one."""
    try:
        return version_text(NCCLLibrary().ncclGetRawVersion())
    except (OSError, AttributeError, RuntimeError, ValueError):  # vLLM logs what it lacks
        return ""


class NcclRelay:
    """A `weight_transfer.groups.GroupListener` of a worker: it sends to one other worker."""

    def __init__(self, device: torch.device) -> None:
        """Make the unique id. NCCL's bootstrap then listens."""
        unique_id = bytes(n & 0xFF for n in NCCLLibrary().ncclGetUniqueId().internal)
        self._device = device
        self._rendezvous = Rendezvous(
            transport="nccl", host="", nccl_unique_id=unique_id, world_size=2
        )

    @property
    def rendezvous(self) -> Rendezvous:
        """See `GroupListener.rendezvous`."""
        return self._rendezvous

    def meet(self, everyones: Sequence[Rendezvous]) -> Rendezvous:
        """See `GroupListener.meet`."""
        return self._rendezvous

    def join(self, deadline_s: float) -> NcclWorkerGroup:
        """See `GroupListener.join`."""
        return join_nccl(
            self._rendezvous,
            rank=0,
            device=self._device,
            deadline_s=deadline_s,
            other_end="the next replica",
        )

    def close(self) -> None:
        """Do nothing: NCCL has no call that ends its bootstrap."""


def join_nccl(
    rendezvous: Rendezvous,
    *,
    rank: int,
    device: torch.device,
    deadline_s: float,
    other_end: str = "the trainer",
) -> NcclWorkerGroup:
    """Join an NCCL group as this rank: a worker's is `rendezvous.senders` or more.

    Raises:
        ConfigError: the rendezvous is not NCCL's, or the worker has no CUDA device.
        TransferTimeout: the group was incomplete at the deadline; NCCL's thread stays.
        TransferError: NCCL refused.
    """
    unique_id = rendezvous.nccl_unique_id
    if unique_id is None or len(unique_id) != UNIQUE_ID_BYTES or device.type != "cuda":
        raise ConfigError(
            f"transport nccl needs a unique id of {UNIQUE_ID_BYTES} bytes and a CUDA device; "
            f"got {device}"
        )
    device = (
        device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
    )
    group = _SharedId(unique_id=unique_id, rank=rank, world_size=rendezvous.world_size)
    communicator = PyNcclCommunicator.__new__(PyNcclCommunicator)
    failure: list[BaseException] = []

    def run() -> None:
        try:
            with torch.cuda.device(device):
                PyNcclCommunicator.__init__(communicator, group, device=device)
                if communicator.available and rendezvous.world_size > 2:
                    _connect(communicator, senders=rendezvous.senders)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            failure.append(without_frames(error))

    thread = threading.Thread(target=run, name="splice-nccl-init", daemon=True)
    thread.start()
    thread.join(timeout=deadline_s)
    if thread.is_alive():
        _abort(communicator, device)
        raise TransferTimeout(
            f"rank {rank} of {rendezvous.world_size} waited {deadline_s:.0f} s for the NCCL group; "
            f"is {other_end} gone?"
        )
    if failure:
        raise TransferError(f"joining the NCCL group failed: {failure[0]}") from failure[0]
    if not communicator.available:
        raise ConfigError("vLLM found no NCCL library in this environment")
    return NcclWorkerGroup(
        communicator=communicator,
        device=device,
        senders=rendezvous.senders,
        other_end=other_end,
    )


def _connect(communicator: PyNcclCommunicator, *, senders: int) -> None:
    """Receive a byte from each sender."""
    bytes_S1 = torch.empty((senders, 1), dtype=torch.uint8, device=communicator.device)
    stream = torch.cuda.current_stream()
    _move(communicator, "receive", list(enumerate(bytes_S1)), stream)
    stream.synchronize()
