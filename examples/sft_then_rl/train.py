"""SFT, then RL from it: the same model, run and adapter.

    splice up examples/arithmetic/run.toml
    python examples/sft_then_rl/train.py runs/sft_then_rl

SFT teaches the form of an answer from solved problems. RL starts from what SFT published.
"""

import argparse
import asyncio
from pathlib import Path

import reasoning_gym

from splice import Completion, LossSpec, OptimParams, SpliceClient, sft_batch
from splice.rl import Loop, LoopConfig, SamplingConfig

SOLVED, HELD_OUT = 256, 64


def problems():
    """Solved problems for SFT, problems for RL, and held-out ones."""
    settings = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
    found = {}
    for problem in reasoning_gym.create_dataset("chain_sum", size=4000, seed=2, **settings):
        row = {"prompt": problem["question"], "answer": problem["answer"]}
        found.setdefault(problem["metadata"]["expression"], row)
    rows = list(found.values())
    return rows[:SOLVED], rows[SOLVED + HELD_OUT :], rows[SOLVED : SOLVED + HELD_OUT]


def reward(row, completion):
    """1 for the right number and nothing else."""
    return float(completion.finish_reason == "stop" and completion.text.strip() == row["answer"])


async def evaluate(loop, rows):
    """Greedy accuracy."""
    answers = await loop.sample(rows)
    return sum(reward(row, answer) for row, (answer,) in zip(rows, answers, strict=True)) / len(
        rows
    )


async def fine_tune(loop, rows, arguments):
    """SFT: each epoch is one job of several optimizer steps, which publishes a version."""
    solved = []
    for row in rows:
        prompt = await loop.encode(row["prompt"])
        answer = await loop.encode(f" {row['answer']}.", add_special_tokens=False)
        solved.append(Completion(prompt_ids=tuple(prompt), answer_ids=tuple(answer), logprobs=()))
    result = await asyncio.to_thread(
        loop.client.train_merged,
        sft_batch(solved),
        LossSpec(name="cross_entropy"),
        OptimParams(lr=arguments.sft_lr),
        mini_batch_sequences=arguments.mini_batch,
        epochs=arguments.epochs,
    )
    print(f"SFT: loss {result.metrics['loss']:.3f}, serving {result.alias}", flush=True)


async def main(arguments):
    """Fine-tune in a run's first start, then train with rewards."""
    solved, rows, held_out = problems()
    config = LoopConfig(
        group_size=arguments.group_size,
        groups_per_step=arguments.groups,
        steps=arguments.steps,
        sampling=SamplingConfig(max_tokens=6, extra={"stop": [".", "\n"]}),
        shuffle_seed=1,
    )
    options = {"prompts": rows, "reward": reward, "config": config}
    loss = LossSpec(name="truncated_importance_sampling")
    with SpliceClient.of_run(arguments.run_dir) as client:
        folder = arguments.run_dir / arguments.loop_dir

        def optim(step):
            return OptimParams(lr=arguments.lr * max(0.1, 1 - step / arguments.steps))

        held_out = held_out[: arguments.held_out]
        if client.status().version == 0:
            async with Loop(client, folder / "sft", **options) as loop:  # to sample and to encode
                print(f"untrained: {await evaluate(loop, held_out):.3f}", flush=True)
                await fine_tune(loop, solved[: arguments.solved], arguments)
        async with Loop(client, folder, loss=loss, optim=optim, **options) as loop:
            print(f"before RL: {await evaluate(loop, held_out):.3f}", flush=True)
            async for step in loop:
                print(f"step {step.number}: reward {step.metrics['reward_mean']:.3f}", flush=True)
            print(f"after RL: {await evaluate(loop, held_out):.3f}", flush=True)


def arguments_of(argv=None):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--loop-dir", default="loop", help="within the run's folder")
    parser.add_argument("--solved", type=int, default=128, help=f"for SFT, at most {SOLVED}")
    parser.add_argument("--mini-batch", type=int, default=32, help="sequences of an SFT step")
    parser.add_argument("--epochs", type=int, default=1, help="of SFT")
    parser.add_argument("--sft-lr", type=float, default=2e-4)
    parser.add_argument("--steps", type=int, default=50, help="of RL")
    parser.add_argument("--groups", type=int, default=12, help="problems in each step")
    parser.add_argument("--group-size", type=int, default=8, help="answers to each problem")
    parser.add_argument("--held-out", type=int, default=HELD_OUT)
    parser.add_argument("--lr", type=float, default=3e-4, help="falls to a tenth over the steps")
    arguments = parser.parse_args(argv)
    if arguments.solved > SOLVED:
        parser.error(f"--solved is {SOLVED} at most")
    return arguments


if __name__ == "__main__":
    asyncio.run(main(arguments_of()))
