"""splice's exceptions, the error code of each, and what to do about it.

SpliceError                              code
├── ConfigError (ValueError)             bad_input            bad input, found before work starts
├── ProtocolError (ValueError)           internal             not a message of this protocol
├── PublicationError (RuntimeError)      apply_failed         a version could not be published
│   ├── MergePlanError                   plan_refused         an adapter does not fit the model
│   ├── ManifestError                    plan_refused         tensors that the receiver lacks
│   └── VerificationError                verification_failed  the served bytes are not those sent
│       └── ContentChanged                                    a version differs from its first send
├── TransferError (RuntimeError)         transfer_failed      bytes did not arrive
│   ├── TransferAborted                  transfer_aborted     told to stop
│   └── TransferTimeout (TimeoutError)   transfer_timeout     the deadline passed
├── JobFailed (RuntimeError)             its own              a job or request ended in `Failed`
└── NodeLost (ConnectionError)           node_lost            a node is silent, or its process ended
    ├── LinkLost                                              the orchestrator is silent
    ├── ProcessEnded                                          the node's process crashed
    ├── TrainerKilled                    trainer_killed       a job has crashed the trainer twice
    └── WorkLost                         work_lost            the trainer's state is an older one

JournalError (RuntimeError) is apart, because it ends the orchestrator and not just a job.

A class states its code, and its remedy if `REMEDIES` has no better one for that code. The trainer's
own exceptions are next to the code that raises them.
"""

from __future__ import annotations

from typing import TypeVar

from orchestrator.errors.codes import REFUSED as REFUSED
from orchestrator.errors.codes import REMEDIES as REMEDIES
from orchestrator.errors.codes import ErrorCode as ErrorCode


class SpliceError(Exception):
    """Base of everything splice raises on purpose.

    Attributes:
        code: an `ErrorCode`.
        remedy: what to do next.
    """

    code: ErrorCode = ErrorCode.INTERNAL
    remedy: str = REMEDIES[ErrorCode.INTERNAL]

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "code" in vars(cls) and "remedy" not in vars(cls):
            cls.remedy = REMEDIES[cls.code]


class ConfigError(SpliceError, ValueError):
    """Bad input, found before any work starts."""

    code = ErrorCode.BAD_INPUT


class ProtocolError(SpliceError, ValueError):
    """A frame or message that is not of this protocol."""


class PublicationError(SpliceError, RuntimeError):
    """A version could not be published."""

    code = ErrorCode.APPLY_FAILED


class MergePlanError(PublicationError):
    """An adapter or weight has no target, two targets, or another shape; names the tensors."""

    code = ErrorCode.PLAN_REFUSED
    remedy = "The adapters or the export do not fit the manifest; plan the publication again."


class ManifestError(PublicationError):
    """Names, dtypes or shapes that the receiver does not know; names the tensors."""

    code = ErrorCode.PLAN_REFUSED


class VerificationError(PublicationError):
    """The live tensors are not what the trainer sent; names the tensors."""

    code = ErrorCode.VERIFICATION_FAILED


class ContentChanged(VerificationError):
    """A version's content is not what it was when it was first sent."""


class TransferError(SpliceError, RuntimeError):
    """Bytes did not arrive."""

    code = ErrorCode.TRANSFER_FAILED


class TransferAborted(TransferError):
    """The watchdog, an operator, or the peer's failure stopped the transfer."""

    code = ErrorCode.TRANSFER_ABORTED


class TransferTimeout(TransferError, TimeoutError):
    """The transfer's deadline passed."""

    code = ErrorCode.TRANSFER_TIMEOUT


class JournalError(RuntimeError):
    """The run's journal cannot be read or written; the orchestrator ends."""


class JobFailed(SpliceError, RuntimeError):
    """A job or request ended in `Failed`.

    Attributes:
        code: an `ErrorCode`.
        node: the node that failed, or "orchestrator".
        phase: the phase in which it failed.
        remedy: what to do next.
        steps_taken: optimizer steps that the job took before the failure. They remain.
        is_answer: the node answered. False: it overran the deadline, and its state is unknown.
    """

    def __init__(
        self,
        *,
        code: str,
        node: str,
        phase: str,
        message: str,
        remedy: str,
        steps_taken: int = 0,
        is_answer: bool = True,
    ) -> None:
        super().__init__(f"{code} on {node} while {phase}: {message} What to do: {remedy}")
        self.code, self.remedy = ErrorCode(code), remedy
        self.node, self.phase, self.message = node, phase, message
        self.steps_taken, self.is_answer = steps_taken, is_answer


class NodeLost(SpliceError, ConnectionError):
    """A node stopped answering or its process ended."""

    code = ErrorCode.NODE_LOST


class LinkLost(NodeLost):
    """The orchestrator does not answer this process; exit code `restarts.EXIT_LINK_LOST`."""


class ProcessEnded(NodeLost):
    """The node's process ended, and not because it lost its connection."""


class TrainerKilled(NodeLost):
    """The trainer's process has ended twice in the same job, which is not sent again."""

    code = ErrorCode.TRAINER_KILLED


class WorkLost(NodeLost):
    """The trainer is back at its last durable state, and what it made or held since is lost. No
    step of the failed job was taken, unless the message says so."""

    code = ErrorCode.WORK_LOST


_FINAL = (ErrorCode.BAD_INPUT, ErrorCode.PLAN_REFUSED, ErrorCode.CHECKPOINT_FAILED)


def is_final(error: BaseException) -> bool:
    """Whether the same request would fail in the same way until somebody changes something."""
    return isinstance(error, ContentChanged) or code_and_remedy(error)[0] in _FINAL


def code_and_remedy(error: BaseException) -> tuple[ErrorCode, str]:
    """Return an exception's code and remedy. One that is not ours is `internal`."""
    known = error if isinstance(error, SpliceError) else SpliceError
    return known.code, known.remedy


E = TypeVar("E", bound=BaseException)


def without_frames(error: E) -> E:
    """Drop the tracebacks of an exception, its causes, its contexts and its members; return it.

    A traceback holds the local variables of its frames, such as the tensors of a failed pass. An
    exception that one of its own frames holds keeps them all until the garbage collector comes.
    """
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        left += (one.__cause__, one.__context__)
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions
    return error
