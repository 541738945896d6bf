"""What is said of files that another version of splice wrote."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path


def splice_version() -> str:
    """Return the installed version of splice."""
    try:
        return importlib.metadata.version("splice")
    except importlib.metadata.PackageNotFoundError:  # it is only on PYTHONPATH
        return "unknown"


def refusal(place: Path, *, layout: object, ours: int, writer: object) -> str:
    """Say which version wrote what this one cannot read, and what to do."""
    return (
        f"{place} was written by splice {writer} in layout {layout}; this is splice "
        f"{splice_version()}, which reads layout {ours}. Use splice {writer} for it, or choose a "
        "new folder"
    )
