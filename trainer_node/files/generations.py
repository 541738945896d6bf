"""Replaces folders as a whole: after a crash at any instant, the last good generation is found.

    .<name>.new    being written; its marker is its last file
    <name>         the current one
    .<name>.old    the previous one, between the two renames

    begin -> files -> marker (last) -> <name> to .old -> .new to <name> -> .old removed

The marker, `COMPLETE`, holds every file's size and hash. Our unfinished folders have `BEGUN`
instead, while they are written or removed. A folder with neither belongs to someone else and is
never deleted.

A part that is written later is its own generation within the folder. The marker names it under
`apart`, and covers none of its files.

At most one of these steps is under way at a crash, so of the three folders at least one is whole,
if ever one was; `recover` puts the newest whole one in its place. Every file, and every folder
whose entries changed, is flushed to the disk before the next step relies on it. All operations that
change the disk go through `Disk`, so that a test can stop the world before, in and after each of
them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.errors import ErrorCode, SpliceError
from trainer_node.files import hashing

log = logging.getLogger("splice.trainer")
MARKER, BEGUN = "COMPLETE", "BEGUN"


class CheckpointError(SpliceError, OSError):
    """A checkpoint could not be written, or is not whole; names the file."""

    code = ErrorCode.CHECKPOINT_FAILED


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
        """Rename atomically; replaces a file at the target."""
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
    """Return the folder of the next generation of `folder`."""
    return folder.with_name(f".{folder.name}.new")


def old_folder(folder: Path) -> Path:
    """Return the folder of the previous generation, between the two renames."""
    return folder.with_name(f".{folder.name}.old")


def begin(folder: Path, *, disk: Disk = DISK) -> Path:
    """Repair what a crash left, and return an empty folder for the next generation."""
    recover(folder, disk=disk)
    return make_empty(new_folder(folder), disk=disk)


def make_empty(folder: Path, *, disk: Disk = DISK) -> Path:
    """Make an empty folder, marked as ours, in place of one of ours. Returns it.

    Raises:
        CheckpointError: the present folder is not ours.
    """
    discard(folder, disk=disk)
    disk.make(folder)
    disk.write(folder / BEGUN, Path.touch)
    disk.flush(folder)
    return folder


def finish(
    folder: Path,
    *,
    facts: dict[str, Any] | None = None,
    hashes: Mapping[str, str] | None = None,
    apart: Sequence[str] = (),
    disk: Disk = DISK,
) -> None:
    """Mark the generation that was written whole, and put it in its place.

    Args:
        hashes: name -> hash (`hashing`) of files that are hashed already; others are read.
        apart: folders within it that later become separate generations.
    """
    temp, known = new_folder(folder), dict(hashes or {})
    paths = _files(temp)
    for part in sorted({path.parent for path in paths.values()} | {temp}, reverse=True):
        disk.flush(part)
    known |= hashing.hashes({name: path for name, path in paths.items() if name not in known})
    marker = {
        **(facts or {}),
        "apart": list(apart),
        "files": {name: path.stat().st_size for name, path in paths.items()},
        "span_bytes": hashing.SPAN_BYTES,
        "sha256": {name: known[name] for name in paths},
    }
    write_file(temp / MARKER, lambda path: path.write_text(json.dumps(marker)), disk=disk)
    disk.unlink(temp / BEGUN)
    _replace(folder, temp, disk=disk)


def _files(folder: Path, *, apart: Iterable[str] = ()) -> dict[str, Path]:
    """Every file by its path within the folder, without markers and what is `apart`."""
    left_out = {name for one in apart for name in names_of(one)}
    found = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if not p.is_dir()}
    return {
        name: path
        for name, path in found.items()
        if name not in (MARKER, BEGUN) and name.partition("/")[0] not in left_out
    }


def names_of(name: str) -> tuple[str, str, str]:
    """Return the names of a folder's current, next and previous generation."""
    path = Path(name)
    return (name, new_folder(path).name, old_folder(path).name)


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
    """Finish or undo a replacement that a crash interrupted: afterwards `folder` is the newest
    whole generation, if there is one."""
    temp, old = new_folder(folder), old_folder(folder)
    if is_whole(temp):
        _replace(folder, temp, disk=disk)
    elif not folder.exists() and is_whole(old):
        disk.rename(old, folder)
        disk.flush(folder.parent)
    elif is_whole(folder) and is_ours(old):
        discard(old, disk=disk)


def is_ours(folder: Path) -> bool:
    """Whether the folder holds one of our markers, or nothing."""
    return folder.is_dir() and (
        not any(folder.iterdir()) or any((folder / m).is_file() for m in (MARKER, BEGUN))
    )


def discard(folder: Path, *, disk: Disk = DISK) -> None:
    """Remove a generation: half removed it is not whole, but still ours.

    Raises:
        CheckpointError: it is not ours.
    """
    if not folder.exists():
        return
    if not is_ours(folder):
        raise CheckpointError(
            f"{folder} is in the way, and is no checkpoint of ours; move it, or choose another "
            "folder"
        )
    if (folder / MARKER).is_file():
        disk.rename(folder / MARKER, folder / BEGUN)
        disk.flush(folder)
    for path in sorted(folder.iterdir()):
        if path.name != BEGUN:
            disk.remove(path) if path.is_dir() and not path.is_symlink() else disk.unlink(path)
    disk.flush(folder)
    disk.unlink(folder / BEGUN)
    disk.remove(folder)
    disk.flush(folder.parent)


def check_whole(folder: Path) -> dict[str, Any]:
    """Return the marker's content.

    Raises:
        CheckpointError: no marker, or a file is missing or has another size. Names it.
    """
    marker = folder / MARKER
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder} on the trainer's host")
    if not marker.is_file():
        raise CheckpointError(
            f"{folder} has no {MARKER}: it is not a trainer's checkpoint, or was never finished"
        )
    try:
        content: dict[str, Any] = json.loads(marker.read_text())
        files = content["files"].items()
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{marker} cannot be read ({error}): the checkpoint is not whole"
        ) from error
    for name, size in files:
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            found = path.stat().st_size if path.is_file() else "no"
            raise CheckpointError(
                f"{path} should have {size} bytes; found {found}: the checkpoint is not whole"
            )
    return content


def check_contents(folder: Path, *, part: int = 0, parts: int = 1) -> None:
    """Check that the folder has exactly the files that were written, and its parts `apart` too.

    Args:
        part, parts: which of the files this rank reads, if several ranks share them.

    Raises:
        CheckpointError: a file is missing, additional or changed. Names it, and checkpoints that
            can be loaded.
    """
    try:
        marker = check_whole(folder)
        _check_contents(folder, marker, part=part, parts=parts)
        for one in (folder / name for name in marker.get("apart", ())):
            if one.exists():
                _check_contents(one, check_whole(one), part=part, parts=parts)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {_others(folder)}") from error


def _check_contents(folder: Path, marker: Mapping[str, Any], *, part: int, parts: int) -> None:
    paths = _files(folder, apart=marker.get("apart", ()))
    extra = sorted(set(paths) - set(marker["files"]))
    if extra:
        raise CheckpointError(
            f"{folder / extra[0]} was not written with this checkpoint; move it away"
        )
    if "sha256" not in marker:
        log.warning(
            "%s was written before checkpoints had hashes: only the sizes of its files are checked",
            folder,
        )
        return
    wanted = marker["sha256"]
    mine = {
        name: path
        for number, (name, path) in enumerate(sorted(paths.items()))
        if number % parts == part
    }
    for name, found in hashing.hashes(mine, span_bytes=marker["span_bytes"]).items():
        if found != wanted.get(name):
            raise CheckpointError(
                f"{folder / name} has changed since it was written (SHA-256 {found[:12]}..., "
                f"written {str(wanted.get(name))[:12]}...)"
            )


def _others(folder: Path) -> str:
    """Return a list of the checkpoints that can be loaded instead."""
    is_there = folder.is_dir()
    with contextlib.suppress(OSError):
        others = sorted(
            p.name
            for p in folder.parent.iterdir()
            if p != folder and not p.name.startswith(".") and is_whole(p)
        )
        if others:
            restore = "Restore the file from a copy, or load" if is_there else "Load"
            return f"{restore} another checkpoint of {folder.parent}: {', '.join(others[:8])}"
    what = "Restore the file from a copy; there" if is_there else "There"
    return f"{what} is no other checkpoint in {folder.parent}"


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
        CheckpointError: it is a file, holds something that is not among `names`, or has no marker
            of ours.
    """
    if not folder.exists():
        return
    if not is_ours(folder) or {p.name for p in folder.iterdir()} - {
        MARKER,
        BEGUN,
        f".{MARKER}.tmp",
        *names,
    }:
        raise CheckpointError(
            f"{folder} exists and is no checkpoint of ours; choose another folder"
        )
