"""Trains on given answers, in the loop that trains on sampled ones.

row: prompt, completion      -> one turn, the completion's tokens
row: messages                -> a turn for each message of the assistant, in one sequence
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.errors import ConfigError
from splice.client.batches import Batch, Completion, sft_batch
from splice.rl import Row, Sample

TEMPLATE = ("tools", "chat_template_kwargs")
"""What a row or `sampling.extra` may have for the chat template."""


def lesson_of(row: Row) -> Row:
    """Return a row with its answer in its place: a prompt's completion becomes a message where the
    prompt did.

    Raises:
        ConfigError: it has no answer.
    """
    if "messages" not in row:
        if not isinstance(row.get("completion"), str) or not isinstance(row["prompt"], str):
            raise ConfigError(
                "a row of `splice sft` needs `messages` with the assistant's, or the texts "
                f"`prompt` and `completion`; it has {sorted(map(str, row))}. (`splice train` "
                "samples the answers; it needs loop.reward.)"
            )
        return row
    messages = list(row["messages"])
    if "completion" in row:
        messages.append({"role": "assistant", "content": row["completion"]})
    if not any(message.get("role") == "assistant" for message in messages):
        raise ConfigError(
            "a row of `splice sft` has no message of the assistant, and no completion"
        )
    return {**row, "messages": messages}


class Teacher:
    """The loop's environment: every answer of a row trains.

    Args:
        extra: fields of requests (`sampling.extra`), of which the chat template takes some.
    """

    def __init__(self, extra: Mapping[str, Any]) -> None:
        self._template = {name: extra[name] for name in TEMPLATE if name in extra}

    async def __call__(self, row: Row, sample: Sample) -> float:
        """Give the row's answers; the reward is 0."""
        if "messages" not in row:
            await sample.given(row["prompt"], row["completion"])
            return 0.0
        own = {name: row[name] for name in TEMPLATE if name in row}
        messages = row["messages"]
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before = messages[:number]
                await sample.given(messages=before, answer=message, **{**self._template, **own})
        return 0.0


def batch_of(groups: Sequence[Sequence[tuple[Any, float]]]) -> Batch:
    """Return the batch of a step's given answers."""
    answers = [answer for group in groups for answer, _ in group]
    return sft_batch(
        [s for a in answers for s in ((a,) if isinstance(a, Completion) else tuple(a))]
    )
