"""Random bytes, the same for a seed."""

from __future__ import annotations

import torch


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_bytes(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=seeded(seed))
