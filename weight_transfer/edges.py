"""Plans which trainer rank sends which elements to which worker, and in which step. Pure.

    what each rank holds, what each worker keeps -> `plan` -> steps of parcels
    `steps_of_rank(edges, rank)`: what a rank sends
    `table_of(edges, worker)`: what a worker must know -> `steps_of_worker`: what it receives

Each element of each tensor is in one parcel, of one rank. All workers that keep it receive that
parcel, and no other worker does. Of ranks with equal copies, the one with the fewest bytes sends.

A step has its share of each stream from a rank to workers, so that all ranks send and all workers
receive all the time. No buffer holds more than a step.
"""

from __future__ import annotations

import base64
import heapq
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from orchestrator.errors import ManifestError
from orchestrator.protocol.messages import DTYPE_BYTES, TensorSpec
from weight_transfer.boxes import Box, matrix, overlap
from weight_transfer.digest import PreparedDigest
from weight_transfer.groups import TransferGroup
from weight_transfer.layout import torch_dtype

STEP_BYTES = 256 * 2**20
"""Most bytes that a rank sends, or a worker receives, in a usual step. Python takes half a
millisecond for one; at 128 MiB it was slower than NVLink."""
PIECE_BYTES = 8 * 2**20
"""Larger pieces are cut into rows, so that streams can be cut into equal steps."""
SHARED_BYTES = 64 * 2**20
"""Ranks with equal copies share the sending of a tensor with more bytes, all its receivers
counted."""
PIECE_ALIGN = 16
PARCEL_ALIGN = 512
Table = npt.NDArray[np.int64]
"""[pieces, TABLE_COLUMNS]: step, rank, parcel, index of the tensor, and its box's numbers."""
TABLE_COLUMNS, KEEPS_COLUMNS = 8, 5


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the manifest's tensor `index`. It travels row after row, without gaps."""

    index: int
    box: Box


@dataclass(frozen=True, slots=True)
class Parcel:
    """What a rank sends to each of `workers` in one step, piece after piece."""

    workers: tuple[int, ...]
    pieces: tuple[Piece, ...]


Edges = list[list[list[Parcel]]]
"""The parcels of each rank in each step: [step][rank]."""
Holders = Sequence[tuple[tuple[int, ...], Box]]
"""Boxes of one tensor, which share no element, and the ranks that hold each."""
Keeps = Mapping[int, Sequence[Box]]
"""Index of a tensor -> what one worker keeps of it."""
_Group = TypeVar("_Group")
_Stream = tuple[int, tuple[int, ...]]
"""A rank, and the workers that it sends the same pieces to."""
_Shared = tuple[int, tuple[int, ...], int, Box]
"""Which of a tensor's senders, the workers, bytes, and the box."""


# ------------------------------------------------------------ the plan


def plan(
    specs: Sequence[TensorSpec],
    holders: Sequence[Holders],
    keeps: Sequence[Keeps],
    *,
    order: Iterable[int],
    ranks: int,
    step_bytes: int | None = None,
) -> Edges:
    """Plan all steps.

    Args:
        holders: for each tensor, who holds what.
        keeps: for each worker, what it keeps.
        order: indices of all tensors, in the order in which they travel.
        step_bytes: by default `STEP_BYTES`.

    Raises:
        ManifestError: no worker keeps an element; names the tensor.
    """
    streams: dict[_Stream, list[tuple[int, Piece]]] = {}
    owners = _owners(specs, holders, keeps, ranks)
    alike: dict[Any, list[_Shared]] = {}  # experts of all layers are cut in the same way
    for index in order:
        spec = specs[index]
        held = tuple(box for _, box in owners[index])
        kept = tuple(tuple(worker.get(index, ())) for worker in keeps)
        pattern = (spec.shape, spec.dtype, held, kept)
        if pattern not in alike:
            alike[pattern] = list(_shared(spec, held, kept))
        for nth, workers, nbytes, box in alike[pattern]:
            stream = streams.setdefault((owners[index][nth][0], workers), [])
            stream.append((nbytes, Piece(index, box)))
    return _in_steps(streams, ranks, len(keeps), step_bytes or STEP_BYTES)


def _owners(
    specs: Sequence[TensorSpec], holders: Sequence[Holders], keeps: Sequence[Keeps], ranks: int
) -> list[list[tuple[int, Box]]]:
    """The one rank that sends each box: of copies, the rank with the fewest bytes to send so
    far."""
    copies = [
        sum(box.numel for worker in keeps for box in worker.get(index, ())) / max(1, spec.numel)
        for index, spec in enumerate(specs)
    ]
    loads = [0.0] * ranks
    queues: dict[tuple[int, ...], list[tuple[float, int]]] = {}
    owners: list[list[tuple[int, Box]]] = [[] for _ in specs]
    for has_choice in (False, True):
        for index, spec in enumerate(specs):
            for held_by, box in holders[index]:
                if (len(held_by) > 1) is not has_choice:
                    continue
                nbytes = box.numel * DTYPE_BYTES[spec.dtype] * copies[index]
                parts = min(len(held_by), int(nbytes // SHARED_BYTES) + 1)
                queue = queues.get(held_by)
                if queue is None:
                    queue = queues[held_by] = [(loads[r], r) for r in held_by]
                    heapq.heapify(queue)
                for part in _row_parts(box, parts):
                    rank = _least(queue, loads)
                    loads[rank] += nbytes * part.numel / box.numel
                    owners[index].append((rank, part))
    return owners


def _least(queue: list[tuple[float, int]], loads: Sequence[float]) -> int:
    """The rank of a heap with the least load. Loads only grow, so an old entry is put back."""
    while loads[queue[0][1]] != queue[0][0]:
        rank = queue[0][1]
        heapq.heapreplace(queue, (loads[rank], rank))
    return queue[0][1]


def _row_parts(box: Box, parts: int) -> Iterator[Box]:
    """The box in at most `parts` parts of its rows, of similar size."""
    ends = sorted({box.rows * n // parts for n in range(parts + 1)})
    for first, end in itertools.pairwise(ends):
        yield Box(box.first_row + first, end - first, box.first_column, box.columns)


def _shared(
    spec: TensorSpec, held: Sequence[Box], kept: Sequence[Sequence[Box]]
) -> Iterator[_Shared]:
    """The pieces of a tensor of which senders hold these boxes and workers keep those."""
    size = DTYPE_BYTES[spec.dtype]
    wanted = _wanted(spec, kept)
    for nth, box in enumerate(held):
        for part, workers in wanted:
            shared = box.within(part)
            for piece in _rows_of(shared, size) if shared is not None else ():
                yield nth, workers, piece.numel * size, piece


def _wanted(spec: TensorSpec, keeps: Sequence[Sequence[Box]]) -> list[tuple[Box, tuple[int, ...]]]:
    """Boxes that share no element, and the workers that keep each whole."""
    wanted: dict[Box, list[int]] = {}
    for worker, kept in enumerate(keeps):
        for box in kept:
            wanted.setdefault(box, []).append(worker)
    if overlap(wanted) is not None:
        wanted = _refined(wanted)
    missing = spec.numel - sum(box.numel for box in wanted)
    if missing:
        raise ManifestError(f"{spec.name}: no worker keeps {missing} of its {spec.numel} elements")
    return [(box, tuple(dict.fromkeys(workers))) for box, workers in wanted.items()]


def _refined(wanted: Mapping[Box, Sequence[int]]) -> dict[Box, list[int]]:
    """The boxes cut along each other's sides, so that no two share an element."""
    rows = sorted({n for b in wanted for n in (b.first_row, b.first_row + b.rows)})
    columns = sorted({n for b in wanted for n in (b.first_column, b.first_column + b.columns)})
    found: dict[Box, list[int]] = {}
    for top, bottom in itertools.pairwise(rows):
        for left, right in itertools.pairwise(columns):
            cell = Box(top, bottom - top, left, right - left)
            workers = [w for box, kept_by in wanted.items() if box.contains(cell) for w in kept_by]
            if workers:
                found[cell] = sorted(workers)
    return found


def _rows_of(box: Box, size: int) -> Iterator[Box]:
    """The box in pieces of some rows."""
    rows = max(1, PIECE_BYTES // (box.columns * size))
    for first in range(0, box.rows, rows):
        count = min(rows, box.rows - first)
        yield Box(box.first_row + first, count, box.first_column, box.columns)


def _in_steps(
    streams: Mapping[_Stream, Sequence[tuple[int, Piece]]],
    ranks: int,
    workers: int,
    step_bytes: int,
) -> Edges:
    totals = {key: sum(nbytes for nbytes, _ in stream) for key, stream in streams.items()}
    sent, received = [0] * ranks, [0] * workers
    for (rank, to), total in totals.items():
        sent[rank] += total
        for worker in to:
            received[worker] += total
    steps = max(1, -(-max([*sent, *received]) // step_bytes))
    edges: Edges = [[[] for _ in range(ranks)] for _ in range(steps)]
    for (rank, to), stream in sorted(streams.items(), key=lambda item: item[0]):
        total, begin = totals[rank, to], 0
        of_step: dict[int, list[Piece]] = {}
        for nbytes, piece in stream:
            of_step.setdefault((2 * begin + nbytes) * steps // (2 * total), []).append(piece)
            begin += nbytes
        for step, some in of_step.items():
            edges[step][rank].append(Parcel(to, tuple(some)))
    return edges


def _nbytes(piece: Piece, specs: Sequence[TensorSpec]) -> int:
    return piece.box.numel * DTYPE_BYTES[specs[piece.index].dtype]


def bytes_of(
    edges: Edges, specs: Sequence[TensorSpec], *, ranks: int, workers: int
) -> tuple[list[int], list[int]]:
    """Bytes that each rank sends to one replica, and that each of its workers receives."""
    sent, received = [0] * ranks, [0] * workers
    for parcels in edges:
        for rank, mine in enumerate(parcels):
            for parcel in mine:
                nbytes = sum(_nbytes(piece, specs) for piece in parcel.pieces)
                sent[rank] += nbytes * len(parcel.workers)
                for worker in parcel.workers:
                    received[worker] += nbytes
    return sent, received


# ------------------------------------------------------------ in memory


@dataclass(frozen=True, slots=True)
class Placed:
    """A piece and its first byte in a buffer."""

    piece: Piece
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A parcel in a buffer: bytes [begin, end)."""

    peers: tuple[int, ...]
    """On a rank: the workers that it goes to. On a worker: the rank that it comes from."""
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step as a rank or a worker has it in its buffer."""

    nbytes: int
    deliveries: tuple[Delivery, ...]
    placed: tuple[Placed, ...]


def steps_of_rank(edges: Edges, rank: int, specs: Sequence[TensorSpec]) -> list[Step]:
    """What a rank sends."""
    return [_laid_out([(p.workers, p.pieces) for p in parcels[rank]], specs) for parcels in edges]


def _laid_out(
    parcels: Iterable[tuple[tuple[int, ...], Sequence[Piece]]], specs: Sequence[TensorSpec]
) -> Step:
    at, messages, placed = 0, [], []
    for peers, pieces in parcels:
        begin = end = _aligned(at, PARCEL_ALIGN)
        for piece in pieces:
            begin_piece = _aligned(end, PIECE_ALIGN)
            placed.append(Placed(piece, begin_piece))
            end = begin_piece + _nbytes(piece, specs)
        messages.append(Delivery(peers=peers, begin=begin, end=end))
        at = end
    return Step(nbytes=at, deliveries=tuple(messages), placed=tuple(placed))


def _aligned(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to


def table_of(edges: Edges, worker: int) -> Table:
    """What a worker must know: the pieces that it receives, in order."""
    rows = [
        (
            step,
            rank,
            number,
            piece.index,
            piece.box.first_row,
            piece.box.rows,
            piece.box.first_column,
            piece.box.columns,
        )
        for step, parcels in enumerate(edges)
        for rank, mine in enumerate(parcels)
        for number, parcel in enumerate(mine)
        if worker in parcel.workers
        for piece in parcel.pieces
    ]
    return np.array([(len(edges), 0, 0, 0, 0, 0, 0, 0), *rows], np.int64)


def steps_of_worker(table: Table, specs: Sequence[TensorSpec]) -> list[Step]:
    """What a worker receives, from `table_of`.

    Raises:
        ManifestError: the table names a tensor or a box that the manifest does not have.
    """
    count, rows = int(table[0, 0]), table[1:].tolist()
    parcels: list[list[tuple[tuple[int, ...], list[Piece]]]] = [[] for _ in range(count)]
    for (step, rank, _), of_parcel in itertools.groupby(rows, key=lambda row: tuple(row[:3])):
        pieces = [Piece(row[3], Box(*row[4:])) for row in of_parcel]
        for piece in pieces:
            if not 0 <= piece.index < len(specs) or not piece.box.is_inside(
                *matrix(specs[piece.index].shape)
            ):
                raise ManifestError(f"the trainer would send {piece}, which the manifest has not")
        parcels[step].append(((rank,), pieces))
    return [_laid_out(of_step, specs) for of_step in parcels]


def check_coverage(steps: Sequence[Step], keeps: Keeps, name_of: Callable[[int], str]) -> None:
    """Check on a worker that it receives what it keeps, each element once, and nothing else.

    Raises:
        ManifestError: names the first tensor for which that is not so.
    """
    found: dict[int, list[Box]] = {}
    for step in steps:
        for placed in step.placed:
            found.setdefault(placed.piece.index, []).append(placed.piece.box)
    for index in sorted(keeps.keys() | found.keys()):
        kept, boxes = keeps.get(index, ()), found.get(index, [])
        inside = all(any(k.within(box) for k in kept) for box in boxes)
        shared = sum(
            part.numel for k in kept for box in boxes if (part := k.within(box)) is not None
        )
        wanted = sum(k.numel for k in kept)
        if not inside or shared != wanted or sum(box.numel for box in boxes) != wanted:
            raise ManifestError(
                f"{name_of(index)}: this worker keeps {wanted} elements and would receive {shared} "
                f"of them in {len(boxes)} pieces"
            )
        if (twice := overlap(boxes)) is not None:
            raise ManifestError(
                f"{name_of(index)}: this worker would receive elements of {twice[0]} in {twice[1]} "
                "again, and lack others"
            )


# ------------------------------------------------------------ on the wire


def receive_into(
    buffer_B: torch.Tensor,
    messages: Sequence[Delivery] | None,
    *,
    group: TransferGroup,
    deadline_s: float,
) -> torch.cuda.Event | None:
    """Receive a step's messages into its buffer; without messages, a broadcast. Returns and raises
    as `TransferGroup.broadcast`."""
    if messages is None:
        return group.broadcast(buffer_B, deadline_s=deadline_s)
    coming = [(m.peers[0], buffer_B[m.begin : m.end]) for m in messages]
    return group.receive(coming, deadline_s=deadline_s)


def in_turn(groups: Mapping[str, _Group], rank: int) -> dict[str, _Group]:
    """The replicas' groups in the order in which a rank serves them over TCP, where a call blocks:
    each rank begins with another replica, so that all links are used."""
    names = list(groups)
    first = rank % len(names) if names else 0
    return {name: groups[name] for name in names[first:] + names[:first]}


def send_from(
    buffer_B: torch.Tensor,
    deliveries: Sequence[Delivery] | None,
    *,
    group: TransferGroup,
    deadline_s: float,
) -> torch.cuda.Event | None:
    """Send a step's deliveries from its buffer; without deliveries, broadcast it. Returns and
    raises as `TransferGroup.broadcast`."""
    if deliveries is None:
        return group.broadcast(buffer_B, deadline_s=deadline_s)
    going = [(worker, buffer_B[d.begin : d.end]) for d in deliveries for worker in d.peers]
    return group.send(going, deadline_s=deadline_s)


def view_of_piece(buffer_B: torch.Tensor, placed: Placed, spec: TensorSpec) -> torch.Tensor:
    """A piece in a step's buffer: [rows, columns], a view."""
    box, dtype = placed.piece.box, torch_dtype(spec.dtype)
    flat_B = buffer_B[placed.offset : placed.offset + box.numel * dtype.itemsize]
    return flat_B.view(dtype).view(box.rows, box.columns)


def digest_of_pieces(
    buffers: Sequence[torch.Tensor],
    steps: Sequence[Step],
    specs: Sequence[TensorSpec],
    *,
    rows: Sequence[int] | None = None,
) -> PreparedDigest:
    """Digest the pieces in steps' buffers, each as a part of its HF tensor.

    Args:
        rows: row of the output for each piece, over all steps. None: its tensor's index.
    """
    placed = [
        (buffer_B, one) for buffer_B, s in zip(buffers, steps, strict=True) for one in s.placed
    ]
    origins = []
    for _, one in placed:
        _, width = matrix(specs[one.piece.index].shape)
        origins.append((one.piece.box.first_row * width + one.piece.box.first_column, (width, 1)))
    return PreparedDigest(
        [view_of_piece(buffer_B, one, specs[one.piece.index]) for buffer_B, one in placed],
        rows=[one.piece.index for _, one in placed] if rows is None else rows,
        origins=origins,
    )


# ------------------------------------------------------------ as text


def to_text(table: Table) -> str:
    """A table of integers as text, compressed."""
    return base64.b64encode(
        zlib.compress(np.ascontiguousarray(table, np.int64).tobytes(), 1)
    ).decode()


def from_text(text: str, *, columns: int) -> Table:
    """Undo `to_text`.

    Raises:
        ManifestError: it is no such table.
    """
    try:
        table = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.int64)
        return table.reshape(-1, columns)
    except (ValueError, zlib.error) as error:
        raise ManifestError(f"a table of pieces cannot be read: {error}") from None


def keeps_table(keeps: Keeps) -> Table:
    """What a worker keeps: rows of a tensor's index and the four numbers of a box."""
    rows = [
        (index, b.first_row, b.rows, b.first_column, b.columns)
        for index, boxes in sorted(keeps.items())
        for b in boxes
    ]
    return np.array(rows, np.int64).reshape(-1, KEEPS_COLUMNS)


def keeps_of(table: Table) -> dict[int, list[Box]]:
    """Undo `keeps_table`."""
    keeps: dict[int, list[Box]] = {}
    for index, *box in table.tolist():
        keeps.setdefault(index, []).append(Box(*box))
    return keeps
