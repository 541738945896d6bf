"""The jobs of Tinker's requests: the only place that knows how splice does each."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from orchestrator.errors import ErrorCode, JobFailed
from orchestrator.protocol.config import LoraConfig
from orchestrator.protocol.messages import OptimParams
from splice.client.clients import SpliceClient
from splice.tinker import losses, wire
from splice.tinker.refused import unsupported

log = logging.getLogger("splice.tinker")


class Jobs:
    """The jobs of a request. Each function is one capability of splice."""

    def __init__(self, client: SpliceClient, timeout_s: float) -> None:
        self._client, self._timeout_s = client, timeout_s

    def served_version(self) -> int | None:
        """Return the version that is served, or None."""
        return self._client.status().version

    def serve_first(self, job_id: str) -> int:
        """Publish the trainer's state, whether or not the run serves anything yet."""
        if self.served_version() is not None:
            return self.publish(job_id)
        return self._client.initial_sync(job_id=job_id, timeout_s=self._timeout_s).version

    def is_untrained(self) -> bool:
        """Whether the model with its adapters is the base model, by the log-probs of a prompt."""
        plan = losses.one_sequence(list(range(1, 17)))
        both = [
            self._client.forward(plan, adapters=adapters, timeout_s=self._timeout_s).logprobs
            for adapters in (True, False)
        ]
        return both[0] == both[1]

    def publish(self, job_id: str) -> int:
        """Publish the trainer's state as the next version."""
        return self._client.publish(job_id=job_id, timeout_s=self._timeout_s).version

    def logprobs(self, job_id: str, plan: losses.Pass) -> wire.Array:
        """Return the trainer's log-prob of every token, [T]."""
        result = self._client.forward(plan.batch(), job_id=job_id, timeout_s=self._timeout_s)
        return np.asarray(result.logprobs, "f4")

    def backward(self, job_id: str, plan: losses.Pass) -> tuple[wire.Array, dict[str, float]]:
        """Add the gradient of the batch's loss; returns every token's log-prob, [T], and the job's
        metrics."""
        result = self._client.forward_backward(
            plan.batch(),
            plan.loss,
            returns_logprobs=True,
            job_id=job_id,
            timeout_s=self._timeout_s,
        )
        for text in result.warnings:
            log.warning("%s: %s", job_id, text)
        return np.asarray(result.logprobs, "f4"), result.metrics

    def step(self, job_id: str, optim: OptimParams) -> dict[str, float]:
        """Take an optimizer step; returns its metrics."""
        return self._client.optim_step(optim, job_id=job_id, timeout_s=self._timeout_s).metrics

    def save(self, job_id: str, folder: str) -> None:
        """Write the trainer's state into a folder of the run."""
        self._client.save_checkpoint(folder, job_id=job_id, timeout_s=self._timeout_s)

    def load(self, job_id: str, folder: str) -> None:
        """Restore adapter, optimizer and random numbers. Pending gradients are dropped."""
        self._client.load_checkpoint(folder, job_id=job_id, timeout_s=self._timeout_s)

    def new_adapter(self, job_id: str, lora: LoraConfig, *, seed: int | None) -> None:
        """Give the trainer a fresh adapter. Pending gradients are dropped."""
        self._client.new_adapter(
            rank=lora.rank,
            alpha=lora.alpha,
            targets=lora.targets,
            seed=seed,
            job_id=job_id,
            timeout_s=self._timeout_s,
        )

    def load_weights_alone(self, job_id: str, folder: str) -> None:
        """Restore the adapter, with a fresh optimizer. Pending gradients are dropped."""
        adapter = str(Path(folder) / "adapter")
        try:
            self._client.load_adapter(adapter, job_id=job_id, timeout_s=self._timeout_s)
        except JobFailed as error:
            if error.code is not ErrorCode.BAD_INPUT:
                raise
            raise unsupported(
                f"{folder}: the optimizer's state cannot be left out: {error}"
            ) from error


class BaseModel:
    """The base model's log-probs, which the trainer computes with its adapters off."""

    def __init__(self, client: SpliceClient, timeout_s: float) -> None:
        self._client, self._timeout_s = client, timeout_s

    def logprobs(self, tokens: list[int]) -> list[float]:
        """Return the log-prob of each token; NaN for the first."""
        plan = losses.one_sequence(tokens)
        result = self._client.forward(plan, adapters=False, timeout_s=self._timeout_s)
        return [float("nan"), *result.logprobs[1:]]
