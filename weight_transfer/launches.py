"""Repeated launches of a Triton kernel without Triton's look-up.

`fn[grid](...)` binds, specialises and hashes every argument each time, some 50 us of the host. A
send queues hundreds of launches within a tenth of a second, mostly the same ones again. The first
launch of a kind therefore keeps the compiled kernel, and later ones call it directly.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Hashable, Sequence
from types import ModuleType
from typing import Any

import torch

ALIGNED_BYTES = 16
"""Triton compiles pointers that are multiples of this apart from others."""


@functools.cache
def kernels(name: str) -> ModuleType | None:
    """The module with these Triton kernels, or None where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(f"weight_transfer.{name}")


class Launches:
    """The compiled kernels of one Triton function.

    Args:
        fn: its compile-time parameters come last.
    """

    def __init__(self, fn: Any) -> None:
        self._fn = fn
        self._compiled: dict[Hashable, Any] = {}

    def __call__(
        self,
        kind: Hashable,
        grid: int,
        args: Sequence[Any],
        constants: dict[str, Any],
        **options: int,
    ) -> None:
        """Queue a launch on the current stream of the current device.

        Args:
            kind: launches of a kind have equal constants and options, and integers that are equal
                or alike: both 1, or both multiples of 16.
            args: tensors on one device, and numbers.
            constants: in the function's order.
        """
        pointers = [a for a in args if isinstance(a, torch.Tensor)]
        aligned = tuple(p.data_ptr() % ALIGNED_BYTES == 0 for p in pointers)
        key = (kind, aligned, pointers[0].device)
        kernel = self._compiled.get(key)
        if kernel is not None:
            kernel[(grid, 1, 1)](*args, *constants.values())
            return
        last = list(self._fn.arg_names)[len(args) :]
        assert last == list(constants), f"{last} are to be passed as {list(constants)}"
        # None where Triton interprets.
        self._compiled[key] = self._fn[(grid,)](*args, **constants, **options)
