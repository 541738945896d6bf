"""Rollouts from the served alias, with the version of every token.

vLLM answers as a stream, because its events name the version of their tokens exactly
(docs/operation.md). A plain answer that spans versions does not say where one ends. A token without
a version is an error; it is never guessed.

    async with Sampler(client.status, name="tiny", max_in_flight=64) as sampler:
        answer = await sampler.sample(row, sampling, seed=3, timeout_s=60.0)
        answer.spans    # ((4, 17), (5, 3)): 17 tokens by version 4, then 3 by version 5
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from orchestrator.errors import ConfigError, ErrorCode, SpliceError
from orchestrator.protocol.messages import Status
from splice.client.batches import ASK, ASK_CHAT, Completion, Routing
from splice.client.replicas import Replica, Replicas
from splice.rl.balance import Meter
from splice.rl.bodies import CHAT, COMPLETIONS, FIELDS, check_fields, json_of, plain
from splice.rl.config import OWN_FIELDS, SamplingConfig
from splice.rl.routing import routing_of

log = logging.getLogger("splice.rl")
Row = Mapping[str, Any]
POLL_S = 1.0
"""Seconds between two looks at the replicas."""
SILENT_S = 5.0
"""Seconds without a ready replica before the log says so."""
CONNECT_S = 10.0
JSON = {"content-type": "application/json"}
ENCODE_TIMEOUT_S = 60.0
KEEP_ALIVE_S = 2.0
"""Idle connections are closed before vLLM closes them, after 5 s."""
STREAM_INTERVALS = range(24, 41)
"""Tokens of an event. With an event for each token, a core of vLLM's API process and one of ours
would set the pace of many streams. Numbers differ, so that streams do not send together."""
GENERATE = "/inference/v1/generate"
_ENCODED = (
    "prompt", "messages", "chat_template_kwargs", "chat_template", "tools",
    "add_generation_prompt", "continue_final_message",
)  # fmt: skip # a list of names
"""Fields of a request that its token ids depend on."""
_NOT_SAMPLING = OWN_FIELDS | set(_ENCODED)
"""Fields of a request that are not vLLM sampling parameters."""
_SAMPLING = frozenset({
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos",
    "stop", "stop_token_ids", "include_stop_str_in_output", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "repetition_detection", "logit_bias",
    "allowed_token_ids", "bad_words", "structured_outputs", "thinking_token_budget",
    "skip_special_tokens", "spaces_between_special_tokens", "extra_args", "stream_interval",
})  # fmt: skip # a list of names
"""vLLM's sampling parameters. Its route of token ids silently drops every other field."""
_FAULTS = frozenset({400, 413, 422})
"""Codes of an error within a stream that another attempt would meet again."""
_PASSING = frozenset({404, 408, 409, 429, 500, 502, 503, 504})
"""Statuses of a replica that restarts, is being swapped, or was left out."""


class RolloutLost(SpliceError, RuntimeError):
    """An answer did not arrive whole, through no fault of its request; ask again."""

    code = ErrorCode.NODE_LOST


class RequestRefused(ConfigError):
    """A request that vLLM refuses, and would again; or a row that makes no request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One sampled answer.

    Attributes:
        spans: (version, number of tokens), in order; they cover all of the answer's tokens.
        replica: the node that sampled it.
    """

    completion: Completion
    spans: tuple[tuple[int, int], ...]
    replica: str


class Sampler:
    """Sends requests to the replicas that are ready, the least busy one first.

    Args:
        status: asks the orchestrator which replicas there are.
        name: the served alias.
        max_in_flight: most requests at once.
        router_replay: answers have the experts of each token.
    """

    def __init__(
        self,
        status: Callable[[], Awaitable[Status]],
        *,
        name: str,
        max_in_flight: int,
        router_replay: bool = False,
    ) -> None:
        self._status, self._name, self._replays = status, name, router_replay
        self.replicas = Replicas()
        self._has_said_none = False
        limits = httpx.Limits(
            max_connections=None,
            max_keepalive_connections=max_in_flight,
            keepalive_expiry=KEEP_ALIVE_S,
        )
        self._http = httpx.AsyncClient(limits=limits, trust_env=False)
        self._watching: asyncio.Task[None]

    async def __aenter__(self) -> Sampler:
        await self._look()
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watching.cancel()
        await asyncio.wait({self._watching})
        await self._http.aclose()

    # ------------------------------------------------------------ the replicas

    async def _watch(self) -> None:
        has_said = False  # once for each outage
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self._look()
                has_said = False
            except (TimeoutError, SpliceError) as error:  # replicas serve without an orchestrator
                if not has_said:
                    has_said = True
                    log.warning("cannot ask for the replicas: %s", error)

    async def _look(self) -> None:
        self.replicas.update((await self._status()).nodes)

    async def choose(self, meter: Meter | None = None) -> Replica:
        """Wait for a replica that has not failed lately; returns the least busy one."""
        meter, began_s = meter or Meter(), time.monotonic()
        while True:
            now_s = time.monotonic()
            ready = self.replicas.ready()
            if free := [r for r in ready if r.avoid_until_s <= now_s]:
                self._has_said_none = False
                return free[0]
            if now_s - began_s > SILENT_S and not self._has_said_none:
                self._has_said_none = True  # once for each outage
                log.warning(
                    "no replica has been ready for %.0f s; requests wait. `splice status` shows "
                    "the replicas, and `splice logs` what they say",
                    now_s - began_s,
                )
            until_s = min((r.avoid_until_s for r in ready), default=now_s + POLL_S)
            with meter.during("no_replica"):
                await asyncio.sleep(until_s - now_s)

    def distrust(self, node_id: str) -> None:
        """Ask other replicas than this one for a while."""
        if node_id in self.replicas.by_id:
            self.replicas.by_id[node_id].failed()

    # ------------------------------------------------------------ one answer

    async def sample(
        self,
        row: Row,
        sampling: SamplingConfig,
        *,
        seed: int | None = None,
        meter: Meter | None = None,
        **more: Any,
    ) -> Answer:
        """Return one answer to the row's `prompt` (text or token ids) or `messages`.

        Args:
            seed: of this request.
            meter: counts the time that the request is with a replica, or waits for one.
            more: further fields of the request.

        Raises:
            RolloutLost: the replica failed, or the publication ended the request.
            RequestRefused: vLLM refuses the request.
            ConfigError: the answer lacks what a batch needs.
        """
        meter = meter or Meter()
        path, body = _request(row, sampling, seed, more)
        if self._replays:
            path, body = GENERATE, await self._generate(body, meter)
        body = {"model": self._name, **body}
        content = _content(body)
        replica = await self.choose(meter)
        try:
            with meter.during("sampling"), self.replicas.counted(replica):
                return await _unless_stopped(replica, self._stream(replica, path, body, content))
        except httpx.TransportError as error:
            replica.failed()
            raise RolloutLost(f"{replica.node_id}: {error or type(error).__name__}") from error
        except RolloutLost:
            replica.failed()
            raise

    async def encode(
        self, row: Row, *, add_special_tokens: bool = True, meter: Meter | None = None
    ) -> list[int]:
        """The token ids of the row's `prompt` or `messages`, as a replica encodes them.

        Raises:
            RolloutLost: the replica failed.
            RequestRefused: vLLM refuses the text.
        """
        meter = meter or Meter()
        content = _content(
            {
                "model": self._name,
                "add_special_tokens": add_special_tokens and "messages" not in row,
                **{name: row[name] for name in _ENCODED if name in row},
            }
        )
        replica = await self.choose(meter)
        url = f"{replica.url}/tokenize"
        try:
            with meter.during("sampling"):
                response = await self._http.post(
                    url, content=content, headers=JSON, timeout=ENCODE_TIMEOUT_S
                )
        except httpx.TransportError as error:
            replica.failed()
            raise RolloutLost(f"{replica.node_id}: {error or type(error).__name__}") from error
        if response.status_code != 200:
            raise _refusal(replica.node_id, response.status_code, response.text)
        tokens: list[int] = response.json()["tokens"]
        return tokens

    async def _generate(self, body: dict[str, Any], meter: Meter) -> dict[str, Any]:
        """The same request for vLLM's route of token ids, whose streams have routed experts.

        Raises:
            ConfigError: that route has no such field.
        """
        if unknown := sorted(body.keys() - _NOT_SAMPLING - _SAMPLING):
            raise ConfigError(
                f"router_replay asks vLLM's {GENERATE}, which ignores {unknown}; leave them out of "
                "sampling.extra and of sample(), or turn router_replay off"
            )
        prompt: Any = body.get("prompt", "")
        token_ids = prompt
        if isinstance(prompt, str):
            token_ids = await self.encode(body, meter=meter)
        sampling = {n: v for n, v in body.items() if n not in _NOT_SAMPLING}
        return {
            "token_ids": token_ids,
            "sampling_params": {**sampling, "logprobs": 0},
            "stream": True,
            "output_mode": "text",
        }

    async def _stream(
        self, replica: Replica, path: str, body: Mapping[str, Any], content: bytes
    ) -> Answer:
        # vLLM sends nothing while a request waits in its queue; the caller's deadline bounds it.
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        url = f"{replica.url}{path}"
        async with self._http.stream(
            "POST", url, content=content, headers=JSON, timeout=timeout
        ) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise _refusal(replica.node_id, response.status_code, text)
            made = _Made(
                name=self._name,
                replica=replica.node_id,
                prompt_ids=body.get("token_ids", []),
                replays=self._replays,
            )
            async for line in _lines(response):
                if line.startswith(b"data: {"):
                    made.add(json.loads(line[6:]))
                elif line == b"data: [DONE]":
                    replica.failures = 0
                    settings = body.get("sampling_params", body)
                    return made.answer(temperature=settings["temperature"])
        raise RolloutLost(f"{replica.node_id} ended the stream early")


async def _unless_stopped(replica: Replica, request: Coroutine[Any, Any, Answer]) -> Answer:
    """Return the answer, unless its replica stops first.

    Raises:
        RolloutLost: it stopped.
    """
    flight = asyncio.create_task(request)
    stopped = asyncio.create_task(replica.stopped.wait())
    try:
        await asyncio.wait((flight, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not flight.done():
            raise RolloutLost(f"{replica.node_id} is gone")
        return await flight
    finally:
        stopped.cancel()
        if flight.cancel():
            await asyncio.wait((flight,))


def _refusal(node_id: str, status: int, text: str) -> RolloutLost | RequestRefused:
    if status in _PASSING:
        return RolloutLost(f"{node_id} answers {status}: {text[:2000]}")
    return RequestRefused(f"{node_id} refuses the request ({status}): {text[:2000]}")


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of a stream. httpx's own also end at characters such as U+2028 in a token."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")


def _request(
    row: Row, sampling: SamplingConfig, seed: int | None, more: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Path and body, without the model."""
    fields = {**sampling.extra, **more}
    # Some of vLLM's parsers of tools lose text where an event has several tokens.
    interval = 1 if "tools" in fields else random.choice(STREAM_INTERVALS)
    body: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "stream": True,
        "stream_interval": interval,
        **fields,
    }
    if seed is not None:
        body["seed"] = seed
    check_row(row)
    path, given, ask = (
        (CHAT, "messages", ASK_CHAT) if "messages" in row else (COMPLETIONS, "prompt", ASK)
    )
    check_fields(body, known=FIELDS[path], where=f"{path}, for a row with `{given}`: ")
    return path, {given: plain(row[given]), **body, **ask}


def check_row(row: Any) -> None:
    """Refuse anything that is not a row with a prompt.

    Raises:
        RequestRefused: says what it needs.
    """
    if not isinstance(row, Mapping):
        raise RequestRefused(
            f'a prompt is a row such as {{"prompt": "2 + 3 ="}}, not {type(row).__name__}'
        )
    if "messages" in row and "prompt" in row:
        raise RequestRefused("a row has `prompt` or `messages`, not both")
    if "messages" not in row and "prompt" not in row:
        names = sorted(map(str, row))
        raise RequestRefused(f"a row needs `prompt` or `messages`; it has {names}")
    prompt = plain(row.get("prompt"))
    if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        raise RequestRefused(
            "`prompt` holds messages, as in TRL's conversational data sets; name them `messages`"
        )


def _content(body: Mapping[str, Any]) -> bytes:
    try:
        return json_of(body)
    except ValueError as error:
        raise RequestRefused(f"the request is not JSON: {error}") from error


@dataclass(slots=True, kw_only=True)
class _Made:
    """What came of one answer so far."""

    name: str
    replica: str
    prompt_ids: list[int] = field(default_factory=list)
    answer_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    made_by: list[int] = field(default_factory=list)
    text: str = ""
    tool_calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    finish_reason: str | None = None
    replays: bool = False
    routing: Routing | None = None

    def add(self, event: Mapping[str, Any]) -> None:
        """Take one event of the stream."""
        if "error" in event:
            text = f"{self.replica}: {event['error'].get('message', event['error'])}"
            if event["error"].get("code") in _FAULTS:
                raise RequestRefused(text)
            raise RolloutLost(text)
        choices = event.get("choices") or [{}]
        choice = choices[0]
        prompt_ids = choice.get("prompt_token_ids") or event.get("prompt_token_ids")
        if prompt_ids:
            self.prompt_ids = list(prompt_ids)
        delta = choice.get("delta")
        self.text += (choice.get("text") if delta is None else delta.get("content")) or ""
        for part in (delta or {}).get("tool_calls") or ():
            self._add_call(part)
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if choice.get("routed_experts"):
            self.routing = routing_of(choice["routed_experts"])
        ids = choice.get("token_ids") or []
        if not ids:
            return
        given = choice.get("logprobs") or {}
        logprobs = given.get("token_logprobs")
        if logprobs is None:
            logprobs = [token["logprob"] for token in given.get("content") or []]
        if len(logprobs) != len(ids):
            raise ConfigError(
                f"an event has {len(ids)} token ids and {len(logprobs)} log-probs; "
                "a request with `echo` or a tool parser does this"
            )
        self.answer_ids += ids
        self.logprobs += map(float, logprobs)
        version = version_of(event, name=self.name)
        self._span(version, len(ids))
        # An update may have come within the prompt, before any token.
        is_mixed = len(event.get("versions") or ()) > 1 or len(self.spans) > 1
        self.made_by += [-1 - version if is_mixed else version] * len(ids)

    def _add_call(self, part: Mapping[str, Any]) -> None:
        """Take a part of a tool call: its id and name come first, its arguments in pieces."""
        new = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        call = self.tool_calls.setdefault(part["index"], new)
        call["id"] = call["id"] or part.get("id") or ""
        for name in call["function"]:
            call["function"][name] += (part.get("function") or {}).get(name) or ""

    def _span(self, version: int, count: int) -> None:
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1] + count)
        else:
            self.spans.append((version, count))

    def answer(self, *, temperature: float) -> Answer:
        """The whole answer."""
        if self.finish_reason == "abort":
            raise RolloutLost(f"{self.replica} aborted the request (pause mode abort)")
        if not self.prompt_ids or self.finish_reason is None:
            raise RolloutLost(f"{self.replica} ended the stream without an answer")
        if self.replays and self.routing is None:
            raise ConfigError(
                f"{self.replica} sent no routed experts, which router_replay needs; put "
                "--enable-return-routed-experts into inference.extra_args"
            )
        completion = Completion(
            prompt_ids=tuple(self.prompt_ids),
            answer_ids=tuple(self.answer_ids),
            logprobs=tuple(self.logprobs),
            temperature=temperature,
            text=self.text,
            finish_reason=self.finish_reason,
            versions=tuple(version for version, _ in self.spans),
            made_by=tuple(self.made_by),
            routing=self.routing,
            tool_calls=tuple(call for _, call in sorted(self.tool_calls.items())),
        )
        return Answer(completion=completion, spans=tuple(self.spans), replica=self.replica)


def version_of(event: Mapping[str, Any], *, name: str) -> int:
    """Return the version that an event's `model` names; the route of token ids has `versions`.

    Raises:
        ConfigError: it names none, so nobody knows which weights made the tokens.
    """
    if "model" not in event and event.get("versions"):
        return int(event["versions"][-1])
    said, _, version = str(event.get("model", "")).rpartition("@")
    if said != name or not version.isdigit():
        raise ConfigError(
            f"the server says model {event.get('model')!r} for its tokens instead of {name}@N; "
            "ask splice's server itself, not a proxy that renames models"
        )
    return int(version)
