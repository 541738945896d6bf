"""What one publication did, for the job's result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.protocol.messages import PublicationMode, Sent

Report = Callable[[str, dict[str, object]], None]
"""Takes each step of a publication and its details, for the client's `Progress`."""


@dataclass(slots=True, kw_only=True)
class PublicationReport:
    """What one publication did."""

    version: int
    sent: Sent
    why_sent: str = ""
    """Why whole tensors or changed elements were sent."""
    changed_elements: int | None = None
    """Number of elements sent, if only those were."""
    bytes_sent: int
    num_tensors: int
    """Number of tensors sent."""
    num_verified: int = 0
    """Number of tensors sent whose digests were compared."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall-clock. `shadow`: receiving and verifying during generation, before the pause."""
    unverified: dict[str, str] = field(default_factory=dict)
    """Tensor that could not be read back -> the reason."""
    states: list[str] = field(default_factory=list)
    attempts: int = 1
    replicas: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    """Replica that does not serve the version -> the reason."""
    mode: PublicationMode = "in_place"
    """The mode that was used."""
    why_in_place: str | None = None
    """Why the configured shadow mode was not used."""
    canary: dict[str, float] = field(default_factory=dict)
    """Replica -> its median difference from the trainer, in nats; only replicas that were asked."""
