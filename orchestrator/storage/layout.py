"""layout.json: which version of splice wrote a folder, and in which layout.

A run's folder has one, and so has a loop's. A checkpoint says the same in its meta.json.
"""

from __future__ import annotations

import json
from pathlib import Path

from orchestrator.errors import ConfigError
from orchestrator.errors.other_version import refusal, splice_version
from orchestrator.storage.files import replace_file

LAYOUT = 1
"""Layout of tables, facts, outcomes of jobs, decisions and Tinker's books. Count it up when this
version would misread an earlier one's, or an earlier version this one's. `tests/layouts` keeps a
folder of each."""
FILE = "layout.json"


def check(folder: Path) -> None:
    """Refuse a run's or a loop's folder of another layout. Changes nothing.

    A folder without the file is new, or has layout 1.

    Raises:
        ConfigError: names both versions and layouts.
    """
    path = folder / FILE
    try:
        found = json.loads(path.read_text())
        layout, writer = found["layout"], found["splice"]
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; restore it from a copy") from error
    if layout != LAYOUT:
        raise ConfigError(refusal(folder, layout=layout, ours=LAYOUT, writer=writer))


def claim(folder: Path) -> None:
    """Check the folder, and note that this version writes into it.

    Raises:
        ConfigError: see `check`.
    """
    check(folder)
    content = json.dumps({"layout": LAYOUT, "splice": splice_version()}) + "\n"
    path = folder / FILE
    if not path.exists() or path.read_text() != content:
        replace_file(path, content, durable=True)
