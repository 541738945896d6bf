"""Exported weights, as one number."""

from __future__ import annotations

import hashlib
from pathlib import Path


def digest(folder: Path) -> str:
    files = sorted(folder.glob("*.safetensors"))
    assert files
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
