"""Given answers: which tokens train, and which rows are refused; tests/e2e/test_sft.py trains."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import ConfigError
from splice.client.batches import Completion
from splice.client.run_file import load_as
from splice.rl.turns import Sample, Turn, sequences_of
from splice.train.command import plan
from splice.train.sections import SftFile
from splice.train.teaching import Teacher, batch_of, lesson_of

FILE = """
name = "tiny"
model = "model"
[trainer]
[inference]
[data]
path = "rows.jsonl"
[loop]
steps = 2
"""


def told(number: int) -> dict[str, str]:
    return {"role": "user" if number % 2 == 0 else "assistant", "content": "ab" * (number + 1)}


async def encode(row: Any, *, add_special_tokens: bool = True) -> list[int]:
    """A token for each character; a message begins with its role's number and ends with 0."""
    if isinstance(row, str):
        return [ord(c) for c in row]
    if "messages" not in row:
        return [1, *map(ord, row["prompt"])]
    ids = [1]
    for message in row["messages"]:
        ids += [2 + (message["role"] == "assistant"), *map(ord, message["content"]), 0]
    return [*ids, 3] if row["add_generation_prompt"] else ids


async def teach(row: Any, encode: Any = encode) -> tuple[Completion, ...]:
    def give(said: Completion, *, turn: int) -> Turn:
        return Turn(number=turn, attempt=0, completion=said, spans=())

    sample = Sample(None, encode, give)  # type: ignore[arg-type]
    assert await Teacher({})(row, sample) == 0.0
    return sequences_of(sample.turns)


def trained(sequence: Completion) -> list[int]:
    marks: Sequence[bool] = sequence.sampled or (True,) * len(sequence.answer_ids)
    return [token for token, mark in zip(sequence.answer_ids, marks, strict=True) if mark]


def test_a_completion_trains_after_its_prompt() -> None:
    (sequence,) = asyncio.run(teach(lesson_of({"prompt": "ab", "completion": "cd"})))
    assert sequence.prompt_ids == (1, 97, 98) and sequence.answer_ids == (99, 100)


def test_tokens_that_merge_at_the_seam_do_not_reach_into_the_prompt() -> None:
    async def merging(row: Any, *, add_special_tokens: bool = True) -> list[int]:
        text = row if isinstance(row, str) else row["prompt"]
        return {"ab": [1, 2], "abcd": [1, 9], "cd": [3]}[text]

    (sequence,) = asyncio.run(teach({"prompt": "ab", "completion": "cd"}, merging))
    assert sequence.prompt_ids == (1, 2) and sequence.answer_ids == (3,)


def test_every_message_of_the_assistant_trains_in_one_sequence() -> None:
    row = lesson_of({"messages": [told(n) for n in range(4)]})
    (sequence,) = asyncio.run(teach(row))
    expected = [*map(ord, "abab"), 0, *map(ord, "abababab"), 0]
    assert trained(sequence) == expected
    assert batch_of([[(sequence, 0.0)]]).specs[0].shape == (
        len(sequence.prompt_ids) + len(sequence.answer_ids),
    )


def test_a_template_that_asks_otherwise_than_it_writes() -> None:
    async def thinking(row: Any, *, add_special_tokens: bool = True) -> list[int]:
        ids = await encode(row)
        return [*ids, 77] if row["add_generation_prompt"] else ids

    with pytest.raises(ValueError, match="chat template writes the assistant's message otherwise"):
        asyncio.run(teach({"messages": [told(0), told(1)]}, thinking))


def test_a_completion_of_a_chat_is_its_message() -> None:
    row = lesson_of({"messages": [told(0)], "completion": "x"})
    assert row["messages"][-1] == {"role": "assistant", "content": "x"}


def planned(folder: Path, rows: list[Any], *overrides: str) -> Any:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "run.toml").write_text(FILE)
    return plan(load_as(SftFile, folder / "run.toml", overrides), folder)


def test_a_plan_needs_no_reward(tmp_path: Path) -> None:
    made = planned(tmp_path, [{"prompt": "a", "completion": "b"}], "data.chat=true")
    assert made.reward is None and made.config.group_size == 1
    assert made.run.loss.name == "cross_entropy"
    assert [m["role"] for m in made.rows[0]["messages"]] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("row", "override", "said"),
    [
        ({"prompt": "a"}, "loop.steps=1", "needs `messages` with the assistant's, or the texts"),
        ({"messages": [told(0)]}, "loop.steps=1", "no message of the assistant"),
        ({"prompt": "a", "completion": "b"}, "loss.name=grpo", "given answers have no log-probs"),
        ({"prompt": "a", "completion": "b"}, "loop.group_size=8", "loop.group_size"),
        ({"prompt": "a", "completion": "b"}, "eval.path=rows.jsonl", "eval needs loop.reward"),
    ],
)
def test_what_is_no_lesson(row: Any, override: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        planned(tmp_path, [row], override)
