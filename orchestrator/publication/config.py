"""How publications run: the user's settings, checked at start-up."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from orchestrator.protocol.config import RolloutWeights, RoundingMode, Settings, TrainerConfig
from orchestrator.protocol.messages import PauseMode, PublicationMode, Transport
from orchestrator.publication.choice import Setting

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class PublicationConfig(Settings):
    """Settings of all publications of a run."""

    transport: Transport = "tcp"
    """How weights travel from trainer to inference nodes. `trainer.transport` decides it."""
    pause_mode: PauseMode = "keep"
    """What a swap does to running requests; docs/operation.md has the table."""
    drain_s: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    """How long a request for `name@N` may continue before a swap ends it with 409, in seconds. At
    most a quarter of `transfer_timeout_s`. The swap waits for it."""
    join_timeout_s: Seconds = 120.0
    """Longest joining of a transfer group, in seconds."""
    plan_timeout_s: Seconds = 300.0
    """Longest planning, or loading of a checkpoint, in seconds."""
    transfer_timeout_s: Seconds = 300.0
    """Longest transfer of a version, in seconds."""
    commit_timeout_s: Seconds = 30.0
    """Longest commit of a version, in seconds."""
    recovery_timeout_s: Seconds = 300.0
    """Longest wait for a lost trainer or for replicas during a publication, in seconds."""
    attempts: int = Field(default=3, ge=1)
    """Attempts at a publication, and at a trainer's request, before the job fails."""
    full_every: int | None = Field(default=None, ge=1)
    """Send all tensors at least every this many publications; 1: always. None: only when needed."""
    mode: PublicationMode = "in_place"
    """in_place: generation stops while the bytes arrive; no extra memory.

    shadow: the bytes arrive next to the live tensors while generation continues, and are swapped in
    once verified. An update that does not fit arrives in place, and the result says why.
    Changed elements (`send`) arrive so in either mode.
    """
    shadow_bytes: int = Field(default=4 * 2**30, ge=1)
    """Most bytes that shadow mode may use next to the model on each inference worker."""
    chain: bool = False
    """Whether the trainer sends to the first replica only, and each replica passes the bytes on to
    the next. Several replicas then take hardly longer than one, where the trainer's link is the
    limit.

    A failure of one replica ends the attempt for all, as without a chain; the next attempt is
    without one. Replicas with different numbers of workers form none.
    """
    send: Setting = "auto"
    """What an update brings when every replica holds the version before it.

    auto: changed elements if they arrive sooner than whole tensors, by measured rates. tensors:
    never changed elements. elements: always, unless encoded they are hardly smaller.
    """
    canary: bool = True
    """Compare a replica that serves nothing with the trainer before its commit.

    Digests prove that the weights are the trainer's. The log-probs of a fixed prompt prove that
    both compute the same model from them.
    """
    rounding: RoundingMode = Field(
        default="stochastic", description=TrainerConfig.model_fields["rounding"].description
    )

    rollout_weights: RolloutWeights = Field(
        default="merged", description=TrainerConfig.model_fields["rollout_weights"].description
    )

    @model_validator(mode="after")
    def _drains_in_time(self) -> Self:
        if self.drain_s > self.transfer_timeout_s / 4:
            raise ValueError(
                f"drain_s is {self.drain_s}; it must be from 0 to {self.transfer_timeout_s / 4:g}, "
                "a quarter of transfer_timeout_s"
            )
        return self
