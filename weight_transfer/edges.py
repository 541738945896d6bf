"""Plans which trainer rank sends which elements to which worker, and in which step. Pure.

    what each rank holds, what each worker keeps -> `plan` -> steps of parcels
    `table_of(edges, worker)` -> the part that one worker must know -> `arrivals_of`

Each element of each tensor is in one parcel, of one rank. All workers that keep it receive that
parcel, and no other worker does. Of ranks with equal copies, the one with the fewest bytes sends.

A step has its share of each stream from a rank to workers, so that all ranks send and all workers
receive all the time. No buffer holds more than a step.
"""

from __future__ import annotations

import base64
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

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
    streams: dict[tuple[int, tuple[int, ...]], list[Piece]] = {}
    owners = _owners(specs, holders, ranks)
    for index in order:
        wanted = _wanted(specs[index], index, keeps)
        for rank, held in owners[index]:
            for box, workers in wanted:
                shared = held.within(box)
                if shared is not None:
                    stream = streams.setdefault((rank, workers), [])
                    stream += _rows_of(index, shared, DTYPE_BYTES[specs[index].dtype])
    return _in_steps(streams, specs, ranks, len(keeps), step_bytes or STEP_BYTES)


def _owners(
    specs: Sequence[TensorSpec], holders: Sequence[Holders], ranks: int
) -> list[list[tuple[int, Box]]]:
    """The one rank that sends each box: of copies, the rank with the fewest bytes so far."""
    loads = [0] * ranks
    for spec, boxes in zip(specs, holders, strict=True):
        for held_by, box in boxes:
            if len(held_by) == 1:
                loads[held_by[0]] += box.numel * DTYPE_BYTES[spec.dtype]
    owners = []
    for spec, boxes in zip(specs, holders, strict=True):
        of_tensor = []
        for held_by, box in boxes:
            rank = min(held_by, key=lambda r: (loads[r], r))
            if len(held_by) > 1:
                loads[rank] += box.numel * DTYPE_BYTES[spec.dtype]
            of_tensor.append((rank, box))
        owners.append(of_tensor)
    return owners


def _wanted(
    spec: TensorSpec, index: int, keeps: Sequence[Keeps]
) -> list[tuple[Box, tuple[int, ...]]]:
    """Boxes that share no element, and the workers that keep each whole."""
    wanted: dict[Box, list[int]] = {}
    for worker, kept in enumerate(keeps):
        for box in kept.get(index, ()):
            wanted.setdefault(box, []).append(worker)
    if sum(box.numel for box in wanted) != spec.numel:
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


def _rows_of(index: int, box: Box, size: int) -> Iterator[Piece]:
    """The box in pieces of some rows."""
    rows = max(1, PIECE_BYTES // (box.columns * size))
    for first in range(0, box.rows, rows):
        count = min(rows, box.rows - first)
        yield Piece(index, Box(box.first_row + first, count, box.first_column, box.columns))


def _in_steps(
    streams: Mapping[tuple[int, tuple[int, ...]], Sequence[Piece]],
    specs: Sequence[TensorSpec],
    ranks: int,
    workers: int,
    step_bytes: int,
) -> Edges:
    sizes = {key: [_nbytes(p, specs) for p in pieces] for key, pieces in streams.items()}
    sent, received = [0] * ranks, [0] * workers
    for (rank, to), each in sizes.items():
        sent[rank] += sum(each)
        for worker in to:
            received[worker] += sum(each)
    steps = max(1, -(-max([*sent, *received]) // step_bytes))
    edges: Edges = [[[] for _ in range(ranks)] for _ in range(steps)]
    for (rank, to), pieces in sorted(streams.items()):
        total, begin = sum(sizes[rank, to]), 0
        of_step: dict[int, list[Piece]] = {}
        for piece, nbytes in zip(pieces, sizes[rank, to], strict=True):
            of_step.setdefault((2 * begin + nbytes) * steps // (2 * total), []).append(piece)
            begin += nbytes
        for step, some in of_step.items():
            edges[step][rank].append(Parcel(to, tuple(some)))
    return edges


def _nbytes(piece: Piece, specs: Sequence[TensorSpec]) -> int:
    return piece.box.numel * DTYPE_BYTES[specs[piece.index].dtype]


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
        ManifestError: the table names a tensor or a box that the manifest has not.
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
