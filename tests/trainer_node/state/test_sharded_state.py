"""Boxes to files and back, cut otherwise; one process, no model. What several ranks write is in
`full.py`.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch

from trainer_node.files.generations import CheckpointError
from trainer_node.state.sharded_state import INDEX, Shard, load, plan, save

WHOLE_67 = torch.arange(42, dtype=torch.float32).view(6, 7)


def box(tensor: torch.Tensor, *offsets: int) -> Shard:
    return Shard(sizes=tuple(tensor.shape), offsets=offsets, shape=(6, 7), tensor=lambda: tensor)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`whole`, and `half`, of which only the first three rows were written."""
    save(
        {
            ("whole", (0, 0)): box(WHOLE_67, 0, 0),
            ("half", (0, 0)): box(WHOLE_67[:3], 0, 0),
            ("none", (6, 0)): box(WHOLE_67[:0], 6, 0),
        },
        tmp_path,
        group=None,
    )
    return tmp_path


@pytest.mark.parametrize(
    ("rows", "columns"),
    [((0, 6), (0, 7)), ((2, 5), (0, 7)), ((0, 6), (3, 4)), ((5, 6), (6, 7)), ((3, 3), (0, 7))],
)
def test_a_box_of_any_cut(rows: tuple[int, int], columns: tuple[int, int], folder: Path) -> None:
    memory = torch.full((rows[1] - rows[0], columns[1] - columns[0]), torch.nan)
    shard = box(memory, rows[0], columns[0])
    load(plan({("whole", shard.offsets): shard}, folder), folder, group=None)
    assert torch.equal(memory, WHOLE_67[slice(*rows), slice(*columns)])


def test_what_is_not_there_is_refused_by_name(folder: Path) -> None:
    assert plan({("half", (1, 0)): box(WHOLE_67[:2].clone(), 1, 0)}, folder).items
    for name, wanted, words in (
        ("missing", box(WHOLE_67, 0, 0), r"missing should have shape \(6, 7\); found nothing"),
        ("half", box(WHOLE_67[:2], 2, 0), r"half is not whole; a part of \(2, 7\) at \(2, 0\)"),
        (
            "whole",
            Shard(sizes=(7, 6), offsets=(0, 0), shape=(7, 6), tensor=torch.Tensor),
            r"whole should have shape \(7, 6\); found \(6, 7\)",
        ),
    ):
        with pytest.raises(CheckpointError, match=words):
            plan({(name, wanted.offsets): wanted}, folder)


def test_a_box_outside_its_tensor_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="out of bounds"):
        save({("whole", (1, 0)): box(WHOLE_67, 1, 0)}, tmp_path, group=None)


class Evil:
    """Unpickled, it makes a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


def test_an_index_cannot_run_code(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "made by a checkpoint"
    (folder / INDEX).write_bytes(pickle.dumps(Evil(str(target))))
    with pytest.raises(CheckpointError, match=r"posix\.mkdir is not allowed"):
        plan({("whole", (0, 0)): box(WHOLE_67, 0, 0)}, folder)
    assert not target.exists()
    (folder / INDEX).write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="cannot be read"):
        plan({("whole", (0, 0)): box(WHOLE_67, 0, 0)}, folder)


class Reach:
    """Unpickled, it takes an attribute of a class."""

    def __init__(self, kind: type, name: str) -> None:
        self.kind, self.name = kind, name

    def __reduce__(self) -> tuple[object, tuple[type, str]]:
        return getattr, (self.kind, self.name)


def test_getattr_in_an_index_is_for_members_of_enums_only(folder: Path) -> None:
    """Python before 3.11.4 pickles them so."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties

    (folder / INDEX).write_bytes(pickle.dumps(Reach(TensorProperties, "__init__")))
    with pytest.raises(CheckpointError, match=r"getattr.*is not allowed"):
        plan({("whole", (0, 0)): box(WHOLE_67, 0, 0)}, folder)
    (folder / INDEX).write_bytes(
        pickle.dumps(Reach(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"))
    )
    with pytest.raises(CheckpointError, match="holds a _MEM_FORMAT_ENCODING"):
        plan({("whole", (0, 0)): box(WHOLE_67, 0, 0)}, folder)
