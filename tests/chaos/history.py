"""What happened in a run, as JSON lines: one file for each process, one clock (CLOCK_MONOTONIC is
the host's).

submit    job, kind, batch, folder, client            outcome   job, outcome, code, message, version
ran       request, kind, job, life, before, after     made      version, content, state
serves    node, version, content                      silent    node, why
fault     kind, target, ...                           healed    kind, target
started, ended  process, life, code                   probe     life, rss, descriptors, threads
rotted    was, is_now                                 final     healthy_s
journaled job, kind, outcome, code, message, number   committed version
left      what
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class History:
    """Appends events; a killed process loses none that `note` has returned from."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(
            folder / f"{name}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )

    def note(self, what: str, **facts: Any) -> None:
        """One line, in one write."""
        os.write(
            self._fd,
            (
                json.dumps({"t": time.clock_gettime(time.CLOCK_MONOTONIC), "what": what, **facts})
                + "\n"
            ).encode(),
        )

    def close(self) -> None:
        os.close(self._fd)


def read(folder: Path) -> list[Event]:
    """All processes' events in the order of their times."""
    lines = [
        line
        for file in sorted(folder.glob("*.jsonl"))
        for line in file.read_text().splitlines()
        if line
    ]
    return sorted((json.loads(line) for line in lines), key=lambda event: event["t"])
