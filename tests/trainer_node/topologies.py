"""The parity matrix's topologies, by name, and what a rank of a cell left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

DENSE = {
    "tp2": (2, (2, 1, 1)),
    "tp2-no-sequence": (2, (2, 1, 1)),
    "pp2": (2, (1, 2, 1)),
    "dp2": (2, (1, 1, 1)),
    "tp2pp2": (4, (2, 2, 1)),
    "cp2": (2, (1, 1, 1)),
}


MOE = DENSE | {
    "ep2": (2, (1, 1, 2)),
    "tp2ep2": (2, (2, 1, 2)),
    "dp2ep2": (4, (1, 1, 2)),
    "tp2ep2-cp2": (4, (2, 1, 2)),
    "tp2-etp2": (2, (2, 1, 1)),
    "tp2-no-sequence-etp2": (2, (2, 1, 1)),
    "dp2ep2-etp2": (4, (1, 1, 2)),
}


def load(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "cell.pt", weights_only=True, map_location="cpu")


def options(topology: str) -> list[str]:
    """What a topology's name says beyond the sizes."""
    return [option for option in ("no-sequence", "cp2", "etp2") if option in topology]
