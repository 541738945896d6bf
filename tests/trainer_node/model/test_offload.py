"""Storages out of memory and back, on plain tensors; the trainer's own in operations.py and
test_memory.py.
"""

from __future__ import annotations

import numpy as np
import torch

from trainer_node.model.offload import HostCopies, by_storage, storage_bytes


def test_views_ties_and_storages_that_torch_cannot_resize() -> None:
    flat = torch.arange(12.0)
    pieces = [flat[:4].view(2, 2), flat[4:]]
    tied = torch.nn.Parameter(pieces[0])
    from_file = torch.from_numpy(np.arange(6.0))
    part = from_file[2:]
    assert not from_file.untyped_storage().resizable()
    tensors = [*pieces, tied, from_file, part, torch.empty(0)]
    wanted = [t.detach().clone() for t in tensors]
    assert storage_bytes(tensors) == 12 * 4 + 6 * 8
    copies = HostCopies(pinned=False)
    for _ in range(2):
        copies.take(tensors)
        copies.take(tensors)  # twice is once
        assert copies.nbytes == 12 * 4 + 6 * 8
        assert copies.holds_data
        assert storage_bytes([*tensors, flat]) == 0
        copies.give_back()
        copies.give_back()
        assert not copies.holds_data
        assert all(torch.equal(t, w) for t, w in zip(tensors, wanted, strict=True))
        assert len(list(by_storage(tensors))) == 2
    tied.data[0, 0] = 7.0
    from_file[3] = 9.0
    assert pieces[0][0, 0] == flat[0] == 7.0
    assert part[1] == 9.0
