"""Every finished rollout as a JSON line: `LOOP/samples/STEP.jsonl`.

    step, group, sample, attempt     its place
    seed                             of its request; null without one, and of an environment
    name, part                       the role in an environment, and its place in what that returned
    prompt                           text, token ids or messages, as the row has it
    row                              the row's other columns
    answer, reward, finish_reason
    tool_calls                       of the answer, as OpenAI's API has them
    turns                            of an environment, each [shared, ids, answer, tool calls]: its
                                     prompt is `shared` ids of the prompt before it, then `ids`
    spans                            [version, number of tokens], in order
    answer_ids, logprobs             one for each token of the answer; log-probs in nats
    at                               seconds since the epoch

The first line that a start of the loop writes for a step replaces those of an earlier start. A line
is written whole or not at all, except where a power cut ends it; readers leave such a line out.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from splice.rl.parts import parts_of

SAMPLES = "samples"
"""Folder of the samples within a loop's."""
DIGITS = 5
"""Decimals of a log-prob."""


def line_of(step: int, rollout: Any, part: int = 0) -> str:
    """Return the line of a `splice.rl.Rollout`."""
    completion, row = rollout.completion, rollout.row
    found = {
        "step": step,
        "group": rollout.group,
        "sample": rollout.sample,
        "attempt": rollout.attempt,
        "seed": rollout.seed,
        "name": rollout.name,
        "part": part,
        "reward": rollout.reward,
        "rewards": parts_of(rollout.reward),
        "prompt": row.get("prompt", row.get("messages")),
        "answer": completion.text,
        "tool_calls": completion.tool_calls,
        "finish_reason": completion.finish_reason,
        "turns": _turns(rollout.turns),
        "spans": rollout.spans,
        "row": {key: value for key, value in row.items() if key not in ("prompt", "messages")},
        "answer_ids": completion.answer_ids,
        "logprobs": [round(logprob, DIGITS) for logprob in completion.logprobs],
        "at": round(time.time(), 3),
    }
    return json.dumps(found, default=str, ensure_ascii=False) + "\n"


def _turns(turns: Sequence[Any]) -> list[list[Any]]:
    """Each turn's prompt has all turns before it. Written whole, they would take as much room as
    the square of the turns."""
    found: list[list[Any]] = []
    before: Sequence[int] = ()
    for turn in turns:
        prompt = turn.completion.prompt_ids
        pairs = zip(before, prompt, strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        found.append([shared, prompt[shared:], turn.text, turn.tool_calls])
        before = prompt
    return found


def row_of(step: int, rollout: Any) -> dict[str, Any]:
    """Return the rollout as a row of a table: texts and numbers only."""
    asked = rollout.row.get("prompt", rollout.row.get("messages"))
    return {
        "step": step,
        "group": rollout.group,
        "prompt": asked if isinstance(asked, str) else json.dumps(asked, default=str),
        "answer": rollout.completion.text,
        "tool_calls": json.dumps(rollout.completion.tool_calls),
        "reward": float(rollout.reward),
        "rewards": json.dumps(parts_of(rollout.reward)),
        "finish_reason": str(rollout.completion.finish_reason),
    }


class SampleFiles:
    """Appends lines, from one thread.

    Args:
        keep_steps: trained steps whose samples stay, the newest. None: all.
    """

    def __init__(self, folder: Path, *, keep_steps: int | None) -> None:
        self._folder, self._keep_steps = folder, keep_steps
        self._begun: set[int] = set()

    def append(self, step: int, line: str) -> None:
        """Append a line to the step's file.

        Raises:
            OSError: it was not written; no part of it is left.
        """
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        if step not in self._begun:  # the lines of an earlier start go: all are made again
            self._folder.mkdir(parents=True, exist_ok=True)
            flags |= os.O_TRUNC
        descriptor = os.open(path_of(self._folder, step), flags, 0o600)
        self._begun.add(step)
        try:
            _append_whole(descriptor, line.encode(errors="replace"))
        finally:
            os.close(descriptor)

    def prune(self, step: int) -> None:
        """Remove what is too old once `step` is trained: later steps may have samples already."""
        for old in steps_of(self._folder) if self._keep_steps is not None else ():
            if old <= step - (self._keep_steps or 0):
                path_of(self._folder, old).unlink(missing_ok=True)


def _append_whole(descriptor: int, data: bytes) -> None:
    size = os.fstat(descriptor).st_size
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)
        raise


def path_of(folder: Path, step: int) -> Path:
    """Return the file of a step's samples."""
    return folder / f"{step:06d}.jsonl"


def steps_of(folder: Path) -> list[int]:
    """Return the steps that have samples, in order."""
    return sorted(int(path.stem) for path in folder.glob("*.jsonl") if path.stem.isdigit())


def read(folder: Path, step: int) -> list[dict[str, Any]]:
    """Return a step's samples by group, sample, name and part, each as it was sampled last."""
    found: dict[tuple[int, int, str, int], dict[str, Any]] = {}
    with path_of(folder, step).open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(json.JSONDecodeError):  # cut off by a power cut
                sample = json.loads(line)
                part = sample.get("part", 0)
                found[sample["group"], sample["sample"], sample["name"], part] = sample
    return [found[place] for place in sorted(found)]


def newest_first(folder: Path) -> Iterator[dict[str, Any]]:
    """Every sample, those of the newest step first."""
    for step in reversed(steps_of(folder)):
        yield from read(folder, step)
