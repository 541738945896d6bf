"""A model learns to use a calculator: each rollout has two turns with a tool between them.

    splice up examples/arithmetic/run.toml
    python examples/calculator/train.py runs/calculator

The model writes an expression, the calculator computes it, and the model reads the result. Both
turns train as one sequence, without the calculator's tokens.
"""

import argparse
import ast
import asyncio
import operator
from pathlib import Path
from statistics import fmean

import reasoning_gym

from splice import LossSpec, OptimParams
from splice.rl import Loop, LoopConfig, SamplingConfig

PROMPT = """Write the expression for the calculator, then read the answer from its result.
Question: What is 3 plus 4 minus 5? Calculator: 3 + 4 - 5; Result: 2 Answer: 2;
Question: {question} Calculator:"""
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
HELD_OUT = 50


def calculate(expression):
    """The value of sums, differences and products of numbers; "error" for anything else."""

    def value(node):
        if isinstance(node, ast.Expression):
            return value(node.body)
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError("not an expression")

    try:
        return str(value(ast.parse(expression.strip(), mode="eval")))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return "error"


async def use_calculator(row, sample):
    """One rollout: a call of the tool, and an answer. The reward is for both."""
    call = await sample(row["prompt"], stop=[";"], max_tokens=24)
    expression = call.text.removesuffix(";")
    result = calculate(expression)
    told = await sample.encode(f" Result: {result} Answer:")
    answer = await sample([*call.token_ids, *told], stop=[";", "\n"], max_tokens=8)
    return 0.2 * (result != "error") + 0.8 * (answer.text.strip(" ;\n") == row["answer"])


def problems():
    """Rows for training and held-out rows."""
    settings = {"min_terms": 3, "max_terms": 4, "min_digits": 2, "max_digits": 3}
    rows = [
        {
            "prompt": PROMPT.format(question=problem["question"].split(": ")[-1]),
            "answer": problem["answer"],
        }
        for problem in reasoning_gym.create_dataset("chain_sum", size=1000, seed=1, **settings)
    ]
    return rows[HELD_OUT:], rows[:HELD_OUT]


async def evaluate(loop, rows):
    """Mean greedy reward."""
    return fmean(part.reward for ((part,),) in await loop.play(rows))


async def main(arguments):
    """Train, and evaluate before and after."""
    rows, held_out = problems()
    config = LoopConfig(
        group_size=arguments.group_size,
        groups_per_step=arguments.groups,
        steps=arguments.steps,
        sampling=SamplingConfig(temperature=1.0),
        shuffle_seed=1,
    )
    async with Loop.of_run(
        arguments.run_dir,
        prompts=rows,
        environment=use_calculator,
        config=config,
        loss=LossSpec(name="truncated_importance_sampling"),
        optim=OptimParams(lr=arguments.lr),
    ) as loop:
        held_out = held_out[: arguments.held_out]
        print(f"before: {await evaluate(loop, held_out):.3f}", flush=True)
        async for step in loop:
            print(f"step {step.number}: reward {step.metrics['reward_mean']:.3f}", flush=True)
        print(f"after: {await evaluate(loop, held_out):.3f}", flush=True)


def arguments_of(argv=None):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--groups", type=int, default=8, help="problems in each step")
    parser.add_argument("--group-size", type=int, default=8, help="rollouts of each problem")
    parser.add_argument("--held-out", type=int, default=HELD_OUT)
    parser.add_argument("--lr", type=float, default=5e-4)
    return parser.parse_args(argv)


if __name__ == "__main__":
    asyncio.run(main(arguments_of()))
