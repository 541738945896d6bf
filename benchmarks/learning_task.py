"""The task of `benchmarks.learning`: chain_sum of reasoning-gym, three to five numbers of two or
three digits, solved step by step.

    python -m benchmarks.learning_task ROWS.json

It writes the problems (`make .venv-trainer/.examples` installs reasoning-gym); whoever trains reads
the file alone.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Row = dict[str, Any]
HELD_OUT = 128
ASK = (
    "\nWork it out step by step, one operation on each line. "
    "End with the answer alone on the last line."
)
CHAIN_SUM = {"min_terms": 3, "max_terms": 5, "min_digits": 2, "max_digits": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What splice and the control have in common."""

    steps: int = 100
    evaluate_every: int = 50
    num_prompts: int = 8
    group_size: int = 8
    max_tokens: int = 256
    rank: int = 16
    alpha: float = 32.0
    lora_lr: float = 1e-4
    full_lr: float = 3e-6
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    micro_batch_tokens: int = 4096


SMALL = Task(steps=2, evaluate_every=2, num_prompts=2, group_size=2, max_tokens=16)


def task_of(*, small: bool) -> Task:
    """The task, with the learning rate and the steps that the environment names."""
    if small:
        return SMALL
    found, given = Task(), os.environ
    lr = float(given.get("SPLICE_BENCH_LR", found.lora_lr))
    return replace(found, lora_lr=lr, steps=int(given.get("SPLICE_BENCH_STEPS", found.steps)))


def reward(row: Row, text: str) -> float:
    """1 if the last whole number of the text is the answer."""
    found = re.findall(r"-?\d+", text.replace(",", ""))
    return float(bool(found) and found[-1] == row["answer"])


def read(path: Path, seed: int) -> tuple[list[Row], list[Row]]:
    """Rows for training, shuffled by the seed, and the held-out rows."""
    rows: list[Row] = json.loads(path.read_text())
    held_out, training = rows[:HELD_OUT], rows[HELD_OUT:]
    random.Random(seed).shuffle(training)
    return training, held_out


def row(question: str, answer: str) -> Row:
    """A row as the loop takes it."""
    return {"messages": [{"role": "user", "content": question + ASK}], "answer": answer}


def problems(count: int = 2000) -> list[Row]:
    """Different problems."""
    import reasoning_gym

    made = reasoning_gym.create_dataset("chain_sum", size=count + 100, seed=11, **CHAIN_SUM)
    found = {p["question"]: row(p["question"], p["answer"]) for p in made}
    return list(found.values())[:count]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(problems(), indent=0))
