"""Command lines of Python processes, which import nothing from the current folder.

`python -m` and `python -c` look there first: a file `orchestrator.py` or a clone of vLLM or
Megatron there would replace the installed package. Modules of a user's own are found by PYTHONPATH.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def python_command(python: str | Path, *arguments: str | Path) -> list[str]:
    """Return the command line. The flag also passes a prefix such as `docker run`."""
    return [str(python), "-P", *map(str, arguments)]


def python_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child. It has the same effect on Python processes that the child
    starts itself: vLLM looks at a model's class in one.

    An empty entry of PYTHONPATH means the current folder. `PYTHONPATH=$PYTHONPATH:/mine` has one
    where the variable was not set.
    """
    entries = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    path = {"PYTHONPATH": os.pathsep.join(entries)} if entries else {}
    rest = {name: value for name, value in env.items() if name != "PYTHONPATH"}
    return {**rest, **path, "PYTHONSAFEPATH": "1"}
