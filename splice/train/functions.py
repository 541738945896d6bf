"""Rewards by name: `"my.py:accuracy"`, or a table of several with weights."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from splice.client.batches import Completion
from splice.rl.rewards import trl_reward
from splice.rl.sampler import Row
from splice.rl.scoring import Reward


@dataclass(frozen=True, slots=True)
class Weighted:
    """A weighted sum of rewards, which processes can import (`reward_processes`)."""

    parts: tuple[tuple[Reward, float], ...]

    def __call__(self, row: Row, completion: Completion) -> float | Awaitable[float]:
        """Return the sum, or a coroutine of it if a part is one."""
        found = [(part(row, completion), weight) for part, weight in self.parts]
        if any(inspect.isawaitable(value) for value, _ in found):
            return _sum(found)
        return sum((float(value) * weight for value, weight in found), 0.0)  # type: ignore[arg-type]


async def _sum(found: list[tuple[Any, float]]) -> float:
    total = 0.0
    for value, weight in found:
        total += weight * float(await value if inspect.isawaitable(value) else value)
    return total


def reward_of(named: str | Mapping[str, float], folder: Path) -> Reward:
    """Import the reward, or the weighted sum of several.

    Args:
        folder: of the file that names them.

    Raises:
        ConfigError: a name does not lead to a function; says why.
    """
    if isinstance(named, str):
        return _reward(named, folder)
    if not named:
        raise ConfigError("loop.reward names no function")
    return Weighted(tuple((_reward(name, folder), weight) for name, weight in named.items()))


def _reward(name: str, folder: Path) -> Reward:
    function = function_of(name, folder)
    parameters = list(inspect.signature(function).parameters)
    return function if parameters[:1] == ["row"] else trl_reward(function)


def function_of(name: str, folder: Path) -> Callable[..., Any]:
    """Import `file.py:name` or `module:name`. The folder then is on sys.path, as for a script.

    Raises:
        ConfigError: there is none, or its import fails.
    """
    place, colon, attribute = name.partition(":")
    if not colon or not attribute:
        raise ConfigError(f'{name!r} names no function; write "file.py:function"')
    path = folder / place
    is_file = place.endswith(".py")
    if is_file and not path.is_file():
        raise ConfigError(f"{name}: there is no file {path}")
    own = str(path.parent if is_file else folder)
    if own not in sys.path:
        sys.path.insert(0, own)
    try:
        module = importlib.import_module(path.stem if is_file else place)
    except Exception as error:
        raise ConfigError(f"{name}: its import failed: {type(error).__name__}: {error}") from error
    if is_file and Path(module.__file__ or "").resolve() != path.resolve():
        raise ConfigError(
            f"{name}: the module name {path.stem} belongs to {module.__file__}; rename the file"
        )
    function = getattr(module, attribute, None)
    if not callable(function):
        known = [n for n, v in vars(module).items() if inspect.isfunction(v)]
        raise ConfigError(f"{name}: no such function; the module has {', '.join(known) or 'none'}")
    return function  # type: ignore[no-any-return]
