"""Tensors out of the device's memory and back, without anybody who holds one noticing: the storages are emptied, not the tensors.

    copies = HostCopies(pinned=True)
    copies.take(tensors)     each storage once: bytes to the host, then the storage is resized to 0
    copies.give_back()       resized to what it was, bytes back

A parameter, a view of it, a tied parameter and the pieces of a flat buffer share a storage, so they leave and return together and
stay views of each other. Addresses may change; who keeps them (`wire_export`) compares before use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True, kw_only=True)
class _Copy:
    storage: torch.UntypedStorage
    nbytes: int
    host_B: torch.Tensor


class HostCopies:
    """Storages whose bytes lie on the host.

    Args:
        pinned: page-locked host memory, which a device copies from and to without staging; kept between uses, because
            making it is slow. Pageable memory is freed by `give_back`.
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
        """Copy the storages behind these tensors to the host and empty them; one that is empty is passed over."""
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
    """The tensors' storage. One that torch cannot resize (read from a file, on the CPU) is first replaced, under all of them."""
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


def held_tensors(runtime: Any) -> Iterator[torch.Tensor]:
    """Every tensor that a `TrainerRuntime` keeps from one request to the next: weights, buffers, adapters, gradients, optimizer state."""
    modules = [*runtime.model, *runtime.adapters.adapters]
    for module in modules:
        for param in module.parameters():
            yield param
            if param.grad is not None:
                yield param.grad
        yield from module.buffers()
    for pieces in runtime.references.values():
        yield from pieces
    yield from (p.main_grad for p in runtime.params if p.main_grad is not None)
    if runtime.optimizer is not None:
        yield from _tensors_in([[master for _, master in runtime.optimizer.masters], runtime.optimizer.state])


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested dicts, lists and tuples; 0-dim ones stay (AdamW's step counters lie on the host, and are read there)."""
    if isinstance(value, torch.Tensor):
        if value.dim():
            yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors_in(inner)
