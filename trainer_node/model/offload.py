"""Moves tensors out of the device's memory and back. It empties storages, so all tensors and views
stay valid objects.

    copies = HostCopies(pinned=True)
    copies.take(tensors)     each storage once: bytes to the host, then the storage is resized to 0
    copies.give_back()       resized to what it was, bytes back

A parameter, its views, a tied parameter and the pieces of a flat buffer share a storage. They leave
and return together and stay views of each other. Addresses may change. Code that keeps them
(`wire_export`) compares before use.
"""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch


def free_bytes() -> int:
    """Bytes of the GPU that this process may still take: free memory, and what torch holds for
    later tensors."""
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def peak_memory_bytes(device: torch.device) -> int:
    """Most bytes in use: of the GPU's tensors since the last `reset_peak_memory_stats`, or of the
    process on a CPU since it started."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


@dataclass(slots=True, kw_only=True)
class _Copy:
    storage: torch.UntypedStorage
    nbytes: int
    host_B: torch.Tensor


class HostCopies:
    """Storages whose bytes are on the host.

    Args:
        pinned: whether to use page-locked host memory, which needs no staging. It is kept between
            uses, because allocating it is slow. `give_back` frees pageable memory.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._copies: list[_Copy] = []
        self._spare: dict[int, list[torch.Tensor]] = defaultdict(list)

    @property
    def holds_data(self) -> bool:
        """Whether anything was taken and not given back."""
        return bool(self._copies)

    @property
    def nbytes(self) -> int:
        """Bytes taken."""
        return sum(c.nbytes for c in self._copies)

    @torch.no_grad()
    def take(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the tensors' storages to the host and empty them. Storages that are already empty
        are skipped."""
        taken = []
        for group in by_storage(tensors):
            storage = _resizable(group)
            nbytes = storage.nbytes()
            host_B = self._host_buffer(nbytes)
            host_B.copy_(_bytes_of(storage), non_blocking=self._pinned)
            taken.append(_Copy(storage=storage, nbytes=nbytes, host_B=host_B))
        self._wait()
        for copy in taken:
            copy.storage.resize_(0)
        self._copies += taken

    @torch.no_grad()
    def give_back(self) -> None:
        """Fill every storage again."""
        for copy in self._copies:
            copy.storage.resize_(copy.nbytes)
            _bytes_of(copy.storage).copy_(copy.host_B, non_blocking=self._pinned)
        self._wait()
        for copy in self._copies:
            if self._pinned:
                self._spare[copy.nbytes].append(copy.host_B)
        self._copies = []

    def _host_buffer(self, nbytes: int) -> torch.Tensor:
        if self._spare[nbytes]:
            return self._spare[nbytes].pop()
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)

    def _wait(self) -> None:
        if self._pinned:
            torch.cuda.synchronize()


def by_storage(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors grouped by the storage they share, those without bytes left out."""
    groups: dict[int, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.untyped_storage().nbytes():
            groups[tensor.untyped_storage().data_ptr()].append(tensor)
    yield from groups.values()


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind the tensors, each once."""
    return sum(group[0].untyped_storage().nbytes() for group in by_storage(tensors))


def _resizable(tensors: Sequence[torch.Tensor]) -> torch.UntypedStorage:
    """The tensors' storage. One that torch cannot resize (read from a file, on the CPU) is first
    replaced, under all of them."""
    storage = tensors[0].untyped_storage()
    if storage.resizable():
        return storage
    fresh = _bytes_of(storage).clone().untyped_storage()
    for tensor in tensors:
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        tensor.data = view.set_(fresh, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]
    return fresh


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload,no-any-return]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested dicts, lists and tuples.

    0-dim tensors stay: AdamW's step counters are on the host.
    """
    if isinstance(value, torch.Tensor):
        if value.dim():
            yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_in(inner)
