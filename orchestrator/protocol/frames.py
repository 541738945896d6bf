"""Frames on the wire: protocol version, kind, msgpack body, then raw tensor buffers. No pickle, no base64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgpack
from pydantic import ValidationError

from orchestrator.errors import ProtocolError
from orchestrator.protocol.messages import ANY_MESSAGE, PROTOCOL_VERSION, AnyMessage

MAX_BODY_BYTES = 64 * 2**20
MAX_BUFFER_BYTES = 256 * 2**20
_VERSION_FRAME = b"splice/%d" % PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A decoded message, the raw buffers that came with it, and all frames as they came, buffers included."""

    message: AnyMessage
    buffers: tuple[bytes, ...] = ()
    frames: tuple[bytes, ...] = field(default=(), repr=False, compare=False)


class OtherProtocolVersion(ProtocolError):
    """The peer speaks another version of the protocol; it is answered `Rejected`."""


def encode(message: AnyMessage, buffers: Sequence[bytes | memoryview] = ()) -> list[bytes | memoryview]:
    """Message and raw buffers to frames; the buffers must be what `message.tensors` says.

    Raises:
        ProtocolError: a buffer's size is not its spec's, or the body holds what msgpack cannot (an integer of more than 64 bits, say).
    """
    _check_buffers(message, buffers)
    try:
        body = msgpack.packb(message.model_dump(mode="python"), use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"{message.kind} cannot be sent: {error}") from error
    return [_VERSION_FRAME, message.kind.encode(), body, *buffers]


def decode(frames: Sequence[bytes]) -> Envelope:
    """Frames to a message; never executes anything the peer sent.

    Raises:
        OtherProtocolVersion: the version frame is another one's.
        ProtocolError: anything else that is not a message of this protocol.
    """
    if len(frames) < 3:
        raise ProtocolError(f"expected at least 3 frames (version, kind, body), got {len(frames)}")
    version, kind, body, *buffers = frames
    if not version.startswith(b"splice/"):
        raise ProtocolError(f"the first frame is {version[:32]!r}, not a protocol version")
    if version != _VERSION_FRAME:
        theirs = version[:32].decode(errors="replace")
        raise OtherProtocolVersion(
            f"peer speaks {theirs!r}, this side {_VERSION_FRAME.decode()!r}; install the same splice on both"
        )
    if len(body) > MAX_BODY_BYTES or any(len(b) > MAX_BUFFER_BYTES for b in buffers):
        raise ProtocolError(f"oversized frame: body {len(body)} bytes, buffers {[len(b) for b in buffers][:4]}")
    try:
        fields = msgpack.unpackb(body, raw=False, strict_map_key=False)
        message = ANY_MESSAGE.validate_python(fields)
    except (ValueError, TypeError, ValidationError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not a message of this protocol (kind {kind[:40]!r}): {str(error)[:500]}") from error
    if message.kind.encode() != kind:
        raise ProtocolError(f"kind frame {kind[:40]!r} does not match the body's kind {message.kind!r}")
    _check_buffers(message, buffers)
    return Envelope(message=message, buffers=tuple(buffers), frames=tuple(frames))


def _check_buffers(message: AnyMessage, buffers: Sequence[bytes | memoryview]) -> None:
    holder = message.job if message.kind == "SubmitJob" else message
    specs = () if getattr(holder, "staged", None) is not None else getattr(holder, "tensors", ())
    sizes = [memoryview(b).nbytes for b in buffers]
    wanted = [s.nbytes for s in specs]
    if sizes != wanted:
        raise ProtocolError(f"{message.kind}: buffers of {sizes} bytes, but its tensors say {wanted}")
