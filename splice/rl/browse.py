"""`splice samples`: chosen samples of a loop, as a table, as text or as JSON lines."""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from orchestrator.errors import ConfigError
from splice.rl import samples

Order = Literal["newest", "best", "worst"]
SHORT = 60
"""Characters of prompt and answer in the table."""


def choose(
    loop_dir: Path, *, step: int | None, order: Order, contains: str | None, limit: int
) -> list[dict[str, Any]]:
    """Return at most `limit` samples of one step, or of all.

    Args:
        contains: text in prompt or answer, in any case.

    Raises:
        ConfigError: there are no samples, or none of this step.
    """
    folder = loop_dir / samples.SAMPLES
    found = _matching(_of(folder, step), contains)
    if order == "best":
        return heapq.nlargest(limit, found, key=_reward)
    if order == "worst":
        return heapq.nsmallest(limit, found, key=_reward)
    return list(itertools.islice(found, limit))


def _reward(sample: dict[str, Any]) -> float:
    return float(sample["reward"])


def _of(folder: Path, step: int | None) -> Iterable[dict[str, Any]]:
    steps = samples.steps_of(folder)
    if not steps:
        raise ConfigError(
            f"no samples in {folder}; a loop writes them there unless keep_samples is 0"
        )
    if step is None:
        return samples.newest_first(folder)
    if step not in steps:
        raise ConfigError(f"no samples of step {step}; there are steps {steps[0]} to {steps[-1]}")
    return samples.read(folder, step)


def _matching(found: Iterable[dict[str, Any]], contains: str | None) -> Iterator[dict[str, Any]]:
    wanted = (contains or "").casefold()
    for sample in found:
        if wanted in f"{text_of(sample['prompt'])}\n{answer_of(sample)}".casefold():
            yield sample


def text_of(prompt: Any) -> str:
    """Return a prompt as text: messages with their roles, token ids as numbers."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(part, dict) for part in prompt):
        return "\n".join(
            f"{m.get('role', '?')}: {_with_calls(m.get('content', ''), m)}" for m in prompt
        )
    return json.dumps(prompt)


def answer_of(sample: dict[str, Any]) -> str:
    """Return the answer's text, and a line for each of its tool calls."""
    return _with_calls(sample["answer"], sample)


def _with_calls(text: Any, of: dict[str, Any]) -> str:
    # Older samples lack them, and a row's messages may have them in another form.
    calls = [call.get("function", call) for call in of.get("tool_calls") or ()]
    lines = [f"{call.get('name')}({call.get('arguments')})" for call in calls]
    return "\n".join([*[str(text)] * bool(text or not lines), *lines])


def facts_of(sample: dict[str, Any]) -> dict[str, str]:
    """Return what the table has in addition to prompt and answer."""
    logprobs = sample["logprobs"]
    return {
        "step": str(sample["step"]),
        "sample": f"{sample['group']}.{sample['sample']}",
        "reward": f"{sample['reward']:.4g}",
        "versions": " ".join(f"@{version}:{count}" for version, count in sample["spans"]),
        "tokens": str(len(sample["answer_ids"])),
        "log-prob": f"{fmean(logprobs):.3f}" if logprobs else "",
        "end": str(sample["finish_reason"]),
    }


def details_of(sample: dict[str, Any]) -> dict[str, str]:
    """Return the facts, and the parts of the reward if it has some."""
    parts = sample.get("rewards", {})  # older samples lack them
    named = ", ".join(f"{name} {value:.4g}" for name, value in parts.items())
    return facts_of(sample) | ({"of": named} if named else {})


def table(found: list[dict[str, Any]]) -> RenderableType:
    """Return one line for each sample."""
    made = Table()
    for name in (*facts_of(found[0]), "prompt", "answer") if found else ("no sample matches",):
        made.add_column(name, no_wrap=name not in ("prompt", "answer"))
    for sample in found:
        texts = (_short(text_of(sample["prompt"])), _short(answer_of(sample)))
        made.add_row(*map(Text, (*facts_of(sample).values(), *texts)))
    return made


def _short(text: str) -> str:
    """The end of a text, on one line: prompts often begin alike."""
    line = text.replace("\n", "⏎")
    return line if len(line) <= SHORT else f"…{line[1 - SHORT :]}"


def whole(found: list[dict[str, Any]]) -> RenderableType:
    """Return each sample with its whole text."""
    panels = []
    for sample in found:
        title = ", ".join(f"{name} {value}" for name, value in details_of(sample).items())
        body = Text(text_of(sample["prompt"]), style="dim")
        body.append(f"\n{answer_of(sample)}", style="bold not dim")
        panels.append(Panel(body, title=Text(title), title_align="left"))
    return Group(*panels)
