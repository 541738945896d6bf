"""Exchanges small Python values between ranks without pickle.

A writer to a rank's socket must not be able to run code there.

`all_gather` and `broadcast` carry msgpack's types: None, bool, int, float, str, bytes, and lists,
tuples and dicts of these. Lists and tuples arrive as tuples.

torch's checkpoint planner and Megatron-Bridge use torch's own object collectives, which unpickle.
`restrict_torch` allows them only the classes that the two exchange.
"""

from __future__ import annotations

import dataclasses
import enum
import pathlib
import pickle
import sys
import traceback
from typing import Any

import msgpack
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def all_gather(value: Any, *, group: Any = None) -> list[Any]:
    """Every rank's value, by rank. A collective."""
    mine, size = _packed(value, group), torch.zeros(dist.get_world_size(group), dtype=torch.int64)
    size[dist.get_rank(group)] = mine.numel()
    size = size.to(mine.device)
    dist.all_reduce(size, group=group)
    padded = torch.zeros(int(size.max()), dtype=torch.uint8, device=mine.device)
    padded[: mine.numel()] = mine
    everyones = [torch.empty_like(padded) for _ in size]
    dist.all_gather(everyones, padded, group=group)
    return [_unpacked(data[:count]) for data, count in zip(everyones, size.tolist(), strict=True)]


def broadcast(value: Any, *, group: Any = None) -> Any:
    """Return rank 0's value on every rank. A collective of a group with rank 0."""
    mine = _packed(value, group)
    size = torch.tensor([mine.numel()], device=mine.device)
    dist.broadcast(size, src=0, group=group)
    data = (
        mine
        if dist.get_rank() == 0
        else torch.empty(int(size), dtype=torch.uint8, device=mine.device)
    )
    dist.broadcast(data, src=0, group=group)
    return _unpacked(data)


def _packed(value: Any, group: Any) -> torch.Tensor:
    raw = np.frombuffer(msgpack.packb(value, unicode_errors="surrogatepass"), np.uint8)
    return torch.from_numpy(raw.copy()).to("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def _unpacked(data: torch.Tensor) -> Any:
    raw = data.cpu().numpy().tobytes()
    return msgpack.unpackb(
        raw, use_list=False, strict_map_key=False, unicode_errors="surrogatepass"
    )


# ------------------------------------------------------------ what torch itself unpickles


def restrict_torch() -> None:
    """Limit torch's object collectives to the objects of `Unpickler`."""
    if not hasattr(distributed_c10d, "_unpickler"):
        raise RuntimeError(
            f"torch {torch.__version__} unpickles what ranks send elsewhere; "
            "trainer_node.ranks.objects has to follow"
        )
    distributed_c10d._unpickler = Unpickler  # type: ignore[attr-defined]


_MODULES = frozenset(
    f"torch.distributed.checkpoint.{name}"
    for name in ("api", "filesystem", "metadata", "planner", "storage")
)
_TRACEBACK = (traceback.FrameSummary, traceback.StackSummary)
_PATHS = (pathlib.PosixPath, pathlib.PurePosixPath)


class Unpickler(pickle.Unpickler):
    """Makes plain values, torch's checkpoint plans, and exceptions of imported modules."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or dtype that may be made."""
        found = getattr(sys.modules.get(module), name, None)  # never imports
        if (module, name) == ("builtins", "getattr"):
            return enum_member
        if isinstance(found, torch.dtype) or (module, name) == (
            "torch.serialization",
            "_get_layout",
        ):
            return found
        if not isinstance(found, type) or not _may_be_made(found):
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed between trainer ranks")
        return found


def _may_be_made(kind: type) -> bool:
    if kind.__module__ in _MODULES:
        return dataclasses.is_dataclass(kind) or issubclass(kind, (enum.Enum, Exception))
    return issubclass(kind, Exception) or kind in (torch.Size, set, frozenset, *_TRACEBACK, *_PATHS)


def enum_member(kind: Any, name: str) -> enum.Enum:
    """Replace `getattr` in a pickle: Python 3.11.0 to 3.11.3 writes an enum's member with it."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"getattr({kind!r}, {name!r}) is not allowed in a pickle")
    return kind[name]
