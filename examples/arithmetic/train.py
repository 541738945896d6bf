"""SmolLM2-135M-Instruct learns arithmetic of reasoning-gym: GRPO with LoRA, asynchronously.

    splice up examples/arithmetic/run.toml
    python examples/arithmetic/train.py runs/arithmetic

It writes curve.json after each step: rewards, and the accuracy on held-out problems. Start it again
to continue where it ended.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path

import reasoning_gym

from splice import LossSpec, OptimParams
from splice.rl import Loop, LoopConfig, SamplingConfig

HELD_OUT, TRAINING = 200, 2000


def problems():
    """Rows for training and held-out rows. No expression is in both, and none twice."""
    settings = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
    found = {}
    for problem in reasoning_gym.create_dataset("chain_sum", size=6000, seed=1, **settings):
        row = {"prompt": problem["question"], "answer": problem["answer"]}
        found.setdefault(problem["metadata"]["expression"], row)
    rows = list(found.values())
    return rows[HELD_OUT : HELD_OUT + TRAINING], rows[:HELD_OUT]


def reward(row, completion):
    """1 if the answer up to a full stop or the line's end is the right number and nothing else."""
    return float(completion.finish_reason == "stop" and completion.text.strip() == row["answer"])


async def evaluate(loop, rows):
    """Greedy accuracy, and some of the answers."""
    answers = await loop.sample(rows, temperature=0.0)
    scores = [reward(row, answer) for row, (answer,) in zip(rows, answers, strict=True)]
    samples = [
        {"question": row["prompt"], "answer": row["answer"], "said": answer.text, "reward": score}
        for row, (answer,), score in zip(rows, answers, scores, strict=True)
    ]
    return {"accuracy": sum(scores) / len(scores), "samples": samples[:12]}


class Curve:
    """What is plotted: a JSON file, whole after each step."""

    def __init__(self, path):
        self.path = path
        empty = {"starts": [], "steps": [], "evaluations": [], "seconds": 0.0}
        self.found = empty | (json.loads(path.read_text()) if path.exists() else {})
        self._began_s = time.monotonic() - self.found["seconds"]

    def add(self, kind, **line):
        """Add a line with the seconds since the first start, then write the file."""
        self.found["seconds"] = round(time.monotonic() - self._began_s, 1)
        self.found[kind].append({"seconds": self.found["seconds"], **line})
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.found, indent=1))
        part.replace(self.path)


async def main(arguments):
    """Train, and evaluate every few steps."""
    rows, held_out = problems()
    config = LoopConfig(
        max_staleness=arguments.max_staleness,
        group_size=arguments.group_size,
        groups_per_step=arguments.groups,
        steps=arguments.steps,
        sampling=SamplingConfig(
            max_tokens=6, temperature=arguments.temperature, extra={"stop": [".", "\n"]}
        ),
        shuffle_seed=arguments.seed,
    )
    loop = Loop.of_run(
        arguments.run_dir,
        prompts=rows,
        reward=reward,
        config=config,
        loss=LossSpec(name="truncated_importance_sampling"),
        optim=lambda step: OptimParams(lr=arguments.lr * max(0.1, 1 - step / arguments.steps)),
    )
    curve = Curve(arguments.out or arguments.run_dir / "curve.json")
    held_out = held_out[: arguments.held_out]
    async with loop:
        curve.add("starts", settings={k: str(v) for k, v in vars(arguments).items()})
        if not curve.found["evaluations"]:
            curve.add("evaluations", step=0, **await evaluate(loop, held_out))
            print(f"untrained: {curve.found['evaluations'][0]['accuracy']:.3f}", flush=True)
        async for step in loop:
            names = ("reward_mean", "answer_tokens", "staleness_mean", "logprob_gap_mean")
            metrics = {name: round(step.metrics[name], 5) for name in names}
            waits = {n: step.seconds[n] for n in ("step", "trainer_waits", "sampler_waits")}
            curve.add("steps", step=step.number, **metrics, waits=waits)
            print(f"step {step.number}: reward {metrics['reward_mean']:.3f}", flush=True)
            if step.number % arguments.evaluate_every == 0 or step.number == arguments.steps:
                curve.add("evaluations", step=step.number, **await evaluate(loop, held_out))
                loop.note(accuracy=curve.found["evaluations"][-1]["accuracy"])
                print(f"held out: {curve.found['evaluations'][-1]['accuracy']:.3f}", flush=True)


def arguments_of(argv=None):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--groups", type=int, default=8, help="problems in each step")
    parser.add_argument("--group-size", type=int, default=8, help="answers to each problem")
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-4, help="falls to a tenth over the steps")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the samples")
    parser.add_argument("--seed", type=int, default=1, help="of the problems' order")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="problems to evaluate on")
    parser.add_argument("--evaluate-every", type=int, default=10, help="steps")
    parser.add_argument("--out", type=Path, help="default: curve.json in the run's folder")
    return parser.parse_args(argv)


if __name__ == "__main__":
    asyncio.run(main(arguments_of()))
