"""The metrics of docs/training.md."""

from __future__ import annotations

import re

from tests.trainer_node.conftest import REPO

SAMPLER = "all, with sampler log-probs"


def documented(*columns: str) -> set[str]:
    """Metrics whose second column is one of these."""
    rows = re.findall(
        r"^\| `(\w+)` \| ([^|]+) \|", (REPO / "docs/training.md").read_text(), re.MULTILINE
    )
    return {name for name, column in rows if column in columns}
