"""What a restarted orchestrator must know in addition to jobs and publications.

The journal keeps it as facts: the trainer's state, the folder with state set aside for a resync,
and how far each open job has come.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.storage.journal import Journal
from orchestrator.trainer_memory import TrainerMemory, moved

_TRAINER, _SET_ASIDE, _RUN = "trainer", "set aside", "run"


class Facts:
    """Journals the trainer's state together with whatever else changes at the same moment."""

    def __init__(self, journal: Journal, memory: TrainerMemory) -> None:
        self._journal, self.memory = journal, memory

    def restore(self) -> None:
        """Read the trainer's state back after a restart."""
        for name, value in self._journal.fact(_TRAINER).items():
            setattr(self.memory, name, value)

    def moved_to(self, run_dir: str) -> str | None:
        """Remember where the run is; after a restart elsewhere, rewrite the folders in it. Returns
        the earlier place. None: it is the same, or unknown."""
        before: str | None = self._journal.fact(_RUN).get("dir")
        if before == run_dir:
            return None
        more: dict[str, dict[str, Any] | None] = {_RUN: {"dir": run_dir}}
        with self._journal.together():
            if before is not None:
                self.memory.moved(before, run_dir)
                self._journal.move(before, run_dir)
                if (kept := self.set_aside) is not None:
                    more[_SET_ASIDE] = {"folder": moved(kept, before, run_dir)}
            self.remember(more)
        return before

    def remember(self, more: dict[str, dict[str, Any] | None] | None = None) -> None:
        """Journal the trainer's state and more facts, all or nothing. None deletes a fact."""
        self._journal.set_facts({_TRAINER: self.memory.as_dict(), **(more or {})})

    def of_job(self, job_id: str) -> dict[str, Any]:
        """Return how far a job has come; empty for a job that has not started."""
        return self._journal.fact(_key(job_id))

    def note(self, job_id: str, **facts: object) -> None:
        """Journal how far a job has come, and the trainer's state at this point."""
        self.remember({_key(job_id): self.of_job(job_id) | facts})

    def forget_job(self, job_id: str) -> None:
        """Drop the notes of a job that has ended."""
        self.remember({_key(job_id): None})

    @property
    def set_aside(self) -> str | None:
        """Folder with the trainer's newer state while it holds the served version, or None."""
        return self._journal.fact(_SET_ASIDE).get("folder")

    def put_aside(self, folder: str | None) -> None:
        """Journal that folder together with the trainer's state. None: the newer state is back."""
        self.remember({_SET_ASIDE: None if folder is None else {"folder": folder}})


def _key(job_id: str) -> str:
    return f"job:{job_id}"


def steps_taken(result: Mapping[str, Any]) -> int:
    """Return the number of optimizer steps that a training request took, without skipped ones."""
    return sum("skipped" not in metrics for metrics in result.get("steps") or [{}])
