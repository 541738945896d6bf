"""The run's folder: private, and locked by the one orchestrator that lives in it.

journal.sqlite    jobs, publications, facts (0600)
endpoint          where the control socket is bound
lock              held by the living orchestrator; holds its pid
versions/N        what version N is made of
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from orchestrator.errors import ConfigError


class RunFolder:
    """Creates the folder (0700) and takes its lock; a process that ends, however it ends, gives it back.

    Raises:
        ConfigError: another orchestrator lives in it, or it cannot be made or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path.chmod(0o700)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot use the run folder {path}: {error}; choose another one") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise ConfigError(
                f"the orchestrator with pid {holder} lives in the run folder {path}; end it first, or choose another folder"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def version_dir(self, version: int) -> Path:
        """Where what the version is made of lies."""
        return self.path / "versions" / str(version)

    def refuse_own(self, folder: str, *, field: str) -> None:
        """What the orchestrator keeps for itself is no place for a job's output.

        Raises:
            ConfigError: the folder is in one of those, also by way of `..` or a link.
        """
        resolved = Path(os.path.realpath(folder))
        for own in ("versions", "resync", "trainer_state", "trainer_state-2"):
            place = Path(os.path.realpath(self.path / own))
            if resolved.is_relative_to(place) or place.is_relative_to(resolved):
                raise ConfigError(f"{field} {folder} is in {place}, which belongs to the run itself; choose a folder outside")

    def close(self) -> None:
        """Give the lock back."""
        os.close(self._lock)
