"""A rank whose moments take long to be written behind, while a file says so.

python -m tests.trainer_node.state.slow_save ...   as `trainer_node`; SLOW_SAVE names the file
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from trainer_node.files import behind
from trainer_node.node import main

FILE = "SLOW_SAVE"
ORIGINAL = behind.Behind.start


def _start(self: behind.Behind, folder: Path, moments: Any, write: Any) -> None:
    def slow(copies: Any) -> None:
        while Path(os.environ[FILE]).exists():
            time.sleep(0.05)
        write(copies)

    ORIGINAL(self, folder, moments, slow)


if __name__ == "__main__":
    behind.Behind.start = _start  # type: ignore[method-assign]
    sys.exit(main())
