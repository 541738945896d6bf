"""Files that appear whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(
    path: Path, content: str | bytes, *, mode: int = 0o666, durable: bool = False
) -> None:
    """Write a file. A reader finds the earlier one or the whole new one.

    Args:
        durable: the new one is on disk when the call returns.
    """
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    part.touch(mode=mode)
    with part.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    part.replace(path)
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path | str) -> None:
    """Make a folder's entries durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
