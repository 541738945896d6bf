"""Rollouts of several turns: what an environment asks, and which sequences train afterwards.

    async def play(row, sample):
        first = await sample(row["prompt"])
        second = await sample(prompt=[*first.token_ids, *tool_ids], max_tokens=8)
        return float(row["answer"] in second.text)     # both turns train with this reward

A turn keeps the sampler's tokens, log-probs and version spans. An environment names turns, never
tokens, so it cannot train on a token without them. A turn whose prompt begins with all tokens of an
earlier sequence extends that sequence. The earlier answers then train once, in one forward pass.
Any other turn begins its own sequence, for example where the chat template encodes the
conversation so far in another way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import MIN_TEMPERATURE
from splice.client.batches import Completion, Routing
from splice.rl.config import OWN_FIELDS
from splice.rl.parts import as_reward, parts_of
from splice.rl.sampler import Row

LARGEST_REWARD = 1e30
"""Of larger ones, sums and squares would be infinite."""
Ask = Callable[..., Awaitable["Turn"]]
Encode = Callable[..., Awaitable[list[int]]]
Give = Callable[..., "Turn"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One answer of the sampler within a rollout.

    Attributes:
        number: counts the rollout's requests from 0, in the order of asking.
        attempt: how often the request was asked again.
        spans: (version, number of tokens), in order; they cover all of the answer's tokens.
    """

    number: int
    attempt: int
    completion: Completion
    spans: tuple[tuple[int, int], ...]

    @property
    def text(self) -> str:
        """The answer."""
        return self.completion.text

    @property
    def tool_calls(self) -> tuple[dict[str, Any], ...]:
        """The answer's tool calls, as OpenAI's API has them."""
        return self.completion.tool_calls

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to follow those that were asked with."""
        return self.completion.message

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and answer: a prompt that begins with them extends this turn's sequence."""
        return (*self.completion.prompt_ids, *self.completion.answer_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Turns that train with one reward.

    Attributes:
        reward: a number; `as_reward({...})` for one with named parts.
        name: of the role that they play. Advantages compare rewards of the same name in a group.
    """

    reward: float
    turns: Sequence[Turn]
    name: str = ""


class Sample:
    """Asks the served model, within one rollout.

    Attributes:
        turns: the answers so far, in the order of arrival.
        asked: number of requests so far.
    """

    def __init__(self, ask: Ask, encode: Encode, give: Give) -> None:
        self._ask, self._encode, self._give = ask, encode, give
        self.turns: list[Turn] = []
        self.asked = 0
        self._open: set[asyncio.Future[Turn]] = set()
        self._has_ended = False

    async def __call__(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[dict[str, Any]] | None = None,
        **more: Any,
    ) -> Turn:
        """Return an answer to a prompt (text or token ids) or to messages.

        A lost replica's request is asked again elsewhere, until the rollout's deadline.

        Args:
            more: further fields of this request, such as `max_tokens` or `stop`.

        Raises:
            RequestRefused: vLLM refuses the request, for example a prompt that is too long.
            RuntimeError: the rollout has ended.
        """
        if self._has_ended:
            raise RuntimeError("the rollout has ended; an environment awaits all that it asks")
        if taken := sorted(OWN_FIELDS & more.keys()):
            raise ConfigError(f"sample(): {taken} are set by the loop")
        if (prompt is None) == (messages is None):
            raise ConfigError("sample() takes either a prompt or messages")
        asked = {"messages": messages} if prompt is None else {"prompt": prompt}
        number, self.asked = self.asked, self.asked + 1
        asking = asyncio.ensure_future(self._ask(asked, turn=number, **more))
        self._open.add(asking)
        asking.add_done_callback(self._open.discard)
        turn = await asking
        self.turns.append(turn)
        return turn

    async def given(
        self,
        prompt: str | None = None,
        answer: str | Mapping[str, Any] = "",
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        **more: Any,
    ) -> Turn:
        """Return a turn whose answer is given, not sampled: it has no log-probs, for the loss
        `cross_entropy`.

        Args:
            answer: for a prompt, its text; for messages, the assistant's message with the chat
                template's end.
            more: what the template takes, such as `tools` or `chat_template_kwargs`.

        Raises:
            ValueError: the chat template writes a given message differently from how it prompts for
                one.
        """
        if messages is None:
            before: dict[str, Any] = {"prompt": prompt}
            whole: dict[str, Any] = {"prompt": f"{prompt}{answer}"}
        else:
            before = {"messages": messages, **more, "add_generation_prompt": True}
            whole = {"messages": [*messages, answer], **more, "add_generation_prompt": False}
        prompt_ids, ids = await self._encode(before), await self._encode(whole)
        if ids[: len(prompt_ids)] != prompt_ids and messages is None:  # merged at the seam
            ids = [*prompt_ids, *await self._encode(answer, add_special_tokens=False)]
        if ids[: len(prompt_ids)] != prompt_ids:
            raise ValueError(
                "the model's chat template writes the assistant's message otherwise than it asks "
                "for one, so no tokens are the answer's; set chat_template_kwargs, or give "
                "`prompt` and `completion`"
            )
        number, self.asked = self.asked, self.asked + 1
        said = Completion(
            prompt_ids=tuple(prompt_ids),
            answer_ids=tuple(ids[len(prompt_ids) :]),
            logprobs=(0.0,) * (len(ids) - len(prompt_ids)),
            text=answer if isinstance(answer, str) else str(answer.get("content") or ""),
            finish_reason="stop",
            tool_calls=() if isinstance(answer, str) else tuple(answer.get("tool_calls") or ()),
        )
        turn = self._give(said, turn=number)
        self.turns.append(turn)
        return turn

    def end(self) -> None:
        """End the requests that the environment did not wait for. Further ones are refused."""
        self._has_ended = True
        for asking in self._open:
            asking.cancel()

    async def encode(self, text: str) -> list[int]:
        """The text's token ids, without special tokens: what a tool said, to follow a turn's."""
        return await self._encode(text, add_special_tokens=False)


Result = float | Mapping[str, float] | Scored | Sequence[Scored]
Environment = Callable[[Row, Sample], Awaitable[Result]]


def scored(result: Result, turns: Sequence[Turn], *, trains: bool = True) -> tuple[Scored, ...]:
    """What an environment returned, checked. A number is the reward of all turns.

    Args:
        trains: False for an evaluation, which may be greedy.

    Raises:
        ValueError: nothing trains, a reward is not a number or is too large, or a turn is not this
            rollout's or would train twice.
    """
    if isinstance(result, Scored):
        found: tuple[Scored, ...] = (result,)
    elif isinstance(result, Sequence):
        found = tuple(result)
    else:
        found = (Scored(reward=as_reward(result), turns=tuple(turns)),)
    trained = [turn for part in found for turn in part.turns]
    if not found or not all(part.turns for part in found):
        raise ValueError("the environment returned a reward without a turn to train on")
    if any(turn not in turns for turn in trained):
        raise ValueError("the environment returned a turn that this rollout did not sample")
    if len({turn.number for turn in trained}) != len(trained):
        raise ValueError("the environment returned a turn twice")
    rewards = [as_reward(part.reward) for part in found]
    found = tuple(replace(p, reward=reward) for p, reward in zip(found, rewards, strict=True))
    for reward in rewards:
        for name, value in {**parts_of(reward), "": reward}.items():
            if not abs(value) <= LARGEST_REWARD:  # nor NaN
                raise ValueError(f"the reward{name and f' {name}'} is {value}")
    for turn in trained:
        if trains and turn.completion.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"turn {turn.number} was sampled at temperature {turn.completion.temperature}, at "
                "which no ratio exists; sample it warmer, or leave it out of the turns that train"
            )
    return found


# ---------------------------------------------------------------- turns -> sequences


@dataclass(slots=True, kw_only=True, eq=False)
class _Growing:
    """A sequence that later turns may extend."""

    prompt_ids: tuple[int, ...]
    temperature: float
    tokens: list[int]
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    made_by: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    routing: Routing | None = None

    def is_extended_by(self, turn: Completion) -> bool:
        prompt = turn.prompt_ids
        return (
            self.temperature == turn.temperature
            and len(self.tokens) <= len(prompt)
            and tuple(self.tokens) == prompt[: len(self.tokens)]
        )

    def extend(self, turn: Completion) -> None:
        given = turn.prompt_ids[len(self.tokens) :]
        self.tokens += (*given, *turn.answer_ids)
        self.mask += [False] * len(given) + [True] * len(turn.answer_ids)
        self.logprobs += (*([0.0] * len(given)), *turn.logprobs)
        self.texts.append(turn.text)
        self.tool_calls += turn.tool_calls
        if turn.made_by:
            self.made_by += (*([0] * len(given)), *turn.made_by)
        self.versions += (v for v in turn.versions if v not in self.versions)
        self.finish_reason = turn.finish_reason
        self.routing = _joined(self.routing, turn.routing)

    def completion(self) -> Completion:
        return Completion(
            prompt_ids=self.prompt_ids,
            answer_ids=tuple(self.tokens[len(self.prompt_ids) :]),
            logprobs=tuple(self.logprobs),
            sampled=() if all(self.mask) else tuple(self.mask),
            temperature=self.temperature,
            text="\n".join(self.texts),
            finish_reason=self.finish_reason,
            versions=tuple(self.versions),
            made_by=tuple(self.made_by) if len(self.made_by) == len(self.mask) else (),
            routing=self.routing,
            tool_calls=tuple(self.tool_calls),
        )


def _joined(before: Routing | None, turn: Routing | None) -> Routing | None:
    """An earlier token keeps the experts with which it was sampled."""
    if before is None or turn is None:
        return turn
    experts = before.experts + turn.rows(len(before), len(turn))
    return replace(turn, experts=experts)


def sequences_of(turns: Iterable[Turn]) -> tuple[Completion, ...]:
    """The sequences that train: each turn's answer is in exactly one of them."""
    made: list[_Growing] = []
    for turn in sorted(turns, key=lambda turn: turn.number):
        said = turn.completion
        longest = max(
            (sequence for sequence in made if sequence.is_extended_by(said)),
            key=lambda sequence: len(sequence.tokens),
            default=None,
        )
        if longest is None:
            longest = _Growing(
                prompt_ids=said.prompt_ids,
                temperature=said.temperature,
                tokens=list(said.prompt_ids),
            )
            made.append(longest)
        longest.extend(said)
    return tuple(sequence.completion() for sequence in made)
