"""Running completions and the gaps between their tokens, as a user of the OpenAI API sees them."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import httpx


def warm_prefill(base_url: str, model: str, *, longest: int = 2048) -> None:
    """Prompts of many lengths, one token each: kernels that a server compiles when it first sees a
    length's size and divisibility, it compiles now, not when a stream is prefilled again after a
    pause. Sizes are those for which vLLM's fused MoE has its own configurations.
    """
    sizes = (8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048)
    lengths = [size + odd for size in sizes for odd in (0, 1, 2)]
    with httpx.Client(base_url=base_url, timeout=120, trust_env=False) as http:
        for n in sorted(n for n in lengths if n <= longest):
            body = {"model": model, "prompt": [1 + i % 97 for i in range(n)], "max_tokens": 1}
            http.post("/v1/completions", json=body).raise_for_status()


class TokenStream:
    """Streams one long completion after another on a thread; use as a context manager.

    Attributes:
        times_s: arrival of every token (`time.monotonic`).
        errors: what went wrong, if anything.
    """

    def __init__(self, *, base_url: str, model: str, max_tokens: int = 4000) -> None:
        self.times_s: list[float] = []
        self.errors: list[str] = []
        self._url, self._model, self._max_tokens = base_url, model, max_tokens
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> TokenStream:
        self._thread.start()
        deadline_s = time.monotonic() + 120
        while len(self.times_s) < 10 and time.monotonic() < deadline_s and not self.errors:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=30)

    def gap_s(self, *, start_s: float, end_s: float) -> float:
        """The largest gap between tokens that ends or begins within the interval."""
        near = [
            (a, b)
            for a, b in zip(self.times_s, self.times_s[1:], strict=False)
            if b >= start_s and a <= end_s
        ]
        return max((b - a for a, b in near), default=float("nan"))

    def wait_for_token_after(self, moment_s: float, *, timeout_s: float = 60.0) -> None:
        """Wait until a token has come after `moment_s`."""
        deadline_s = time.monotonic() + timeout_s
        while (
            time.monotonic() < deadline_s
            and not self.errors
            and not (self.times_s and self.times_s[-1] > moment_s)
        ):
            time.sleep(0.002)

    def _run(self) -> None:
        body = {
            "model": self._model,
            "prompt": [1, 2, 3],
            "max_tokens": self._max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.Client(base_url=self._url, timeout=120, trust_env=False) as http:
            while not self._stop.is_set():
                with http.stream("POST", "/v1/completions", json=body) as response:
                    if response.status_code != 200:
                        self.errors.append(response.read().decode()[:300])
                        return
                    for line in response.iter_lines():
                        if line.startswith("data: {"):
                            self.times_s.append(time.monotonic())
                        if self._stop.is_set():
                            return


@dataclass(slots=True, kw_only=True)
class Request:
    """One streamed completion: when tokens came (`time.monotonic`), how many at a time, how many
    were asked for.
    """

    wanted: int
    start_s: float
    times_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    error: str | None = None

    @property
    def lost(self) -> str | None:
        """Why this request counts as lost: an error, or an end before all its tokens. None: it is
        whole, or still running.
        """
        got = f"{sum(self.tokens)} of {self.wanted} tokens"
        if self.error is not None:
            return f"{self.error}, after {got}"
        return got if self.ended and sum(self.tokens) != self.wanted else None


def largest_gap_s(requests: Sequence[Request], *, start_s: float, end_s: float) -> float:
    """The largest gap between two tokens of one request that ends after `start_s` and begins before
    `end_s`; nan without any.
    """
    pairs = (pair for r in requests for pair in itertools.pairwise(r.times_s))
    return max((b - a for a, b in pairs if b >= start_s and a <= end_s), default=float("nan"))


def largest_gap_within_s(requests: Sequence[Request], *, start_s: float, end_s: float) -> float:
    """The same of gaps that end within the interval."""
    pairs = (pair for r in requests for pair in itertools.pairwise(r.times_s))
    return max((b - a for a, b in pairs if start_s <= b <= end_s), default=float("nan"))


def step_s(requests: Sequence[Request], *, start_s: float, end_s: float) -> float:
    """Time for each token of a request within the interval: the median over requests of their
    means, because tokens may come several at a time. nan without any.
    """
    means = []
    for r in requests:
        came = [(t, n) for t, n in zip(r.times_s, r.tokens, strict=True) if start_s <= t <= end_s]
        if len(came) > 1:
            means.append((came[-1][0] - came[0][0]) / sum(n for _, n in came[1:]))
    return median(means or [float("nan")])


def tokens_per_s(requests: Sequence[Request], *, start_s: float, end_s: float) -> float:
    """Tokens of all requests that came within the interval, per second."""
    came = (
        n
        for r in requests
        for t, n in zip(r.times_s, r.tokens, strict=True)
        if start_s <= t < end_s
    )
    return sum(came) / (end_s - start_s)


class Streams:
    """`count` completions at a time, each followed by another, on one thread; use as a context
    manager.

    On leaving, what runs may end by itself, so that every request is either whole or lost.

    Args:
        prompt_tokens: length of each prompt, of random tokens, so that no two have a prefix in
            common.
        min_tokens, max_tokens: each answer wants a random number between them, so that they do not
            end together. Where one ends, its successor's prefill is a longer step for all: a gap
            that no publication made.
    """

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        count: int,
        prompt_tokens: int,
        min_tokens: int,
        max_tokens: int,
        vocab_size: int,
    ) -> None:
        self.requests: list[Request] = []
        self._url, self._model, self._count = base_url, model, count
        self._prompt_tokens, self._min_tokens, self._max_tokens, self._vocab_size = (
            prompt_tokens,
            min_tokens,
            max_tokens,
            vocab_size,
        )
        self._current: list[Request | None] = [None] * count
        self._random = random.Random(0)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run()), name="splice-streams", daemon=True
        )

    def __enter__(self) -> Streams:
        self._thread.start()
        try:
            self.wait_all_after(time.monotonic())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=180)

    def wait_all_after(self, moment_s: float, *, timeout_s: float = 120.0) -> None:
        """Wait until every stream has had a token, or a new request, after `moment_s`.

        Raises:
            TimeoutError: a stream stalls.
        """
        deadline_s = time.monotonic() + timeout_s
        while not all(
            r is not None and r.times_s and r.times_s[-1] > moment_s for r in self._current
        ):
            if time.monotonic() > deadline_s or not self._thread.is_alive():
                raise TimeoutError(
                    f"not every stream has gone on within {timeout_s:.0f} s; lost: {self.lost()}"
                )
            time.sleep(0.005)

    def lost(self) -> list[str]:
        """Why requests were lost, one entry each."""
        return [r.lost for r in list(self.requests) if r.lost is not None]

    async def _run(self) -> None:
        # vLLM closes a connection after 5 s of idleness, or of its own: a request sent just then
        # would count as lost. A connection for each.
        limits = httpx.Limits(max_connections=self._count, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=self._url, timeout=120, limits=limits, trust_env=False
        ) as http:
            await asyncio.gather(*(self._stream(http, n) for n in range(self._count)))

    async def _stream(self, http: httpx.AsyncClient, number: int) -> None:
        while not self._stop.is_set():
            wanted = self._random.randint(self._min_tokens, self._max_tokens)
            request = Request(wanted=wanted, start_s=time.monotonic())
            self._current[number] = request
            self.requests.append(request)
            try:
                await self._complete(http, request)
            except httpx.HTTPError as error:
                request.error = f"{type(error).__name__}: {error}"
            request.ended = True
            if request.error is not None:
                await asyncio.sleep(0.1)

    async def _complete(self, http: httpx.AsyncClient, request: Request) -> None:
        prompt = [self._random.randrange(10, self._vocab_size) for _ in range(self._prompt_tokens)]
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": request.wanted,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        async with http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                request.error = (
                    f"HTTP {response.status_code}: {(await response.aread()).decode()[:300]}"
                )
                return
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.monotonic()
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    request.error = str(event["error"])[:300]
                    return
                count = sum(len(choice.get("token_ids") or ()) for choice in event["choices"])
                if count:
                    request.times_s.append(now)
                    request.tokens.append(count)
