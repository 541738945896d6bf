"""A rank whose model is checked for longer than the ranks wait for each other."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from trainer_node.node import main
from trainer_node.tools import admission

CHECK_S = 25.0


def _check(model: Path) -> None:
    time.sleep(CHECK_S)


if __name__ == "__main__":
    admission.require = _check
    sys.exit(main())
