"""Greeting, readiness, signs of life, and the end."""

from __future__ import annotations

import socket
from typing import Literal

from pydantic import BaseModel, Field

from orchestrator.protocol.messages.base import Message, NodeId, Role
from orchestrator.protocol.messages.json_fields import Json


class Hello(Message):
    """First message of every peer, and of each new connection that it opens."""

    kind: Literal["Hello"] = "Hello"
    role: Role
    node_id: NodeId
    incarnation: str = Field(max_length=64)
    """Random secret of the process. It proves that a new connection belongs to the same process."""
    run_token: str = Field(max_length=1024)
    """The run's token. The orchestrator rejects peers of another run."""
    packages: dict[str, str] = Field(default={}, max_length=64)
    """Versions: torch, nccl, vllm and its dialect, megatron-core, ..."""
    gpus: tuple[str, ...] = Field(default=(), max_length=64)
    pid: int = 0
    host: str = Field(default_factory=socket.gethostname, max_length=255)
    """Name of the peer's host."""
    serves: str | None = Field(default=None, max_length=255)
    """The alias that an inference node will serve. None: no inference node."""
    start_id: str = Field(default="", max_length=64)
    """The launcher's id of the start that made this process; empty without a launcher."""


class Welcome(Message):
    """The orchestrator has accepted the peer."""

    kind: Literal["Welcome"] = "Welcome"
    heartbeat_s: float
    incarnation: str = ""
    """The orchestrator's process. A new one has given up the requests of the old. Empty:
    unknown."""


class Rejected(Message):
    """The orchestrator has refused the peer."""

    kind: Literal["Rejected"] = "Rejected"
    reason: str
    retry: bool = False
    """The reason may pass by itself: send `Hello` again."""


class Ready(Message):
    """The node's model is loaded and the node takes requests."""

    kind: Literal["Ready"] = "Ready"
    node_id: str
    detail: Json = Field(default={})
    """trainer: {"model", "parallel": {...}, "trainable_parameters", "memory", "losses", ...}.
    launcher: {"memory", "node_rank", "num_nodes"}.
    inference: {"base_url", "name", "workers", "model", "model_dtype"}."""


class InferenceDetail(BaseModel):
    """What the orchestrator uses of an inference node's `Ready.detail`."""

    base_url: str = Field(max_length=1024)
    workers: int = Field(default=1, ge=1, le=4096)
    name: str | None = None
    """The alias that the node serves."""
    restarted: int = Field(default=0, ge=0)
    packages: dict[str, str] = Field(default={}, max_length=64)
    """Versions in vLLM's workers: torch, nccl."""


class TrainerDetail(BaseModel):
    """What the orchestrator uses of a trainer's `Ready.detail`."""

    memory: Literal["resident", "offload", "exit"] = "resident"
    ranks: int = Field(default=1, ge=1, le=65536)
    """Its processes, each with one GPU."""
    version: int = Field(default=0, ge=0)
    """The number under which `InitialSync` publishes its weights."""


class LauncherDetail(TrainerDetail):
    """What the orchestrator uses of a launcher's `Ready.detail`."""

    num_nodes: int = Field(default=1, ge=1, le=65536)


READY_DETAILS: dict[str, type[BaseModel]] = {
    "inference": InferenceDetail, "trainer": TrainerDetail, "launcher": LauncherDetail,
}  # fmt: skip  # one row
"""Role -> what its `Ready.detail` must hold."""


class Unready(Message):
    """The node lives but takes no requests until its next `Ready`, because vLLM has ended."""

    kind: Literal["Unready"] = "Unready"
    node_id: str
    reason: str


class NodeEnded(Message):
    """Launcher: the node has no process left, and nobody asked for that. It counts as lost at
    once."""

    kind: Literal["NodeEnded"] = "NodeEnded"
    node_id: str
    """The ended node, not the launcher."""
    start_id: str = Field(default="", max_length=64)
    """The `Hello.start_id` of the ended process: a process that was started since still lives."""
    code: int
    """Exit code; negative: the signal."""
    given_up: str = Field(default="", max_length=1000)
    """Why the launcher ends too, and does not start the node again. Empty: it starts it."""


class EndedDuring(Message):
    """Answers `NodeEnded`, to all launchers of the node: what its process did when it ended."""

    kind: Literal["EndedDuring"] = "EndedDuring"
    node_id: str
    cause: str = Field(default="", max_length=512)
    """The request, under one name however often it is sent; empty: none."""
    is_counted: bool = False
    """Whether the orchestrator counts the crashes in this request, and fails its job."""
    has_trained: bool = False
    """Whether the process had trained: crashes before it do not count."""


class MemoryUse(Message):
    """Memory of one GPU, all its processes included, or of a node's processes on its host."""

    device: str = Field(max_length=64)
    """"GPU 0", or "host"."""
    used_bytes: int = Field(ge=0)
    total_bytes: int = Field(ge=0)
    """Of the GPU or the host."""


class Heartbeat(Message):
    """A node is alive."""

    kind: Literal["Heartbeat"] = "Heartbeat"
    node_id: str
    memory: tuple[MemoryUse, ...] = Field(default=(), max_length=64)
    """Of launchers and inference nodes; a few seconds old. Empty until it was measured."""


class Shutdown(Message):
    """Ask a node to end in order. Not a request."""

    kind: Literal["Shutdown"] = "Shutdown"
    reason: str = "the run is over"
