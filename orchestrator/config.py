"""Settings of one run's orchestrator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import check_alias_name
from orchestrator.publication.config import PublicationConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class OrchestratorConfig:
    """One run."""

    run_dir: Path
    run_token: str
    name: str
    endpoint: str = "tcp://127.0.0.1:0"
    publication: PublicationConfig
    replicas: int = 1
    ready_timeout_s: float = 600.0
    train_timeout_s: float = 3600.0
    curve_dir: Path | None = None
    resume: bool = False
    """Continue the run in `run_dir`, if there is one, from its journal."""
    keep_versions: int | None = None
    """Number of version checkpoints to keep on disk, the newest included; at least 2. None: all.

    The checkpoint of the served version is never deleted."""

    max_jobs: int = 1024
    """Most open jobs, the running one included."""
    max_job_bytes: int = 4 * 2**30
    """Most bytes of all open jobs' batches, which the orchestrator keeps in memory and on disk."""
    metrics_port: int | None = None
    """Port of the numbers for Prometheus; 0: the kernel chooses. None: they are not served."""
    metrics_host: str = "127.0.0.1"
    """Address on which they are served."""
    stop_on_term: bool = False
    """SIGTERM ends the run, like StopRun. False: it ends only the orchestrator; --resume continues.
    """

    def __post_init__(self) -> None:
        try:
            check_alias_name(self.name)
        except ValueError as error:
            raise ConfigError(f"--name: {error}") from None
        if self.replicas < 1:
            raise ConfigError(f"replicas is {self.replicas}; it must be at least 1")
        if self.keep_versions is not None and self.keep_versions < 2:
            raise ConfigError(
                f"keep_versions is {self.keep_versions}; it must be at least 2: "
                "the served version and the next"
            )
