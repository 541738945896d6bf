"""A stand-in with what a report shows: metrics, seconds, an answer that would be a script."""

from __future__ import annotations

from orchestrator.protocol.messages import TrainMergedResult
from tests.rl.stand_in import StandIn

SECRET = "<script>alert(1)</script>"


class Measured(StandIn):
    """With the metrics and seconds of a real trainer."""

    def wait(self, job_id: str, *, timeout_s: float) -> TrainMergedResult:
        found = super().wait(job_id, timeout_s=timeout_s)
        metrics = {"loss": 0.5, "entropy_mean": 1.5, "kl_mean": 0.1, "logprob_gap_mean": 0.01}
        return found.model_copy(update={"seconds": {"pause": 0.01}, "metrics": metrics})
