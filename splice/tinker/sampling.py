"""Samples from the inference nodes.

A snapshot is `name@N`: vLLM refuses the name once another version is served, so an old snapshot is
never served wrong. With `old_snapshots` it is served again, as a later version, and every sample
waits for its turn (`snapshots`). An inflight sampler is the alias; a stream then names the version
of every token. Futures of samples are only in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from tinker import types

from orchestrator.errors import NodeLost, SpliceError
from splice.client.batches import ASK
from splice.client.clients import SpliceClient
from splice.rl.config import SamplingConfig
from splice.rl.sampler import RolloutLost, Sampler
from splice.tinker.books import Books, Result, defect, failure
from splice.tinker.config import TinkerConfig
from splice.tinker.jobs import BaseModel
from splice.tinker.refused import BUSY, GONE, UNSUPPORTED, Refused, malformed, unsupported
from splice.tinker.snapshots import Snapshots
from splice.tinker.wire import Sampled, Samples, TopK, sample_output

log = logging.getLogger("splice.tinker")
KEPT, KEPT_BYTES = 4096, 256 * 2**20
"""Newest samples whose results stay, in addition to those that run, and their bytes."""
SCORES_AT_ONCE = 2
"""Scores of the base model that wait for the trainer on a thread each."""
RETRY_S = 0.5
_PASSING = frozenset({429, 500, 502, 503, 504})
"""vLLM's answers while a replica starts or is being swapped."""
_TOKEN = "token_id:"


@dataclass(slots=True, kw_only=True)
class _Future:
    digest: str
    task: asyncio.Task[Result]


class NotServed(Refused):
    """A sampler's version is not served any more."""

    def __init__(self, text: str) -> None:
        super().__init__(UNSUPPORTED, text)


class Sampling:
    """Samplers' requests and their futures, on the event loop."""

    def __init__(
        self,
        client: SpliceClient,
        books: Books,
        config: TinkerConfig,
        base: BaseModel,
        snapshots: Snapshots | None = None,
    ) -> None:
        self._client, self._books, self._config, self._base = client, books, config, base
        self._snapshots = snapshots
        self._futures: OrderedDict[str, _Future] = OrderedDict()
        self._kept_bytes = 0
        self._scores = asyncio.Semaphore(SCORES_AT_ONCE)
        self._name = client.status().name
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(config.sample_timeout_s, connect=10.0),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0),
            trust_env=False,
        )
        self._streams = Sampler(self._status, name=self._name, max_in_flight=256)
        self._context_length = 0
        self._temperatures = {config.temperature, 0.0}
        """Temperatures that need no warning: the policy's, greedy, and those that had one."""

    async def __aenter__(self) -> Sampling:
        await self._streams.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        tasks = [future.task for future in self._futures.values() if not future.task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._streams.__aexit__(*exc)
        await self._http.aclose()

    async def context_length(self) -> int:
        """Return the longest sequence that vLLM takes.

        Raises:
            Refused: no replica says so.
        """
        if not self._context_length:
            try:
                replica = await self._streams.choose()
                reply = await self._http.get(f"{replica.url}/v1/models")
                served = reply.raise_for_status().json()["data"]
            except httpx.HTTPError as error:
                raise Refused(BUSY, f"no replica is ready yet: {error}") from error
            self._context_length = min(int(model["max_model_len"]) for model in served)
        return self._context_length

    async def _status(self) -> Any:
        """The run's status; waits for an orchestrator that starts again."""
        while True:
            try:
                return await asyncio.to_thread(self._client.status)
            except (NodeLost, TimeoutError) as error:
                log.info("a sample waits for the orchestrator: %s", error)
                await asyncio.sleep(RETRY_S)

    # ------------------------------------------------------------ futures

    def accept(self, asked: types.SampleRequest, body: bytes) -> tuple[str, list[str]]:
        """Start a request; returns its future's id and the ids of its sequences.

        Raises:
            Refused: it asks for what this server lacks, or another request has its number.
        """
        check(asked)
        self._note_temperature(asked)
        sampler = self._books.sampler(str(asked.sampling_session_id))
        future_id = f"{sampler['sampler_id']}:{asked.seq_id}"
        digest = hashlib.sha256(body).hexdigest()
        known = self._futures.get(future_id)
        if known is not None and known.digest != digest:
            raise malformed(
                f"request {asked.seq_id} of {sampler['sampler_id']} was another one; a seq_id "
                "names one request"
            )
        if known is None:
            task = asyncio.ensure_future(self._answer(asked, sampler))
            self._futures[future_id] = _Future(digest=digest, task=task)
            self._forget()
        return future_id, [f"{future_id}:{i}" for i in range(asked.num_samples)]

    def _note_temperature(self, asked: types.SampleRequest) -> None:
        """Say once of each temperature that the trained policy has another one."""
        given = asked.sampling_params.temperature
        if only_scores(asked) or given in self._temperatures:
            return
        self._temperatures.add(given)
        log.warning(
            "a recipe samples at temperature %s, and policy losses train the policy at %s: these "
            "samples are off policy. If it trains on them, start with --temperature %s",
            given,
            self._config.temperature,
            given,
        )

    def _forget(self) -> None:
        """Drop the oldest results beyond the bounds."""
        for future_id in list(self._futures):
            if len(self._futures) <= KEPT and self._kept_bytes <= KEPT_BYTES:
                return
            task = self._futures[future_id].task
            if task.done():
                self._kept_bytes -= 0 if task.cancelled() else len(task.result().body)
                del self._futures[future_id]

    def has(self, future_id: str) -> bool:
        """Whether it is the future of a sample that this process knows."""
        return future_id in self._futures

    async def result(self, future_id: str, *, timeout_s: float) -> Result | None:
        """Wait for a result; None: not yet.

        Raises:
            Refused: the request was cancelled.
        """
        task = self._futures[future_id].task
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if not done:
            return None
        if task.cancelled():
            raise Refused(GONE, f"future {future_id} was cancelled")
        return task.result()

    def cancel(self, future_id: str) -> None:
        """End a request that nobody waits for."""
        if future_id in self._futures:
            self._futures[future_id].task.cancel()

    async def _answer(self, asked: types.SampleRequest, sampler: Mapping[str, Any]) -> Result:
        result = await self._outcome(asked, sampler)
        self._kept_bytes += len(result.body)
        return result

    async def _outcome(self, asked: types.SampleRequest, sampler: Mapping[str, Any]) -> Result:
        try:
            async with asyncio.timeout(self._config.sample_timeout_s):
                samples = await self._sample(asked, sampler)
        except (Refused, SpliceError) as error:
            return failure(str(error), is_user=isinstance(error, Refused))
        except TimeoutError:
            text = f"no sample within {self._config.sample_timeout_s:.0f} s"
            return failure(text, is_user=False)
        except Exception as error:
            log.exception("a sample failed, which is a defect of splice tinker")
            return defect(error)
        said = ";".join(
            ",".join(f"{version}x{count}" for version, count in sampled.spans)
            for sampled in samples.sequences
        )
        body = sample_output(samples)
        return Result(body=body, media="application/x-protobuf", versions=said)

    # ------------------------------------------------------------ the three kinds of samplers

    async def _sample(self, asked: types.SampleRequest, sampler: Mapping[str, Any]) -> Samples:
        if sampler["kind"] == "inflight":
            async with self._turn(self._books.fact("newest")):
                if wants_more(asked):
                    return await self._completions(asked, self._name)
                return await self._inflight(asked)
        served, version = self._books.fact("served"), sampler["version"]
        if sampler["kind"] == "base" and self._books.is_base(served["version"]):
            version = self._books.served_snapshot()
        is_base = sampler["kind"] == "base" or self._books.is_base(version)
        if version is None and self._snapshots is not None and not only_scores(asked):
            initial = self._books.fact("initial")
            version = initial.get("version") if initial["is_base"] else None
        if is_base and version != served["version"] and only_scores(asked):
            return await self._score_base(asked)
        if version is None:
            raise unsupported(
                "the base model is not served any more, because a trained version is; it still "
                "scores prompts (compute_logprobs). A server with --old-snapshots serves it again"
            )
        try:
            async with self._turn(version) as now:
                return await self._completions(asked, f"{self._name}@{now}", snapshot=version)
        except NotServed:
            if is_base and only_scores(asked):  # a publication came between
                return await self._score_base(asked)
            raise

    @contextlib.asynccontextmanager
    async def _turn(self, snapshot: int | None) -> AsyncIterator[int | None]:
        """Yield the version that a snapshot has now."""
        if snapshot is None:
            yield None
            return
        if self._snapshots is None:
            # A server with --old-snapshots may have served it again before.
            is_served = snapshot == self._books.served_snapshot()
            yield int(self._books.fact("served")["version"]) if is_served else snapshot
            return
        async with self._snapshots.turn(snapshot) as version:
            yield version

    async def _inflight(self, asked: types.SampleRequest) -> Samples:
        """Each sequence its own stream, with the version of every token."""
        row = {"prompt": prompt_of(asked)}
        more = await self._fields(asked)
        limits = SamplingConfig(
            max_tokens=more.pop("max_tokens"), temperature=more.pop("temperature")
        )
        seed = more.pop("seed", None)
        answers = await asyncio.gather(
            *(
                self._stream(row, limits, None if seed is None else seed + i, more)
                for i in range(asked.num_samples)
            )
        )
        return Samples(
            sequences=tuple(
                Sampled(
                    tokens=answer.completion.answer_ids,
                    logprobs=answer.completion.logprobs,
                    is_cut=answer.completion.finish_reason == "length",
                    spans=answer.spans,
                )
                for answer in answers
            )
        )

    async def _stream(
        self, row: dict[str, Any], limits: SamplingConfig, seed: int | None, more: dict[str, Any]
    ) -> Any:
        while True:
            try:
                return await self._streams.sample(row, limits, seed=seed, **more)
            except RolloutLost as error:
                log.info("a sample is asked for again: %s", error)
                await asyncio.sleep(RETRY_S)

    async def _score_base(self, asked: types.SampleRequest) -> Samples:
        """The base model's log-probs of the prompt, from the trainer. It generates nothing."""
        async with self._scores:
            logprobs = await asyncio.to_thread(self._base.logprobs, prompt_of(asked))
        nothing = Sampled(tokens=(), logprobs=(), is_cut=True)
        return Samples(sequences=(nothing,), prompt_logprobs=last_n(asked, logprobs))

    async def _completions(
        self, asked: types.SampleRequest, model: str, *, snapshot: int | None = None
    ) -> Samples:
        """All sequences in one request to vLLM.

        Args:
            snapshot: version of the tokens in the answer; None: as vLLM says.
        """
        prompt = prompt_of(asked)
        # vLLM refuses several greedy samples. They are all the same.
        is_greedy = asked.sampling_params.temperature == 0
        body: dict[str, Any] = {
            **await self._fields(asked),
            "model": model,
            "prompt": prompt,
            "n": 1 if is_greedy else asked.num_samples,
            **ASK,
            "logprobs": asked.topk_sample_logprobs,
        }
        if asked.prompt_logprobs or asked.topk_prompt_logprobs:
            body["prompt_logprobs"] = asked.topk_prompt_logprobs
        reply = await self._post(body)
        rows = reply["choices"][0].get("prompt_logprobs") or []
        version = str(reply["model"]).rpartition("@")[2] if snapshot is None else str(snapshot)
        sequences = tuple(_sampled(c, asked, version=version) for c in reply["choices"])
        return Samples(
            sequences=sequences * asked.num_samples if is_greedy else sequences,
            prompt_logprobs=_scored(rows, prompt, asked) if asked.prompt_logprobs else None,
            prompt_top=_prompt_top(rows, asked),
        )

    async def _fields(self, asked: types.SampleRequest) -> dict[str, Any]:
        longest, tokens = await self.context_length(), len(prompt_of(asked))
        if tokens >= longest:
            raise malformed(
                f"the prompt has {tokens} tokens, and vLLM takes {longest} with the answer "
                "(inference.max_model_len)"
            )
        return sampling_fields(asked, room=longest - tokens)

    async def _post(self, body: dict[str, Any]) -> Any:
        """Ask a replica. If it is not ready, ask another one.

        Raises:
            Refused: vLLM refuses the request, or does not serve the version.
        """
        deadline_s = time.monotonic() + self._config.sample_timeout_s
        while True:
            replica = await self._streams.choose()
            try:
                with self._streams.replicas.counted(replica):
                    answer = await self._http.post(f"{replica.url}/v1/completions", json=body)
                why = f"{answer.status_code}: {answer.text[:1000]}"
                if answer.status_code == 200:
                    reply = answer.json()
                    if all(c["finish_reason"] != "abort" for c in reply["choices"]):
                        replica.failures = 0
                        return reply
                    why = "vLLM gave the request up"
            except httpx.TransportError as error:
                answer, why = None, str(error) or type(error).__name__
            if answer is not None and answer.status_code in (404, 409):
                raise NotServed(
                    f"this sampler is {body['model']}, which is not served any more: one version "
                    "is served at a time. Make a new sampler "
                    "(save_weights_and_get_sampling_client), sample inflight, or start "
                    f"`splice tinker` with --old-snapshots. vLLM says {why}"
                )
            if answer is not None and answer.status_code not in (200, *_PASSING):
                raise malformed(f"vLLM refuses the request ({why})")
            if time.monotonic() > deadline_s:
                raise unsupported(f"no replica answers: {why}")
            log.info("a sample is asked for again: %s", why)
            replica.failed()


# ---------------------------------------------------------------- requests


def check(asked: types.SampleRequest) -> None:
    """Refuse a request that needs something which no sampler here supports.

    Raises:
        Refused: names what is unsupported.
    """
    if asked.sampling_session_id is None or asked.seq_id is None:
        raise unsupported("send sampling_session_id and seq_id (create_sampling_session)")
    if asked.num_samples < 1:
        raise malformed(f"num_samples is {asked.num_samples}; it must be 1 at least")
    for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"):
        if getattr(asked, name):
            raise unsupported(f"{name} is not supported")
    if not prompt_of(asked):
        raise malformed("the prompt has no tokens")
    params = asked.sampling_params
    for name in ("temperature", "top_p"):
        if not math.isfinite(getattr(params, name)):
            raise malformed(f"{name} is {getattr(params, name)}; send a finite number")
    if params.max_tokens is not None and params.max_tokens < 1:
        raise malformed(f"max_tokens is {params.max_tokens}; it must be 1 at least")
    last = asked.prompt_logprobs_last_n
    if last is not None and not (asked.prompt_logprobs and 1 <= last < len(prompt_of(asked))):
        raise malformed(
            f"prompt_logprobs_last_n is {last}; it needs prompt_logprobs, and must be in [1, "
            f"{len(prompt_of(asked)) - 1}]"
        )


def prompt_of(asked: types.SampleRequest) -> list[int]:
    """Return the prompt's tokens.

    Raises:
        Refused: it has something else than text.
    """
    for chunk in asked.prompt.chunks:
        if not isinstance(chunk, types.EncodedTextChunk):
            raise unsupported(
                f"the prompt has a chunk of {chunk.type}; only text (encoded_text) is supported"
            )
    return [token for chunk in asked.prompt.chunks for token in chunk.tokens]


def only_scores(asked: types.SampleRequest) -> bool:
    """Whether the request is `compute_logprobs`, whose one sampled token nobody reads."""
    wants_text = asked.sampling_params.max_tokens != 1 or asked.num_samples != 1
    return bool(asked.prompt_logprobs) and not (wants_text or asked.topk_prompt_logprobs)


def wants_more(asked: types.SampleRequest) -> bool:
    """Whether a stream cannot answer the request."""
    return bool(asked.prompt_logprobs or asked.topk_prompt_logprobs or asked.topk_sample_logprobs)


def sampling_fields(asked: types.SampleRequest, *, room: int) -> dict[str, Any]:
    """Return the sampling settings as vLLM names them. `stop: []` means no end but the length.

    Args:
        room: tokens that fit after the prompt.
    """
    params = asked.sampling_params
    fields: dict[str, Any] = {
        "max_tokens": min(params.max_tokens or room, room),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
    }
    if params.seed is not None:
        fields["seed"] = params.seed
    stop = params.stop
    if isinstance(stop, str):
        fields["stop"] = [stop]
    elif stop is not None and not stop:
        fields["ignore_eos"] = True
    elif stop is not None:
        fields["stop_token_ids" if isinstance(stop[0], int) else "stop"] = list(stop)
    return fields


# ---------------------------------------------------------------- answers


def _sampled(choice: Mapping[str, Any], asked: types.SampleRequest, *, version: str) -> Sampled:
    given, top = choice["logprobs"], None
    if asked.topk_sample_logprobs:
        rows = [_by_id(row or {}) for row in given["top_logprobs"]]
        top = TopK(k=asked.topk_sample_logprobs, rows=rows)
    return Sampled(
        tokens=choice["token_ids"],
        logprobs=given["token_logprobs"],
        is_cut=choice["finish_reason"] == "length",
        spans=((int(version), len(choice["token_ids"])),) if version.isdigit() else (),
        top=top,
    )


def _by_id(row: Mapping[str, float]) -> list[tuple[int, float]]:
    pairs = [(int(name.removeprefix(_TOKEN)), logprob) for name, logprob in row.items()]
    return sorted(pairs, key=lambda pair: -pair[1])


def _scored(rows: Sequence[Any], prompt: Sequence[int], asked: types.SampleRequest) -> list[float]:
    pairs = zip(rows[1:], prompt[1:], strict=True)
    return last_n(asked, [math.nan, *(row[str(token)]["logprob"] for row, token in pairs)])


def last_n(asked: types.SampleRequest, logprobs: list[float]) -> list[float]:
    """Keep those that the request asks for."""
    keep = asked.prompt_logprobs_last_n
    return logprobs if keep is None else [math.nan] * (len(logprobs) - keep) + logprobs[-keep:]


def _prompt_top(rows: Sequence[Any], asked: types.SampleRequest) -> TopK | None:
    if not asked.topk_prompt_logprobs:
        return None
    k, first = asked.topk_prompt_logprobs, len(rows) - (asked.prompt_logprobs_last_n or len(rows))
    top: list[list[tuple[int, float]]] = []
    for i, row in enumerate(rows):
        ranked = sorted((row or {}).items(), key=lambda pair: pair[1]["rank"])[:k]
        wanted = ranked if i >= first else []
        top.append([(int(token), float(value["logprob"])) for token, value in wanted])
    return TopK(k=k, rows=top)
