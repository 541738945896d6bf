"""A strict loop on a run's folder, as a process that a test kills.

python -m tests.rl.strict_run RUN_DIR LOOP_DIR STEPS
"""

from __future__ import annotations

import asyncio
import sys

from splice import LossSpec, OptimParams, SpliceClient
from splice.rl import Loop, LoopConfig, SamplingConfig

ROWS = [{"prompt": [5 + k, 17, 33, 101, 7]} for k in range(4)]


def even(row, completion) -> float:
    return sum(t % 2 == 0 for t in completion.answer_ids) / len(completion.answer_ids)


async def main(run_dir: str, folder: str, steps: int) -> None:
    config = LoopConfig(
        max_staleness=0,
        groups_per_step=2,
        group_size=4,
        steps=steps,
        sampling=SamplingConfig(max_tokens=20, seed=11, extra={"ignore_eos": True}),
        max_in_flight=1,
    )
    options = {"prompts": ROWS, "reward": even, "config": config}
    loss, optim = LossSpec(name="grpo"), OptimParams(lr=5e-3)
    with SpliceClient.of_run(run_dir) as client:
        async with Loop(client, folder, loss=loss, optim=optim, **options) as loop:
            async for step in loop:
                print("step", step.number, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
