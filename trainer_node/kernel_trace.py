"""Records the kernels and operators of chosen training jobs: RUN/profiles/N.json.gz."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from torch.profiler import profile

log = logging.getLogger("splice.trainer")
PROFILES = "profiles"
"""Folder of the traces within the run's."""


def path_of(checkpoint_dir: Path) -> Path:
    """Return the trace of the job that writes this checkpoint: RUN/versions/N."""
    return checkpoint_dir.parents[1] / PROFILES / f"{checkpoint_dir.name}.json.gz"


@contextlib.contextmanager
def recorded(path: Path | None) -> Iterator[None]:
    """Record what this process's CPU and GPU do meanwhile. None: nothing is recorded.

    A trace that cannot be written is logged; the job continues.
    """
    if path is None:
        yield
        return
    with profile() as found:
        yield
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(path))
    except (OSError, RuntimeError) as error:  # the profiler's own
        log.warning("cannot write the trace %s: %s", path, error)
