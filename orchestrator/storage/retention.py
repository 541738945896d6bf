"""Which versions' checkpoints to delete: a pure function."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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
