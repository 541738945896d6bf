"""A model in Hugging Face's cache, laid out by hand."""

from __future__ import annotations

import shutil
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make_cache(model: Path, cache: Path, *, repo: str) -> Path:
    """One revision of `models--org--name`; returns its snapshot folder."""
    folder = cache / repo
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "blobs").mkdir()
    for number, file in enumerate(sorted(model.iterdir())):
        blob = folder / "blobs" / f"{number:064x}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(blob)
    return snapshot
