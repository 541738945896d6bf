"""Harm to files, as disks do it."""

from __future__ import annotations

from pathlib import Path


def spoil(path: Path) -> None:
    """One bit, as a disk or a copy may change it."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
