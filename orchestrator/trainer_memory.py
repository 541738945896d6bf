"""What the trainer holds in memory that the disk does not."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from orchestrator.errors import REFUSED, ErrorCode
from orchestrator.protocol.config import MemoryMode

log = logging.getLogger("splice.orchestrator")
MESSAGE_CHARS = 2000
"""Longest description of a loss, so that it fits into a `Failed`."""
NOTES_KEPT = 20
COPIES_KEPT = 4


@dataclass(slots=True, kw_only=True)
class TrainerMemory:
    """What the trainer's process holds."""

    incarnation: str | None = None
    """The process that was asked last, or None."""
    uncertain: str = ""
    """The process that may still be at work on a request that was given up; empty: none."""
    durable_dir: str = ""
    """The checkpoint last saved or loaded; empty: the base weights."""
    copies: list[str] = field(default_factory=list)
    """Other checkpoints of the same state, the newest first. Some may be deleted by now."""
    steps: int = 0
    """Optimizer steps since that checkpoint."""
    adapter: str = ""
    """The PEFT folder loaded since that checkpoint; empty: none."""
    version: int = 0
    """The newest version made from its state."""
    mode: MemoryMode | None = None
    """Its memory mode between jobs. None: unknown, because no trainer has joined yet."""
    pending: int = 0
    """Number of batches with pending gradients."""
    killed_by: str = ""
    """The request in which a process of the trainer ended last; empty: in none."""
    kills: int = 0
    """Number of processes that ended in that request."""
    saving: str = ""
    """Folder of a client's save in progress. It may be complete although no answer came."""
    unsaid: str = ""
    """Description of lost state, until a failed job reports it."""
    notes: list[str] = field(default_factory=list)
    """Warnings of requests that no job sees, until a job's result has them."""

    def as_dict(self) -> dict[str, Any]:
        """Return its fields. `dataclasses.asdict` would copy them."""
        return {name: getattr(self, name) for name in _REMEMBERED}

    def free_folder(self, folder: str) -> str:
        """Return `folder` or its alternative: the one that is not the last durable state."""
        return folder if folder != self.durable_dir else f"{folder}-2"

    def saved(self, folder: str) -> None:
        """Note a save to `folder`. Pending gradients stay, because no checkpoint contains them."""
        same = [] if self.is_ahead or not self.durable_dir else [self.durable_dir, *self.copies]
        self.copies = [other for other in same if other != folder][:COPIES_KEPT]
        self.durable_dir, self.steps, self.adapter, self.saving = folder, 0, "", ""

    def loaded(self, folder: str) -> None:
        """Note that the state came from `folder`."""
        self.durable_dir, self.steps, self.pending, self.adapter, self.saving = folder, 0, 0, "", ""
        self.copies = []

    def find_durable(self) -> str | None:
        """Take a copy of the state whose folder is gone, if there is one; returns the lost folder.
        None: the folder is there, or is nowhere to be seen from here."""
        lost = self.durable_dir
        found = [other for other in self.copies if Path(other).is_dir()]
        if not lost or Path(lost).exists() or not found:
            return None
        self.durable_dir, self.copies = found[0], found[1:]
        return lost

    def moved(self, before: str, after: str) -> None:
        """Note that the run's folder has another place."""
        self.durable_dir, self.saving = (
            moved(folder, before, after) for folder in (self.durable_dir, self.saving)
        )
        self.copies = [moved(folder, before, after) for folder in self.copies]

    def heard(self, result: Mapping[str, Any]) -> None:
        """Keep the warnings of a request whose result no job sees."""
        for text in result.get("warnings") or ():
            log.warning("the trainer: %s", text)
            if len(self.notes) < NOTES_KEPT:
                self.notes.append(str(text)[:MESSAGE_CHARS])

    def take_notes(self) -> list[str]:
        """Return `notes` for a job's result, and forget them."""
        notes, self.notes = self.notes, []
        return notes

    def took_adapter(self, folder: str) -> None:
        """Note that the adapters came from `folder`, which drops the pending gradients."""
        self.adapter, self.pending = folder, 0

    @property
    def is_ahead(self) -> bool:
        """Whether it has steps or adapters that no checkpoint has."""
        return bool(self.steps or self.adapter)

    def stepped(self, count: int = 1) -> None:
        """Note optimizer steps, which use the pending gradients."""
        self.steps, self.pending, self.saving = self.steps + count, 0, ""

    def failed(self, code: str, *, steps_taken: int) -> None:
        """Note a failed request that may change the state.

        A refused request changed nothing. A later failure dropped the pending gradients. Earlier
        steps remain, also those that could not be saved.
        """
        if steps_taken:
            self.stepped(steps_taken)
        elif code == ErrorCode.CHECKPOINT_FAILED:
            return
        elif code not in REFUSED:
            self.pending = 0

    def was_killed(self, request_id: str) -> int:
        """Note that the process ended in a request. Returns how many processes have."""
        self.kills = self.kills + 1 if self.killed_by == request_id else 1
        self.killed_by = request_id
        return self.kills

    def take_loss(self) -> str | None:
        """Describe what a lost process took with it, or None, and keep it in `unsaid`."""
        saving, self.saving = self.saving, ""
        if not self.is_ahead and not self.pending:
            return None
        where = self.durable_dir or "the base weights"
        loaded = f"the adapter {self.adapter}, " if self.adapter else ""
        said = (
            f"{loaded}{self.steps} optimizer steps and the gradients of {self.pending} batches "
            f"since {where} are lost with it"
        )
        if saving and saving == self.durable_dir and self.is_ahead:
            said += ", unless the last save to that folder had come to its end"
        self.steps = self.pending = 0
        self.adapter, self.unsaid = "", said[:MESSAGE_CHARS]
        return self.unsaid

    def was_said(self, message: str) -> None:
        """Forget `unsaid` if this message of a failed job reported it to the user."""
        if self.unsaid in message:
            self.unsaid = ""


def moved(folder: str, before: str, after: str) -> str:
    """The folder's place after what was in `before` went to `after`."""
    is_within = folder == before or folder.startswith(f"{before}/")
    return after + folder.removeprefix(before) if is_within else folder


_REMEMBERED = tuple(one.name for one in fields(TrainerMemory))
