"""Sums of a step, losses by hand, and the gap to the sampler."""

from __future__ import annotations

import math
import re

import pytest
import torch

from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import LossSpec
from tests.numerics import sum_error_bound
from tests.trainer_node.data import LENGTHS, arrays, make_batch
from trainer_node.training import gap
from trainer_node.training.head import linear_statistics
from trainer_node.training.losses import bind_loss, cross_entropy, grpo
from trainer_node.training.sums import Pending, StepSums

ROUNDING = sum_error_bound(torch.float32, count=12, magnitude=1.0)
"""Of a softmax over 12 logits or less."""


def log_probs_of(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    allowed_K: torch.Tensor | None = None,
):
    """Log-probs of given logits: those of a head that is the identity."""
    weight = torch.eye(logits.shape[1])
    return linear_statistics(logits, weight, targets, vocab_size=vocab_size, allowed_K=allowed_K)[0]


class TestLosses:
    def test_log_probs_ignore_padding(self) -> None:
        logits, targets = torch.randn(5, 12), torch.tensor([0, 3, 9, 1, 2])
        logits[:, 10:] = 50.0
        ours = log_probs_of(logits, targets, vocab_size=10)
        assert torch.allclose(
            ours, logits[:, :10].log_softmax(-1).gather(1, targets[:, None])[:, 0], atol=ROUNDING
        )
        counted = log_probs_of(logits, targets, vocab_size=12)
        assert (counted < ours - 30).all(), "the mutant that counts the padding is told apart"

    def test_log_probs_over_allowed_ids(self) -> None:
        logits, allowed = torch.randn(3, 10, requires_grad=True), torch.tensor([2, 5, 7])
        ours = log_probs_of(logits, torch.tensor([5, 2, 7]), vocab_size=10, allowed_K=allowed)
        theirs = logits[:, allowed].log_softmax(-1)[torch.arange(3), torch.tensor([1, 0, 2])]
        assert torch.allclose(ours, theirs, atol=ROUNDING)
        gradient = torch.autograd.grad(ours.sum(), logits, retain_graph=True)[0]
        assert torch.allclose(gradient, torch.autograd.grad(theirs.sum(), logits)[0], atol=ROUNDING)
        assert gradient[:, 0].abs().max() == 0

    def test_grpo_by_hand(self) -> None:
        """Ratios 2, 2, 0.5, 0.5 with advantages 1, -1, 1, -1 and clip 0.2/0.3: -(1.3 - 2 + 0.5 -
        0.8) = 1.0; two are clipped.
        """
        old = torch.zeros(4)
        new = torch.tensor([2.0, 2.0, 0.5, 0.5]).log()
        out = grpo(
            new,
            sampler_logprobs_N=old,
            advantages_N=torch.tensor([1.0, -1, 1, -1]),
            clip_low=0.2,
            clip_high=0.3,
        )
        assert out.loss.item() == pytest.approx(1.0)
        assert out.num_clipped.item() == 2

    def test_cross_entropy_is_a_sum(self) -> None:
        assert cross_entropy(torch.tensor([-1.0, -2.5])).loss.item() == 3.5


class TestSums:
    def test_denominators(self) -> None:
        sums = StepSums(loss=12.0, num_tokens=6, num_loss_sequences=3, num_sequences=4)
        assert [sums.metrics(by)["loss"] for by in ("tokens", "sequences", 24.0)] == [2.0, 4.0, 0.5]
        assert "kl_mean" not in sums.metrics("tokens")

    def test_batches_add_up_and_are_divided_once(self) -> None:
        """A mean of means would be (1 + 5) / 2 = 3."""
        a = StepSums(
            loss=3.0,
            num_tokens=3,
            num_loss_sequences=1,
            num_sequences=1,
            logprob_gap_max=0.5,
            gap_tokens=3,
            kl=6.0,
            kl_tokens=3,
        )
        b = StepSums(
            loss=5.0, num_tokens=1, num_loss_sequences=1, num_sequences=2, logprob_gap_max=0.25
        )
        pending = Pending().plus(a, normalize_by="tokens").plus(b, normalize_by="tokens")
        assert (pending.num_batches, pending.denominator) == (2, 4)
        metrics = pending.sums.metrics("tokens")
        assert (
            metrics["loss"],
            metrics["num_sequences"],
            metrics["logprob_gap_max"],
            metrics["kl_mean"],
        ) == (
            2.0,
            3.0,
            0.5,
            2.0,
        )
        with pytest.raises(
            ConfigError, match=r"normalize_by = 3\.0, but the 2 pending batches came with 'tokens'"
        ):
            pending.check(3.0)
        Pending().check(3.0)

    def test_sequences_without_loss_do_not_count(self) -> None:
        values = arrays()
        values["loss_mask"][: LENGTHS[0]] = 0
        assert make_batch(values).num_loss_sequences == 4


class TestGap:
    def sums(self, mean: float, count: int = 4) -> StepSums:
        return StepSums(
            logprob_gap=mean * count,
            logprob_gap_max=2 * mean,
            gap_tokens=count,
            num_tokens=count,
            num_clipped=1,
        )

    def test_only_losses_that_take_the_samplers_log_probs_count(self) -> None:
        both = self.sums(0.5) + StepSums(num_tokens=12, loss=1.0)
        assert both.metrics("tokens")["logprob_gap_mean"] == both.logprob_gap_mean == 0.5
        without = StepSums(num_tokens=3)
        assert without.logprob_gap_mean == 0.0
        assert not {"logprob_gap_mean", "logprob_gap_max", "kl_sampler_mean"} & set(
            without.metrics("tokens")
        ), "a gap that nobody measured is no gap of 0"

    @pytest.mark.parametrize(
        ("dtype", "mean", "coldest", "warns"),
        [
            ("float32", 1e-6, 1.0, False),
            ("float32", 2e-3, 1.0, True),
            ("float32", 2e-3, 0.4, False),
            ("bfloat16", 0.031, 1.0, False),
            ("bfloat16", 0.031, 0.25, False),
            ("bfloat16", 0.47, 0.7, True),
            ("bfloat16", 0.15, 2.0, True),
            ("float32", math.nan, 1.0, True),
        ],
    )
    def test_what_rounding_explains_is_not_said(
        self, dtype: str, mean: float, coldest: float, warns: bool
    ) -> None:
        temperatures_T = torch.tensor([3.0, coldest])
        said = gap.warnings(self.sums(mean), LossSpec(), dtype=dtype, temperatures_T=temperatures_T)
        assert bool(said) == warns
        if warns:
            assert re.search(
                rf"differ.* by .* nats in the mean and .* at most, 25.0% of .*; {dtype} explains .*temperature",  # noqa: E501
                said[0],
            )
        assert (
            gap.warnings(
                self.sums(mean), LossSpec(max_logprob_gap=5.0), dtype=dtype, temperatures_T=None
            )
            == []
        )

    @pytest.mark.parametrize(("mean", "warns"), [(0.02, False), (0.68, True)])
    def test_older_samples_explain_more_than_rounding(self, mean: float, warns: bool) -> None:
        said = gap.warnings(
            self.sums(mean), LossSpec(off_policy=True), dtype="float32", temperatures_T=None
        )
        assert bool(said) == warns and all("samples of an older version" in text for text in said)

    def test_a_jobs_own_bound(self) -> None:
        gap.check(self.sums(0.5), LossSpec())
        gap.check(self.sums(0.5), LossSpec(max_logprob_gap=0.5))
        for mean in (0.51, math.nan):
            with pytest.raises(
                gap.LogprobGapError,
                match=r"loss.max_logprob_gap is 0.5. Usual causes: a temperature",
            ):
                gap.check(self.sums(mean), LossSpec(max_logprob_gap=0.5))
        with pytest.raises(ConfigError, match="cross_entropy takes no sampler_logprobs"):
            bind_loss(LossSpec(name="cross_entropy", max_logprob_gap=0.5))
