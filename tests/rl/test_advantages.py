"""`LoopConfig.advantages`: what reaches the trainer."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest

from orchestrator.errors import ConfigError
from splice import LossSpec, ValueSpec, grpo_batch
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
        self.__dict__["loss"] = job.loss
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
