"""Launches of a kernel that is compiled once for each kind, and then called without Triton."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weight_transfer.launches import Launches


class Kernel:
    """Stand-in for Triton's function: compiles when it is called, and returns what it compiled."""

    arg_names = ("x_ptr", "count", "BLOCK", "EVEN")

    def __init__(self, *, is_interpreted: bool = False) -> None:
        self.compiled: list[Any] = []
        self.called: list[Any] = []
        self._is_interpreted = is_interpreted

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **constants: Any) -> Any:
            self.compiled.append((grid, args[1:], constants))
            return None if self._is_interpreted else Compiled(self.called)

        return launch


class Compiled:
    """Takes all arguments by position, the compile-time ones too, as Triton's does."""

    def __init__(self, called: list[Any]) -> None:
        self._called = called

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args: self._called.append((grid, args[1:]))


CONSTANTS = {"BLOCK": 128, "EVEN": True}


def test_a_kind_is_compiled_once() -> None:
    kernel, x_B = Kernel(), torch.zeros(64, dtype=torch.uint8)
    launch = Launches(kernel)
    for grid in (5, 6, 7):
        launch("a", grid, (x_B, 32), CONSTANTS, num_warps=8)
    assert kernel.compiled == [((5,), (32,), CONSTANTS | {"num_warps": 8})]
    assert kernel.called == [((6, 1, 1), (32, 128, True)), ((7, 1, 1), (32, 128, True))]
    launch("b", 5, (x_B, 32), CONSTANTS)
    launch("a", 5, (x_B[1:], 32), CONSTANTS)  # Triton compiles an odd address apart
    assert len(kernel.compiled) == 3 and len(kernel.called) == 2


def test_an_interpreted_kernel_is_launched_by_triton_each_time() -> None:
    kernel = Kernel(is_interpreted=True)
    launch = Launches(kernel)
    for _ in range(3):
        launch("a", 1, (torch.zeros(16), 1), CONSTANTS)
    assert len(kernel.compiled) == 3


def test_constants_in_another_order_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"BLOCK.*EVEN"):
        Launches(Kernel())("a", 1, (torch.zeros(16), 1), {"EVEN": True, "BLOCK": 128})
