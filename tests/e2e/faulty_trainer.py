"""The trainer node, which kills itself with SIGKILL before a piece of its second publication
leaves, once per marker file: the second piece, or that of SPLICE_TEST_KILL_PIECE.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from trainer_node import node, transfer
from weight_transfer import socket_group

_broadcast, _send = socket_group.SocketGroup.broadcast, transfer.Transfer.send


class _Count:
    publications = pieces = 0


def _count(self: Any, *given: Any, **options: Any) -> Any:
    _Count.publications, _Count.pieces = _Count.publications + 1, 0
    return _send(self, *given, **options)


def _broadcast_or_die(self: Any, buffer_B: Any, *, deadline_s: float) -> None:
    marker = Path(os.environ["SPLICE_TEST_KILL_MARKER"])
    _Count.pieces += 1
    last = int(os.environ.get("SPLICE_TEST_KILL_PIECE", "2"))
    if _Count.publications == 2 and _Count.pieces == last and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    _broadcast(self, buffer_B, deadline_s=deadline_s)


if __name__ == "__main__":
    transfer.Transfer.send = _count  # type: ignore[method-assign]
    socket_group.SocketGroup.broadcast = _broadcast_or_die  # type: ignore[method-assign]
    sys.exit(node.main())
