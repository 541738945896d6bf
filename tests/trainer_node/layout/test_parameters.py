"""Who owns what, and which rows of what stand where; pure."""

from __future__ import annotations

import torch

from trainer_node.layout.pieces import Piece
from trainer_node.layout.strides import derive
from trainer_node.training import gradients
from trainer_node.training.optimizer import assign_owners


def test_owners_by_hand() -> None:
    """Largest first to whoever has least, the lower number at a draw."""
    assert assign_owners([10, 7, 6, 4, 1], 2) == [0, 1, 1, 0, 1]
    assert assign_owners([3, 3, 3], 1) == [0, 0, 0]
    assert assign_owners([], 2) == []


def test_owners_are_balanced() -> None:
    """No owner has more than the mean and the largest parameter."""
    sizes = [
        int(n) for n in torch.randint(1, 1000, (200,), generator=torch.Generator().manual_seed(0))
    ]
    owners = assign_owners(sizes, 7)
    loads = [sum(s for s, o in zip(sizes, owners, strict=True) if o == rank) for rank in range(7)]
    assert max(loads) <= sum(sizes) / 7 + max(sizes)
    assert max(loads) - min(loads) < 100


def test_pieces_of_a_fused_qkv_by_hand() -> None:
    """Two query groups of [q, q, k, v] with heads of one row: rows 0 to 7, of which q is 0, 1, 4,
    5.
    """
    fused = torch.arange(8.0)[:, None].repeat(1, 3)
    index = torch.arange(24).view(8, 3)

    def piece(key: str, *rows: int) -> Piece:
        (place,) = derive(index[list(rows)], 24).pieces
        return Piece(key=key, shape=(len(rows), 3), offsets=(0, 0), rows=len(rows), place=place)

    q, k = piece("q", 0, 1, 4, 5), piece("k", 2, 6)
    assert q.read(fused)[:, 0].tolist() == [0, 1, 4, 5]
    assert k.read(fused)[:, 0].tolist() == [2, 6]
    assert q.box_shape(fused) == tuple(q.read(fused).shape)
    k.write(fused, torch.full((2, 3), -1.0))
    assert fused[:, 0].tolist() == [0, 1, -1, 3, 4, 5, -1, 7]
    padded = Piece(key="vocab", shape=(5, 3), offsets=(0, 0), rows=5)
    assert padded.read(fused)[:, 0].tolist() == [0, 1, -1, 3, 4]


def test_buckets(monkeypatch) -> None:
    """In order, none above the limit unless it is one tensor."""
    monkeypatch.setattr(gradients, "BUCKET_ELEMENTS", 10)
    tensors = [torch.empty(n) for n in (4, 6, 1, 20, 3, 3)]
    assert [[t.numel() for t in b] for b in gradients.buckets(tensors)] == [
        [4, 6],
        [1],
        [20],
        [3, 3],
    ]
