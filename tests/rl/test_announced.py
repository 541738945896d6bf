"""The trainer begins the next batch while it saves, on a real cluster whose disk is slow."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from orchestrator.protocol.messages import TrainMerged
from splice import LossSpec, OptimParams
from splice.client.batches import Completion, grpo_batch
from splice.rl import Loop, LoopConfig, SamplingConfig, decisions
from splice.rl.checker import check
from tests.rl.strict_run import ROWS, even
from tests.rl.weights import digest
from trainer_node.files.generations import new_folder

pytestmark = pytest.mark.timeout(900)
LOSS, OPTIM = LossSpec(name="grpo"), OptimParams(lr=5e-3)
LOOP = {
    "prompts": ROWS,
    "reward": even,
    "config": LoopConfig(
        groups_per_step=2,
        group_size=4,
        steps=5,
        sampling=SamplingConfig(max_tokens=10, extra={"ignore_eos": True}),
    ),
}


def batch(seed: int):
    """Two groups of two answers."""

    def answer(k: int) -> Completion:
        ids = [(seed * 31 + k * 7 + i) % 150 + 5 for i in range(8)]
        return Completion(prompt_ids=(5, 17, 33), answer_ids=tuple(ids), logprobs=(-5.0,) * 8)

    return grpo_batch([[(answer(2 * g + k), float(k)) for k in range(2)] for g in range(2)])


def job(made) -> TrainMerged:
    return TrainMerged(loss=LOSS, optim=OPTIM, tensors=made.specs)


@pytest.mark.parametrize("announced", [2, 3], ids=["the next batch", "another one"])
def test_an_announced_batch_changes_nothing_but_time(cluster, tmp_path, announced):
    client, one, two = cluster.client, batch(1), batch(2)
    client.save_checkpoint(str(tmp_path / "start"))
    client.train_merged(one, LOSS, OPTIM)
    client.train_merged(two, LOSS, OPTIM)
    client.export_hf(str(tmp_path / "plain"))
    client.load_checkpoint(str(tmp_path / "start"))
    client.publish()
    running = client.submit(job(one), buffers=one.buffers)
    told = batch(announced)
    client.announce(job(told), buffers=told.buffers)
    first = client.wait(running, timeout_s=60)
    second = client.train_merged(two, LOSS, OPTIM)
    client.export_hf(str(tmp_path / "ahead"))
    assert digest(tmp_path / "ahead") == digest(tmp_path / "plain")
    assert 0 < first.seconds["ahead"] < first.seconds["save"]
    assert second.seconds["ahead"] == 0
    assert (second.seconds["begun"] > 0) == (announced == 2)
    assert second.version == first.version + 1


def test_a_loop_announces_its_batches(cluster, tmp_path):
    async def run() -> list:
        async with Loop(cluster.client, tmp_path / "loop", optim=OPTIM, **LOOP) as loop:
            return [step async for step in loop]

    steps = asyncio.run(run())
    ahead = [step.seconds["job.ahead"] for step in steps]
    assert sum(seconds > 0 for seconds in ahead) >= 2, ahead
    assert ahead[-1] == 0, "there is no sixth step"
    found = check(decisions.read(tmp_path / "loop" / decisions.LOG))
    assert found.violations == [] and found.steps == 5 and found.max_staleness <= 1


def rank_of(run_dir) -> psutil.Process:
    """The trainer's only rank."""
    (found,) = (
        process
        for process in psutil.process_iter(["name", "cmdline"])
        if process.info["name"] == "splice-rank-0"
        and any(str(run_dir) in part for part in process.info["cmdline"])
    )
    return found


def test_a_trainer_that_dies_while_it_works_ahead_has_lost_time_alone(cluster, tmp_path):
    run_dir = cluster.run.run_dir
    steps_before = cluster.client.status().version

    async def kill_in_the_save_of(version: int) -> None:
        folder = new_folder(run_dir / "versions" / str(version))
        while not folder.exists():
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.3)
        rank_of(run_dir).kill()

    async def run() -> list:
        killing = asyncio.create_task(kill_in_the_save_of(steps_before + 3))
        async with Loop(cluster.client, tmp_path / "loop", optim=OPTIM, **LOOP) as loop:
            steps = [step async for step in loop]
        await killing
        return steps

    steps = asyncio.run(run())
    assert [step.number for step in steps] == [1, 2, 3, 4, 5]
    assert sum(step.seconds["job.begun"] > 0 for step in steps) >= 1
    found = check(decisions.read(tmp_path / "loop" / decisions.LOG))
    assert found.violations == [] and (found.steps, found.trained) == (5, 5 * 8)
