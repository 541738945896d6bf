"""A chunk or a step as a worker receives it, and what is live of it now.

Axes: B = bytes, P = parts of tensors on this worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from orchestrator.errors import TransferError
from orchestrator.protocol.messages import TensorSpec
from weight_transfer.boxes import Strided, matrix
from weight_transfer.changes import drop_zero_signs
from weight_transfer.copies import PreparedCopy, elements_of
from weight_transfer.digest import PreparedDigest, region_digest
from weight_transfer.edges import Delivery, Placed, view_of_piece
from weight_transfer.layout import views_of
from weight_transfer.strides import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Widened:
    """A part that vLLM keeps in a wider dtype, such as a router or a decay in fp32. There are few,
    so torch copies them, and digests them as they were sent."""

    part: Part
    sent: torch.dtype
    row: int
    region: Strided

    def place(self, buffer_B: torch.Tensor) -> None:
        """Copy what came to its place."""
        self.part.target.copy_(self.part.source_in(elements_of(buffer_B, self.sent)))

    def read(self, buffer_B: torch.Tensor) -> None:
        """The inverse of `place`; exact, because the values came from the narrower dtype."""
        self.part.source_in(elements_of(buffer_B, self.sent)).copy_(self.part.target)

    def digest(self, digests_P: torch.Tensor) -> None:
        """Add the digest of the live part, in the dtype that was sent."""
        digests_P[self.row] += region_digest(
            self.part.target.to(self.sent),
            first_index=self.region.first_index,
            index_strides=self.region.index_strides,
        )


@dataclass(slots=True)
class LocalChunk:
    """A `WireChunk` as this worker receives it."""

    kind: str
    nbytes: int
    tensors: tuple[int, ...]
    """Those that begin here."""
    deliveries: tuple[Delivery, ...] | None = None
    """What comes from which trainer rank. None: one broadcast."""
    reloaded: tuple[Placed, ...] = ()
    """Pieces of tensors of the reload path."""
    target_B: torch.Tensor | None = None
    """live: the bytes in place. None for other kinds."""
    copy: PreparedCopy | None = None
    """staged: copies the parts that land here."""
    widened: list[Widened] = field(default_factory=list)
    """staged: those that are kept in a wider dtype."""
    digest: PreparedDigest | None = None
    """Digests the live parts, if they are digested on arrival."""
    slot: int = 0


def present_bytes(
    chunk: LocalChunk,
    specs: Sequence[TensorSpec],
    olds: Mapping[str, torch.Tensor] | None,
    *,
    device: torch.device,
) -> torch.Tensor:
    """A chunk's bytes as they are live now: the live memory itself, or a copy.

    Args:
        olds: the present tensors of the reload path (`verify.read_tensors`). None: the chunk's
            bytes are not needed.

    Raises:
        TransferError: a tensor cannot be read.
    """
    if chunk.target_B is not None:
        return chunk.target_B
    buffer_B = torch.zeros(chunk.nbytes, dtype=torch.uint8, device=device)
    if olds is None:
        return buffer_B
    if chunk.copy is not None:
        chunk.copy.read(buffer_B)
    for widened in chunk.widened:
        widened.read(buffer_B)
    if chunk.kind == "reload":
        reloaded = [specs[i] for i in chunk.tensors]
        for spec, view in zip(reloaded, views_of(buffer_B, reloaded), strict=True):
            view.copy_(_old(olds, spec))
    for placed in chunk.reloaded:
        spec, box = specs[placed.piece.index], placed.piece.box
        rows = _old(olds, spec).view(matrix(spec.shape)).narrow(0, box.first_row, box.rows)
        there = view_of_piece(buffer_B, placed, spec)
        there.copy_(rows.narrow(1, box.first_column, box.columns))
    return buffer_B


def _old(olds: Mapping[str, torch.Tensor], spec: TensorSpec) -> torch.Tensor:
    """A tensor of the reload path, with 0.0 for -0.0, as the trainer encodes against it."""
    if spec.name not in olds:
        raise TransferError(
            f"{spec.name} cannot be read back, so its elements cannot be changed; "
            "the next update brings it whole"
        )
    old = olds[spec.name]
    drop_zero_signs(old.view(-1).view(torch.uint8), old.element_size())
    return old
