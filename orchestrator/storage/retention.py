"""Which versions' checkpoints to delete, and which a client keeps: RUN_DIR/kept.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from orchestrator.errors import ConfigError
from orchestrator.storage.files import replace_file

KEPT = "kept.json"


def keep(run_dir: Path, versions: Iterable[int]) -> None:
    """Keep the checkpoints of these versions, and no others, whatever `keep_versions` says.

    It counts from the next job that makes a version.
    """
    replace_file(run_dir / KEPT, json.dumps(sorted(set(versions))), durable=True)


def kept(run_dir: Path) -> list[int]:
    """Return the versions of `keep`.

    Raises:
        ConfigError: the file cannot be read.
    """
    path = run_dir / KEPT
    try:
        return [int(version) for version in json.loads(path.read_text())]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} is no list of versions ({error}); correct it, or delete it to keep none"
        ) from error


def expired(
    versions: Sequence[int], *, new: int, keep: int | None, protected: Iterable[int | None]
) -> list[int]:
    """Return the versions to delete once `new` is durable, oldest first.

    Args:
        versions: versions on disk.
        keep: number of versions that remain, `new` included. None: all.
        protected: versions that always remain: the served one, and the one to which a restarted
            trainer returns.
    """
    if keep is None:
        return []
    newest = sorted(set(versions) - {new}, reverse=True)[: keep - 1]
    return sorted(set(versions) - {new, *newest, *(v for v in protected if v is not None)})
