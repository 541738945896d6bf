"""A crash before, in and after every operation on the disk: the last good generation is always
found, and the next save works.

The disk of these tests is unkind: at a crash the file being written keeps half its bytes, files
that were not flushed are emptied, and renames whose folder was not flushed may not have happened.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer_node.harm import spoil
from trainer_node.files import generations, hashing
from trainer_node.files.bulk_files import Extent, bulk_writer
from trainer_node.files.generations import (
    MARKER,
    CheckpointError,
    Disk,
    check_whole,
    is_whole,
    recover,
    write_file,
)

NAMES = ("a.bin", "part")


class Crash(BaseException):
    """The machine stops here."""


class UnkindDisk(Disk):
    """Stops at operation `stop_at` (counted from 0), after `share` of it; then only what was
    flushed is there.
    """

    def __init__(
        self, stop_at: int | None = None, *, torn: bool = False, undo_renames: bool = False
    ) -> None:
        self.stop_at, self.torn, self.undo_renames = stop_at, torn, undo_renames
        self.log: list[str] = []
        self._unflushed: set[Path] = set()
        self._renames: list[tuple[Path, Path]] = []

    def _at(self, what: str) -> bool:
        self.log.append(what)
        return self.stop_at is not None and len(self.log) - 1 == self.stop_at

    def _crash(self) -> None:
        for path in self._unflushed:
            if path.exists():
                path.write_bytes(b"")
        if self.undo_renames:
            for source, target in reversed(self._renames):
                if target.exists() and not source.exists():
                    target.rename(source)
        raise Crash

    def make(self, folder: Path) -> None:
        if self._at(f"make {folder.name}"):
            self._crash()
        super().make(folder)

    def write(self, path: Path, write: Callable[[Path], Any]) -> None:
        stops = self._at(f"write {path.name}")
        if stops and not self.torn:
            self._crash()
        super().write(path, write)
        if stops:
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2])
            self._crash()
        self._unflushed.add(path)

    def flush(self, path: Path) -> None:
        if self._at(f"flush {path.name}"):
            self._crash()
        super().flush(path)
        self._unflushed.discard(path)
        self._renames = [(s, t) for s, t in self._renames if t.parent != path]

    def rename(self, source: Path, target: Path) -> None:
        if self._at(f"rename {source.name} {target.name}"):
            self._crash()
        super().rename(source, target)
        # A folder takes the files in it along.
        self._unflushed = {
            target / p.relative_to(source) if p.is_relative_to(source) else p
            for p in self._unflushed
        }
        self._renames.append((source, target))

    def unlink(self, path: Path) -> None:
        if self._at(f"unlink {path.name}"):
            self._crash()
        super().unlink(path)

    def remove(self, folder: Path) -> None:
        if self._at(f"remove {folder.name}"):
            if self.torn and folder.exists():  # half of it is gone
                for path in sorted(p for p in folder.rglob("*") if p.is_file())[:1]:
                    path.unlink()
            self._crash()
        super().remove(folder)


def save(folder: Path, text: str, disk: Disk) -> None:
    """What `checkpoint.save` does, without a model."""
    temp = generations.begin(folder, disk=disk)
    write_file(temp / "a.bin", lambda path: path.write_text(text), disk=disk)
    disk.make(temp / "part")
    write_file(temp / "part" / "b.bin", lambda path: path.write_text(text * 2), disk=disk)
    generations.finish(folder, facts={"version": int(text)}, disk=disk)


def found(folder: Path) -> int:
    """What `loading.load` would read, after mending."""
    recover(folder)
    said = check_whole(folder)
    text = (folder / "a.bin").read_text()
    assert (folder / "part" / "b.bin").read_text() == text * 2
    assert said["version"] == int(text)
    return int(text)


def count(folder: Path, *, before: bool) -> int:
    if before:
        save(folder, "1111", Disk())
    disk = UnkindDisk()
    save(folder, "2222", disk)
    return len(disk.log)


@pytest.mark.parametrize("undo_renames", [False, True])
@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_a_crash_at_every_operation(
    before: bool, torn: bool, undo_renames: bool, tmp_path: Path
) -> None:
    operations = count(tmp_path / "counted", before=before)
    assert operations > 15
    outcomes = []
    for stop_at in range(operations):
        folder = tmp_path / str(stop_at) / "v"
        folder.parent.mkdir()
        if before:
            save(folder, "1111", Disk())
        with pytest.raises(Crash):
            save(folder, "2222", UnkindDisk(stop_at, torn=torn, undo_renames=undo_renames))
        if before or is_whole(folder) or is_whole(generations.new_folder(folder)):
            outcomes.append(found(folder))
        else:
            with pytest.raises(CheckpointError):
                found(folder)
            outcomes.append(0)
        save(folder, "3333", Disk())
        assert found(folder) == 3333
        assert [p.name for p in folder.parent.iterdir()] == ["v"], "nothing is left behind"
    assert outcomes == sorted(outcomes), "once the new one is found, it stays found"
    assert {outcomes[0], outcomes[-1]} == {1111 if before else 0, 2222}


@pytest.mark.parametrize("torn", [False, True])
def test_a_crash_while_mending(torn: bool, tmp_path: Path) -> None:
    """A second crash, in the recovery from the first, at every operation of it."""
    operations = count(tmp_path / "counted", before=True)
    for first in range(operations):
        for second in range(12):
            folder = tmp_path / f"{first}-{second}" / "v"
            folder.parent.mkdir()
            save(folder, "1111", Disk())
            with pytest.raises(Crash):
                save(folder, "2222", UnkindDisk(first, torn=torn))
            with contextlib.suppress(Crash):
                recover(folder, disk=UnkindDisk(second, torn=torn))
            assert found(folder) in (1111, 2222)


def test_the_test_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 2's order (rename the old one away, then mark the new one) loses both; so does a marker
    that is not flushed.
    """

    def unmarked_first(
        folder: Path, *, facts: dict[str, Any] | None = None, disk: Disk = generations.DISK
    ) -> None:
        temp, old = generations.new_folder(folder), generations.old_folder(folder)
        files = {str(p.relative_to(temp)): p.stat().st_size for p in temp.rglob("*") if p.is_file()}
        disk.rename(folder, old)
        disk.rename(temp, folder)
        disk.flush(folder.parent)
        disk.remove(old)
        write_file(
            folder / MARKER,
            lambda path: path.write_text(json.dumps({**(facts or {}), "files": files})),
            disk=disk,
        )

    monkeypatch.setattr(generations, "finish", unmarked_first)
    lost = 0
    for stop_at in range(40):
        folder = tmp_path / str(stop_at) / "v"
        folder.parent.mkdir()
        with monkeypatch.context() as original:
            original.setattr(generations, "finish", FINISH)
            save(folder, "1111", Disk())
        with contextlib.suppress(Crash):
            save(folder, "2222", UnkindDisk(stop_at))
        try:
            found(folder)
        except CheckpointError:
            lost += 1
    assert lost > 0


FINISH = generations.finish


def test_what_is_not_whole_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "v"
    save(folder, "1111", Disk())
    (folder / "part" / "b.bin").write_text("short")
    with pytest.raises(CheckpointError, match=r"b\.bin should have 8 bytes; found 5"):
        check_whole(folder)
    (folder / MARKER).write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        check_whole(folder)
    (folder / MARKER).unlink()
    with pytest.raises(CheckpointError, match="never finished"):
        check_whole(folder)


def test_a_changed_an_extra_and_a_missing_file_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "1"
    for name in ("0", "1", "2"):
        save(tmp_path / name, "1111", Disk())
    generations.check_contents(folder)
    spoil(folder / "part" / "b.bin")
    check_whole(folder)  # its size is the same
    with pytest.raises(
        CheckpointError,
        match=r"part/b\.bin has changed since it was written.*load another checkpoint of .*: 0, 2",
    ):
        generations.check_contents(folder)
    spoil(folder / "part" / "b.bin")
    (folder / "part" / "c.bin").write_text("more")
    with pytest.raises(CheckpointError, match=r"part/c\.bin was not written with this checkpoint"):
        generations.check_contents(folder)
    (folder / "part" / "c.bin").unlink()
    (folder / "a.bin").unlink()
    with pytest.raises(
        CheckpointError, match=r"a\.bin should have 4 bytes; found no.*another checkpoint"
    ):
        generations.check_contents(folder)


def test_ranks_share_the_reading(tmp_path: Path) -> None:
    folder = tmp_path / "v"
    save(folder, "1111", Disk())
    spoil(folder / "a.bin")  # the first of two files
    generations.check_contents(folder, part=1, parts=2)
    with pytest.raises(CheckpointError, match=r"a\.bin has changed.*there is no other checkpoint"):
        generations.check_contents(folder, part=0, parts=2)


def test_a_checkpoint_without_hashes_is_taken_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "v"
    save(folder, "1111", Disk())
    marker = json.loads((folder / MARKER).read_text())
    del marker["sha256"], marker["span_bytes"]
    (folder / MARKER).write_text(json.dumps(marker))
    generations.check_contents(folder)
    assert "before checkpoints had hashes" in caplog.text


def test_a_hash_made_while_writing_is_the_one_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "SPAN_BYTES", 10)
    parts = [
        Extent(offset=0, nbytes=7, source=b"seven b"),
        Extent(offset=7, nbytes=20, source=b"twenty bytes of file"),
    ]
    with bulk_writer(torch.device("cpu")) as writer:
        found = writer.start(tmp_path / "f", parts).wait()
    spans = [b"seven btwe", b"nty bytes ", b"of file"]
    assert found == hashlib.sha256(b"".join(hashlib.sha256(s).digest() for s in spans)).hexdigest()
    (tmp_path / "empty").touch()
    files = {name: tmp_path / name for name in ("f", "empty")}
    assert hashing.hashes(files, span_bytes=10) == {
        "f": found,
        "empty": hashlib.sha256().hexdigest(),
    }


@pytest.mark.parametrize("sibling", [generations.new_folder, generations.old_folder])
def test_siblings_without_a_marker_of_ours_are_never_deleted(
    sibling: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "v"
    save(folder, "1111", Disk())
    theirs = sibling(folder)
    theirs.mkdir()
    (theirs / "a.bin").write_text("theirs, under a name that we use")
    with pytest.raises(CheckpointError, match="no checkpoint of ours"):
        generations.refuse_foreign(theirs, names=NAMES)
    with pytest.raises(CheckpointError, match="is in the way"):
        save(folder, "2222", Disk())
    with contextlib.suppress(CheckpointError):
        recover(folder)
    assert (theirs / "a.bin").read_text().startswith("theirs")


def test_only_ours_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "v"
    save(folder, "1111", Disk())
    generations.refuse_foreign(folder, names=NAMES)
    generations.refuse_foreign(tmp_path / "nowhere", names=NAMES)
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="no checkpoint of ours"):
        generations.refuse_foreign(folder, names=NAMES)


def test_retention() -> None:
    from orchestrator.storage.retention import expired

    assert expired([0, 1, 2, 3], new=4, keep=None, protected=[]) == []
    assert expired([0, 1, 2, 3], new=4, keep=2, protected=[3]) == [0, 1, 2]
    assert expired([0, 1, 2, 3], new=4, keep=3, protected=[0, None]) == [1]
    assert expired([3, 4], new=4, keep=2, protected=[]) == []
