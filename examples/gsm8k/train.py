"""Qwen3-8B on GSM8K: GRPO with LoRA, asynchronously.

    splice up examples/gsm8k/run.toml
    python examples/gsm8k/train.py runs/gsm8k

It needs the model hub (`pip install datasets`), or the problems as JSON lines with `question` and
`answer`: --train and --test.
"""

import argparse
import asyncio
import json
import re
from pathlib import Path

from splice import LossSpec, OptimParams
from splice.rl import Loop, LoopConfig, SamplingConfig

ASK = "{question}\nReason step by step, then give the final number after ####."
NUMBER = re.compile(r"####\s*(-?[\d,]*\.?\d+)")


def final_number(text):
    """The last number after ####, without commas; None if there is none."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def reward(row, completion):
    """1 for the right final number of a finished answer."""
    is_right = final_number(completion.text) == row["number"]
    return float(completion.finish_reason == "stop" and is_right)


def rows_of(problems):
    """Rows of the loop."""
    return [
        {
            "messages": [{"role": "user", "content": ASK.format(question=problem["question"])}],
            "number": final_number(problem["answer"]),
        }
        for problem in problems
    ]


def problems_of(path, split):
    """A split of GSM8K, from a file of JSON lines or from the hub."""
    if path is not None:
        return [json.loads(line) for line in path.read_text().splitlines()]
    import datasets

    return datasets.load_dataset("openai/gsm8k", "main", split=split)


async def evaluate(loop, rows):
    """Greedy accuracy."""
    answers = await loop.sample(rows)
    return sum(reward(row, answer) for row, (answer,) in zip(rows, answers, strict=True)) / len(
        rows
    )


async def main(arguments):
    """Train, and evaluate every few steps."""
    rows = rows_of(problems_of(arguments.train, "train"))
    held_out = rows_of(problems_of(arguments.test, "test"))[: arguments.held_out]
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    config = LoopConfig(
        group_size=arguments.group_size,
        groups_per_step=arguments.groups,
        steps=arguments.steps,
        sampling=SamplingConfig(max_tokens=arguments.max_tokens, extra=extra),
        shuffle_seed=1,
        on_error="drop",
    )
    async with Loop.of_run(
        arguments.run_dir,
        prompts=rows,
        reward=reward,
        config=config,
        loss=LossSpec(name="truncated_importance_sampling"),
        optim=OptimParams(lr=arguments.lr),
    ) as loop:
        print(f"before: {await evaluate(loop, held_out):.3f}", flush=True)
        async for step in loop:
            print(f"step {step.number}: reward {step.metrics['reward_mean']:.3f}", flush=True)
            if step.number % arguments.evaluate_every == 0:
                print(f"held out: {await evaluate(loop, held_out):.3f}", flush=True)
                await asyncio.to_thread(loop.client.save_checkpoint, f"saved/{step.number}")


def arguments_of(argv=None):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--train", type=Path, help="JSON lines, instead of the hub")
    parser.add_argument("--test", type=Path, help="JSON lines, instead of the hub")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--groups", type=int, default=32, help="problems in each step")
    parser.add_argument("--group-size", type=int, default=8, help="answers to each problem")
    parser.add_argument("--max-tokens", type=int, default=768)
    parser.add_argument("--held-out", type=int, default=256, help="problems to evaluate on")
    parser.add_argument("--evaluate-every", type=int, default=20, help="steps")
    parser.add_argument("--lr", type=float, default=2e-5)
    return parser.parse_args(argv)


if __name__ == "__main__":
    asyncio.run(main(arguments_of()))
