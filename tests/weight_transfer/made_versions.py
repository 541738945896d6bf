"""Versions in a store, of which each changes a few elements of the one before."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from weight_transfer.store import Store, new_keys

PRIVATE, PUBLIC = new_keys()
SIZE = 3 * 4096 + 2


def write(folder: Path, values: np.ndarray, *, config: str = "{}") -> Path:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(values.tobytes())
    (folder / "odd.safetensors").write_bytes(values.tobytes()[:4097])
    (folder / "empty.txt").write_bytes(b"")
    (folder / "config.json").write_text(config)
    return folder


def published(store: Store, folder: Path, *, versions: int, full_every: int = 100) -> list[Path]:
    """Folders of versions of which each changes a few elements of the one before."""
    rng, values = np.random.default_rng(3), np.random.default_rng(4).integers(0, 2**16, SIZE // 2)
    before, folders = None, []
    for number in range(versions):
        values = values.copy()
        values[rng.integers(0, 2048, 40)] += 1  # the third piece never changes
        made = write(folder / str(number), values.astype("<u2"))
        base = before if number % full_every else None
        before = store.put(made, name="m", version=number, base=base, key=PRIVATE)
        folders.append(made)
    return folders


def same(a: Path, b: Path) -> bool:
    names = {p.name for p in a.iterdir()}
    return names == {p.name for p in b.iterdir()} and all(
        (a / n).read_bytes() == (b / n).read_bytes() for n in names
    )
