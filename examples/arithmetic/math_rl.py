"""The task of tinker_cookbook's recipe `math_rl env=arithmetic` in splice's own loop: the same
prompts in the same order, rewards, loss and optimizer. docs/tinker.md has both curves.

    splice up examples/arithmetic/run.toml --set inference.max_model_len=256
    python examples/arithmetic/math_rl.py runs/arithmetic --out math_rl.json
"""

import argparse
import asyncio
import json
import re
from functools import partial
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from splice import LossSpec, OptimParams, grpo_batch
from splice.rl import Loop, LoopConfig, SamplingConfig

GROUPS, GROUP_SIZE, STOP = 12, 4, "\n\nUser:"


def problems(tokenizer, steps):
    r"""Rows of all steps: "User: ...\n\nAssistant:" with one solved sum before."""

    def turn(role, text):
        return [*encode(f"{role}:"), *encode(f" {text}\n\n")]

    encode = partial(tokenizer.encode, add_special_tokens=False)
    solved = turn("User", "What is 4 + 5?") + turn("Assistant", "9")
    rows = []
    for step in range(steps):
        numbers = np.random.RandomState(step)
        for _ in range(GROUPS):
            x, y = (int(numbers.randint(0, 101)) for _ in range(2))
            ids = solved + turn("User", f"What is {x} + {y}?") + encode("Assistant:")
            rows.append({"prompt": ids, "answer": x + y})
    return rows


def is_right(row, completion):
    """Whether the answer's last integer is the sum."""
    found = re.findall(r"-?\d+", completion.text.replace(",", ""))
    return bool(found) and int(found[-1]) == row["answer"]


def reward(row, completion):
    """1 for the right sum, and 0.1 less where the answer does not end."""
    return is_right(row, completion) - 0.1 * (completion.finish_reason != "stop")


async def main(arguments):
    """Train, and write the share of right answers of each step."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    loop = Loop.of_run(
        arguments.run_dir,
        prompts=problems(tokenizer, arguments.steps),
        reward=reward,
        config=LoopConfig(
            max_staleness=0,
            group_size=GROUP_SIZE,
            groups_per_step=GROUPS,
            steps=arguments.steps,
            sampling=SamplingConfig(max_tokens=8, extra={"stop": [STOP]}),
        ),
        loss=LossSpec(name="importance_sampling"),
        optim=OptimParams(lr=2e-4, max_grad_norm=None),
        make_batch=partial(grpo_batch, divides_by_std=False),
    )
    shares = []
    async with loop:
        async for step in loop:
            answers = [rollout for group in step.groups for rollout in group]
            right = sum(is_right(r.row, r.completion) for r in answers)
            shares.append(right / len(answers))
            print(f"step {step.number}: {shares[-1]:.2f} right", flush=True)
            arguments.out.write_text(json.dumps({"right": shares}))


def arguments_of(argv=None):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tokenizer", type=Path, default=Path("runs/models/smollm2-135m"))
    parser.add_argument("--out", type=Path, default=Path("math_rl.json"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    asyncio.run(main(arguments_of()))
