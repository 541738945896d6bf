"""The sums of a step and the metrics made of them. Pure, without tensors.

A loss is a sum over tokens. Sums and counts of several batches add up, and are divided once, at the
end.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import NormalizeBy


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """Sums over the loss tokens of one or several batches, over all data-parallel ranks; the same
    on every rank."""

    loss: float = 0.0
    """With KL, entropy bonus and loss_weight."""
    num_clipped: float = 0.0
    logprob_gap: float = 0.0
    logprob_gap_max: float = 0.0
    gap_tokens: int = 0
    """Loss tokens of the batches whose loss takes the sampler's log-probs; only those are in
    `logprob_gap` and `kl_sampler`."""
    kl_sampler: float = 0.0
    kl: float = 0.0
    kl_tokens: int = 0
    """Loss tokens of the batches that had a KL term; only those are in `kl`."""
    entropy: float = 0.0
    num_tokens: int = 0
    """Tokens that carry loss."""
    num_loss_sequences: int = 0
    """Sequences with at least one such token."""
    num_sequences: int = 0
    value_tokens: int = 0
    """Loss tokens of the batches that a value head gave advantages. Only those are in the sums
    below, which but for the first two are of the values before the job's first step."""
    value_loss: float = 0.0
    """Without its coefficient."""
    num_values_clipped: float = 0.0
    value: float = 0.0
    returns: float = 0.0
    returns_squared: float = 0.0
    value_error: float = 0.0
    """Return less value."""
    value_error_squared: float = 0.0

    def __add__(self, other: StepSums) -> StepSums:
        names = [f.name for f in fields(self) if f.name != "logprob_gap_max"]
        sums: dict[str, Any] = {n: getattr(self, n) + getattr(other, n) for n in names}
        return StepSums(**sums, logprob_gap_max=max(self.logprob_gap_max, other.logprob_gap_max))

    @property
    def logprob_gap_mean(self) -> float:
        """|trainer - sampler| in nats a token; 0 where no loss takes the sampler's log-probs."""
        return self.logprob_gap / self.gap_tokens if self.gap_tokens else 0.0

    def denominator(self, normalize_by: NormalizeBy) -> float:
        """Return the divisor of the summed loss and gradient."""
        if normalize_by == "tokens":
            return self.num_tokens
        if normalize_by == "sequences":
            return self.num_loss_sequences
        return normalize_by

    def metrics(self, normalize_by: NormalizeBy) -> dict[str, float]:
        """The values over all ranks. `loss` is divided as the gradient is. The others are means
        over loss tokens, or 0 without any.

        kl_mean is present if a batch had a KL term, the gap to the sampler if a loss takes the
        sampler's log-probs, and those of values if a value head gave advantages.
        """
        count = self.num_tokens or 1
        metrics = {
            "loss": self.loss / (self.denominator(normalize_by) or 1),
            "tokens": float(self.num_tokens),
            "num_sequences": float(self.num_sequences),
            "entropy_mean": self.entropy / count,
            "clip_fraction": self.num_clipped / count,
        }
        if self.gap_tokens:
            metrics["logprob_gap_mean"] = self.logprob_gap_mean
            metrics["logprob_gap_max"] = self.logprob_gap_max
            metrics["kl_sampler_mean"] = self.kl_sampler / self.gap_tokens
        if self.kl_tokens:
            metrics["kl_mean"] = self.kl / self.kl_tokens
        if self.value_tokens:
            metrics |= self._value_metrics(self.value_tokens)
        return metrics

    def _value_metrics(self, count: int) -> dict[str, float]:
        """explained_variance is 1 - var(return - value) / var(return), and 0 if all returns are
        equal."""
        mean, square = self.returns / count, self.returns_squared / count
        variance = square - mean**2
        rest = self.value_error_squared / count - (self.value_error / count) ** 2
        is_constant = variance <= 1e-12 * square  # but for rounding
        return {
            "value_loss": self.value_loss / count,
            "value_clip_fraction": self.num_values_clipped / count,
            "value_mean": self.value / count,
            "return_mean": mean,
            "explained_variance": 0.0 if is_constant else 1 - rest / variance,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """Gradients that wait for the optimizer step: how many batches, what they add up to, how they
    will be divided."""

    num_batches: int = 0
    num_rows: int = 0
    """Tokens of those batches, with and without loss."""
    num_shared: int = 0
    """Of these tokens, those that were not computed, because another sequence has them too."""
    num_recomputed: float = 0.0
    """Of these tokens, times the share of the layers that the backward pass ran again."""
    seconds: float = 0.0
    """Of their forward and backward passes."""
    sums: StepSums = StepSums()
    normalize_by: NormalizeBy = "tokens"

    def check(self, normalize_by: NormalizeBy) -> None:
        """Refuse a batch that would have to be divided by something else than what is pending.

        Raises:
            ConfigError: names both.
        """
        if self.num_batches and normalize_by != self.normalize_by:
            raise ConfigError(
                f"loss.normalize_by = {normalize_by!r}, but the {self.num_batches} pending "
                f"batches came with {self.normalize_by!r}; "
                "one sum is divided once: send OptimStep in between, or use the same"
            )

    def plus(
        self,
        sums: StepSums,
        *,
        normalize_by: NormalizeBy,
        rows: int = 0,
        num_shared: int = 0,
        recomputed_share: float = 0.0,
        seconds: float = 0.0,
    ) -> Pending:
        """Return the sums with one more batch, of `rows` tokens, whose passes took `seconds`."""
        return Pending(
            num_batches=self.num_batches + 1,
            num_rows=self.num_rows + rows,
            num_shared=self.num_shared + num_shared,
            num_recomputed=self.num_recomputed + rows * recomputed_share,
            seconds=self.seconds + seconds,
            sums=self.sums + sums,
            normalize_by=normalize_by,
        )

    @property
    def denominator(self) -> float:
        """Return the divisor of the pending gradients."""
        return self.sums.denominator(self.normalize_by)
