"""Carries one message of bytes per chunk from every trainer rank to rank 0.

Each rank has two buffers, so both ends work a chunk ahead.

    exchange = Exchange(sizes, ...)      sizes[k][r]: bytes of rank r's message for chunk k
    every rank   exchange.start(...)     before each send: makes the buffers, moves nothing
    rank 0       exchange.post(k)        for k = 0, 1, ...: asks for chunks k and k + 1
                 exchange.wait(k)        waits for chunk k
                 exchange.drain()        at the end, whatever happened: receives the rest
    the others   exchange.send(fill)     all their messages; `fill(k, message_B)` writes one

Rank 0 sends nothing.

Every message is sent and received, whatever happens, so a failure on one rank leaves no other
waiting. A rank whose `fill` fails sends its buffer as it is and reports the failure at the end.
Rank 0 drains. On CUDA the host only queues until the end: NCCL's stream and the current one wait
for each other. `limit` bounds every wait. Past it the ranks are out of step.

Axes: B = bytes.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.errors import TransferTimeout
from trainer_node.export.gather_plan import aligned
from trainer_node.ranks.lockstep import OutOfStep
from weight_transfer.cuda_events import wait_for_event

SLOTS = 2
"""Buffers: one is used, one is on its way."""


class Exchange:
    """One rank's end of the messages. The module's docstring shows its methods.

    Args:
        group: of all ranks, used for nothing else; NCCL's on CUDA, gloo's on the CPU.
    """

    def __init__(
        self, sizes: Sequence[Sequence[int]], *, group: Any, device: torch.device | str
    ) -> None:
        self._sizes = [tuple(s) for s in sizes]
        self._group = group
        self._device = torch.device(device)
        self._is_cuda = self._device.type == "cuda"
        self._rank = dist.get_rank()
        self._buffers: list[torch.Tensor] = []
        self._typed: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._works: dict[int, list[dist.Work]] = {}
        self._posted, self._limit, self._is_broken = len(self._sizes), 0.0, False
        self._stream: torch.cuda.Stream | None = None
        if self._is_cuda and self.moves:
            # NCCL's communicator: every rank must take part in a group's first operation.
            dist.all_reduce(torch.zeros(1, device=self._device), group=group)

    @property
    def moves(self) -> bool:
        """Whether any rank sends a message."""
        return any(any(sizes) for sizes in self._sizes)

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of one of this rank's buffers."""
        mine = (sum(map(aligned, s)) if self._rank == 0 else s[self._rank] for s in self._sizes)
        return aligned(max(mine, default=0))

    def place(self, k: int, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        """Return rank 0's buffer for chunk k, as elements, and the first byte of a rank's message.

        The tensor is empty until `start`. It stays the same object.
        """
        key = (k % SLOTS, dtype)
        if key not in self._typed:
            self._typed[key] = torch.empty(0, dtype=dtype, device=self._device)
        return self._typed[key], self._spans(k)[rank][0]

    def _spans(self, k: int) -> list[tuple[int, int]]:
        begins = accumulate(map(aligned, self._sizes[k]), initial=0)
        return [(begin, begin + size) for begin, size in zip(begins, self._sizes[k], strict=False)]

    def start(self, *, limit: float) -> None:
        """Make the buffers, unless they exist, and begin with the first chunk.

        Args:
            limit: `time.monotonic()` up to which this rank waits for another.
        """
        if not self._buffers and self.buffer_nbytes:
            self._buffers = [
                torch.empty(self.buffer_nbytes, dtype=torch.uint8, device=self._device)
                for _ in range(SLOTS)
            ]
            for (slot, dtype), typed in self._typed.items():
                typed.data = self._buffers[slot].view(dtype)
        self._posted, self._limit, self._stream = 0, limit, None
        self._works.clear()

    def release(self) -> None:
        """Free the buffers; nothing may be under way."""
        self._buffers = []
        for typed in self._typed.values():
            typed.data = typed.new_empty(0)

    # ------------------------------------------------------------ rank 0

    def post(self, k: int) -> None:
        """Ask for chunk k and the next one. The current stream has read their buffers by then."""
        if self._is_cuda:
            self._stream = torch.cuda.current_stream(self._device)
        while self._posted < min(k + SLOTS, len(self._sizes)):
            buffer_B = self._buffers[self._posted % SLOTS] if self._buffers else None
            ops = [
                dist.P2POp(dist.irecv, buffer_B[begin:end], rank, self._group)
                for rank, (begin, end) in enumerate(self._spans(self._posted))
                if buffer_B is not None and end > begin
            ]
            self._works[self._posted] = self._begin(ops)
            self._posted += 1

    def wait(self, k: int) -> None:
        """Wait for chunk k. On CUDA, work queued after this call waits for it."""
        self._finish(self._works.pop(k, []))

    def drain(self) -> None:
        """Receive and drop the remaining messages.

        Raises:
            OutOfStep: a message did not come before the limit, or a rank is gone.
        """
        if not self.moves:
            return
        with self._on(self._stream):
            for k in range(len(self._sizes)):
                self.post(k)
                self.wait(k)
            self._wait_for_device()

    # ------------------------------------------------------------ the others

    def send(self, fill: Callable[[int, torch.Tensor], None]) -> None:
        """Send this rank's message of every chunk.

        Raises:
            OutOfStep: rank 0 did not receive them before the limit, or is gone.
            Exception: `fill`'s, after all messages have left; those from the failed one on do not
                hold weights.
        """
        failed: Exception | None = None
        chunks = [k for k, sizes in enumerate(self._sizes) if sizes[self._rank]]
        works: list[list[dist.Work]] = [[] for _ in range(SLOTS)]
        with self._on(torch.cuda.Stream(self._device) if self._is_cuda and chunks else None):
            for n, k in enumerate(chunks):
                slot = n % SLOTS
                self._finish(works[slot])
                message_B = self._buffers[slot][: self._sizes[k][self._rank]]
                if failed is None:
                    failed = _error_of(fill, k, message_B)
                works[slot] = self._begin([dist.P2POp(dist.isend, message_B, 0, self._group)])
            for left in works:
                self._finish(left)
            if chunks:
                self._wait_for_device()
        try:
            if failed is not None:
                raise failed
        finally:
            failed = None  # its traceback holds this frame

    # ------------------------------------------------------------ both

    def _begin(self, ops: list[dist.P2POp]) -> list[dist.Work]:
        with self._translated():
            return dist.batch_isend_irecv(ops) if ops else []

    def _finish(self, works: Sequence[dist.Work]) -> None:
        with self._translated():
            for work in works:
                if self._is_cuda:
                    work.wait()  # the current stream waits, the host does not
                else:
                    work.wait(
                        datetime.timedelta(seconds=max(0.001, self._limit - time.monotonic()))
                    )

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Translate a process group's errors. After the first one the group is unusable."""
        if self._is_broken:
            raise OutOfStep(
                "a message between trainer ranks failed before; the trainer has to be started again"
            )
        try:
            yield
        except RuntimeError as error:
            self._is_broken = True
            raise OutOfStep(
                f"rank {self._rank}: a message between trainer ranks did not arrive: {error}"
            ) from error

    def _wait_for_device(self) -> None:
        if not self._is_cuda:
            return
        event = torch.cuda.Event()
        event.record()
        late = (
            f"rank {self._rank}: messages between trainer ranks did not arrive before the deadline"
        )
        try:
            wait_for_event(
                event,
                deadline_s=max(0.001, self._limit - time.monotonic()),
                check=lambda: None,
                late=late,
            )
        except TransferTimeout as error:
            self._is_broken = True
            raise OutOfStep(late) from error

    @contextlib.contextmanager
    def _on(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Work on a stream after the current one's work. Later work on the current one waits for
        it."""
        if stream is None:
            yield
            return
        outer = torch.cuda.current_stream(self._device)
        stream.wait_stream(outer)
        with torch.cuda.stream(stream):
            yield
        outer.wait_stream(stream)


def _error_of(
    fill: Callable[[int, torch.Tensor], None], k: int, message_B: torch.Tensor
) -> Exception | None:
    try:
        fill(k, message_B)
    except Exception as error:  # noqa: BLE001  - whatever it is, rank 0 waits for this rank's messages
        error.add_note(f"(rank {dist.get_rank()}, chunk {k})")
        return error
    return None
