"""An update of changed elements on the wire: each buffer of a layout as a code, or as it is.

    compare(old_B, new_B, ...)         on a rank, for each chunk or step: what differs
    begin_encoding(compared)           of several: codes, which travel to host memory meanwhile
    encode_buffer(old_B, new_B, ...)   of one: its messages
    send_changes(groups, buffers)      a table of sizes and checksums first, then the messages
    receive_changes(group, buffers)    on a worker: everything, into host memory
    restore(messages, buffer_B)        makes a buffer of its old bytes, in place
    restoring(buffers)                 the same of one buffer after the other, while threads read

The table comes first because sizes vary. A message without a change is empty and does not travel.
Until all messages have arrived and their checksums are right, a worker changes nothing.

Axes: B = bytes.
"""

from __future__ import annotations

import functools
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from orchestrator.errors import TransferError, TransferTimeout
from weight_transfer import delta
from weight_transfer.edges import Delivery
from weight_transfer.groups import TransferGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A part of a buffer as it travels."""

    delivery: Delivery
    """The part, and where it goes or comes from. Without peers: to all, or from rank 0."""
    nbytes: int
    """Bytes on the wire, to each peer. A code is shorter than what it stands for."""
    crc: int
    body_B: torch.Tensor | None = None
    """The bytes, in host memory. None: they are not there yet, or the sender fills them again."""

    @property
    def is_code(self) -> bool:
        """Whether it stands for changes of the old bytes."""
        return self.nbytes < self.delivery.end - self.delivery.begin

    def row(self) -> tuple[int, int]:
        """Its row in the table."""
        return self.nbytes, self.crc


PART_BYTES = 1 << 26
"""Bytes of a chunk in one message. Decoding takes several times the bytes that change, and a GPU
that generates has little memory left."""
AHEAD_BYTES = 1 << 25
"""Codes that threads read before they are applied. What they read takes some ten times as much."""
Buffers = Sequence[Sequence[Message]]
"""The messages of each chunk or step."""


def whole(nbytes: int) -> tuple[Delivery, ...]:
    """The deliveries of a chunk that all workers receive."""
    return tuple(
        Delivery(peers=(), begin=begin, end=min(begin + PART_BYTES, nbytes))
        for begin in range(0, nbytes, PART_BYTES)
    )


# ------------------------------------------------------------ sending


def drop_zero_signs(floats_B: torch.Tensor, element_bytes: int) -> None:
    """Make -0.0 to 0.0 in place: some tensors are read back without the sign of zero.

    Only of 2 or 4 bytes; integers may change too, which does no harm if both ends do it.
    """
    dtype = {2: torch.int16, 4: torch.int32}.get(element_bytes)
    if dtype is not None:
        bits = floats_B.view(dtype)
        bits.masked_fill_(bits == torch.iinfo(dtype).min, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """The messages of one buffer, whose codes are on their way to host memory."""

    deliveries: Sequence[Delivery]
    codings: Sequence[delta.Coding]
    """Of each delivery. It travels as it is if its code is no shorter."""

    @property
    def changed(self) -> int:
        """Number of changed words."""
        return sum(one.changed for one in self.codings)

    @property
    def sent_bytes(self) -> int:
        """Bytes on the wire to all peers."""
        return sum(
            min(one.end - one.begin, coding.nbytes) * max(1, len(one.peers))
            for one, coding in zip(self.deliveries, self.codings, strict=True)
        )

    def messages(self, fill: Callable[[], torch.Tensor]) -> list[Message]:
        """Wait for the threads.

        Args:
            fill: returns the buffer's new bytes, if a code is no shorter than they are.
        """
        messages, new_B = list[Message](), None
        for one, coding in zip(self.deliveries, self.codings, strict=True):
            if coding.nbytes < one.end - one.begin:
                code, crc = coding.arrived()
                body_B = torch.from_numpy(code)
                messages.append(Message(delivery=one, nbytes=len(code), crc=crc, body_B=body_B))
                continue
            new_B = fill() if new_B is None else new_B
            crc = _crc(new_B, one)
            messages.append(Message(delivery=one, nbytes=one.end - one.begin, crc=crc))
        return messages


Compared = tuple[Sequence[Delivery], delta.Changes | None]
"""The deliveries of a buffer, and what differs in it. None: it travels as it is."""


def compare(
    old_B: torch.Tensor, new_B: torch.Tensor, deliveries: Sequence[Delivery], *, word_bytes: int
) -> Compared:
    """Find what differs. The buffers may change afterwards on the current stream.

    Args:
        deliveries: ascending and without overlap.
        word_bytes: 0 if the buffer travels as it is.
    """
    if not word_bytes or not deliveries:
        return deliveries, None
    parts = [(one.begin, one.end) for one in deliveries]
    return deliveries, delta.compare(old_B, new_B, parts, word_bytes=word_bytes)


def begin_encoding(
    compared: Sequence[Compared], *, tables: delta.Tables | None = None
) -> list[Encoding]:
    """Begin to encode buffers.

    Args:
        tables: as in `delta.encode_changes`.
    """
    changes = [one for _, one in compared if one is not None]
    coded = iter(delta.encode_changes(changes, tables=tables))
    return [
        Encoding(
            deliveries=deliveries,
            codings=[delta.Coding(changed=0, nbytes=one.end - one.begin) for one in deliveries]
            if changes is None
            else next(coded),
        )
        for deliveries, changes in compared
    ]


def _crc(new_B: torch.Tensor, one: Delivery) -> int:
    return zlib.crc32(new_B[one.begin : one.end].cpu().numpy().data)


def encode_buffer(
    old_B: torch.Tensor, new_B: torch.Tensor, deliveries: Sequence[Delivery], *, word_bytes: int
) -> tuple[list[Message], int]:
    """As `compare`; returns the messages of a buffer, and how many of its words changed."""
    (encoding,) = begin_encoding([compare(old_B, new_B, deliveries, word_bytes=word_bytes)])
    return encoding.messages(lambda: new_B), encoding.changed


def send_changes(
    groups: Mapping[str, TransferGroup],
    buffers: Buffers,
    *,
    fill: Callable[[int], torch.Tensor],
    device: torch.device,
    deadline: float,
) -> None:
    """Send the table and every message to every group.

    Args:
        fill: returns the new bytes of a buffer of which a message has no body.
        deadline: `time.monotonic()` at which the last message must have left.

    Raises:
        TransferTimeout, TransferAborted, TransferError: the caller must close the groups.
    """
    everything = [message for messages in buffers for message in messages]
    peers = sorted({peer for m in everything for peer in m.delivery.peers})
    tables = [
        (
            Delivery(peers=(peer,), begin=0, end=0),
            [m for m in everything if peer in m.delivery.peers],
        )
        for peer in peers
    ] or [(Delivery(peers=(), begin=0, end=0), everything)]
    _send(groups, [(d, _table(rows).to(device)) for d, rows in tables if rows], deadline)
    for k, messages in enumerate(buffers):
        is_filled = any(m.body_B is None for m in messages)
        whole_B = fill(k) if is_filled else torch.empty(0, dtype=torch.uint8)
        bodies = [
            (m.delivery, whole_B[m.delivery.begin : m.delivery.end])
            if m.body_B is None
            else (m.delivery, m.body_B.to(device))
            for m in messages
            if m.nbytes
        ]
        _send(groups, bodies, deadline)


def _table(messages: Sequence[Message]) -> torch.Tensor:
    rows = np.array([m.row() for m in messages], "<i8")
    return torch.from_numpy(rows.view(np.uint8).reshape(-1))


def _send(
    groups: Mapping[str, TransferGroup],
    bodies: Sequence[tuple[Delivery, torch.Tensor]],
    deadline: float,
) -> None:
    for name, group in groups.items():
        try:
            for one, body_B in bodies:
                if not one.peers:
                    _wait(group, group.broadcast(body_B, deadline_s=_left_s(deadline)), deadline)
            going = [(peer, body_B) for one, body_B in bodies for peer in one.peers]
            if going:
                _wait(group, group.send(going, deadline_s=_left_s(deadline)), deadline)
        except TransferError as error:
            raise type(error)(f"replica {name!r}: {error}") from error


def _wait(group: TransferGroup, event: torch.cuda.Event | None, deadline: float) -> None:
    if event is not None:
        group.synchronize(event, deadline_s=_left_s(deadline))


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TransferTimeout("the deadline passed before all changed elements had travelled")
    return left_s


# ------------------------------------------------------------ receiving


def receive_changes(
    group: TransferGroup,
    buffers: Sequence[Sequence[Delivery]],
    *,
    device: torch.device,
    deadline: float,
) -> Buffers:
    """Receive everything, buffer by buffer.

    Args:
        buffers: what comes of each; `whole` for chunks.
        device: of the group's buffers.

    Raises:
        TransferTimeout, TransferAborted, TransferError: also if a checksum is wrong.
    """
    everything = [one for deliveries in buffers for one in deliveries]
    sources = sorted({one.peers for one in everything})
    tables = {
        peers: _room(16 * sum(one.peers == peers for one in everything), device)
        for peers in sources
    }
    _receive(group, list(tables.items()), deadline)
    rows = {
        peers: iter(table_B.cpu().numpy().view("<i8").reshape(-1, 2).tolist())
        for peers, table_B in tables.items()
    }
    arrived = []
    for deliveries in buffers:
        messages = [_announced(one, *next(rows[one.peers])) for one in deliveries]
        bodies = [_room(m.nbytes, device) for m in messages]
        pairs = [(m.delivery.peers, b) for m, b in zip(messages, bodies, strict=True) if m.nbytes]
        _receive(group, pairs, deadline)
        arrived.append([_checked(m, b.cpu()) for m, b in zip(messages, bodies, strict=True)])
    return arrived


def _room(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _announced(delivery: Delivery, nbytes: int, crc: int) -> Message:
    if not 0 <= nbytes <= delivery.end - delivery.begin:
        raise TransferError(
            f"the trainer announces {nbytes:,} bytes for a part of "
            f"{delivery.end - delivery.begin:,}; the two ends have different plans"
        )
    return Message(delivery=delivery, nbytes=nbytes, crc=crc)


def _receive(
    group: TransferGroup,
    coming: Sequence[tuple[tuple[int, ...], torch.Tensor]],
    deadline: float,
) -> None:
    for peers, body_B in coming:
        if not peers:
            _wait(group, group.broadcast(body_B, deadline_s=_left_s(deadline)), deadline)
    messages = [(peers[0], body_B) for peers, body_B in coming if peers]
    if messages:
        _wait(group, group.receive(messages, deadline_s=_left_s(deadline)), deadline)


def _checked(message: Message, body_B: torch.Tensor) -> Message:
    if message.nbytes and zlib.crc32(body_B.numpy().data) != message.crc:
        raise TransferError(
            f"{message.nbytes:,} bytes of an update of changed elements arrived with another "
            "checksum; none of it is used, and the next update brings everything"
        )
    return replace(message, body_B=body_B)


def restoring(buffers: Buffers) -> Iterator[Callable[[torch.Tensor], None]]:
    """For each buffer, in order, a function that makes its new bytes of its old ones, in place.

    Threads read the codes of the next buffers meanwhile.

    Raises:
        TransferError: as the functions it gives: a code does not fit.
    """
    rest, begun, held = iter(buffers), deque[list[tuple[Message, delta.Applying | None]]](), 0
    while True:
        while held < AHEAD_BYTES and (messages := next(rest, None)) is not None:
            begun.append([(m, _begun(m)) for m in messages])
            held += sum(m.nbytes for m in messages if m.is_code)
        if not begun:
            return
        now = begun.popleft()
        held -= sum(m.nbytes for m, _ in now if m.is_code)
        yield functools.partial(_restore, now)


def _begun(message: Message) -> delta.Applying | None:
    if not message.is_code:
        return None
    assert message.body_B is not None
    size = message.delivery.end - message.delivery.begin
    return delta.begin_applying(message.body_B.numpy().data, size)


def _restore(
    messages: Sequence[tuple[Message, delta.Applying | None]], buffer_B: torch.Tensor
) -> None:
    for message, applying in messages:
        here_B = buffer_B[message.delivery.begin : message.delivery.end]
        if applying is not None:
            applying.apply(here_B)
        else:
            assert message.body_B is not None
            here_B.copy_(message.body_B)


def restore(messages: Sequence[Message], buffer_B: torch.Tensor) -> None:
    """Make a buffer's new bytes of its old ones, in place.

    Raises:
        TransferError: a code does not fit.
    """
    (only,) = restoring([messages])
    only(buffer_B)
