"""Frames: protocol version, kind, msgpack body, then raw tensor buffers. No pickle, no base64.

On the socket (`to_wire`, `from_wire`) body and buffers travel in pieces of at most `PIECE_BYTES`,
after a frame with their lengths. ZeroMQ closes a connection that sends a larger frame, even during
the handshake. A stranger can therefore make this process hold one piece at most.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
from pydantic import ValidationError

from orchestrator.errors import ProtocolError
from orchestrator.protocol.messages import ANY_MESSAGE, MAX_KEYS, PROTOCOL_VERSION, AnyMessage

Frames = Sequence[bytes | memoryview]
PIECE_BYTES = 256 * 1024
"""Largest piece on the socket."""
MAX_FRAME_BYTES = PIECE_BYTES + 1024
"""ZMQ_MAXMSGSIZE: a piece with CURVE's overhead."""
MAX_BUFFERS = 16
MAX_BUFFERS_BYTES = 450_000_000
"""Most bytes of a message's buffers. An outcome may have twice as many: two float32 for each token.
SQLite stores up to 1 GB in a row."""
_KIB, _MIB = 2**10, 2**20
MAX_BODY_BYTES = 64 * _KIB
"""Largest body, except for the kinds in `_LARGER_BODIES`."""
_LARGER_BODIES = {
    "Hello": 16 * _KIB,
    # allowed_token_ids may hold a whole vocabulary; client_state is the user's.
    **dict.fromkeys(("SubmitJob", "NextBatch", "RunJob"), 4 * _MIB),
    # Manifests and layouts: a model of 100,000 tensors takes 12 MiB.
    **dict.fromkeys(("Completed", "PrepareUpdate", "UseLayout", "UseEdges"), 32 * _MIB),
    "Status": _MIB,
    **dict.fromkeys(("SwapWeights", "EncodeChanges"), 2 * _MIB),
}
VERSION_FRAME = b"splice/%d" % PROTOCOL_VERSION
_HEAD_FRAMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A decoded message, its raw buffers, and all its frames as they came, buffers included."""

    message: AnyMessage
    buffers: tuple[bytes, ...] = ()
    frames: tuple[bytes, ...] = field(default=(), repr=False, compare=False)


class OtherProtocolVersion(ProtocolError):
    """The peer speaks another version of the protocol and gets `Rejected`."""


class KindNotAllowed(ProtocolError):
    """The peer may not send this kind of message."""


def encode(message: AnyMessage, buffers: Frames = ()) -> list[bytes | memoryview]:
    """Turn a message and its raw buffers, as in `message.tensors`, into frames.

    Raises:
        ProtocolError: a buffer's size differs from its spec, the message exceeds the limit of its
            kind, or msgpack cannot hold the body, as with an integer of more than 64 bits.
    """
    _check_buffers(message, buffers)
    try:
        body = msgpack.packb(message.model_dump(mode="python"), use_bin_type=True)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"{message.kind} cannot be sent: {error}") from error
    _check_sizes(message.kind, [len(body), *(memoryview(b).nbytes for b in buffers)])
    return [VERSION_FRAME, message.kind.encode(), body, *buffers]


def decode(frames: Sequence[bytes]) -> Envelope:
    """Turn frames into a message. Nothing that the peer sent is executed.

    Raises:
        OtherProtocolVersion: the peer speaks another version.
        ProtocolError: the frames are not a message of this protocol.
    """
    if len(frames) < _HEAD_FRAMES:
        raise ProtocolError(
            f"expected at least {_HEAD_FRAMES} frames (version, kind, body), got {len(frames)}"
        )
    version, kind, body, *buffers = frames
    _check_version(version)
    name = bytes(kind[:40]).decode(errors="replace")
    _check_sizes(name, [len(body), *map(len, buffers)])
    try:
        fields = msgpack.unpackb(body, raw=False, strict_map_key=False, max_map_len=MAX_KEYS)
        if not isinstance(fields, dict) or fields.get("kind") != name:
            raise ProtocolError(f"the body is not of the kind {name!r} that its frame says")
        message = ANY_MESSAGE.validate_python(fields)
        _check_buffers(message, buffers)
    except ProtocolError:
        raise
    except Exception as error:
        raise ProtocolError(
            f"not a message of this protocol (kind {name!r}): {briefly(error)}"
        ) from error
    return Envelope(message=message, buffers=tuple(buffers), frames=tuple(frames))


def unpacked(data: memoryview) -> Envelope:
    """Undo the trainer's `packed`, which also made a version's `remake.bin`. The buffers are views.

    Raises:
        ProtocolError: as `decode`.
    """
    begin = 8 + int.from_bytes(data[:8], "little")
    frames: list[Any] = []
    for size in msgpack.unpackb(data[8:begin]):
        frames.append(data[begin : begin + size])
        begin += size
    return decode([*map(bytes, frames[:_HEAD_FRAMES]), *frames[_HEAD_FRAMES:]])


def to_wire(frames: Frames) -> list[bytes | memoryview]:
    """Return the frames of `encode` as they travel: version, kind, lengths, pieces."""
    version, kind, *parts = frames
    views = [memoryview(part).cast("B") for part in parts]
    lengths = msgpack.packb([len(view) for view in views])
    pieces = [
        view[at : at + PIECE_BYTES] for view in views for at in range(0, len(view), PIECE_BYTES)
    ]
    return [version, kind, lengths, *pieces]


def from_wire(parts: Sequence[bytes], *, kinds: Container[str] | None = None) -> list[bytes]:
    """Reverse `to_wire`.

    Args:
        kinds: the kinds that the peer may send. None: all.

    Raises:
        OtherProtocolVersion: the peer speaks another version.
        KindNotAllowed: the peer may not send this kind. Its pieces were not read.
        ProtocolError: the message exceeds the limit of its kind, or lengths and pieces differ.
    """
    if len(parts) < _HEAD_FRAMES:
        raise ProtocolError(
            f"expected at least {_HEAD_FRAMES} frames (version, kind, lengths), got {len(parts)}"
        )
    version, kind, packed, *pieces = parts
    _check_version(version)
    name = kind[:40].decode(errors="replace")
    if kinds is not None and name not in kinds:
        raise KindNotAllowed(f"this peer may not send {name!r}")
    lengths = _lengths(name, packed)
    frames, at = [version, kind], 0
    for length in lengths:
        count = -(-length // PIECE_BYTES)
        joined = (
            pieces[at] if count == 1 and at < len(pieces) else b"".join(pieces[at : at + count])
        )
        if len(joined) != length:
            raise ProtocolError(f"{name}: {length} bytes were announced, {len(joined)} came")
        frames.append(joined)
        at += count
    if at != len(pieces):
        raise ProtocolError(f"{name}: {len(pieces)} pieces came, {at} were announced")
    return frames


def _lengths(kind: str, packed: bytes) -> list[int]:
    try:
        lengths = msgpack.unpackb(packed, max_array_len=1 + MAX_BUFFERS)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"{kind}: the lengths are not readable: {briefly(error)}") from None
    if (
        not isinstance(lengths, list)
        or not lengths
        or not all(isinstance(n, int) and n >= 0 for n in lengths)
    ):
        raise ProtocolError(f"{kind}: the lengths are not a list of numbers")
    _check_sizes(kind, lengths)
    return lengths


def _check_version(version: bytes) -> None:
    if not version.startswith(b"splice/"):
        raise ProtocolError(f"the first frame is {bytes(version[:32])!r}, not a protocol version")
    if version != VERSION_FRAME:
        theirs = bytes(version[:32]).decode(errors="replace")
        raise OtherProtocolVersion(
            f"peer speaks {theirs!r}, this side {VERSION_FRAME.decode()!r}; install the same "
            "splice on both"
        )


def _check_sizes(kind: str, sizes: Sequence[int]) -> None:
    """Check the sizes of the body and of each buffer, in this order."""
    most = _LARGER_BODIES.get(kind, MAX_BODY_BYTES)
    if sizes[0] > most:
        raise ProtocolError(
            f"the body of {kind} has {sizes[0]:,} bytes; at most {most:,} are allowed"
        )
    most = 2 * MAX_BUFFERS_BYTES if kind == "Completed" else MAX_BUFFERS_BYTES
    if len(sizes) - 1 > MAX_BUFFERS or sum(sizes[1:]) > most:
        raise ProtocolError(
            f"{kind} has {len(sizes) - 1} buffers of {sum(sizes[1:]):,} bytes together; at most "
            f"{MAX_BUFFERS} of "
            f"{most:,} are allowed. Send a batch in parts: forward_backward for each, then "
            "optim_step"
        )


def _check_buffers(message: AnyMessage, buffers: Frames) -> None:
    holder = getattr(message, "job", message)
    sizes = [memoryview(b).nbytes for b in buffers]
    wanted = [s.nbytes for s in getattr(holder, "tensors", ())]
    if sizes != wanted:
        raise ProtocolError(
            f"{message.kind}: buffers of {sizes[:8]} bytes, but its tensors say {wanted[:8]}"
        )


def briefly(error: Exception) -> str:
    """Say what is wrong in a peer's message without repeating its contents, which may be secret."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part)[:40] for part in first["loc"][:8])
        return f"{where}: {first['msg'][:300]} ({error.error_count()} errors)"
    return f"{type(error).__name__}: {str(error)[:200]}"
