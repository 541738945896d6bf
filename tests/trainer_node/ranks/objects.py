"""One rank of a check of what goes between ranks: `torchrun ... -m tests.trainer_node.ranks.objects
MARKER`. Code of rank 1 must not touch the marker.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainer_node.ranks import objects


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


def main() -> None:
    marker = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.new_group(backend="gloo")
    mine = [None, "an error of rank 0 \udcff", {"shape": (3, rank), "names": ["w"] * 1000 * rank}][
        rank
    ]
    for n in range(3):
        everyones = objects.all_gather(mine, group=group if n else None)
        assert everyones == [
            None,
            "an error of rank 0 \udcff",
            {"shape": (3, 2), "names": ("w",) * 2000},
        ]
    assert objects.all_gather(None, group=group) == [None] * 3
    assert objects.broadcast(("of", rank), group=group) == ("of", 0)

    objects.restrict_torch()
    found = [None] * 3
    dist.all_gather_object(
        found, (torch.Size([2, rank]), torch.bfloat16, None, {"p": 1.0}), group=group
    )  # as Megatron-Bridge does
    assert found[2] == (torch.Size([2, 2]), torch.bfloat16, None, {"p": 1.0})
    with pytest.raises(pickle.UnpicklingError, match="is not allowed between trainer ranks"):
        dist.all_gather_object(found, Evil(marker) if rank == 1 else None, group=group)
    dist.barrier(group)
    assert not marker.exists()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
