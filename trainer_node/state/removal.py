"""Deletes old checkpoints while the trainer continues.

Gigabytes take seconds to delete, above all during a save. A new version does not
wait for that. There is one removal at a time, and the next one waits for it, so the disk never
holds more than one job's old checkpoints too many. If the process ends first, folders are left, and
the orchestrator names them again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from trainer_node.state import checkpoint

log = logging.getLogger("splice.trainer")
TIMEOUT_S = 600.0
"""Longest wait for the earlier removal, in seconds."""


class Removal:
    """One rank's removal in the background."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._folders: frozenset[Path] = frozenset()
        """What is being deleted."""
        self._kept: dict[str, str] = {}
        """Folder -> why the last removal left it."""

    def start(self, folders: Sequence[Path]) -> dict[str, str]:
        """Begin to delete checkpoints of ours; missing ones are skipped.

        Returns folder -> why it is not deleted: folders that are not ours, and those that the
        earlier removal left. A save that came before still counts.
        """
        if not folders:
            return {}
        if not self.wait(timeout_s=TIMEOUT_S):
            text = f"the earlier checkpoints are still being deleted after {TIMEOUT_S:.0f} s"
            return {str(folder): text for folder in folders}
        kept, self._kept = self._kept, {}
        ours = []
        for folder in folders:
            try:
                checkpoint.check_ours(folder)
                ours.append(folder)
            except OSError as error:
                kept[str(folder)] = str(error)
        self._folders = frozenset(folder.resolve() for folder in ours)
        self._thread = threading.Thread(
            target=self._delete, args=(ours,), name="remove-checkpoints", daemon=True
        )
        self._thread.start()
        return kept

    def wait_for(self, folder: Path) -> None:
        """Before a folder is read or written: wait until it is not being deleted."""
        folder = folder.resolve()
        if not self._folders.isdisjoint((folder, *folder.parents)):
            self.wait(timeout_s=TIMEOUT_S)

    def wait(self, *, timeout_s: float) -> bool:
        """Wait for the end of the removal. Returns whether it has ended."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _delete(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            try:
                checkpoint.delete(folder)
            except OSError as error:
                log.warning("cannot delete the old checkpoint %s: %s", folder, error)
                self._kept[str(folder)] = str(error)
