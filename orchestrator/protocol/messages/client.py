"""What a client sends, and the status that it gets."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from orchestrator.protocol.messages.base import Message, Role
from orchestrator.protocol.messages.jobs import JobSpec
from orchestrator.protocol.messages.json_fields import Json
from orchestrator.protocol.messages.peers import MemoryUse


class SubmitJob(Message):
    """Run one job. The batch's buffers, if any, follow the body."""

    kind: Literal["SubmitJob"] = "SubmitJob"
    job_id: str = Field(min_length=1, max_length=128)
    job: JobSpec
    progress: bool = True
    """Whether to send the job's `Progress`. False: send the outcome only."""


class CancelJob(Message):
    """Cancel a job that has not started. A running job continues to its end."""

    kind: Literal["CancelJob"] = "CancelJob"
    job_id: str = Field(min_length=1, max_length=128)


class GetStatus(Message):
    """Ask for `Status`."""

    kind: Literal["GetStatus"] = "GetStatus"


class Subscribe(Message):
    """Receive every `Progress` and terminal message of every job from now on."""

    kind: Literal["Subscribe"] = "Subscribe"


class StopRun(Message):
    """Send `Shutdown` to every node, then end the orchestrator."""

    kind: Literal["StopRun"] = "StopRun"


class NodeStatus(Message):
    """One node in `Status`."""

    node_id: str
    role: Role
    state: Literal["connected", "ready", "lost", "poisoned"]
    packages: dict[str, str] = Field(default={})
    gpus: tuple[str, ...] = ()
    host: str = ""
    memory: tuple[MemoryUse, ...] = ()
    detail: Json = Field(default={})


class Status(Message):
    """Answer to `GetStatus`."""

    kind: Literal["Status"] = "Status"
    name: str
    version: int | None
    publication: str
    """State of the publication machine."""
    nodes: tuple[NodeStatus, ...]
    queued_jobs: int
    trouble: str = ""
    """Why replicas lack the served version: what the last attempt to send it again said."""
    apart: str = ""
    """How the trainer's state differs from the served version; empty: it does not, or cannot be
    told."""
    is_final: bool = False
    """Whether the next attempt will fail in the same way, until somebody changes something."""
    dropped: dict[str, int] = Field(default={})
    """Peer -> number of its messages that were dropped as malformed or forbidden.
    "strangers": connections without a `Hello`. "forgotten": peers that are gone."""
