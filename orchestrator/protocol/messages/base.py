"""What every message is made of: the base model, tensor specs, and ids."""

from __future__ import annotations

import functools
import math
import uuid
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from orchestrator.errors import ConfigError
from orchestrator.errors import ErrorCode as ErrorCode

PROTOCOL_VERSION = 21
"""The orchestrator answers `Rejected` to peers of another version."""

Transport = Literal["tcp", "nccl"]
Role = Literal["trainer", "inference", "client", "launcher"]
LayoutOrder = Literal["edges", "own", "shared", "manifest"]
PauseMode = Literal["keep", "keep_kv", "wait", "abort"]
PublicationMode = Literal["in_place", "shadow"]
Sent = Literal["full", "changed", "elements"]
"""full: all tensors. changed: those that training changes, with all of their layers. elements: of
these, the elements that changed."""
Dtype = Literal[
    "float32", "bfloat16", "float16", "int64", "int32", "uint8", "float64", "float8_e4m3fn"
]

DTYPE_BYTES: dict[str, int] = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "uint8": 1,
    "float8_e4m3fn": 1,
}  # fmt: skip  # by size


class Message(BaseModel):
    """Base of every body: frozen, and an unknown field is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64"
    )


def new_id(prefix: str) -> str:
    """Return a fresh request, job or client id."""
    return f"{prefix}-{uuid.uuid4().hex[:12]}"


class Request(Message):
    """Base of what the orchestrator asks a node to do."""

    request_id: str = Field(default_factory=functools.partial(new_id, "request"))
    deadline_s: float = Field(gt=0)
    """Seconds from receipt within which the node must complete or fail the request."""


class TensorSpec(Message):
    """One tensor of a manifest, or one raw buffer after a body. `shape` is in elements,
    row-major."""

    name: str = Field(max_length=1024)
    dtype: Dtype
    shape: Annotated[
        tuple[Annotated[int, Field(ge=0, lt=2**48)], ...], Field(max_length=8, fail_fast=True)
    ]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.numel * DTYPE_BYTES[self.dtype]


NodeId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""At most 64 letters, digits, '.', '_' and '-'."""
_NODE_ID: TypeAdapter[str] = TypeAdapter(NodeId)


CANARY = "canary"
"""Prefix of the ids of a canary's requests."""


def check_node_id(text: str) -> str:
    """Return `text` if it is a `NodeId`.

    Raises:
        ConfigError: `text` is not a `NodeId`.
    """
    try:
        return _NODE_ID.validate_python(text)
    except ValidationError:
        raise ConfigError(
            f"{text!r} is no id; take letters, digits, '.', '_' and '-', at most 64, "
            "and begin with a letter or digit"
        ) from None
