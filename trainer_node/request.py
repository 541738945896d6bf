"""One request to the trainer: its message, its progress, and how it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from orchestrator.errors import (
    ConfigError,
    PublicationError,
    SpliceError,
    TransferAborted,
    TransferError,
    TransferTimeout,
)
from orchestrator.protocol.messages import ErrorCode, TensorSpec
from orchestrator.protocol.node_link import NodeLink

M = TypeVar("M")


class NotReady(SpliceError, RuntimeError):
    """The request needs an earlier request, which the message names."""


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
        received_s: when this process received it, on the monotonic clock.
        link: on rank 0, the link to the orchestrator.
        aborts: request id -> reason, for each request to abort.
        phase: the present step of the request.
        steps_taken: optimizer steps of this request.
    """

    message: M
    buffers: Sequence[bytes]
    received_s: float
    link: NodeLink | None
    aborts: Mapping[str, str]
    phase: str
    steps_taken: int = 0

    @property
    def id(self) -> str:
        """The request's id."""
        return str(self.message.request_id)  # type: ignore[attr-defined]

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
    from trainer_node.state.generations import CheckpointError
    from trainer_node.training.gap import LogprobGapError
    from trainer_node.training.trainer import NonFiniteGradient, NothingPending

    if error is None:
        return ErrorCode.INTERNAL, "See the trainer's log."
    reopen = "Open a new transfer group and resend the version."
    table: list[tuple[type[BaseException], ErrorCode, str]] = [
        (NonFiniteGradient, ErrorCode.NON_FINITE_GRADIENT,
         "Look at the batch's advantages and the learning rate; send the next batch."),
        (LogprobGapError, ErrorCode.LOGPROB_GAP,
         "Find the cause; no step was taken. To train all the same, raise loss.max_logprob_gap."),
        (CheckpointError, ErrorCode.CHECKPOINT_FAILED,
         "Fix the disk or folder named above. LoadCheckpoint the last durable version before "
         "training, because the state in memory may be a step ahead of it."),
        (NothingPending, ErrorCode.NOT_READY, "Send ForwardBackward first."),
        (NotReady, ErrorCode.NOT_READY, "Send the request named above first."),
        (PublicationError, ErrorCode.PLAN_REFUSED,
         "The adapters or the export do not fit the manifest; plan the publication again."),
        (TransferTimeout, ErrorCode.TRANSFER_TIMEOUT, reopen),
        (TransferAborted, ErrorCode.TRANSFER_ABORTED, reopen),
        (TransferError, ErrorCode.TRANSFER_FAILED, reopen),
        (ConfigError, ErrorCode.BAD_INPUT, "Correct the field named above and submit again."),
    ]  # fmt: skip # a table
    for kind, code, remedy in table:
        if isinstance(error, kind):
            return code, remedy
    if phase == "training":
        remedy = "LoadCheckpoint the last durable version and submit again."
        return ErrorCode.TRAINING_FAILED, f"See the trainer's log; {remedy}"
    return ErrorCode.INTERNAL, "See the trainer's log; restart the trainer if it happens again."
