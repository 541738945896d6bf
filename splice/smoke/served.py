"""Checks of a served version over the OpenAI API."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from statistics import median
from typing import Any

import httpx

from orchestrator.errors import SpliceError

Logprobs = list[list[float]]


class ServedError(SpliceError, RuntimeError):
    """The server returned a wrong alias, version or header."""


def probe_sequences(
    *, vocab_size: int, prompts: Sequence[Sequence[int]], count: int = 12, length: int = 24
) -> list[list[int]]:
    """Token sequences for the comparison of log-probs.

    These are the prompts, and random sequences that reach every expert and many embeddings.
    """
    rng = random.Random(20)
    return [list(p) for p in prompts] + [
        [rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)
    ]


async def prompt_logprobs(
    http: httpx.AsyncClient, *, model: str, sequences: Sequence[Sequence[int]]
) -> Logprobs:
    """Log-probs of the tokens under the served `model`; 0.0 for the first of each sequence."""

    async def one(ids: Sequence[int]) -> list[float]:
        body = {
            "model": model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        response = await http.post("/v1/completions", json=body)
        if response.status_code != 200:
            raise ServedError(f"{model} answered {response.status_code}: {response.text[:500]}")
        rows = response.json()["choices"][0]["prompt_logprobs"]
        return [0.0, *(_of_token(row, token) for row, token in zip(rows[1:], ids[1:], strict=True))]

    return list(await asyncio.gather(*(one(s) for s in sequences)))


def _of_token(row: dict[str, Any], token: int) -> float:
    value = float(row[str(token)]["logprob"])
    if not math.isfinite(value):
        raise ServedError(f"the served log-prob of token {token} is {value}")
    return value


async def check_alias(http: httpx.AsyncClient, *, name: str, version: int) -> None:
    """Check the alias over the API.

    `/v1/models` must list `name` and `name@N` only. Neighbouring versions must answer 404 and name
    the current one. Headers must carry the version.

    Raises:
        ServedError: names the broken promise.
    """
    response = await http.get("/v1/models")
    listed = {m["id"] for m in response.json()["data"]}
    if listed != {name, f"{name}@{version}"}:
        raise ServedError(
            f"/v1/models lists {sorted(listed)}, expected {name} and {name}@{version}"
        )
    _check_header(response, version)
    for model in (name, f"{name}@{version}"):
        body = {"model": model, "prompt": [1], "max_tokens": 1, "temperature": 0.0}
        answer = await http.post("/v1/completions", json=body)
        if answer.status_code != 200 or answer.json()["model"] != f"{name}@{version}":
            raise ServedError(
                f"{model} answered {answer.status_code} {answer.text[:200]}, "
                f"expected model {name}@{version}"
            )
        _check_header(answer, version)
    for other in {version + 1, max(version - 1, 0)} - {version}:
        answer = await http.post(
            "/v1/completions", json={"model": f"{name}@{other}", "prompt": [1], "max_tokens": 1}
        )
        if answer.status_code != 404 or f"{name}@{version}" not in answer.text:
            raise ServedError(
                f"{name}@{other} answered {answer.status_code} {answer.text[:200]}, "
                "expected a 404 that names the current version"
            )
        _check_header(answer, version)
    closed = await http.post("/pause")
    if closed.status_code != 403:
        raise ServedError(f"/pause answered {closed.status_code} to an API user, expected 403")


def _check_header(response: httpx.Response, version: int) -> None:
    got = response.headers.get("x-splice-version")
    if got != str(version):
        raise ServedError(
            f"{response.request.url} carries x-splice-version {got!r}, expected {version}"
        )


def max_difference(a: Logprobs, b: Logprobs) -> float:
    """Largest absolute difference in nats, without the first token of each sequence.

    Infinite if shapes disagree or a value is not finite.
    """
    return max(_differences(a, b), default=math.inf)


def median_difference(a: Logprobs, b: Logprobs) -> float:
    """Median absolute difference over the tokens of `max_difference`, infinite as there."""
    differences = _differences(a, b)
    return median(differences) if differences and max(differences) < math.inf else math.inf


def way(logprobs: Logprobs, own: Logprobs, previous: Logprobs) -> float:
    """The b for which `previous + b (own - previous)` is nearest to `logprobs`, in the sum of
    absolute differences over the tokens of `max_difference`: the median of (logprobs - previous) /
    (own - previous), weighted by |own - previous|. nan if shapes disagree, nothing differs, or a
    value is not finite.
    """
    return _way(_tokens(logprobs, own, previous))


def is_way_visible(
    own: Logprobs, rounded: Logprobs, previous: Logprobs, *, times: float, draws: int = 100
) -> bool:
    """Whether `way` stays within 0.5 of 1 for log-probs that equal `own` plus rounding errors. The
    errors are `times` as large as those of `rounded`, with random signs. Every draw must pass."""
    rng, tokens = random.Random(20), _tokens(own, rounded, previous)
    for _ in range(draws):
        drawn = [(a + times * rng.choice((-1, 1)) * (x - a), a, b) for a, x, b in tokens]
        if not abs(_way(drawn) - 1) < 0.5:
            return False
    return True


def _way(tokens: Sequence[tuple[float, ...]]) -> float:
    if not all(math.isfinite(value) for values in tokens for value in values):
        return math.nan
    ways = [((x - b) / (a - b), abs(a - b)) for x, a, b in tokens if a != b]
    half, passed = sum(weight for _, weight in ways) / 2, 0.0
    for ratio, weight in sorted(ways):
        passed += weight
        if passed >= half:
            return ratio
    return math.nan


def _differences(a: Logprobs, b: Logprobs) -> list[float]:
    return [
        abs(x - y) if math.isfinite(x) and math.isfinite(y) else math.inf for x, y in _tokens(a, b)
    ]


def _tokens(*tables: Logprobs) -> list[tuple[float, ...]]:
    """Of each table a token's log-prob, without the first of each sequence; none if shapes
    disagree."""
    if len({tuple(len(row) for row in table) for table in tables}) > 1:
        return []
    return [
        values
        for rows in zip(*tables, strict=True)
        for values in zip(*(row[1:] for row in rows), strict=True)
    ]
