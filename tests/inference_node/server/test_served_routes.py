"""The doors of a real vLLM server: what is closed, what is said about versions, and what its
log-probs are of.
"""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest
import torch

from orchestrator.protocol.messages import MIN_TEMPERATURE
from tests.inference_node import tiny
from tests.inference_node.harness import PROMPT, Node, ensure_published

CLOSED = [
    "/pause",
    "/resume",
    "/is_paused",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/collective_rpc",
    "/get_world_size",
    "/sleep",
    "/wake_up",
    "/reset_prefix_cache",
    "/server_info",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/abort_requests",
    "/invocations",
    "/scale_elastic_ep",
    "/splice/v1/info",
    "/splice/v1/CommitUpdate",
    "/splice/v1/poison",
]


@pytest.mark.parametrize("path", CLOSED)
def test_development_and_control_routes_are_closed(dense: Node, path: str) -> None:
    ensure_published(dense)
    for answer in (
        dense.post(path, {}),
        dense.get(path),
        dense.post(path, {}, headers={"x-splice-secret": "guess"}),
    ):
        assert (
            answer.status_code == 403 and answer.json()["error"]["type"] == "PermissionDeniedError"
        )
        assert answer.headers["x-splice-version"] == str(dense.version)


def test_every_answer_carries_the_version(dense: Node) -> None:
    version = ensure_published(dense)
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "w3 w4"}], "max_tokens": 2}
    answers = [
        dense.get("/v1/models"),
        dense.get("/health"),
        dense.get("/version"),
        dense.get("/metrics"),
        dense.get("/nowhere"),
        dense.post("/v1/completions", {"model": "tiny", "prompt": [3], "max_tokens": 1}),
        dense.post(
            "/v1/completions", {"model": "tiny", "prompt": [3], "max_tokens": 1, "stream": True}
        ),
        dense.post("/v1/completions", {"model": "tiny", "prompt": [3], "max_tokens": -1}),
        dense.post("/v1/completions", {"model": "tiny@99", "prompt": [3]}),
        dense.post("/v1/chat/completions", chat),
        dense.post("/tokenize", {"model": "tiny", "prompt": "w3 w4"}),
        httpx.post(
            dense.url + "/v1/completions", content=b"{not json", timeout=10, trust_env=False
        ),
    ]
    assert [a.headers.get_list("x-splice-version") for a in answers] == [[str(version)]] * len(
        answers
    )
    assert answers[5].json()["model"] == f"tiny@{version}"
    assert answers[6].status_code == 200 and f'"model":"tiny@{version}"' in answers[6].text.replace(
        " ", ""
    )
    assert answers[7].status_code == 400 and answers[11].status_code in (400, 422)


def test_models_and_the_404_name_the_current_version(dense: Node) -> None:
    version = ensure_published(dense)
    assert [card["id"] for card in dense.get("/v1/models").json()["data"]] == [
        f"tiny@{version}",
        "tiny",
    ]
    gone = dense.post("/v1/completions", {"model": f"tiny@{version + 1}", "prompt": [3]})
    assert gone.status_code == 404 and f"tiny@{version}" in gone.json()["error"]["message"]


def test_sampled_logprobs_are_of_the_restricted_distribution_and_prompt_logprobs_are_not(
    dense: Node,
) -> None:
    version = ensure_published(dense)
    dense.publish(version + 1, dense.base)
    allowed = [10, 20, 30]
    body = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 1,
        "temperature": 1.0,
        "allowed_token_ids": allowed,
        "logprobs": 3,
        "prompt_logprobs": 0,
        "return_tokens_as_token_ids": True,
    }
    choice = dense.post("/v1/completions", body).json()["choices"][0]
    reference_TV = tiny.reference_logprobs("dense", dense.base, PROMPT)
    expected = torch.log_softmax(reference_TV[-1][allowed], dim=-1)
    top = {
        int(k.removeprefix("token_id:")): v
        for k, v in choice["logprobs"]["top_logprobs"][0].items()
    }
    for token, logprob in zip(allowed, expected.tolist(), strict=True):
        assert math.isclose(top[token], logprob, abs_tol=1e-4)
    served = [
        row[str(t)]["logprob"]
        for row, t in zip(choice["prompt_logprobs"][1:], PROMPT[1:], strict=True)
    ]
    assert (
        max(
            abs(s - float(reference_TV[n, t]))
            for n, (s, t) in enumerate(zip(served, PROMPT[1:], strict=True))
        )
        < 1e-4
    )


@pytest.mark.parametrize("more", [{}, {"prompt_logprobs": 0}])
def test_tokens_named_by_id_have_the_same_logprobs(dense: Node, more: dict[str, Any]) -> None:
    ensure_published(dense)
    body = {
        "model": "tiny", "prompt": PROMPT, "max_tokens": 6, "temperature": 0.0, "logprobs": 2,
        "return_token_ids": True, **more,
    }  # fmt: skip # a table
    by_text = dense.post("/v1/completions", body).json()["choices"][0]
    by_id = dense.post("/v1/completions", body | {"return_tokens_as_token_ids": True})
    (choice,) = by_id.json()["choices"]
    assert choice["token_ids"] == by_text["token_ids"] and choice["text"] == by_text["text"]
    given, named = choice["logprobs"], [f"token_id:{i}" for i in choice["token_ids"]]
    assert given["tokens"] == named != by_text["logprobs"]["tokens"]
    assert given["token_logprobs"] == by_text["logprobs"]["token_logprobs"]
    best = [max(row.values()) for row in given["top_logprobs"]]
    assert best == [max(row.values()) for row in by_text["logprobs"]["top_logprobs"]]
    assert choice["prompt_logprobs"] == by_text["prompt_logprobs"]


def sampled_gap(node: Node, settings: dict[str, Any], *, temperature: float) -> float:
    """Largest |vLLM - transformers| of sampled tokens' log-probs, the latter's of softmax(logits /
    temperature) over the allowed ids.
    """
    version = ensure_published(node)
    node.publish(version + 1, node.base)
    body = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 12,
        "n": 4,
        "seed": 5,
        "logprobs": 0,
        "return_token_ids": True,
    }
    if "min_tokens" not in settings:
        body["ignore_eos"] = True
    answer = node.post("/v1/completions", body | settings)
    assert answer.status_code == 200, answer.text
    gaps = []
    for choice in answer.json()["choices"]:
        ids, served = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        logits_TV = (
            tiny.reference_logprobs("dense", node.base, PROMPT + ids)[len(PROMPT) - 1 : -1]
            / temperature
        )
        if "allowed_token_ids" in settings:
            kept = torch.isin(
                torch.arange(logits_TV.shape[1]), torch.tensor(settings["allowed_token_ids"])
            )
            logits_TV = logits_TV.masked_fill(~kept, -torch.inf)
        expected = logits_TV.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]
        gaps.append((expected - torch.tensor(served)).abs().max().item())
    return max(gaps)


ALLOWED = [10, 20, 30, 40]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 1.4},
        {"temperature": 0.7, "allowed_token_ids": ALLOWED},
    ],
    ids=str,
)
def test_sampling_settings_that_a_batch_can_say(dense: Node, settings: dict[str, Any]) -> None:
    assert sampled_gap(dense, settings, temperature=settings["temperature"]) < 1e-4
    if settings["temperature"] != 1.0:
        assert sampled_gap(dense, settings, temperature=1.0) > 0.05, (
            "the check tells temperatures apart"
        )


@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 0.9},
        {"top_k": 20},
        {"min_p": 0.1},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
        {"logit_bias": {"10": 5.0, "300": -5.0}},
        {"min_tokens": 12},
    ],
    ids=str,
)
def test_sampling_settings_that_a_batch_cannot_say(dense: Node, settings: dict[str, Any]) -> None:
    """Each moves the log-probs that vLLM returns away from softmax(logits / temperature);
    min_tokens by hiding the end of sequence.
    """
    assert sampled_gap(dense, {"temperature": 0.8} | settings, temperature=0.8) > 1e-3


def test_a_temperature_below_vllms_lowest_is_that(dense: Node) -> None:
    assert sampled_gap(dense, {"temperature": 0.002}, temperature=MIN_TEMPERATURE) < 1e-3
