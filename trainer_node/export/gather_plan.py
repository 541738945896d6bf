"""Plans which rank sends which piece of which HF tensor, and where it goes. Pure functions.

    what each rank holds -> `assign`: one owner for every element of every tensor -> `lay_out`:
    every chunk as pieces

A tensor counts as a matrix, [everything else, shape[-1]]; a vector has one column. Tensor-parallel
ranks hold boxes of its rows and columns. Data- and context-parallel ranks hold equal boxes: copies.
The lowest rank sends a copy. Rank 0, the destination, therefore sends as much as possible to
itself.

An owner's message holds all of its pieces of a chunk, end to end and row after row. In the chunk, a
piece's rows are a tensor's row apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orchestrator.errors import ManifestError
from orchestrator.protocol.messages import DTYPE_BYTES, TensorSpec
from weight_transfer.boxes import Box, matrix, overlap


class PartitionError(ManifestError):
    """The ranks' pieces do not make up a tensor, each element once. Names the tensor."""


ALIGN = 16
"""Alignment of pieces in a message, in bytes: kernels move 16 bytes at a time."""


@dataclass(frozen=True, slots=True)
class Held:
    """A piece that a rank has: a box of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    box: Box


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a piece goes in its owner's message and in the chunk."""

    index: int
    """Index of the tensor in the manifest."""
    box: Box
    packed: int
    """First byte of the piece in its owner's message."""
    offset: int
    """First byte of the piece in the chunk."""
    row_stride: int
    """Elements from one row of the piece to the next, in the chunk."""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """A chunk as pieces."""

    nbytes: int
    placements: tuple[tuple[Placement, ...], ...]
    """Placements of each rank's pieces."""
    messages: tuple[int, ...]
    """Bytes that each rank sends to rank 0. Rank 0 sends none."""


def assign(
    held: Sequence[Iterable[Held]], specs: Sequence[TensorSpec]
) -> list[list[tuple[int, Box]]]:
    """For each tensor its pieces and their owners, in the tensor's order. Of copies, the lowest
    rank's counts.

    Args and raises: as `holders`.
    """
    return [[(ranks[0], box) for ranks, box in boxes] for boxes in holders(held, specs)]


def holders(
    held: Sequence[Iterable[Held]], specs: Sequence[TensorSpec]
) -> list[list[tuple[tuple[int, ...], Box]]]:
    """For each tensor its pieces and the ranks that have each, in the tensor's order.

    Args:
        held: what each rank has; it may name more tensors than `specs`.

    Raises:
        PartitionError: an element that two different pieces have, or none.
        ManifestError: a tensor that no rank has, or in another shape or dtype; names it.
    """
    wanted = {spec.name: spec for spec in specs}
    owners: dict[str, dict[Box, list[int]]] = {spec.name: {} for spec in specs}
    for rank, pieces in enumerate(held):
        for piece in pieces:
            if piece.name in wanted:
                _check_kind(wanted[piece.name], piece)
                owners[piece.name].setdefault(piece.box, []).append(rank)
    for spec in specs:
        _check_partition(spec, owners[spec.name])
    return [
        sorted(
            ((tuple(ranks), box) for box, ranks in owners[spec.name].items()),
            key=lambda p: (p[1].first_row, p[1].first_column),
        )
        for spec in specs
    ]


def _check_kind(spec: TensorSpec, piece: Held) -> None:
    if piece.shape != spec.shape or piece.dtype != spec.dtype:
        raise ManifestError(
            f"{spec.name} is {spec.dtype} {list(spec.shape)} in the manifest and {piece.dtype} "
            f"{list(piece.shape)} in the model; "
            "plan again"
        )


def _check_partition(spec: TensorSpec, boxes: Iterable[Box]) -> None:
    """Check that the boxes are inside the tensor, do not overlap, and have as many elements as the
    tensor. Each element is then there exactly once."""
    boxes = list(boxes)
    if not boxes and spec.numel:
        raise ManifestError(
            f"the manifest has {spec.name}, which the model has not; plan the publication again"
        )
    height, width = matrix(spec.shape)
    for box in boxes:
        if not box.is_inside(height, width):
            raise PartitionError(
                f"{spec.name}: a rank has {box}, but the tensor ends at [{height}, {width}]"
            )
    twice = overlap(boxes)
    if twice is not None:
        raise PartitionError(
            f"{spec.name}: elements of {twice[0]} are in {twice[1]} of another rank as well"
        )
    missing = spec.numel - sum(box.numel for box in boxes)
    if missing:
        raise PartitionError(
            f"{spec.name}: no rank has {missing} of its {spec.numel} elements; there are {boxes}"
        )


def lay_out(
    specs: Sequence[TensorSpec],
    order: Sequence[Sequence[int]],
    owners: Sequence[Sequence[tuple[int, Box]]],
    *,
    ranks: int,
) -> list[ChunkPlan]:
    """Every chunk: its tensors end to end, row-major, and who brings which piece of them.

    Args:
        order: for each chunk the indices of its tensors.
        owners: as `assign` returns them.
    """
    return [_lay_out_chunk(specs, indices, owners, ranks=ranks) for indices in order]


def _lay_out_chunk(
    specs: Sequence[TensorSpec],
    indices: Sequence[int],
    owners: Sequence[Sequence[tuple[int, Box]]],
    *,
    ranks: int,
) -> ChunkPlan:
    placements: list[list[Placement]] = [[] for _ in range(ranks)]
    ends, offset = [0] * ranks, 0
    for index in indices:
        spec = specs[index]
        size, (_, width) = DTYPE_BYTES[spec.dtype], matrix(spec.shape)
        for rank, box in owners[index]:
            if not box.numel:
                continue
            at = offset + (box.first_row * width + box.first_column) * size
            placements[rank].append(
                Placement(index=index, box=box, packed=ends[rank], offset=at, row_stride=width)
            )
            ends[rank] += aligned(box.numel * size)
        offset += spec.nbytes
    return ChunkPlan(
        nbytes=offset, placements=tuple(map(tuple, placements)), messages=(0, *ends[1:])
    )


def aligned(nbytes: int) -> int:
    """Rounded up to a multiple of `ALIGN`."""
    return -(-nbytes // ALIGN) * ALIGN
