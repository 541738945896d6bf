"""How a request or job continues and ends."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from orchestrator.errors import JobFailed
from orchestrator.protocol.messages.base import ErrorCode, Message
from orchestrator.protocol.messages.batches import BatchSpecs
from orchestrator.protocol.messages.json_fields import Json

WAITING = "waiting for nodes"
"""Phase of the `Progress` that every client of the job gets, also one that asked for none."""


class Progress(Message):
    """A step of a request or job. `sequence` counts from 0 without gaps."""

    kind: Literal["Progress"] = "Progress"
    request_id: str
    sequence: int = Field(ge=0)
    phase: str
    detail: Json = Field(default={})


class Completed(Message):
    """Terminal: the work is done. Buffers follow, as `tensors` lists them."""

    kind: Literal["Completed"] = "Completed"
    request_id: str
    result: Json = Field(default={})
    tensors: BatchSpecs = ()


class Failed(Message):
    """Terminal: the work failed. `remedy` tells the reader what to do."""

    kind: Literal["Failed"] = "Failed"
    request_id: str
    code: ErrorCode
    node: str
    phase: str
    message: str
    remedy: str
    steps_taken: int = Field(default=0, ge=0)
    """Training: optimizer steps that this request took before the failure. They remain."""

    def as_error(self, *, node: str) -> JobFailed:
        """Return the exception of whoever waits; `node` sent this message."""
        fields = self.model_dump(exclude={"kind", "request_id", "node"})
        return JobFailed(node=node, **fields)


class Cancelled(Message):
    """Terminal: cancelled before the work started."""

    kind: Literal["Cancelled"] = "Cancelled"
    request_id: str
    reason: str


Terminal = Completed | Failed | Cancelled
