"""A trainer whose adapters seem to take a second to be written.

python -m tests.rl.slow_disk ...   as `trainer_node`
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from trainer_node import node

WRITE_S = 1.0


def _left(_: Any) -> Callable[[], float]:
    end_s = time.monotonic() + WRITE_S
    return lambda: max(0.0, end_s - time.monotonic())


def main() -> int:
    """Patch once the trainer is built: on a CPU nothing of Megatron can be imported before."""
    whole = node.Node.__init__

    def patched(self: Any, *given: Any, **options: Any) -> None:
        whole(self, *given, **options)
        from trainer_node.state import checkpoint

        checkpoint._left = _left  # type: ignore[assignment]

    node.Node.__init__ = patched  # type: ignore[method-assign]
    return node.main()


if __name__ == "__main__":
    sys.exit(main())
