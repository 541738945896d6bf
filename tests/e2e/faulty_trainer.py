"""The trainer node, which kills itself with SIGKILL after ten tensors of its second publication, once per marker file."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer_node import export, node

KILL_AFTER_TENSORS = 10
_original = export.Exporter.merged_tensors


class _Count:
    publications = 0


def _merged_then_killed(self: Any) -> Iterator[Any]:
    marker = Path(os.environ["SPLICE_TEST_KILL_MARKER"])
    _Count.publications += 1
    is_fatal = _Count.publications == 2 and not marker.exists()
    for count, item in enumerate(_original(self)):
        if is_fatal and count == KILL_AFTER_TENSORS:
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield item


export.Exporter.merged_tensors = _merged_then_killed  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(node.main())
