"""The unmodified SDK drives a real vLLM and a real Megatron through the server, on the CPU."""

from __future__ import annotations

import json
import time

import httpx
import numpy as np
import pytest

from splice.tinker.books import Books
from tests.readme import blocks

pytestmark = pytest.mark.timeout(900)
SHARP = 2e-5
"""fp32: trainer and vLLM agree to a few 1e-6 nats on this model (`make smoke`)."""


def facts_of(server, python, part: str) -> dict:
    """What the program says at its end."""
    user = server.user(python, part)
    text, _ = user.communicate(timeout=600)
    assert user.returncode == 0, text
    return json.loads(text.splitlines()[-1])


def test_the_pages_recipe(server, sdk_python):
    recipe, *_ = blocks("python", "docs/tinker.md")
    user = server.user(sdk_python, "-c", recipe)
    text, _ = user.communicate(timeout=600)
    assert user.returncode == 0, text
    *losses, answer = text.splitlines()
    assert sorted(map(float, losses), reverse=True) == list(map(float, losses))
    assert len(json.loads(answer)) == 4


def test_sft(server, sdk_python):
    found = facts_of(server, sdk_python, "sft")
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert found["losses"][-1] < found["losses"][0] - 1, "two answers of four tokens"
    assert found["gap"] < SHARP, "the served log-probs are the trainer's"
    assert found["grad_norm"] > 0
    np.testing.assert_allclose(found["base"], found["fresh"], atol=SHARP)


def test_rl(server, sdk_python):
    found = facts_of(server, sdk_python, "rl")
    assert found["gap"] < SHARP, "on policy"
    assert np.mean(found["rewards"][-2:]) > np.mean(found["rewards"][:2])


def test_a_loss_of_ones_own(server, sdk_python):
    found = facts_of(server, sdk_python, "custom")
    linear = found["cross_entropy"]["loss:sum"]
    assert found["custom"]["mine"] == pytest.approx(linear, abs=1e-3)
    assert found["custom"]["surrogate_loss:sum"] == pytest.approx(linear, abs=1e-3)
    np.testing.assert_allclose(found["custom_after"], found["cross_entropy_after"], atol=SHARP)


def test_states_come_back(server, sdk_python):
    found = facts_of(server, sdk_python, "state")
    assert found["loaded"] == found["saved"] != found["fresh"]
    assert found["again"] == found["went_on"] != found["saved"], "the optimizer came back too"
    assert found["weights_alone"] == found["saved"]
    one, two = found["greedy"]
    assert one == two and len(one) == 3 and len(set(found["sequence_ids"])) == 2
    assert found["base_of_sampler"] == "tiny" and found["info"] == ["tiny", 4]
    assert found["num_runs"] >= 3 and len(found["checkpoints"]) >= 4


def test_a_publication_does_not_touch_pending_gradients(server, sdk_python):
    """To the bit, the optimizer included."""
    found = facts_of(server, sdk_python, "publishing")
    books = Books(server.run_dir / "tinker" / "books.sqlite")
    folders = [server.run_dir / books.checkpoint(path)["folder"] for path in found["paths"]]
    books.close()
    for name in ("adapter/adapter_model.safetensors", "state/__0_0.distcp"):
        with_it, without = ((folder / name).read_bytes() for folder in folders)
        assert with_it == without, name


def test_models_choose_their_adapters(server, sdk_python):
    """Rank and linears change without a restart; what is served is what was trained."""
    found = facts_of(server, sdk_python, "adapters")
    assert max(found["gaps"]) < SHARP < 1e-2 < min(found["trained"])
    assert found["back"] and found["rank"] == 9 and found["info"] == [2, True, False]


def test_inflight_and_old_snapshots(server, sdk_python):
    found = facts_of(server, sdk_python, "inflight")
    assert found["before"] == 2 and found["lengths"] == [4] * 4
    assert "which is not served any more" in found["why"] and "tiny@" in found["why"]
    # An untrained snapshot is the base model, which the trainer still has: DPO's reference.
    np.testing.assert_allclose(found["scored_later"], found["scored"], atol=SHARP)

    headers = {"x-api-key": (server.run_dir / "tinker" / "api_key").read_text().strip()}
    url = f"{server.url}/api/v1"
    with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as http:
        body = {
            "sampling_session_id": found["sampler"],
            "seq_id": 10**6,
            "num_samples": 2,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 17, 33]}]},
            "sampling_params": {"max_tokens": 4, "stop": []},
        }
        future = http.post("/asample", json=body).raise_for_status().json()
        answer = http.post("/retrieve_future", json={"request_id": future["request_id"]})
    first, second = answer.headers["x-splice-versions"].split(";")
    assert first == second and first.endswith("x4"), "two sequences of four tokens of one version"


def test_old_snapshots_are_served_again(server, sdk_python):
    """To the log-probs that they had; the trainer continues to the bit."""
    server.stop()
    server.start("--old-snapshots", "2")
    try:
        found = facts_of(server, sdk_python, "again")
    finally:
        server.stop()
        server.start()
    first, second = found["scores"]
    assert np.abs(np.array(first) - second).max() > 1e-2, "two policies"
    for again in found["again"]:
        np.testing.assert_allclose(again, [first, second], atol=SHARP)
    assert all(len(tokens) == 4 for answers in found["answers"] for tokens in answers)
    assert found["trainer"] == found["trainer_before"]
    assert found["went_on"] == found["went_on_before"] != found["trainer"], "optimizer and all"


def test_what_a_user_reads(server, sdk_python):
    found = facts_of(server, sdk_python, "refused")
    assert found["linears"][0] == 422 and "nothing would train" in found["linears"][1]
    assert found["model"][0] == 422 and "this run has tiny" in found["model"][1]
    assert found["loss"][0] == 422 and "loss_fn 'dro' is not supported" in found["loss"][1]
    assert found["path"][0] == 404 and "no checkpoint" in found["path"][1]


def test_a_killed_server_loses_nothing(server, sdk_python):
    """SIGKILL, three times within a loop; the program notices nothing but time."""
    user = server.user(sdk_python, "rl")
    for _ in range(3):
        time.sleep(4)
        if user.poll() is None:
            server.kill()
            server.start()
    text, _ = user.communicate(timeout=600)
    assert user.returncode == 0, text
    found = json.loads(text.splitlines()[-1])
    assert len(found["rewards"]) == 6 and found["gap"] < SHARP


def test_two_sessions_of_which_one_dies(server, sdk_python):
    """One samples while the other trains; the trainer's death frees the model for it."""
    holder, sampler = (server.user(sdk_python, part) for part in ("hold", "sample"))
    try:
        snapshot = json.loads(holder.stdout.readline())["holding"]
        sampler.stdin.write(f"{snapshot}\n")
        sampler.stdin.flush()
        assert "sampled" in sampler.stdout.readline()
        holder.kill()
        for _ in range(5):
            assert "sampled" in sampler.stdout.readline()
        sampler.stdin.write("\n")
        text, _ = sampler.communicate(timeout=120)
        assert sampler.returncode == 0 and json.loads(text.splitlines()[-1])["loss"] > 0
    finally:
        for user in (holder, sampler):
            user.kill()
            user.wait(10)
