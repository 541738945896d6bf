"""Keeps the trainer's ranks in step: all handle the same requests, and learn how each one ended.

The control group is gloo on the CPU. While no request comes, rank 0 broadcasts a keepalive every
few seconds, so the wait of an idle rank never nears its deadline.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import torch
import torch.distributed as dist

from orchestrator.errors import SpliceError, TransferAborted, TransferError
from orchestrator.protocol.frames import Envelope, encode, unpacked
from orchestrator.protocol.messages import AnyMessage
from trainer_node.ranks import objects

_KEEPALIVE, _STOP = 0, -1
"""Sent in place of a request's size. `_STOP - code` means: stop with this exit code."""


class OutOfStep(SpliceError, RuntimeError):
    """A rank did not send or take a message, so the ranks no longer run the same step."""


class SendFailed(TransferError):
    """A send failed on some rank. All ranks have reached its end and are in step."""


BROKEN_GROUP = frozenset({
    "RuntimeError", "OutOfStep", "OutOfMemoryError",
    "DistBackendError", "DistNetworkError", "DistStoreError",
})  # fmt: skip # a short list
"""Errors after which a process group may be unusable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception on one rank. `text` includes its notes."""

    rank: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def compare(error: BaseException | None, *, group: Any) -> list[Failure]:
    """Return the failures of all ranks, in rank order. A collective."""
    mine = None
    if error is not None:
        mine = (type(error).__name__, " ".join([str(error), *getattr(error, "__notes__", [])]))
    everyones = objects.all_gather(mine, group=group)
    return [Failure(rank=r, kind=m[0], text=m[1]) for r, m in enumerate(everyones) if m is not None]


@contextlib.contextmanager
def agree(
    group: Any, as_error: Callable[[Sequence[Failure], Exception | None], Exception]
) -> Iterator[None]:
    """Run a block on every rank; if it fails on one rank, it fails on all. A collective.

    The block must not leave another rank waiting, however it ends.

    Args:
        as_error: makes the exception to raise from all failures and this rank's own exception.
    """
    own: Exception | None = None
    error: Exception | None = None
    try:
        try:
            yield
        except Exception as caught:  # noqa: BLE001  - the other ranks must learn of any error here
            own = caught
        failures = compare(own, group=group)
        if failures:
            error = as_error(failures, own)
            if error is own:
                raise error
            raise error from own
    finally:
        own = error = None  # an error that is raised holds this frame


def send_error(failures: Sequence[Failure], own: Exception | None) -> Exception:
    """What to raise after a join or a send. A rank that another one aborted is not the cause."""
    if own is not None and dist.get_world_size() == 1:
        return own
    causes = [f for f in failures if f.kind != TransferAborted.__name__] or failures[:1]
    text = "; ".join(f"rank {f.rank}: {f}" for f in causes)
    if any(f.kind == OutOfStep.__name__ for f in causes):
        return OutOfStep(text)
    if isinstance(own, SpliceError) and dist.get_rank() == causes[0].rank == 0:
        return own
    return SendFailed(text)


def has_diverged(failures: Sequence[Failure], *, world_size: int) -> bool:
    """Whether the ranks may have reached different points.

    They have not if all ended alike, or if only rank 0 failed, outside a collective. An error of
    torch's own means a broken process group. `SendFailed` comes from ranks that are in step.
    """
    failures = [f for f in failures if f.kind != SendFailed.__name__]
    if world_size == 1 or not failures:
        return False
    kinds = {f.kind for f in failures}
    if kinds & BROKEN_GROUP:
        return True
    is_alike = len(kinds) == 1 and len(failures) == world_size
    return not is_alike and any(f.rank != 0 for f in failures)


class Lockstep:
    """The control group of all ranks."""

    def __init__(self, group: Any) -> None:
        self._group, self._is_root = group, dist.get_rank() == 0

    def broadcast(self, envelope: Envelope | None, *, stop: int | None = None) -> Envelope | None:
        """Send rank 0's request to all ranks. None is a keepalive.

        Args:
            stop: exit code with which all ranks stop.

        Raises:
            StopIteration: rank 0 gave an exit code, which is the exception's value.
        """
        if dist.get_world_size() == 1:
            if stop is not None:
                raise StopIteration(stop)
            return envelope
        payload = np.empty(0, np.uint8)
        if self._is_root and envelope is not None:
            payload = packed(envelope.message, envelope.buffers)
        size = torch.tensor([len(payload) if stop is None else _STOP - stop], dtype=torch.int64)
        dist.broadcast(size, src=0, group=self._group)
        if int(size) <= _STOP:
            raise StopIteration(_STOP - int(size))
        if int(size) == _KEEPALIVE:
            return None
        data = torch.empty(int(size), dtype=torch.uint8)
        if self._is_root:
            data = torch.from_numpy(payload)
        dist.broadcast(data, src=0, group=self._group)
        return envelope if self._is_root else unpacked(data.numpy().data)

    def compare(self, error: BaseException | None) -> list[Failure]:
        """See `compare`."""
        return compare(error, group=self._group)

    def first(self, text: str) -> str:
        """Return the text of the first rank that has one; empty: none has. A collective."""
        return next(filter(None, objects.all_gather(text, group=self._group)), "")

    def agree(self) -> contextlib.AbstractContextManager[None]:
        """Run a block of a send on every rank; see `agree`.

        Raises:
            OutOfStep: on every rank, if one rank raised it.
            SendFailed: a rank failed. If only rank 0 did, with an error of ours, it raises that.
        """
        return agree(self._group, send_error)


def packed(message: AnyMessage, buffers: Sequence[bytes]) -> np.ndarray:
    """One array of bytes that holds a message and its buffers."""
    frames = encode(message, buffers)
    head = msgpack.packb([memoryview(f).nbytes for f in frames])
    parts = [len(head).to_bytes(8, "little"), head, *frames]
    # numpy releases the interpreter's lock for the copy, so heartbeats continue.
    return np.concatenate([np.frombuffer(p, np.uint8) for p in parts])
