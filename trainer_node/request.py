"""One request to the trainer: its message, its progress, and how it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from orchestrator.errors import REMEDIES, SpliceError, TransferAborted, code_and_remedy
from orchestrator.protocol.messages import ErrorCode, TensorSpec
from orchestrator.protocol.node_link import NodeLink

M = TypeVar("M")


class NotReady(SpliceError, RuntimeError):
    """The request needs an earlier request, which the message names."""

    code = ErrorCode.NOT_READY


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The contents of `Completed`."""

    result: dict[str, Any] = field(default_factory=dict)
    tensors: tuple[TensorSpec, ...] = ()
    buffers: tuple[bytes, ...] = ()


@dataclass(slots=True, kw_only=True)
class Request(Generic[M]):
    """The request that this rank handles now.

    Attributes:
        sent: the message as it came.
        received_s: when this process received it, on the monotonic clock.
        link: on rank 0, the link to the orchestrator.
        aborts: request id -> reason, for each request to abort.
        phase: the present step of the request.
        steps_taken: optimizer steps of this request.
    """

    sent: Any
    buffers: Sequence[bytes]
    received_s: float
    link: NodeLink | None
    aborts: Mapping[str, str]
    phase: str = ""
    steps_taken: int = 0

    @property
    def message(self) -> M:
        """What to do: the job of a `RunJob`, otherwise the message itself."""
        return getattr(self.sent, "job", self.sent)  # type: ignore[no-any-return]

    @property
    def id(self) -> str:
        """The request's id."""
        return str(self.sent.request_id)

    def progress(self, phase: str, **detail: object) -> None:
        """Enter a phase and report it."""
        self.phase = phase
        if self.link is not None:
            self.link.progress(self.id, phase, **detail)

    def check_abort(self) -> None:
        """Raise if the orchestrator has asked to end this request.

        Raises:
            TransferAborted: with the orchestrator's reason.
        """
        if self.id in self.aborts:
            raise TransferAborted(self.aborts[self.id])


def classify(error: BaseException | None, *, phase: str) -> tuple[ErrorCode, str]:
    """Return an exception's code and what to do about it. None: the error was on another rank."""
    if error is None:
        return ErrorCode.INTERNAL, "See the trainer's log."
    code, remedy = code_and_remedy(error)
    if code == ErrorCode.INTERNAL and phase == "training":
        return ErrorCode.TRAINING_FAILED, REMEDIES[ErrorCode.TRAINING_FAILED]
    return code, remedy
