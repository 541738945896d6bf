"""Exact numerics on the trainer: gradients on real Megatron, and what is compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from orchestrator.protocol.messages import LossSpec
from tests.trainer_node.conftest import Ranks
from tests.trainer_node.data import make_batch
from trainer_node.training import bits
from trainer_node.training.losses import bind_loss


@pytest.mark.parametrize("model", ["dense_untied", "dense_tied"])
def test_gradients_are_those_of_the_served_weights(models, torchrun: Ranks, model: str) -> None:
    torchrun(1, "training.exact_gradients", models[model])


def batch_of_versions(*versions: int):
    """The batch's log-probs; the loss tokens are dealt to the versions in turn."""
    batch = make_batch()
    made = torch.tensor(versions, dtype=torch.int32).repeat(len(batch.tokens_T))
    return replace(batch, versions_T=made[: len(batch.tokens_T)]), batch.sampler_logprobs_T.clone()


def test_equal_log_probs_say_nothing() -> None:
    batch, logprobs_T = batch_of_versions(4)
    found = bits.compare(batch, logprobs_T, 4)
    assert found is not None and not found.warnings(Path("m"))
    assert found.metrics() == {"exact_share": 1.0, "mixed_share": 0.0, "exact_gap_max": 0.0}


def test_only_tokens_of_the_present_version_must_be_equal() -> None:
    batch, logprobs_T = batch_of_versions(3, 4, -1 - 4)
    mask_T, made_T = batch.loss_mask_T != 0, batch.versions_T
    wrong_T = torch.where(made_T == 4, logprobs_T, logprobs_T + 1)
    found = bits.compare(batch, wrong_T, 4)
    assert found is not None and not found.different
    count = int(mask_T.sum())
    assert (found.exact, found.mixed) == tuple(int((mask_T & (made_T == v)).sum()) for v in (4, -5))
    assert found.metrics()["mixed_share"] == found.mixed / count
    assert bits.compare(batch, wrong_T, 3).different == int((mask_T & (made_T == 3)).sum())  # type: ignore[union-attr]


def test_one_bit_is_named() -> None:
    batch, logprobs_T = batch_of_versions(4)
    at = int((batch.loss_mask_T != 0).nonzero()[5])
    logprobs_T[at] = float(np.nextafter(np.float32(logprobs_T[at]), np.float32(0)))
    found = bits.compare(batch, logprobs_T, 4)
    assert found is not None and found.different == 1 and 0 < found.largest < 1e-6
    ends = np.cumsum(batch.lengths)
    sequence = int(np.searchsorted(ends, at, side="right"))
    place = at - (ends[sequence] - batch.lengths[sequence])
    (text,) = found.warnings(Path("folder"))
    assert f"token {place} of sequence {sequence} (id {int(batch.tokens_T[at])})" in text
    assert "version 4" in text and "splice check folder --bits --exact" in text
    logprobs_T[at] = torch.nan
    assert bits.compare(batch, logprobs_T, 4).different == 1  # type: ignore[union-attr]


def test_nothing_is_compared_without_a_version_or_after_a_step() -> None:
    batch, logprobs_T = batch_of_versions(4)
    assert bits.compare(batch, logprobs_T, None) is None
    unknown = bits.compare(replace(batch, versions_T=None), logprobs_T, 4)
    assert unknown is not None and "`versions`" in unknown.warnings(Path("m"))[0]
    assert "exact_gap_max" not in unknown.metrics()
    for sent, steps, loss, does in (
        (bits.Sent(is_exact=True, version=4), 0, "grpo", True),
        (bits.Sent(is_exact=True, version=4), 1, "grpo", False),
        (bits.Sent(is_exact=False, version=4), 0, "grpo", False),
        (bits.Sent(is_exact=True, version=4), 0, "cross_entropy", False),
    ):
        spec = LossSpec(name=loss)
        bind_loss(spec)  # registers the built-in ones
        sent.compare(batch, spec, logprobs_T, steps=steps)
        assert (sent.compared is not None) == does
