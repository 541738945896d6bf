"""A real server under load while it is swapped: no answer under a wrong name, and every span is
said.
"""

from __future__ import annotations

import time

import pytest
import torch

from tests.inference_node.harness import Node, ensure_published, moved
from tests.inference_node.long_requests import LONG, Request

ATTEMPTS = 6
"""A request may arrive after the swap, or be through before it, where the machine is slow or fast:
what it says must be right in any case, and one of the attempts must span the swap.
"""


def two_running(node: Node, model: str) -> tuple[Request, Request]:
    """A streaming request and a plain one, the stream under way."""
    plain, stream = Request(node, model, stream=False), Request(node, model, stream=True)
    assert stream.first.wait(20.0)
    return stream, plain


@pytest.mark.parametrize("mode", ["keep", "keep_kv"])
def test_unpinned_requests_span_the_swap_and_say_so(dense: Node, mode: str) -> None:
    streamed = whole = False
    for attempt in range(ATTEMPTS):
        old = ensure_published(dense)
        stream, plain = two_running(dense, "tiny")
        dense.publish(old + 1, moved(dense.base, 20 + attempt), mode=mode)
        stream.join(60.0)
        plain.join(60.0)
        versions = [int(e["model"].removeprefix("tiny@")) for e in stream.events]
        assert stream.done and set(versions) <= {old, old + 1} and versions == sorted(versions)
        if versions[0] == old:
            assert all(
                e.get("versions") == [old, old + 1]
                for e in stream.events
                if e["model"] == f"tiny@{old + 1}"
            )
        spans = plain.json.get("versions")
        last = old + 1 if spans else int(plain.json["model"].removeprefix("tiny@"))
        assert (
            plain.json["model"] == f"tiny@{last}"
            and last in (old, old + 1)
            and spans in (None, [old, old + 1])
        )
        said = plain.headers["x-splice-version"], plain.headers.get("x-splice-versions")
        assert said == (str(last), f"{old},{old + 1}" if spans else None)
        assert plain.json["usage"]["completion_tokens"] == LONG["max_tokens"]
        streamed, whole = streamed or len(set(versions)) == 2, whole or spans is not None
        if streamed and whole:
            return
    raise AssertionError(
        f"in {ATTEMPTS} swaps no request spanned one: streamed {streamed}, plain {whole}"
    )


def halves(node: Node) -> list[dict[str, torch.Tensor]]:
    """Two versions whose greedy tokens are told apart: the first says ids below 160 only, the
    second the others.
    """
    head = "lm_head.weight"
    low = torch.arange(320)[:, None] < 160
    spoken = torch.arange(320)[:, None] > 2  # not the special tokens, which leave no text
    base = node.base[head]
    return [
        {**node.base, head: torch.where(half & spoken, base, torch.zeros_like(base))}
        for half in (low, ~low)
    ]


@pytest.mark.parametrize(
    ("mode", "interval"),
    [("keep", 1), ("keep_kv", 1), ("wait", 1), ("abort", 1), ("keep", 64), ("keep_kv", 64)],
)
def test_every_token_comes_under_the_name_of_the_weights_that_made_it(
    dense: Node, mode: str, interval: int
) -> None:
    """Tokens that a stream holds back for its next event leave before the name moves."""
    first, second = halves(dense)
    count = {"wait": 250, "abort": 900}.get(mode, 500)
    for _ in range(ATTEMPTS):
        old = ensure_published(dense) + 1
        dense.publish(old, first)
        streams = [
            Request(
                dense,
                "tiny",
                stream=True,
                prompt=[3 + k, 9, 27],
                max_tokens=count,
                temperature=0.0,
                logprobs=0,
                stream_interval=interval,
            )
            for k in range(6)
        ]
        assert all(s.first.wait(20.0) for s in streams)
        dense.publish(old + 1, second, mode=mode)
        seen: set[str] = set()
        for stream in streams:
            stream.join(60.0)
            choices = [(e["model"], c) for e in stream.events for c in e.get("choices", ())]
            said = [(model, int(word[1:])) for model, c in choices for word in c["text"].split()]
            assert said and all(
                model == f"tiny@{old if token < 160 else old + 1}" for model, token in said
            )
            scored = [len(c["logprobs"]["tokens"]) for _, c in choices if c["logprobs"]]
            assert sum(scored) == len(said) and (interval == 1 or interval in scored)
            reason = choices[-1][1]["finish_reason"]
            assert stream.done and (reason == "length" or (mode == "abort" and reason == "abort"))
            if reason == "length":  # nothing was lost
                assert len(said) == count
            seen |= {model for model, _ in said} | {reason}
        wanted = {f"tiny@{old}", "abort"} if mode == "abort" else {f"tiny@{old}", f"tiny@{old + 1}"}
        if mode == "wait" or wanted <= seen:
            return
    raise AssertionError(f"in {ATTEMPTS} swaps (mode {mode}) no stream was under way")


def test_pinned_requests_are_finished_before_the_swap_or_ended(dense: Node) -> None:
    old = ensure_published(dense)
    stream, plain = two_running(dense, f"tiny@{old}")
    dense.publish(old + 1, moved(dense.base, 21))
    stream.join(60.0)
    plain.join(60.0)
    if plain.status == 200:
        assert plain.json["model"] == f"tiny@{old}" and "versions" not in plain.json
    else:
        # 404: it came after the swap.
        assert plain.status in (404, 409) and f"tiny@{old + 1}" in plain.json["error"]["message"]
    assert stream.done and all(
        e.get("model", f"tiny@{old}") == f"tiny@{old}" for e in stream.events
    )


def test_wait_lets_everything_land_and_abort_ends_it(dense: Node) -> None:
    old = ensure_published(dense)
    waited = Request(dense, "tiny", stream=True)
    assert waited.first.wait(20.0)
    dense.publish(old + 1, moved(dense.base, 22), mode="wait")
    waited.join(60.0)
    assert {e["model"] for e in waited.events} == {f"tiny@{old}"} and waited.events[-1]["choices"][
        0
    ]["finish_reason"] == "length"

    aborted = Request(dense, "tiny", stream=True)
    assert aborted.first.wait(20.0)
    began = time.monotonic()
    dense.publish(old + 2, moved(dense.base, 23), mode="abort")
    aborted.join(60.0)
    assert time.monotonic() - began < 40.0
    assert {e.get("model") for e in aborted.events} == {f"tiny@{old + 1}"}
