"""Whole loops on stand-ins, for tests of what a loop writes."""

from __future__ import annotations

import statistics

from splice.rl import Loop, LoopConfig, SamplingConfig
from tests.rl.stand_in import Server

ROWS = [{"prompt": [k, 1, 2], "name": k} for k in range(5)]


def reward(row, completion) -> float:
    return statistics.fmean(completion.answer_ids)


def config(**more) -> LoopConfig:
    sampling = SamplingConfig(max_tokens=4, seed=3)
    return LoopConfig(**{"group_size": 3, "groups_per_step": 2, "sampling": sampling, **more})


async def run_loop(
    run,
    folder,
    *,
    servers=1,
    reward=reward,
    on_step=None,
    optim=None,
    environment=None,
    loss=None,
    **more,
):
    """All steps, with servers that live as long as the loop. `on_step(step, replicas, loop)`."""
    run.servers.clear()
    replicas = [await Server(run).start() for _ in range(servers)]
    try:
        settings = config(**more)
        options = {"prompts": ROWS, "reward": reward, "config": settings, "optim": optim}
        options |= {"environment": environment, "loss": loss}
        async with Loop(run, folder, **options) as loop:
            steps = []
            async for step in loop:
                steps.append(step)
                if on_step is not None:
                    await on_step(step, replicas, loop)
            return steps
    finally:
        for replica in replicas:
            replica.kill()
