"""Evaluations of a run's versions, as JSON lines: `LOOP/evaluations.jsonl`.

    step       the newest step when the evaluation began; 0 before the first one
    version    which was evaluated
    metrics    eval_reward, and others

A line is durable when `add` returns. Of several for a step, the last one counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from orchestrator.errors import ConfigError
from orchestrator.storage.retention import kept
from splice.rl import decisions

FILE = "evaluations.jsonl"
REWARD = "eval_reward"
"""The metric that says which version is best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """How good a version was."""

    step: int
    version: int
    metrics: Mapping[str, float]


def add(folder: Path, evaluation: Evaluation) -> None:
    """Append an evaluation to those of a loop's folder."""
    path = folder / FILE
    if path.exists():
        decisions.cut_torn_line(path)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(evaluation)) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> list[Evaluation]:
    """Return a loop's evaluations, in the order of their steps.

    Raises:
        ConfigError: a line is not an evaluation.
    """
    path = folder / FILE
    if not path.exists():
        return []
    found: dict[int, Evaluation] = {}
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:  # a torn last line has no end
        try:
            one = Evaluation(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path} has a line that is no evaluation: {line!r:.100}") from error
        found[one.step] = one
    return [found[step] for step in sorted(found)]


def best(run_dir: Path) -> Evaluation | None:
    """Return the best evaluation whose version is on disk; of equal ones the first."""
    on_disk = [
        one
        for one in read(run_dir / decisions.LOOP_DIR)
        if (run_dir / "versions" / str(one.version)).is_dir()
    ]
    return max(on_disk, key=lambda one: one.metrics[REWARD], default=None)


def best_kept(run_dir: Path) -> Evaluation | None:
    """Return the best evaluation, if its version stays on disk."""
    found = best(run_dir) if (run_dir / decisions.LOOP_DIR / FILE).exists() else None
    return found if found is not None and found.version in kept(run_dir) else None
