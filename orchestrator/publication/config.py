"""How publications run: the user's settings, checked at start-up."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import PauseMode, PublicationMode, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationConfig:
    """Settings of all publications of a run."""

    transport: Transport = "tcp"
    """How weights travel from trainer to inference nodes."""
    pause_mode: PauseMode = "keep"
    """What a swap does to running requests; docs/operation.md has the table."""
    drain_s: float = 2.0
    """How long a request for `name@N` may go on before a swap ends it with 409, in seconds. At most
    a quarter of `transfer_timeout_s`. The swap waits for it."""
    join_timeout_s: float = 120.0
    """Longest joining of a transfer group, in seconds."""
    plan_timeout_s: float = 300.0
    """Longest planning, or loading of a checkpoint, in seconds."""
    transfer_timeout_s: float = 300.0
    """Longest transfer of a version, in seconds."""
    commit_timeout_s: float = 30.0
    """Longest commit of a version, in seconds."""
    recovery_timeout_s: float = 300.0
    """Longest wait for a lost trainer or for replicas during a publication, in seconds."""
    attempts: int = 3
    """Attempts at a publication, and at a trainer's request, before the job fails."""
    full_every: int | None = None
    """Send all tensors at least every this many publications; 1: always. None: only when needed."""
    mode: PublicationMode = "in_place"
    """in_place: generation stops while the bytes arrive; no extra memory.

    shadow: the bytes arrive beside the live tensors while generation continues, and are swapped in
    once verified. An update that does not fit arrives in place, and the result says why.
    """
    shadow_bytes: int = 4 * 2**30
    """Most bytes that shadow mode may use beside the model on each inference worker."""
    canary: bool = True
    """Compare a replica that serves nothing with the trainer before its commit.

    Digests prove that the weights are the trainer's. The log-probs of a fixed prompt prove that
    both compute the same model from them.
    """

    def __post_init__(self) -> None:
        if self.transport not in ("tcp", "nccl"):
            raise ConfigError(f"the transport is tcp or nccl, got {self.transport!r}")
        if self.pause_mode not in ("keep", "keep_kv", "wait", "abort"):
            raise ConfigError(
                f"the pause mode is keep, keep_kv, wait or abort, got {self.pause_mode!r}"
            )
        for key in (f.name for f in fields(self) if f.name.endswith("_timeout_s")):
            if not 0 < (value := getattr(self, key)) < math.inf:
                raise ConfigError(f"{key} is {value}; it must be a number of seconds above 0")
        if not 0 <= self.drain_s <= self.transfer_timeout_s / 4:
            raise ConfigError(
                f"drain_s is {self.drain_s}; it must be from 0 to {self.transfer_timeout_s / 4:g}, "
                "a quarter of transfer_timeout_s"
            )
        if self.attempts < 1:
            raise ConfigError(f"attempts is {self.attempts}; it must be at least 1")
        if self.mode not in ("in_place", "shadow"):
            raise ConfigError(f"the publication mode is in_place or shadow, got {self.mode!r}")
        if self.shadow_bytes < 1:
            raise ConfigError(
                f"shadow_bytes is {self.shadow_bytes}; it must be at least 1. "
                "To publish without a shadow, use mode in_place"
            )
        if self.full_every is not None and self.full_every < 1:
            raise ConfigError(
                f"full_every is {self.full_every}; it must be at least 1 (always all), or left out"
            )
