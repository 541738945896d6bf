"""The trainer's end of the NCCL transport: cupy's communicator talks to vLLM's pynccl.

Rank 0 makes the unique id, and all ranks call ncclCommInitRank with it. Right after it every vLLM
worker issues a one-element float32 all-reduce. Every sender must issue the same, or all ranks hang.
With more than one sender or worker, each sender then sends a byte to each worker, because the first
message between two ranks connects them, and that has no deadline. Then uint8 buffers follow. The
trainer does not import vLLM.

Hazards and their answers:
- ncclCommInitRank blocks until all ranks call it, and nothing interrupts it. It runs in a daemon
  thread. After the deadline the thread is abandoned; it aborts a communicator that it still gets.
- An NCCL kernel whose peer died never ends. `synchronize` polls the event, NCCL's asynchronous
  error and the deadline. `abort` ends the communicator, and with it the kernel.
- ncclCommAbort frees the communicator, so no other call may be inside. A lock separates them for at
  most ABORT_GRACE_S, because `abort` must also end a call that is stuck in NCCL.

Axes: B = bytes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from orchestrator.errors import (
    ConfigError,
    TransferAborted,
    TransferError,
    TransferTimeout,
    without_frames,
)
from orchestrator.protocol.messages import Rendezvous
from weight_transfer.cuda_events import WIRE_PRIORITY, wait_for_event

ABORT_GRACE_S = 0.2


def _cupy_nccl() -> Any:
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise ConfigError(
            "transport 'nccl' needs cupy with NCCL on the trainer (pip install cupy-cuda13x)"
        ) from error
    if not nccl.available:
        raise ConfigError(
            "cupy is installed but found no NCCL library; install nvidia-nccl-cu13 next to it"
        )
    return nccl


def nccl_version() -> str:
    """Version of the NCCL that the trainer's groups use, such as 2.28.9; empty without one."""
    try:
        return version_text(_cupy_nccl().get_version())
    except ConfigError:
        return ""


def version_text(number: int) -> str:
    """NCCL's 22809 as 2.28.9."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


class NcclGroup:
    """Base of both ends of a group over NCCL: a stream, and the reason for the end.

    Args:
        other_end: whom the text of a missed deadline names.
    """

    def __init__(self, *, device: torch.device, other_end: str) -> None:
        self._device, self._other_end = device, other_end
        self._stream = torch.cuda.Stream(device, priority=WIRE_PRIORITY)
        self._reason: str | None = None
        self._abort_lock = threading.Lock()
        self._lock = threading.Lock()
        """Held by a call into NCCL. `abort` waits for it, for at most ABORT_GRACE_S."""

    def synchronize(self, event: torch.cuda.Event, *, deadline_s: float) -> None:
        """Wait for the event of a call.

        The wait ends on NCCL's asynchronous errors, on `abort` and at the deadline.
        """
        late = f"NCCL was not done after {deadline_s:.1f} s; {self._other_end} is stuck or gone"
        wait_for_event(event, deadline_s=deadline_s, check=self._check, late=late)
        self._raise_if_aborted()

    def _check(self) -> None:
        self._raise_if_aborted()

    @contextlib.contextmanager
    def _without_calls(self) -> Iterator[None]:
        """Keep other calls out of NCCL, unless one is stuck there."""
        held = self._lock.acquire(timeout=ABORT_GRACE_S)
        try:
            yield
        finally:
            if held:
                self._lock.release()

    def _recorded(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def _raise_if_aborted(self) -> None:
        if self._reason is not None:
            raise TransferAborted(f"transfer aborted: {self._reason}")


class NcclSenderGroup(NcclGroup):
    """A sender's `TransferGroup` over NCCL. Made by `NcclListener.join`.

    Args:
        communicator: the group takes ownership of it.
        rank: this sender.
    """

    def __init__(
        self,
        *,
        communicator: Any,
        device: torch.device,
        rank: int,
        senders: int,
        world_size: int,
    ) -> None:
        super().__init__(device=device, other_end="a worker")
        self._nccl, self._communicator = _cupy_nccl(), communicator
        self._rank, self._senders, self._num_workers = rank, senders, world_size - senders

    def warm_up(self, *, deadline_s: float) -> None:
        """Issue what every worker issues after joining; see the module."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            one = torch.zeros(1, dtype=torch.float32, device=self._device)
            self._call(
                "allReduce",
                one.data_ptr(),
                one.data_ptr(),
                1,
                self._nccl.NCCL_FLOAT32,
                self._nccl.NCCL_SUM,
                self._stream.cuda_stream,
            )
            self.synchronize(self._recorded(), deadline_s=deadline_s)
            if self._senders + self._num_workers > 2:
                byte_B = one.view(torch.uint8)[:1]
                event = self._send_to_all(byte_B, deadline_s=deadline_s)
                self.synchronize(event, deadline_s=deadline_s)

    def broadcast(self, buffer_B: torch.Tensor, *, deadline_s: float) -> torch.cuda.Event | None:
        """Queue the buffer on the group's stream, after the current stream's work.

        See `TransferGroup.broadcast`.
        """
        if self._senders > 1:
            if self._rank or not buffer_B.numel():
                return None
            return self._send_to_all(buffer_B, deadline_s=deadline_s)
        self._check_buffer(buffer_B)
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            self._call(
                "bcast",
                buffer_B.data_ptr(),
                buffer_B.numel(),
                self._nccl.NCCL_UINT8,
                0,
                self._stream.cuda_stream,
            )
            return self._recorded()

    def send(
        self, messages: Sequence[tuple[int, torch.Tensor]], *, deadline_s: float
    ) -> torch.cuda.Event | None:
        """Queue the messages as one group of NCCL calls. See `TransferGroup.send`."""
        for _, buffer_B in messages:
            self._check_buffer(buffer_B)
        if not messages:
            self._raise_if_aborted()
            return None
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            stream, uint8 = self._stream.cuda_stream, self._nccl.NCCL_UINT8
            with self._calling("send") as communicator:
                self._nccl.groupStart()
                try:
                    for position, buffer_B in messages:
                        peer = self._senders + position
                        at, count = buffer_B.data_ptr(), buffer_B.numel()
                        communicator.send(at, count, uint8, peer, stream)
                finally:
                    self._nccl.groupEnd()
            return self._recorded()

    def receive(
        self, messages: Sequence[tuple[int, torch.Tensor]], *, deadline_s: float
    ) -> torch.cuda.Event | None:
        """Refuse: this end only sends."""
        raise ValueError("a sender's group receives nothing")

    def _send_to_all(self, buffer_B: torch.Tensor, *, deadline_s: float) -> torch.cuda.Event:
        messages = [(position, buffer_B) for position in range(self._num_workers)]
        event = self.send(messages, deadline_s=deadline_s)
        assert event is not None
        return event

    def _check_buffer(self, buffer_B: torch.Tensor) -> None:
        if (
            buffer_B.dtype != torch.uint8
            or buffer_B.device != self._device
            or not buffer_B.is_contiguous()
        ):
            raise ValueError(
                f"expected a contiguous uint8 buffer on {self._device}, "
                f"got {buffer_B.dtype} on {buffer_B.device}"
            )

    def _check(self) -> None:
        self._call("check_async_error")

    def abort(self, reason: str) -> None:
        """See `TransferGroup.abort`. Running kernels end."""
        with self._abort_lock:
            if self._reason is None:
                self._reason = reason
            communicator, self._communicator = self._communicator, None
        if communicator is None:
            return
        with (
            self._without_calls(),
            torch.cuda.device(self._device),
            contextlib.suppress(self._nccl.NcclError, KeyError),
        ):
            communicator.abort()

    def close(self) -> None:
        """Abort the idle communicator: ncclCommDestroy would wait for peers that may be gone."""
        self.abort("the transfer group is closed")

    def _call(self, method: str, *args: Any) -> None:
        with self._calling(method) as communicator:
            getattr(communicator, method)(*args)

    @contextlib.contextmanager
    def _calling(self, method: str) -> Iterator[Any]:
        """Use the communicator under the lock that `abort` takes; NCCL's errors become ours."""
        with self._lock:
            communicator = self._communicator
            self._raise_if_aborted()
            if communicator is None:
                raise TransferAborted("transfer aborted: the transfer group is closed")
            try:
                yield communicator
            # KeyError: a status that cupy has no name for, such as ncclRemoteError
            except (self._nccl.NcclError, KeyError) as error:
                self._raise_if_aborted()
                raise TransferError(
                    f"NCCL {method}: {error}; a worker is gone or its GPU failed"
                ) from error


class NcclListener:
    """Waits for the workers and the other senders. Rank 0's makes the unique id."""

    def __init__(
        self, *, host: str, world_size: int, device: torch.device, senders: int = 1, rank: int = 0
    ) -> None:
        """Make the unique id on rank 0. NCCL's bootstrap then listens."""
        nccl, self._rank = _cupy_nccl(), rank
        self._device = (
            device
            if device.index is not None
            else torch.device("cuda", torch.cuda.current_device())
        )
        self._unique_id: Any = None
        if rank == 0:
            with torch.cuda.device(self._device):
                # bytes; before cupy 14 a tuple of signed chars
                self._unique_id = nccl.get_unique_id()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._warming_up: NcclSenderGroup | None = None
        self._rendezvous = Rendezvous(
            transport="nccl",
            host=host,
            nccl_unique_id=bytes(c & 0xFF for c in self._unique_id or ()) or None,
            world_size=world_size,
            senders=senders,
        )

    @property
    def rendezvous(self) -> Rendezvous:
        """Address and, on rank 0, the unique id with which all ranks join."""
        return self._rendezvous

    def meet(self, everyones: Sequence[Rendezvous]) -> Rendezvous:
        """See `GroupListener.meet`."""
        if self._rank and not self._closed.is_set():
            self._unique_id = everyones[0].nccl_unique_id
        return everyones[0]

    def join(self, deadline_s: float) -> NcclSenderGroup:
        """See `GroupListener.join`."""
        unique_id, self._unique_id = self._unique_id, None
        if unique_id is None:
            raise TransferAborted("this listener is closed or has joined already; open a new one")
        deadline = time.monotonic() + deadline_s
        place = {"rank": self._rank, "world_size": self._rendezvous.world_size}
        init = _Init(unique_id=unique_id, device=self._device, **place)
        group = NcclSenderGroup(
            communicator=init.wait(deadline, self._closed),
            device=self._device,
            senders=self._rendezvous.senders,
            **place,
        )
        left_s = max(0.1, deadline - time.monotonic())
        # The first message to a worker connects to it: the call itself waits, without a deadline.
        late = threading.Timer(
            left_s + ABORT_GRACE_S, group.abort, ["the group was not complete in time"]
        )
        late.daemon = True
        late.start()
        try:
            with self._lock:
                self._warming_up = group
            if self._closed.is_set():
                raise TransferAborted("transfer aborted: the listener was closed")
            group.warm_up(deadline_s=left_s)
        except BaseException:
            group.close()
            raise
        finally:
            late.cancel()
            with self._lock:
                self._warming_up = None
        return group

    def close(self) -> None:
        """See `GroupListener.close`."""
        self._closed.set()
        self._unique_id = None
        with self._lock:
            group = self._warming_up
        if group is not None:
            group.abort("the listener was closed while the workers joined")


class _Init:
    """ncclCommInitRank in its own thread."""

    def __init__(
        self, *, unique_id: Any, world_size: int, device: torch.device, rank: int = 0
    ) -> None:
        self._args, self._device = (world_size, unique_id, rank), device
        self._lock = threading.Lock()
        self._given_up = False
        self._communicator: Any = None
        self._error: Exception | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, name="splice-nccl-init", daemon=True).start()

    def wait(self, deadline: float, closed: threading.Event) -> Any:
        while not self._done.wait(0.02):
            if closed.is_set() or time.monotonic() > deadline:
                break
        with self._lock:
            if self._error is not None:
                raise TransferError(f"ncclCommInitRank failed: {self._error}") from self._error
            if self._communicator is not None:
                return self._communicator
            self._given_up = True
        if closed.is_set():
            raise TransferAborted(
                "transfer aborted: the listener was closed while it waited for the workers"
            )
        raise TransferTimeout(
            f"not all {self._args[0]} ranks had joined the NCCL group in time; is a worker gone?"
        )

    def _run(self) -> None:
        nccl = _cupy_nccl()
        communicator, failure = None, None
        try:
            with torch.cuda.device(self._device):  # the current device belongs to a thread
                communicator = nccl.NcclCommunicator(*self._args)
        except Exception as error:  # noqa: BLE001  - the waiting thread raises it
            failure = without_frames(error)
        with self._lock:
            if not self._given_up:
                self._communicator, self._error = communicator, failure
                communicator = None
        self._done.set()
        if communicator is not None:
            with contextlib.suppress(nccl.NcclError, KeyError):
                communicator.abort()
