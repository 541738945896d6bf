"""Reward functions as TRL has them, in the loop.

    Loop(..., reward=trl_reward(accuracy, brevity, weights=[1.0, 0.1]))

    def accuracy(completions, answer, **kwargs): return [float(...) for ...]     # TRL's lists
    def accuracy(prompt, completion, answer, **row): return float(...)           # one sample
    def accuracy(row, completion): return float(...)                             # a loop's own form

A function gets what its signature names: prompts, completions, completion_ids and the row's other
columns. The loop scores each answer when it arrives, so the lists have one element. A function that
compares the answers of a batch does not fit.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from orchestrator.errors import ConfigError
from splice.client.batches import Completion
from splice.rl.parts import PartedReward, as_reward, parts_of
from splice.rl.sampler import Row

RewardFunction = Callable[..., Any]
Parts = Sequence[tuple[RewardFunction, str, float]]
"""Each function with its kind and weight."""
LISTS, SINGLE, OWN = "completions", "completion", "row"


def trl_reward(
    *functions: RewardFunction, weights: Sequence[float] | None = None
) -> Callable[[Row, Completion], Awaitable[float] | float]:
    """The weighted sum of reward functions. A function that returns None does not count.

    Each one's own number is a part of the reward, with the function's name (`splice.rl.parts`).

    As a loop's `reward`, plain functions run on its threads (`reward_threads`), before coroutines.
    With `reward_processes`, all of them run in its processes.
    Called elsewhere, such as in an environment, they run where they are called.

    Raises:
        ConfigError: there is no function, a signature names neither `completions` nor
            `completion`, or the number of weights differs.
    """
    given = [1.0] * len(functions) if weights is None else list(weights)
    if not functions or len(given) != len(functions):
        raise ConfigError(
            f"{len(functions)} reward functions and {len(given)} weights; give one weight for each"
        )
    parts = [(f, _kind(f), weight) for f, weight in zip(functions, given, strict=True)]
    given_to = _all_async if all(map(_is_async, functions)) else _plain_first
    return partial(given_to, parts)  # can be pickled, for reward_processes


async def _all_async(parts: Parts, row: Row, completion: Completion) -> float:
    return await _rest(parts, row, completion, {})


def _plain_first(parts: Parts, row: Row, completion: Completion) -> Awaitable[float] | float:
    """The plain ones now, on the loop's thread; the coroutines where it awaits the rest."""
    known = {
        i: _call(function, kind, row, completion)
        for i, (function, kind, _) in enumerate(parts)
        if not _is_async(function)
    }
    if len(known) == len(parts):
        return _sum(parts, list(known.values()))
    return _rest(parts, row, completion, known)


async def _rest(parts: Parts, row: Row, completion: Completion, known: Mapping[int, Any]) -> float:
    scores = [
        known[i] if i in known else await _call(function, kind, row, completion)
        for i, (function, kind, _) in enumerate(parts)
    ]
    return _sum(parts, scores)


def _is_async(function: RewardFunction) -> bool:
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def _kind(function: RewardFunction) -> str:
    names = inspect.signature(function).parameters
    if next(iter(names), "") == OWN:
        return OWN
    for kind in (LISTS, SINGLE):
        if kind in names:
            return kind
    name = getattr(function, "__name__", str(function))
    raise ConfigError(f"the reward function {name} takes neither `completions` nor `completion`")


def _call(function: RewardFunction, kind: str, row: Row, completion: Completion) -> Any:
    if kind == OWN:
        return function(row, completion)
    columns = {name: value for name, value in row.items() if name not in ("prompt", "messages")}
    is_chat = "messages" in row
    prompt = row["messages"] if is_chat else row["prompt"]
    said: Any = completion.text
    if is_chat and kind == LISTS:
        said = [completion.message]
    ids = list(completion.answer_ids)
    fields = {**columns, "prompt": prompt, "completion": said, "completion_ids": ids}
    if kind == LISTS:
        fields = {name: [value] for name, value in fields.items()}
        fields |= {"prompts": fields.pop("prompt"), "completions": fields.pop("completion")}
    parameters = inspect.signature(function).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        fields = {name: value for name, value in fields.items() if name in parameters}
    return function(**fields)


def _sum(parts: Parts, scores: Sequence[Any]) -> float:
    total, found, counted = 0.0, dict[str, float](), 0
    for (function, kind, weight), score in zip(parts, scores, strict=True):
        given = score[0] if kind == LISTS else score
        if given is None:
            continue
        try:
            value, counted = as_reward(given), counted + 1
        except (TypeError, ValueError) as error:
            raise ValueError(f"{_name(function)}: {error}") from error
        total += weight * value
        own = parts_of(value) or {_name(function): float(value)}
        for name, part in own.items():
            taken = sum(n.split(".")[0] == name for n in found)
            found[f"{name}.{taken + 1}" if taken else name] = part
    if not counted:
        raise ValueError("every reward function returned None")
    return PartedReward(total, found)


def _name(function: RewardFunction) -> str:
    inner = function.func if isinstance(function, partial) else function
    return getattr(inner, "__name__", type(inner).__name__)
