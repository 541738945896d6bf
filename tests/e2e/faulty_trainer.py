"""The trainer node, which kills itself with SIGKILL after the first chunk of its second publication has left, once per marker file."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from trainer_node import node, wire_export

_original = wire_export.ChunkMerger.fill


class _Count:
    publications = 0


def _fill_or_die(self: Any, chunk: int, out_B: Any) -> None:
    marker = Path(os.environ["SPLICE_TEST_KILL_MARKER"])
    _Count.publications += chunk == 0
    if _Count.publications == 2 and chunk == 1 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    _original(self, chunk, out_B)


if __name__ == "__main__":
    wire_export.ChunkMerger.fill = _fill_or_die  # type: ignore[method-assign]
    sys.exit(node.main())
