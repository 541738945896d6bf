"""What the parts of one orchestrator share."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.config import OrchestratorConfig
from orchestrator.control.router import ControlRouter
from orchestrator.facts import Facts
from orchestrator.publication.publisher import Publisher
from orchestrator.storage.journal import Journal
from orchestrator.storage.run_folder import RunFolder
from orchestrator.trainer_requests import TrainerRequests


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: its settings, folder, journal and nodes."""

    config: OrchestratorConfig
    folder: RunFolder
    journal: Journal
    facts: Facts
    router: ControlRouter
    trainer: TrainerRequests
    publisher: Publisher
