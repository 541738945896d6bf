"""`LoopConfig.advantages`: what reaches the trainer."""

from __future__ import annotations

import array
import asyncio
import logging

import numpy as np
import pytest

from orchestrator.errors import ConfigError, JobFailed
from orchestrator.protocol.messages import ForwardResult
from splice import KlSpec, LossSpec, ValueSpec, grpo_batch
from splice.client.advantages import advantages_of
from splice.rl import Loop
from tests.rl.stand_in import StandIn
from tests.rl.stood_in import ROWS, config, reward, run_loop


class Kept(StandIn):
    """Keeps each batch's advantages."""

    advantages: list[np.ndarray]
    rewards: list[np.ndarray]

    def submit(self, job, *, job_id, buffers, on_progress=None):
        for spec, buffer in zip(job.tensors, buffers, strict=True):
            found = np.frombuffer(bytes(buffer), np.float32)
            self.__dict__.setdefault(spec.name, []).append(found)
        self.__dict__["loss"] = getattr(job, "loss", None)
        return super().submit(job, job_id=job_id, buffers=buffers, on_progress=on_progress)


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"])
def test_a_step_trains_with_them(tmp_path, name):
    run = Kept()
    (step,) = asyncio.run(run_loop(run, tmp_path, steps=1, advantages=name))
    wanted = advantages_of([[r.reward for r in group] for group in step.groups], name)
    expected = [
        value
        for group, own in zip(step.groups, wanted, strict=True)
        for rollout, advantage in zip(group, own, strict=True)
        for value in (
            *([0.0] * len(rollout.completion.prompt_ids)),
            *([advantage] * len(rollout.completion.answer_ids)),
        )
    ]
    assert run.advantages[0] == pytest.approx(expected, rel=1e-5)
    assert np.abs(run.advantages[0]).max() > 0.1


class Referred(Kept):
    """Its base model's log-prob of a token is -2 times the id modulo 7."""

    lost = 0

    def _train(self, job_id, batch):
        if "reference" not in job_id:
            super()._train(job_id, batch)
        elif self.lost:
            self.lost -= 1
            self.outcomes[job_id] = JobFailed(
                code="node_lost", node="trainer-0", phase="forward", message="gone", remedy="wait"
            )
        else:
            found = array.array("f", -2.0 * (self.tokens[-1].view(np.int32) % 7))
            self.outcomes[job_id] = ForwardResult(logprobs=found, entropy=found)


KL = LossSpec(kl=KlSpec(coefficient=0.05, in_reward=True))


@pytest.mark.parametrize("lost", [0, 2, 3])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_the_kl_to_the_base_is_taken_from_the_rewards(tmp_path, name, lost):
    """Before they become advantages. The loss has no KL term then, and the step says what it was. A
    lost trainer is asked again, as often as for a step."""
    run = Referred()
    run.lost = lost
    steps = run_loop(run, tmp_path, steps=1, advantages=name, loss=KL)
    if lost == 3:
        with pytest.raises(JobFailed, match="node_lost"):
            asyncio.run(steps)
        return
    (step,) = asyncio.run(steps)
    answers = [[rollout.completion for rollout in group] for group in step.groups]
    kl = [
        [
            sum(p + 2 * (token % 7) for token, p in zip(a.answer_ids, a.logprobs, strict=True))
            for a in g
        ]
        for g in answers
    ]
    rewards = [
        [rollout.reward - 0.05 * own for rollout, own in zip(group, of_group, strict=True)]
        for group, of_group in zip(step.groups, kl, strict=True)
    ]
    expected = [
        value
        for group, own in zip(answers, advantages_of(rewards, name), strict=True)
        for a, advantage in zip(group, own, strict=True)
        for value in (*([0.0] * len(a.prompt_ids)), *([advantage] * len(a.answer_ids)))
    ]
    assert run.advantages[0] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    plain = advantages_of([[r.reward for r in group] for group in step.groups], name)
    assert abs(run.advantages[0][3] - plain[0][0]) > 1e-3
    assert run.loss.kl is None
    tokens = sum(len(a.answer_ids) for group in answers for a in group)
    assert step.metrics["kl_mean"] == pytest.approx(sum(map(sum, kl)) / tokens, rel=1e-5)


def test_the_kl_in_the_reward_is_that_to_the_base(tmp_path):
    kl = KlSpec(in_reward=True, reference="given")
    with pytest.raises(ConfigError, match=r'in_reward with advantages = "grpo".*is "given": use'):
        Loop(StandIn(), tmp_path, prompts=ROWS, reward=reward, loss=LossSpec(kl=kl))


def test_a_value_head_gets_rewards(tmp_path, caplog):
    """At each answer's last token, also of the only answer to a prompt; the loss says how they
    become advantages.
    """
    run = Kept()
    with caplog.at_level(logging.WARNING):
        (step,) = asyncio.run(run_loop(run, tmp_path, steps=1, advantages="gae", group_size=1))
    expected = [
        value
        for group in step.groups
        for rollout in group
        for value in (
            *([0.0] * len(rollout.completion.prompt_ids)),
            *([0.0] * (len(rollout.completion.answer_ids) - 1)),
            rollout.reward,
        )
    ]
    assert run.rewards[0] == pytest.approx(expected, rel=1e-6)
    assert run.advantages[0].tolist() == [0.0] * len(expected)
    assert run.loss.value == ValueSpec() and run.loss.needs_other_passes
    assert "nothing is learnt" not in caplog.text


def test_other_advantages_take_no_value_head(tmp_path):
    with pytest.raises(ConfigError, match=r'loss\.value makes the advantages.*= "rloo"'):
        Loop(
            StandIn(),
            tmp_path,
            prompts=ROWS,
            reward=reward,
            config=config(advantages="rloo"),
            loss=LossSpec(value=ValueSpec()),
        )


def test_one_answer_to_a_prompt_learns_from_the_batch(tmp_path, caplog):
    run = Kept()
    with caplog.at_level(logging.WARNING):
        asyncio.run(
            run_loop(
                run,
                tmp_path,
                steps=1,
                group_size=1,
                groups_per_step=4,
                advantages="reinforce_pp",
            )
        )
    assert np.abs(run.advantages[0]).max() > 0.1
    assert "nothing is learnt" not in caplog.text


def test_a_batch_of_ones_own_has_its_own(tmp_path):
    with pytest.raises(ConfigError, match='advantages = "rloo" is for batches that the loop makes'):
        Loop(
            StandIn(),
            tmp_path,
            prompts=ROWS,
            reward=reward,
            config=config(advantages="rloo"),
            make_batch=lambda groups: grpo_batch(groups),
        )
