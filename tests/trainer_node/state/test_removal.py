"""Old checkpoints are deleted behind the trainer's back, one set at a time."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from trainer_node.files import generations
from trainer_node.files.generations import CheckpointError
from trainer_node.state import checkpoint
from trainer_node.state.removal import Removal


def a_checkpoint(folder: Path) -> Path:
    """A folder that looks like one of ours."""
    folder.mkdir()
    (folder / "meta.json").write_text("{}")
    (folder / generations.MARKER).write_text("{}")
    return folder


class Disk:
    """Deletions wait until they are let go."""

    def __init__(self) -> None:
        self.go, self.began = threading.Event(), threading.Event()
        self.deleted: list[str] = []

    def delete(self, folder: Path) -> None:
        self.began.set()
        assert self.go.wait(30)
        if folder.name == "broken":
            raise CheckpointError("the disk is broken")
        self.deleted.append(folder.name)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(checkpoint, "delete", disk.delete)
    return disk


def test_nobody_waits_for_a_removal_but_the_next_one(disk: Disk, tmp_path: Path) -> None:
    removal = Removal()
    one, two = a_checkpoint(tmp_path / "1"), a_checkpoint(tmp_path / "2")
    assert removal.start([one]) == {}
    assert disk.began.wait(30) and not removal.wait(timeout_s=0.0) and disk.deleted == []
    second = threading.Thread(target=lambda: removal.start([two]))
    second.start()
    second.join(0.3)
    assert second.is_alive(), "the disk would hold more and more"
    disk.go.set()
    second.join(30)
    assert removal.wait(timeout_s=30) and disk.deleted == ["1", "2"]


def test_what_could_not_be_deleted_is_said(disk: Disk, tmp_path: Path) -> None:
    removal = Removal()
    foreign = tmp_path / "mine"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("")
    disk.go.set()
    found = removal.start([foreign, a_checkpoint(tmp_path / "broken"), tmp_path / "gone"])
    assert list(found) == [str(foreign)] and "no checkpoint of ours" in found[str(foreign)]
    assert removal.wait(timeout_s=30) and disk.deleted == ["gone"]
    (later,) = removal.start([a_checkpoint(tmp_path / "3")]).values()
    assert later == "the disk is broken"


def test_it_deletes(tmp_path: Path) -> None:
    removal, folder = Removal(), a_checkpoint(tmp_path / "1")
    assert removal.start([folder]) == {}
    assert removal.wait(timeout_s=30) and not folder.exists()


def test_a_folder_is_neither_read_nor_written_while_it_is_deleted(
    disk: Disk, tmp_path: Path
) -> None:
    removal, folder = Removal(), a_checkpoint(tmp_path / "1")
    removal.wait_for(folder)
    removal.start([folder])
    removal.wait_for(tmp_path / "2")  # another one waits for nothing
    waiting = threading.Thread(target=lambda: removal.wait_for(folder / "adapter"))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    disk.go.set()
    waiting.join(30)
    assert not waiting.is_alive() and disk.deleted == ["1"]
