"""Folders that are replaced as a whole: whatever the instant of a crash, the last good generation can be found again.

    .<name>.new    being written; its marker is its last file, so with a marker it is whole
    <name>         the current one
    .<name>.old    the one before, between the two renames of a replacement

    begin -> files -> marker (last) -> <name> to .old -> .new to <name> -> .old removed

At most one of these steps is under way at a crash, so of the three folders at least one is whole, if ever one was; `recover` puts the
newest whole one in its place. Every file, and every folder whose entries changed, is flushed to the disk before the next step relies
on it. All operations that change the disk go through `Disk`, so that a test can stop the world before, in and after each of them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from orchestrator.errors import SpliceError

MARKER = "COMPLETE"


class CheckpointError(SpliceError, OSError):
    """A checkpoint could not be written, or is not whole; names the file."""


class Disk:
    """Every operation that changes the disk."""

    def make(self, folder: Path) -> None:
        """A folder, with its parents."""
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, write: Callable[[Path], Any]) -> None:
        """Let `write` write the file; not flushed."""
        write(path)

    def flush(self, path: Path) -> None:
        """fsync a file, or a folder's entries."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Atomic; a file that stands at the target is replaced."""
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        path.unlink(missing_ok=True)

    def remove(self, folder: Path) -> None:
        """Remove a folder and what is in it, if it is there."""
        if folder.exists():
            shutil.rmtree(folder)


DISK = Disk()


def write_file(path: Path, write: Callable[[Path], Any], *, disk: Disk = DISK) -> None:
    """A file that appears whole or not at all."""
    temp = path.with_name(f".{path.name}.tmp")
    disk.write(temp, write)
    disk.flush(temp)
    disk.rename(temp, path)
    disk.flush(path.parent)


def new_folder(folder: Path) -> Path:
    """Where the next generation of `folder` is written."""
    return folder.with_name(f".{folder.name}.new")


def old_folder(folder: Path) -> Path:
    """Where the generation before stands for a moment."""
    return folder.with_name(f".{folder.name}.old")


def begin(folder: Path, *, disk: Disk = DISK) -> Path:
    """Mend what a crash left, and make an empty folder for the next generation; returns it."""
    recover(folder, disk=disk)
    temp = new_folder(folder)
    discard(temp, disk=disk)
    disk.make(temp)
    return temp


def finish(folder: Path, *, facts: dict[str, Any] | None = None, disk: Disk = DISK) -> None:
    """Mark the generation that was written whole, and put it in its place."""
    temp = new_folder(folder)
    files = {str(p.relative_to(temp)): p.stat().st_size for p in sorted(temp.rglob("*")) if p.is_file()}
    for part in sorted({(temp / f).parent for f in files} | {temp}, reverse=True):
        disk.flush(part)
    marker = json.dumps({**(facts or {}), "files": files})
    write_file(temp / MARKER, lambda path: path.write_text(marker), disk=disk)
    _replace(folder, temp, disk=disk)


def _replace(folder: Path, temp: Path, *, disk: Disk) -> None:
    old = old_folder(folder)
    if folder.exists():
        discard(old, disk=disk)
        disk.rename(folder, old)
        disk.flush(folder.parent)
    disk.rename(temp, folder)
    disk.flush(folder.parent)
    discard(old, disk=disk)


def recover(folder: Path, *, disk: Disk = DISK) -> None:
    """Finish or undo a replacement that a crash interrupted: afterwards `folder` is the newest whole generation, if there is one."""
    temp, old = new_folder(folder), old_folder(folder)
    if is_whole(temp):
        _replace(folder, temp, disk=disk)
    elif not folder.exists() and is_whole(old):
        disk.rename(old, folder)
        disk.flush(folder.parent)
    elif is_whole(folder):
        discard(old, disk=disk)


def discard(folder: Path, *, disk: Disk = DISK) -> None:
    """Remove a generation, its marker first: half removed it is not whole."""
    if not folder.exists():
        return
    disk.unlink(folder / MARKER)
    disk.flush(folder)
    disk.remove(folder)
    disk.flush(folder.parent)


def check_whole(folder: Path) -> dict[str, Any]:
    """What the marker says.

    Raises:
        CheckpointError: no marker, or a file is missing or of another size; names it.
    """
    marker = folder / MARKER
    if not marker.is_file():
        raise CheckpointError(f"{folder} has no {MARKER}: it does not exist or was never finished")
    try:
        said: dict[str, Any] = json.loads(marker.read_text())
        files = said["files"].items()
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{marker} cannot be read: {error}. The checkpoint is not whole") from error
    for name, size in files:
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            found = path.stat().st_size if path.is_file() else "no"
            raise CheckpointError(f"{path} should have {size} bytes; found {found}. The checkpoint is not whole")
    return said


def is_whole(folder: Path) -> bool:
    """Whether `check_whole` is content."""
    try:
        check_whole(folder)
    except CheckpointError:
        return False
    return True


def refuse_foreign(folder: Path, *, names: Collection[str]) -> None:
    """Only a folder of ours, finished or not, is ever replaced or deleted.

    Raises:
        CheckpointError: it is a file, or holds something that is not among `names`.
    """
    if not folder.exists():
        return
    if not folder.is_dir() or {p.name for p in folder.iterdir()} - {MARKER, f".{MARKER}.tmp", *names}:
        raise CheckpointError(f"{folder} exists and is no checkpoint of ours; choose another folder")
