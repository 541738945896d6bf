"""Advantages by a value head, and its loss: by hand, and against second implementations in fp64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import KlSpec, LossSpec, OptimParams, ValueSpec
from tests.trainer_node.data import arrays, make_batch
from tests.trainer_node.references import paper_gae
from trainer_node.training import gae
from trainer_node.training.batch import Batch, BatchError
from trainer_node.training.head import linear_values
from trainer_node.training.losses import ValueInputs, bind_loss, value_loss
from trainer_node.training.sums import StepSums

PLAIN = ValueSpec(gamma=0.5, lam=0.5, whiten=False)


def batch_of(mask: list[list[int]], rewards: list[list[float]]) -> Batch:
    mask_T, rewards_T = (
        torch.tensor([x for row in rows for x in row], dtype=torch.float32)
        for rows in (mask, rewards)
    )
    return Batch(
        tokens_T=torch.zeros(len(mask_T), dtype=torch.int64),
        loss_mask_T=mask_T,
        advantages_T=torch.zeros_like(mask_T),
        sampler_logprobs_T=torch.zeros_like(mask_T),
        rewards_T=rewards_T,
        lengths=tuple(map(len, mask)),
    )


def some_batch(seed: int = 0) -> tuple[Batch, torch.Tensor]:
    """Sequences of several turns, some without loss; a reward on each sampled token; values."""
    rng = np.random.default_rng(seed)
    lengths = [11, 1, 40, 3, 17]
    masks = [[0, *(rng.random(n - 1) < 0.6)] for n in lengths]
    masks[3] = [0, 0, 0]
    rewards = [[float(rng.standard_normal()) * m for m in row] for row in masks]
    batch = batch_of([[int(m) for m in row] for row in masks], rewards)
    values_T = torch.from_numpy(rng.standard_normal(sum(lengths)).astype(np.float32))
    return batch, values_T * batch.loss_mask_T


def test_by_hand() -> None:
    """Values 1, 2, 4 with a reward of 8 at the end: deltas 0.5 * 2 - 1 = 0, 0.5 * 4 - 2 = 0 and 8 -
    4 = 4; gamma lambda is 0.25.
    """
    batch = batch_of([[0, 1, 1, 1]], [[0, 0, 0, 8]])
    advantages_T, returns_T = gae.advantages(batch, torch.tensor([0.0, 1, 2, 4]), PLAIN)
    assert advantages_T.tolist() == [0, 0.25, 1, 4]
    assert returns_T.tolist() == [0, 1.25, 3, 8]


def test_lambda_1_is_the_reward_less_the_value() -> None:
    batch = batch_of([[0, 1, 1], [0, 1, 1]], [[0, 0, 1], [0, 0.5, -1]])
    values_T = torch.tensor([0.0, 0.3, 0.4, 0.0, 0.1, -0.2])
    advantages_T, returns_T = gae.advantages(batch, values_T, ValueSpec(whiten=False))
    assert returns_T.tolist() == [0, 1, 1, 0, -0.5, -1]
    assert advantages_T == pytest.approx(torch.tensor([0, 0.7, 0.6, 0, -0.6, -0.8]))


def test_tokens_of_a_tool_take_no_time() -> None:
    """With what a tool wrote left out, everything is the same: the next turn's first value is the
    bootstrap.
    """
    batch = batch_of([[0, 1, 1, 0, 0, 0, 1]], [[0, 0, 0, 0, 0, 0, 8]])
    short = batch_of([[0, 1, 1, 1]], [[0, 0, 0, 8]])
    # A value on another's token does not exist, and would not count.
    found = gae.advantages(batch, torch.tensor([9.0, 1, 2, 9, 9, 9, 4]), PLAIN)
    wanted = gae.advantages(short, torch.tensor([9.0, 1, 2, 4]), PLAIN)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours[[0, 1, 2, 6]].tolist() == theirs.tolist()
        assert ours[3:6].count_nonzero() == 0


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9), (1.0, 0.95), (0.9, 0.0)])
def test_the_papers_sum(gamma: float, lam: float, whiten: bool) -> None:
    batch, values_T = some_batch()
    spec = ValueSpec(gamma=gamma, lam=lam, whiten=whiten)
    found = gae.advantages(batch, values_T, spec)
    for ours, theirs in zip(found, paper_gae(batch, values_T, spec), strict=True):
        assert ours.dtype is torch.float32
        assert ours.numpy() == pytest.approx(theirs, rel=2**-23, abs=1e-12)


@pytest.mark.parametrize("has_old", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_is_taken_from_each_tokens_reward(estimator: str, has_old: bool) -> None:
    """With NumPy: that of the sampler, or of the trainer's old policy, to the reference."""
    batch, values_T = some_batch()
    rng = np.random.default_rng(3)
    sampler, old, reference = rng.normal(-1, 1, (3, len(values_T))).astype(np.float32)
    batch = replace(
        batch,
        sampler_logprobs_T=torch.from_numpy(sampler),
        old_logprobs_T=torch.from_numpy(old) if has_old else None,
        reference_logprobs_T=torch.from_numpy(reference),
    )
    kl = KlSpec(coefficient=0.3, estimator=estimator, in_reward=True)
    d = reference.astype(np.float64) - (old if has_old else sampler)
    each = {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - 1 - d}[estimator]
    wanted = batch.rewards_T.numpy() - 0.3 * each * (batch.loss_mask_T.numpy() != 0)
    found = gae.rewards_of(batch, kl)
    assert found.numpy() == pytest.approx(wanted, rel=1e-12)
    assert gae.rewards_of(batch, kl.model_copy(update={"in_reward": False})).equal(
        batch.rewards_T.double()
    )
    less = replace(batch, rewards_T=torch.from_numpy(wanted))
    for ours, theirs in zip(
        gae.advantages(batch, values_T, PLAIN, kl), paper_gae(less, values_T, PLAIN), strict=True
    ):
        assert ours.numpy() == pytest.approx(theirs, rel=2**-23, abs=1e-12)


def test_in_the_reward_the_estimator_is_k1() -> None:
    assert KlSpec(in_reward=True).estimator == "k1" != KlSpec().estimator
    assert KlSpec(in_reward=True, estimator="k2").estimator == "k2"


def test_no_reward_differs() -> None:
    """Whitened advantages that are all equal are 0, and a batch without loss has none."""
    batch = batch_of([[0, 1], [0, 1]], [[0, 1], [0, 1]])
    assert gae.advantages(batch, torch.zeros(4), ValueSpec())[0].tolist() == [0, 0, 0, 0]
    empty = replace(batch, loss_mask_T=torch.zeros(4))
    assert gae.advantages(empty, torch.zeros(4), ValueSpec())[0].tolist() == [0, 0, 0, 0]


# ---------------------------------------------------------------- the value loss


def value_inputs(dtype: torch.dtype = torch.float64) -> ValueInputs:
    generator = torch.Generator().manual_seed(4)
    values, old, returns = (
        torch.randn(40, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)
    )
    return ValueInputs(
        values_N=(0.3 * values + old).requires_grad_(), old_values_N=old, returns_N=returns
    )


def test_the_value_loss_by_hand() -> None:
    """Values 1, 1, 0.1 were 0, 0, 0 and should be 2, 0, 1. The first counts as 0.2 (error 1.8, not
    1), the second as 1, because 0.2 would be nearer, and the third is within the clip.
    """
    inputs = ValueInputs(
        values_N=torch.tensor([1.0, 1.0, 0.1]),
        old_values_N=torch.zeros(3),
        returns_N=torch.tensor([2.0, 0.0, 1.0]),
    )
    loss, clipped = value_loss(inputs, clip=0.2)
    assert loss.item() == pytest.approx((1.8**2 + 1 + 0.9**2) / 2)
    assert clipped.item() == 1
    loss, clipped = value_loss(inputs, clip=None)
    assert (loss.item(), clipped.item()) == (pytest.approx((1 + 1 + 0.9**2) / 2), 0)


def test_the_value_loss_and_its_gradient() -> None:
    """Token by token, in Python's numbers. A clipped value has no gradient."""
    inputs = value_inputs()
    loss, clipped = value_loss(inputs, clip=0.2)
    loss.backward()
    total, gradient = 0.0, []
    for v, old, r in zip(
        *(t.tolist() for t in (inputs.values_N, inputs.old_values_N, inputs.returns_N)), strict=True
    ):
        near = min(max(v, old - 0.2), old + 0.2)
        total += max((v - r) ** 2, (near - r) ** 2) / 2
        gradient.append(0.0 if (near - r) ** 2 > (v - r) ** 2 else v - r)
    assert loss.item() == pytest.approx(total, rel=1e-12)
    assert inputs.values_N.grad.numpy() == pytest.approx(np.array(gradient), rel=1e-12)
    assert 0 < clipped == gradient.count(0.0) < 40


def test_at_the_old_values_clipping_changes_no_gradient() -> None:
    inputs = value_inputs()
    at_old = replace(inputs, values_N=inputs.old_values_N.clone().requires_grad_())
    value_loss(at_old, clip=0.2)[0].backward()
    wanted = at_old.values_N - at_old.returns_N
    assert torch.equal(at_old.values_N.grad, wanted.detach())


@pytest.mark.parametrize(("first", "rows"), [(0, 100), (3, 4)])
def test_values_of_a_tensor_ranks_features(first: int, rows: int) -> None:
    """Values and gradients in chunks, of this rank's features only; the others' have none."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(10, 8, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_()
    upstream = torch.randn(10, generator=generator, dtype=torch.float64)
    values = linear_values(hidden, weight, first=first, rows=rows)
    plain = hidden[:, first : first + 5] @ weight
    assert torch.allclose(values, plain, rtol=1e-14)
    ours = torch.autograd.grad(values, (hidden, weight), upstream)
    wanted = torch.autograd.grad(plain, (hidden, weight), upstream)
    for mine, theirs in zip(ours, wanted, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-13)
    assert ours[0][:, :first].count_nonzero() == ours[0][:, first + 5 :].count_nonzero() == 0


def test_a_bfloat16_models_values_are_of_fp32() -> None:
    hidden = torch.randn(6, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    weight = torch.full((8,), 1 / 3).requires_grad_()
    values = linear_values(hidden.requires_grad_(), weight, first=0)
    assert values.dtype is torch.float32
    assert torch.allclose(values, hidden.detach().float() @ weight.detach(), rtol=1e-6)
    grad_hidden, grad_weight = torch.autograd.grad(values.sum(), (hidden, weight))
    assert (grad_hidden.dtype, grad_weight.dtype) == (torch.bfloat16, torch.float32)


# ---------------------------------------------------------------- metrics and refusals


def test_metrics() -> None:
    """Explained variance with NumPy, of two batches together; constant returns have none."""
    batch, values_T = some_batch()
    _, returns_T = gae.advantages(batch, values_T, PLAIN)
    valued = replace(batch, values_T=values_T, returns_T=returns_T)
    sums = gae.value_sums(valued)
    both = StepSums(**sums, value_loss=3.0, num_values_clipped=4.0) + StepSums(**sums)
    metrics = both.metrics("tokens")
    mask = batch.loss_mask_T != 0
    v, r = (t[mask].double().numpy() for t in (values_T, returns_T))
    assert metrics["explained_variance"] == pytest.approx(1 - (r - v).var() / r.var())
    assert metrics["value_mean"] == pytest.approx(v.mean())
    assert metrics["return_mean"] == pytest.approx(r.mean())
    count = 2 * batch.num_loss_tokens
    assert metrics["value_loss"] == pytest.approx(3 / count)
    assert metrics["value_clip_fraction"] == pytest.approx(4 / count)
    constant = replace(valued, returns_T=batch.loss_mask_T / 3)
    assert StepSums(**gae.value_sums(constant)).metrics("tokens")["explained_variance"] == 0.0
    assert "value_loss" not in StepSums(num_tokens=3).metrics("tokens")


def rewarded(**changed: np.ndarray) -> dict[str, np.ndarray]:
    values = arrays()
    return values | {"rewards": values["loss_mask"]} | changed


def test_a_batch_needs_rewards_and_a_use_for_them() -> None:
    loss = LossSpec(name="ppo", value=ValueSpec())
    assert make_batch(rewarded(), loss=loss).rewards_T is not None
    with pytest.raises(BatchError, match=r"loss.value .* there are none \(gae_batch\)"):
        make_batch(loss=loss)
    with pytest.raises(BatchError, match=r"there are rewards, but no loss\.value"):
        make_batch(rewarded())
    wrong = np.zeros(36, np.float32)
    wrong[10] = 1.0
    with pytest.raises(BatchError, match=r"sequence 1: rewards\[1\] = 1.0 is on a token that"):
        make_batch(rewarded(rewards=wrong), loss=loss)
    with pytest.raises(BatchError, match=r"rewards.* is not finite"):
        make_batch(rewarded(rewards=wrong * np.nan), loss=loss)


def test_a_loss_without_advantages_takes_no_value_head() -> None:
    with pytest.raises(ConfigError, match=r"loss\.value: cross_entropy takes no advantages"):
        bind_loss(LossSpec(name="cross_entropy", value=ValueSpec()))


@pytest.mark.parametrize("wrong", [{"gamma": 0.0}, {"lam": 1.1}, {"clip": 0.0}])
def test_bounds_of_a_value_head(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"ValueSpec: {next(iter(wrong))}"):
        ValueSpec(**wrong)


def test_names_of_others() -> None:
    with pytest.raises(ConfigError, match=r"vf_coef: unknown key; splice has it as 'coefficient'"):
        ValueSpec(vf_coef=0.1)
    with pytest.raises(ConfigError, match=r"ValueSpec\(clip=\.\.\.\)"):
        LossSpec(cliprange_value=0.2)
    with pytest.raises(ConfigError, match="splice has it as 'value_lr'"):
        OptimParams(critic_lr=1e-5)
