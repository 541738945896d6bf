"""Settings of one run's orchestrator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, field_validator

from orchestrator.protocol.config import Settings, check_alias_name
from orchestrator.publication.config import PublicationConfig, Seconds


class OrchestratorSettings(Settings):
    """The orchestrator, as a table of run.toml."""

    endpoint: str = "tcp://127.0.0.1:0"
    """Where it binds: tcp://HOST:PORT; with port 0 the kernel chooses. Beyond loopback it needs
    `curve_dir`."""
    curve_dir: Path | None = None
    """Its folder from `splice keys`."""
    keep_versions: int = Field(default=2, ge=0)
    """Versions whose checkpoints stay on disk, at least 2. 0: all. That of the served version is
    never deleted."""
    ready_timeout_s: Seconds = 600.0
    """Longest wait of a job for missing nodes, in seconds."""
    train_timeout_s: Seconds = 3600.0
    """Longest training, forward, save or load request, in seconds."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the numbers for Prometheus. With 0 the kernel chooses; RUN_DIR/metrics has the URL.
    Without a value they are not served."""
    metrics_host: str = "127.0.0.1"
    """Address on which they are served. 0.0.0.0: all of this host's addresses. Readers need no
    authentication."""

    @field_validator("keep_versions")
    @classmethod
    def _two_or_all(cls, keep_versions: int) -> int:
        if keep_versions == 1:
            raise ValueError(
                "1 is too few; keep 2 (the served version and the next), more, or 0: all"
            )
        return keep_versions


class OrchestratorConfig(OrchestratorSettings):
    """One run's orchestrator."""

    run_dir: Path
    run_token: str
    name: Annotated[str, AfterValidator(check_alias_name)]
    publication: PublicationConfig
    replicas: int = Field(default=1, ge=1)
    resume: bool = False
    """Continue the run in `run_dir`, if there is one, from its journal."""
    max_jobs: int = 1024
    """Most open jobs, the running one included."""
    max_job_bytes: int = 4 * 2**30
    """Most bytes of all open jobs' batches, which the orchestrator keeps in memory and on disk."""
    stop_on_term: bool = False
    """SIGTERM ends the run, like StopRun. False: it ends only the orchestrator; --resume continues.
    """
