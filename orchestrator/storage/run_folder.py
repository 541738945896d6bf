"""The run's folder: private, and locked by the one orchestrator that uses it.

journal.sqlite    jobs, publications, facts (0600)
endpoint          where nodes and clients reach the control socket
token             the run's token, for nodes and clients on hosts that see the folder (0600)
layout.json       version and layout of the splice that wrote the folder
bound             where the control socket is bound
lock              held by the running orchestrator; contains its pid
up.lock           held by the background process of `splice up`
loop.lock         held by the loop that trains the run; contains its pid and folder
versions/N        the checkpoint of version N
profiles/N.json.gz   what torch.profiler recorded of the training of version N
kept.json         versions that a client keeps
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from orchestrator.errors import ConfigError
from orchestrator.processes import locks
from orchestrator.storage import layout


class RunFolder:
    """Creates the folder (0700), or restricts an empty one or a run's to 0700, and takes its lock.

    The lock ends with the process.

    Raises:
        ConfigError: the folder is open to others and not a run's, another orchestrator uses it, it
            has another layout, or it cannot be created or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        layout.check(self.path)
        self._is_ours = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if stat.S_IMODE(self.path.stat().st_mode) != 0o700:
                if any(self.path.iterdir()) and not self.journal.exists():
                    raise ConfigError(
                        f"{path} is not a run's folder, and is open to others; choose a new or an "
                        "empty folder"
                    )
                self.path.chmod(0o700)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"cannot use the run folder {path}: {error}; choose another one"
            ) from error
        self.holds_run = self.journal.exists()
        """Whether an orchestrator has used the folder before."""
        if not locks.soon(lambda: locks.try_lock(self._lock)):
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise ConfigError(
                f"the orchestrator with pid {holder} lives in the run folder {path}; end it "
                "first, or choose another folder"
            )
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    @property
    def journal(self) -> Path:
        """The journal's file."""
        return self.path / "journal.sqlite"

    def resolve(self, folder: str) -> str:
        """Return a job's folder as an absolute path. A relative one is relative to this folder.

        Raises:
            ConfigError: the path begins with `~`, whose meaning differs between hosts and users.
        """
        if folder.startswith("~"):
            raise ConfigError(f"{folder}: `~` is not expanded; give a path without it")
        return os.path.abspath(self.path / folder)

    def version_dir(self, version: int) -> Path:
        """Return the folder with the version's checkpoint."""
        return self.path / "versions" / str(version)

    @staticmethod
    def is_in_use(path: Path) -> bool:
        """Whether an orchestrator of this host lives in the folder."""
        try:
            lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return not locks.try_lock(lock)
        finally:
            os.close(lock)

    def refuse_own(self, folder: str, *, field: str) -> None:
        """Refuse the orchestrator's own folders as a place for a job's output.

        Raises:
            ConfigError: the folder is in one of them, or contains one; `..` and links are resolved.
        """
        resolved = Path(os.path.realpath(folder))
        for own in ("versions", "resync", "trainer_state", "trainer_state-2"):
            place = Path(os.path.realpath(self.path / own))
            if resolved.is_relative_to(place) or place.is_relative_to(resolved):
                how = "is in" if resolved.is_relative_to(place) else "holds"
                raise ConfigError(
                    f"{field} {folder} {how} {place}, which belongs to the run itself; choose "
                    "another folder"
                )

    def discard(self) -> None:
        """Remove the files of a run that never began, because no client could reach it."""
        if self.holds_run:
            return
        for path in (
            *self.path.glob("journal.sqlite*"),
            self.path / "lock",
            self.path / layout.FILE,
        ):
            path.unlink(missing_ok=True)
        if self._is_ours:
            with contextlib.suppress(OSError):  # somebody has put a file into it
                self.path.rmdir()

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)
