"""Command lines of Python processes, which import nothing from the current folder.

`python -m` and `python -c` look there first: a file `orchestrator.py` or a clone of vLLM or
Megatron there would replace the installed package. Modules of a user's own are found by PYTHONPATH.
"""

from __future__ import annotations

from pathlib import Path

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Environment with the same effect on the Python processes that a child starts itself: vLLM looks
at a model's class in one."""


def python_command(python: str | Path, *arguments: str | Path) -> list[str]:
    """Return the command line. The flag also passes a prefix such as `docker run`."""
    return [str(python), "-P", *map(str, arguments)]
