"""Rewards by name: `"my.py:accuracy"`, or a table of several with weights."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from splice.rl.rewards import trl_reward
from splice.rl.scoring import Reward


def reward_of(named: str | Mapping[str, float], folder: Path) -> Reward:
    """Import the reward, or the weighted sum of several.

    Args:
        folder: of the file that names them.

    Raises:
        ConfigError: a name does not lead to a function; says why.
    """
    weights = {named: 1.0} if isinstance(named, str) else named
    if not weights:
        raise ConfigError("loop.reward names no function")
    functions = [function_of(name, folder) for name in weights]
    return trl_reward(*functions, weights=list(weights.values()))


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
