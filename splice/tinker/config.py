"""Settings of the Tinker server."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from orchestrator.protocol.config import Settings
from orchestrator.protocol.messages import MIN_TEMPERATURE


class TinkerConfig(Settings):
    """How the server listens, and its bounds."""

    run_dir: Path
    """Folder of the run."""
    host: str = "127.0.0.1"
    """Address on which it listens. Another one than loopback needs a key of your own."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Its port."""
    api_key: str = Field(pattern=r"^tml-[\x21-\x7e]+$", repr=False)
    """What clients send as X-API-Key. The SDK takes only keys that begin with `tml-`."""
    model_name: str | None = None
    """A further name of the model, such as `Qwen/Qwen3-8B`, for recipes that derive from it."""
    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE, allow_inf_nan=False)
    """Temperature of the policy that importance_sampling, ppo and cispo train. Set what your recipe
    samples at. Tinker's batches name no temperature."""
    old_snapshots: int = Field(default=0, ge=0)
    """Newest snapshots that are served again when a sampler asks for an old one; 0: it is refused.
    Each has a checkpoint on disk. Publications then wait for running samples."""
    poll_s: float = Field(default=30.0, gt=0)
    """Longest wait of one `retrieve_future`. The SDK's own limit is 45 s."""
    session_timeout_s: float = Field(default=30.0, gt=0)
    """A session without a heartbeat for this long is dead. The SDK sends one every 10 s."""
    gap_timeout_s: float = Field(default=60.0, gt=0)
    """Longest wait of a request for an earlier one of its model (`seq_id`)."""
    job_timeout_s: float = Field(default=7200.0, gt=0)
    """Longest wait for a job of the orchestrator."""
    sample_timeout_s: float = Field(default=3600.0, gt=0)
    """Longest wait for vLLM's answer."""
    body_timeout_s: float = Field(default=60.0, gt=0)
    """Longest time that a request's body may take to arrive."""
    max_body_bytes: int = Field(default=2**26, gt=0)
    """Largest body, before and after decompression."""
    max_waiting: int = Field(default=256, ge=1)
    """Most training requests that wait."""
