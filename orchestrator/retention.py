"""Which versions' checkpoints are no longer kept. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def expired(versions: Sequence[int], *, new: int, keep: int | None, protected: Iterable[int | None]) -> list[int]:
    """The versions that go once `new` is durable, oldest first, so that `new` and the newest others make `keep`.

    Args:
        versions: those on disk, without `new`.
        keep: None: all.
        protected: never go, whatever `keep` says: what is served, and what a restarted trainer would be put back to.
    """
    if keep is None:
        return []
    newest = sorted(set(versions) - {new}, reverse=True)[: keep - 1]
    return sorted(set(versions) - {new, *newest, *(v for v in protected if v is not None)})
