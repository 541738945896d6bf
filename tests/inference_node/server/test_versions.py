"""Every token of every route says which version made it: log-probs against transformers in fp32, on
prompts whose prefix is cached.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import torch

from tests.inference_node import tiny
from tests.inference_node.harness import Node, ensure_published

TAU = 5e-4
TOKENS = 12
SWAPS, PATIENCE_S = 6, 60.0
PROMPT = [3 + (7 * n) % 300 for n in range(700)]
"""Several blocks of the KV cache."""
WORDS = " ".join(f"w{n}" for n in PROMPT)
GREEDY = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": PROMPT,
        "logprobs": 1,
        "return_tokens_as_token_ids": True,
        **GREEDY,
    },
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": WORDS}],
        "logprobs": True,
        "return_tokens_as_token_ids": True,
        **GREEDY,
    },
    "/v1/responses": {
        "input": WORDS,
        "temperature": 0.0,
        "max_output_tokens": TOKENS,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": WORDS}],
        "temperature": 0.0,
        "max_tokens": TOKENS,
    },
    "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": {"logprobs": 1, **GREEDY}},
}
KINDS = list(itertools.product(BODIES, (False, True)))


@dataclass
class Piece:
    """Tokens that came together, what is said about them, and their log-probs where the route has
    them.
    """

    versions: list[int]
    tokens: list[int]
    logprobs: list[float | None]


@dataclass
class Request:
    """One request and its answer."""

    route: str
    stream: bool
    model: str
    status: int = 0
    header: str = ""
    headers: str | None = None
    pieces: list[Piece] = field(default_factory=list)
    nameless: list[Any] = field(default_factory=list)
    """Events that name neither a model nor versions."""

    @property
    def versions(self) -> list[int]:
        """All that made it, by its last word."""
        return self.pieces[-1].versions

    def ask(self, node: Node) -> Request:
        body = {**BODIES[self.route], "model": self.model, "stream": self.stream}
        with httpx.stream(
            "POST", node.url + self.route, json=body, timeout=60.0, trust_env=False
        ) as answer:
            self.status, self.header = answer.status_code, answer.headers["x-splice-version"]
            self.headers = answer.headers.get("x-splice-versions")
            if self.status != 200 or not self.stream:
                answer.read()
                if self.status == 200:
                    self._take(answer.json())
                return self
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self._take(json.loads(line[6:]))
        return self

    def _take(self, event: Any) -> None:
        assert "error" not in event, event
        models = [
            h["model"]
            for h in (event, event.get("response"), event.get("message"))
            if h and "model" in h
        ]
        versions = event.get("versions") or [int(m.removeprefix("tiny@")) for m in models]
        if not versions or any(m != f"tiny@{versions[-1]}" for m in models):
            self.nameless.append(event)
        tokens, logprobs = _tokens(event)
        if tokens:
            self.pieces.append(Piece(versions, tokens, logprobs))


def _tokens(event: Any) -> tuple[list[int], list[float | None]]:
    """What of an event, or of a whole answer, was sampled."""
    if event.get("choices"):
        choice = event["choices"][0]
        said = choice.get("logprobs") or {}
        if "tokens" in said:
            return [_token(t) for t in said["tokens"]], said["token_logprobs"]
        rows = said.get("content") or []
        return [r["token_id"] if "token_id" in r else _token(r["token"]) for r in rows], [
            r["logprob"] for r in rows
        ]
    texts = [part for item in event.get("output", ()) for part in item.get("content", ())] + list(
        event.get("content", ())
    )
    if event.get("type") == "response.output_text.delta":
        texts = [{"text": event["delta"], "logprobs": event.get("logprobs")}]
    elif event.get("type") == "content_block_delta":
        texts = [event["delta"]]
    tokens = [int(n) for text in texts for n in re.findall(r"w(\d+)", text.get("text", ""))]
    logprobs = [row["logprob"] for text in texts for row in text.get("logprobs") or ()]
    return tokens, logprobs if len(logprobs) == len(tokens) else [None] * len(tokens)


def _token(text: str) -> int:
    return int(text.removeprefix("token_id:"))


class Weights:
    """Three sets of weights that take turns as versions, and what each of them says, by
    transformers in fp32.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self.sets = [
            self._without_special_tokens(tiny.state_dict(node.kind, seed=seed))
            for seed in (5, 6, 7)
        ]
        self._rows: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}

    @staticmethod
    def _without_special_tokens(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """They leave no text."""
        head = tensors["lm_head.weight"].clone()
        head[:3] = 0.0
        return {**tensors, "lm_head.weight": head}

    def of(self, version: int) -> dict[str, torch.Tensor]:
        return self.sets[version % 3]

    def rows_TV(self, version: int, tokens: list[int]) -> torch.Tensor:
        """Log-probs at each of these sampled tokens' places."""
        key = version % 3, tuple(tokens)
        if key not in self._rows:
            rows = tiny.reference_logprobs(self._node.kind, self.sets[version % 3], PROMPT + tokens)
            self._rows[key] = rows[len(PROMPT) - 1 : -1]
        return self._rows[key]

    def fits(self, version: int, request: Request) -> list[bool]:
        """For each token of an answer, whether that version made it: greedily, and with that
        log-prob.
        """
        tokens = [t for p in request.pieces for t in p.tokens]
        logprobs = [x for p in request.pieces for x in p.logprobs]
        rows_TV = self.rows_TV(version, tokens)
        return [
            bool(row[t] > row.max() - TAU) and (x is None or abs(float(row[t]) - x) < TAU)
            for row, t, x in zip(rows_TV, tokens, logprobs, strict=True)
        ]


def check(request: Request, weights: Weights, *, keeps_kv: bool) -> None:
    """What it says about its versions is true of every token whose version can be told."""
    assert request.pieces and not request.nameless, request
    versions = request.versions
    assert versions == sorted(set(versions)), versions
    assert (
        int(request.header) == (request.pieces[0].versions if request.stream else versions)[-1]
    ), request
    if request.model != "tiny":
        assert versions == [int(request.model.removeprefix("tiny@"))]
    said = [v for p in request.pieces for v in [p.versions] * len(p.tokens)]
    fits = {v: weights.fits(v, request) for v in versions}
    for n, before in enumerate(said):
        if len(before) > 1 and keeps_kv:  # new weights on keys and values of the old ones
            continue
        possible = before[-1:] if request.stream else before
        assert any(fits[v][n] for v in possible), (n, request, {v: f[n] for v, f in fits.items()})


@pytest.fixture(scope="module")
def weights(dense: Node) -> Weights:
    return Weights(dense)


def test_three_sets_of_weights_can_be_told_apart(dense: Node, weights: Weights) -> None:
    version = ensure_published(dense) + 1
    dense.publish(version, weights.of(version))
    for route, stream in KINDS:
        request = Request(route, stream, "tiny").ask(dense)
        check(request, weights, keeps_kv=False)
        assert (
            request.versions == [version]
            and sum(len(p.tokens) for p in request.pieces) >= TOKENS - 1
        ), request
        assert (
            sum(weights.fits(version + 1, request)) <= 1
            and sum(weights.fits(version + 2, request)) <= 1
        )


@pytest.mark.parametrize("mode", ["keep", "keep_kv", "wait", "abort"])
def test_what_comes_while_the_engine_stands_still_is_the_next_versions_alone(
    dense: Node, weights: Weights, mode: str
) -> None:
    """On every route; and its first byte waits. The prompt's prefix is in the cache of the version
    before.
    """
    version = ensure_published(dense) + 1
    dense.publish(version, weights.of(version))
    Request("/v1/completions", False, "tiny").ask(dense)
    dense.join()
    assert dense.prepare(version + 1).kind == "Completed"
    assert (
        dense.receive(version + 1, weights.of(version + 1), mode=mode)[0].message.kind
        == "Completed"
    )
    requests = [Request(route, stream, "tiny") for route, stream in KINDS]
    threads = [threading.Thread(target=request.ask, args=(dense,)) for request in requests]
    for thread in threads:
        thread.start()
    time.sleep(1.5)
    early = [request for request in requests if request.status]
    assert dense.commit(version + 1).kind == "Completed"
    for thread in threads:
        thread.join(30.0)
    assert not early
    for request in requests:
        check(request, weights, keeps_kv=False)
        assert (
            request.versions == [version + 1]
            and request.header == str(version + 1)
            and request.headers is None
        )


@pytest.mark.parametrize("mode", ["keep", "keep_kv"])
def test_a_new_request_never_starts_from_another_versions_cache(
    dense: Node, weights: Weights, mode: str
) -> None:
    """Also where the same client's salt is given on both sides of the swap."""
    salted = {**BODIES["/v1/completions"], "cache_salt": "mine"}
    version = ensure_published(dense) + 1
    dense.publish(version, weights.of(version))
    for body in (BODIES["/v1/completions"], salted):
        dense.post("/v1/completions", {"model": "tiny", **body})
    dense.publish(version + 1, weights.of(version + 1), mode=mode)
    for body in (BODIES["/v1/completions"], salted):
        request = Request(
            "/v1/completions", False, f"tiny@{version + 1}", status=200, header=str(version + 1)
        )
        request._take(dense.post("/v1/completions", {"model": request.model, **body}).json())
        check(request, weights, keeps_kv=False)


@pytest.mark.parametrize("mode", ["keep", "keep_kv"])
def test_every_token_under_continuous_swaps(dense: Node, weights: Weights, mode: str) -> None:
    version = ensure_published(dense) + 1
    dense.publish(version, weights.of(version))
    requests: list[Request] = []
    stop = threading.Event()

    def load(first: int) -> None:
        for n in itertools.count(first):
            if stop.is_set():
                return
            route, stream = KINDS[n % len(KINDS)]
            model = f"tiny@{version}" if n % 3 == 0 else "tiny"
            requests.append(Request(route, stream, model).ask(dense))

    def kinds() -> set[tuple[str, bool]]:
        return {(r.route, r.stream) for r in tuple(requests) if r.status == 200}

    threads = [threading.Thread(target=load, args=(n,)) for n in (0, 3, 6, 7)]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    first = version
    while time.monotonic() - began < PATIENCE_S:
        if version >= first + SWAPS and len(kinds()) == len(KINDS):
            break
        dense.publish(version + 1, weights.of(version + 1), mode=mode)
        version += 1
    stop.set()
    for thread in threads:
        thread.join(60.0)
    # A pinned request may come too late (404), or be in the way of a swap (409).
    assert all(r.status in ((200,) if r.model == "tiny" else (200, 404, 409)) for r in requests)
    answered = [r for r in requests if r.status == 200]
    for request in answered:
        check(request, weights, keeps_kv=mode == "keep_kv")
    assert len(kinds()) == len(KINDS)
