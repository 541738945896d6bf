"""splice's exception tree.

SpliceError
├── ConfigError (ValueError)          bad input, found before anything starts
├── ProtocolError (ValueError)        a frame or message that is not of this protocol
├── PublicationError (RuntimeError)   a version could not be published; @N goes on, or the replica is poisoned
│   ├── MergePlanError                an adapter or weight has no target, two targets, or another shape
│   ├── ManifestError                 names, dtypes or shapes that the receiver does not know
│   └── VerificationError             what is served is not what was sent
│       └── ContentChanged            a version's content is not what it was when it was first sent
├── TransferError (RuntimeError)      bytes did not arrive
│   ├── TransferAborted               told to stop (watchdog, operator, or the peer's failure)
│   └── TransferTimeout (TimeoutError) the deadline passed
├── JobFailed (RuntimeError)          a job ended in `Failed`; carries code, node, phase and what to do
└── NodeLost (ConnectionError)        a node stopped answering or its process ended
    └── LinkLost                      the orchestrator stopped answering: start the process again

JournalError (RuntimeError)           the run's journal cannot be read or written; apart, because no job's failure: it ends the orchestrator
"""

from __future__ import annotations


class SpliceError(Exception):
    """Base of everything splice raises on purpose."""


class ConfigError(SpliceError, ValueError):
    """Bad input, found before anything starts."""


class ProtocolError(SpliceError, ValueError):
    """A frame or message that is not of this protocol."""


class PublicationError(SpliceError, RuntimeError):
    """A version could not be published."""


class MergePlanError(PublicationError):
    """An adapter or weight has no target, two targets, or another shape; names the tensors."""


class ManifestError(PublicationError):
    """Names, dtypes or shapes that the receiver does not know; names the tensors."""


class VerificationError(PublicationError):
    """The live tensors are not what the trainer sent; names the tensors."""


class ContentChanged(VerificationError):
    """What a version would be made of is not what it was when it was first sent."""


class TransferError(SpliceError, RuntimeError):
    """Bytes did not arrive."""


class TransferAborted(TransferError):
    """The transfer was told to stop: by the watchdog, an operator, or the peer's failure."""


class TransferTimeout(TransferError, TimeoutError):
    """The transfer's deadline passed."""


class JournalError(RuntimeError):
    """The run's journal cannot be read or written; nothing goes on without it."""


class JobFailed(SpliceError, RuntimeError):
    """A job ended in `Failed`.

    Attributes:
        code: one of `orchestrator.protocol.messages.ErrorCode`.
        node: the node that failed, or "orchestrator".
        phase: the phase it was in.
        remedy: what to do next.
        steps_taken: optimizer steps of the job that were taken before and stand.
        is_answer: the node said so itself; False: it overran the request's deadline, and what it did is not known.
    """

    def __init__(
        self, *, code: str, node: str, phase: str, message: str, remedy: str, steps_taken: int = 0, is_answer: bool = True
    ) -> None:
        super().__init__(f"{code} on {node} while {phase}: {message} What to do: {remedy}")
        self.code, self.node, self.phase, self.message, self.remedy = code, node, phase, message, remedy
        self.steps_taken, self.is_answer = steps_taken, is_answer


class NodeLost(SpliceError, ConnectionError):
    """A node stopped answering or its process ended."""


class LinkLost(NodeLost):
    """The orchestrator stopped answering this process, or never answered; exit code `restarts.EXIT_LINK_LOST`."""
