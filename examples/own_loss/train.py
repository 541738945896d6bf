"""Train with a loss of your own, on rewards that need no data.

export PYTHONPATH=$PWD/examples/own_loss
splice up runs/own_loss --set "trainer.loss_modules=['my_losses']"
python examples/own_loss/train.py runs/own_loss/run
"""

import argparse
import asyncio
from pathlib import Path

from splice import LossSpec, OptimParams
from splice.rl import Loop, LoopConfig, SamplingConfig

ROWS = [{"prompt": f"{verb} with yes or no or maybe:"} for verb in ("Respond", "Answer", "Reply")]


def reward(row, completion):
    """1 if the answer is short."""
    return float(len(completion.text) < 20)


async def main(arguments):
    """Some steps with the loss `careful`."""
    config = LoopConfig(
        group_size=8,
        groups_per_step=3,
        steps=arguments.steps,
        sampling=SamplingConfig(max_tokens=16),
    )
    async with Loop.of_run(
        arguments.run_dir,
        prompts=ROWS,
        reward=reward,
        config=config,
        loss=LossSpec(name="careful", params={"negative_weight": arguments.negative_weight}),
        optim=OptimParams(lr=1e-3),
    ) as loop:
        async for step in loop:
            loss, mean = step.metrics["loss"], step.metrics["reward_mean"]
            print(f"step {step.number}: loss {loss:.4f}, mean reward {mean:.2f}", flush=True)


def arguments_of(argv=None):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--negative-weight", type=float, default=0.5)
    return parser.parse_args(argv)


if __name__ == "__main__":
    asyncio.run(main(arguments_of()))
