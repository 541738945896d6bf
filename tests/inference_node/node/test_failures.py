"""Failures on a real server: each leaves @N serving, or a replica that serves nothing and heals
with the next whole update.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import psutil
import pytest
import torch

from orchestrator.protocol import messages as m
from tests.inference_node.failing import SOON_S, fail_update, stalled_send
from tests.inference_node.harness import TAU, Node, ensure_published, moved, new
from tests.inference_node.long_requests import Request

FORGOT = m.Hello(role="client", node_id="orchestrator", incarnation="", run_token="")
"""What an orchestrator sends to a node that it does not know, or no longer."""

SILENCE_ENDS_S = 8.0
"""By then a silent orchestrator is taken for gone (after four seconds), and requests
are answered.
"""


def test_a_refused_manifest_names_the_tensors_and_pauses_nothing(dense: Node) -> None:
    version = ensure_published(dense)
    tensors = dense.manifest.tensors
    lacking = m.Manifest(tensors=tuple(t for t in tensors if "layers.1.mlp.up_proj" not in t.name))
    extra = m.Manifest(
        tensors=(
            *tensors,
            m.TensorSpec(
                name="model.layers.0.self_attn.nonsense.weight", dtype="float32", shape=(2, 2)
            ),
        )
    )
    shape = m.Manifest(
        tensors=(m.TensorSpec(name=tensors[0].name, dtype="float32", shape=(7, 64)), *tensors[1:])
    )
    dtype = m.Manifest(
        tensors=(
            m.TensorSpec(name=tensors[0].name, dtype="float64", shape=tensors[0].shape),
            *tensors[1:],
        )
    )
    for manifest, named in [
        (lacking, "model.layers.1.mlp.gate_up_proj.weight"),
        (extra, "nonsense"),
        (shape, tensors[0].name),
        (dtype, tensors[0].name),
    ]:
        failed = dense.prepare(version + 1, manifest)
        assert (
            failed.kind == "Failed" and failed.code == "plan_refused" and named in failed.message
        ), failed
    assert (
        dense.post(
            "/v1/completions", {"model": f"tiny@{version}", "prompt": [3, 4], "max_tokens": 2}
        ).status_code
        == 200
    )


def test_commit_without_a_received_version_is_refused(dense: Node) -> None:
    version = ensure_published(dense)
    failed = dense.commit(version + 7)
    assert failed.kind == "Failed" and failed.code == "not_ready"


def test_aborted_before_the_first_byte_goes_on_as_before(dense: Node) -> None:
    version = ensure_published(dense)
    before = dense.prompt_logprobs()
    failed, took_s = fail_update(dense, moved(dense.base, 5), after=0)
    assert (
        failed.code == "transfer_aborted"
        and failed.phase == "waiting for the first byte"
        and took_s < SOON_S
    )
    assert torch.equal(dense.prompt_logprobs(f"tiny@{version}"), before)


def test_aborted_half_way_poisons_and_a_full_update_heals_exactly(dense: Node) -> None:
    version = ensure_published(dense)
    failed, took_s = fail_update(dense, moved(dense.base, 6), after=6)
    assert failed.code == "transfer_aborted" and took_s < SOON_S
    for model in ("tiny", f"tiny@{version}"):
        refused = dense.post("/v1/completions", {"model": model, "prompt": [3, 4], "max_tokens": 2})
        assert refused.status_code == 503 and "retry-after" in refused.headers
    tensors = moved(dense.base, 7)
    dense.join()
    dense.publish(version + 1, tensors)
    assert (
        dense.prompt_logprobs(f"tiny@{version + 1}") - dense.expected(tensors)
    ).abs().max() < TAU


def test_the_workers_own_deadline_ends_a_stalled_transfer(dense: Node) -> None:
    version = ensure_published(dense)
    failed, took_s = fail_update(dense, moved(dense.base, 8), after=6, deadline_s=6.0, abort=None)
    assert failed.code in ("transfer_timeout", "transfer_aborted") and took_s < 6.0 + SOON_S
    dense.join()
    dense.publish(version + 1, moved(dense.base, 9))
    assert dense.get("/v1/models").json()["data"][0]["id"] == f"tiny@{version + 1}"


def test_an_abort_between_receive_and_commit_is_never_served(dense: Node) -> None:
    version = ensure_published(dense)
    assert dense.prepare(version + 1).kind == "Completed"
    envelope, _ = dense.receive(version + 1, moved(dense.base, 10))
    assert envelope.message.kind == "Completed"
    dense.router.send(m.AbortUpdate(reason="the digests differ"))
    deadline = time.monotonic() + 40
    while dense.post("/tokenize", {"model": "tiny", "prompt": "w3"}).status_code != 503:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert dense.commit(version + 1).kind == "Failed"
    dense.join()
    dense.publish(version + 2, dense.base)


def test_what_was_received_for_an_orchestrator_that_forgot_us_does_not_stand_still(
    dense: Node,
) -> None:
    """It may be long before a restarted one publishes; until then requests are refused, not kept
    waiting.
    """
    version = ensure_published(dense)
    dense.join()
    assert dense.prepare(version + 1).kind == "Completed"
    assert dense.receive(version + 1, moved(dense.base, 21))[0].message.kind == "Completed"
    waiting = Request(dense, "tiny", stream=False, max_tokens=4)
    dense.router.send(FORGOT)
    waiting.join(20.0)
    assert waiting.status == 503, waiting.json
    assert dense.commit(version + 1).kind == "Failed"
    dense.join()
    dense.publish(version + 2, dense.base)


def test_a_transfer_for_an_orchestrator_that_forgot_us_ends_at_once(dense: Node) -> None:
    version = ensure_published(dense)
    failed, took_s = fail_update(dense, moved(dense.base, 22), after=0, abort=FORGOT)
    assert failed.code == "transfer_aborted" and took_s < SOON_S
    assert dense.prompt_logprobs(f"tiny@{version}").numel()


def test_a_transfer_right_after_an_idle_node_was_forgotten_is_not_ended(dense: Node) -> None:
    version = ensure_published(dense)
    dense.join()
    assert dense.prepare(version + 1).kind == "Completed"
    dense.router.send(FORGOT)
    envelope, _ = dense.receive(version + 1, dense.base)
    assert envelope.message.kind == "Completed", envelope.message
    assert dense.commit(version + 1).kind == "Completed"


def test_an_abort_while_it_pauses_leaves_the_version_served(dense: Node) -> None:
    """The orchestrator does not hear "applying", after which it would take the replica for
    poisoned.
    """
    version = ensure_published(dense)
    dense.join()
    assert dense.prepare(version + 1).kind == "Completed"
    pinned = Request(
        dense, f"tiny@{version}", stream=True, max_tokens=900
    )  # it is given two seconds to end
    dense.router.wait(lambda: len(pinned.events) > 3, 30.0)
    request = new(m.ReceiveWeights, 20.0, version=version + 1)
    dense.router.send(request)
    dense.router.wait(lambda: bool(dense.router.progress.get(request.request_id)), 30.0)
    dense.router.send(m.AbortUpdate(reason="the test says so"))
    failed = dense.router.outcome(request.request_id).message
    assert (
        failed.kind == "Failed"
        and failed.code == "transfer_aborted"
        and f"tiny@{version}" in failed.remedy
    ), failed
    assert [p.phase for p in dense.router.progress[request.request_id]] == ["pausing", "paused"]
    pinned.join(20.0)
    assert dense.prompt_logprobs(f"tiny@{version}").numel()
    dense.leave()


def test_a_replica_that_is_left_out_serves_nothing_until_it_is_published_to(dense: Node) -> None:
    version = ensure_published(dense)
    assert dense.prompt_logprobs(f"tiny@{version}").numel()
    dense.router.request(new(m.LeaveAlias, reason="its transfers fail"))
    for model in ("tiny", f"tiny@{version}"):
        refused = dense.post("/v1/completions", {"model": model, "prompt": [3], "max_tokens": 1})
        assert refused.status_code == 503 and "its transfers fail" in refused.text
    dense.publish(version + 1, dense.base)
    assert (
        dense.prompt_logprobs(f"tiny@{version + 1}") - dense.expected(dense.base)
    ).abs().max() < TAU


def test_an_abort_ends_the_update_that_it_names_and_no_other(dense: Node) -> None:
    version = ensure_published(dense)
    other = m.AbortUpdate(reason="the test says so", request_id="of-another-update")
    dense.join()
    assert dense.prepare(version + 1).kind == "Completed"
    assert dense.receive(version + 1, moved(dense.base, 23))[0].message.kind == "Completed"
    dense.router.send(other)
    time.sleep(1.0)
    assert dense.commit(version + 1).kind == "Completed"
    with stalled_send(dense, dense.base, after=0) as sent:
        request = new(m.ReceiveWeights, 25.0, version=version + 2)
        dense.router.send(request)
        assert sent.wait(20.0)
        dense.router.send(other)
        with pytest.raises(AssertionError, match="timed out"):
            dense.router.outcome(request.request_id, 2.0)
        dense.router.send(m.AbortUpdate(reason="the test says so", request_id=request.request_id))
        assert dense.router.outcome(request.request_id, SOON_S).message.code == "transfer_aborted"
    assert dense.prompt_logprobs(f"tiny@{version + 1}").numel()


def test_an_abort_that_overtakes_its_update_ends_it(dense: Node) -> None:
    version = ensure_published(dense)
    dense.join()
    assert dense.prepare(version + 1).kind == "Completed"
    request = new(m.ReceiveWeights, 25.0, version=version + 1)
    dense.router.send(m.AbortUpdate(reason="the test says so", request_id=request.request_id))
    time.sleep(1.0)  # a node that is idle takes it now
    failed = dense.router.request(request).message
    assert failed.kind == "Failed" and failed.code == "transfer_aborted", failed
    assert dense.prompt_logprobs(f"tiny@{version}").numel()
    dense.leave()


def silent(node: Node) -> tuple[int, float]:
    """What a request is told while the orchestrator says nothing, and how long it waits
    for that.
    """
    began = time.monotonic()
    answer = node.post("/v1/completions", {"model": "tiny", "prompt": [3], "max_tokens": 1})
    return answer.status_code, time.monotonic() - began


def test_an_update_whose_orchestrator_is_gone_before_the_commit_is_given_up(dense: Node) -> None:
    version = ensure_published(dense)
    dense.join()
    assert dense.prepare(version + 1).kind == "Completed"
    assert dense.receive(version + 1, moved(dense.base, 24))[0].message.kind == "Completed"
    status, waited_s = silent(dense)
    assert status == 503 and waited_s < SILENCE_ENDS_S
    assert dense.get("/health").status_code == 503
    assert dense.commit(version + 1).kind == "Failed"  # it is back
    dense.publish(version + 1, dense.base)
    assert dense.get("/health").status_code == 200
    assert (
        dense.prompt_logprobs(f"tiny@{version + 1}") - dense.expected(dense.base)
    ).abs().max() < TAU


def test_a_transfer_whose_orchestrator_is_gone_is_given_up(dense: Node) -> None:
    version = ensure_published(dense)
    dense.join()
    assert dense.prepare(version + 1).kind == "Completed"
    with stalled_send(dense, dense.base, after=0) as sent:
        request = new(m.ReceiveWeights, 25.0, version=version + 1)
        dense.router.send(request)
        assert sent.wait(20.0)
        status, waited_s = silent(dense)
        assert status == 200 and waited_s < SILENCE_ENDS_S
        assert dense.router.outcome(request.request_id).message.code == "transfer_aborted"
    assert dense.prompt_logprobs(f"tiny@{version}").numel()


def test_what_is_committed_goes_on_being_served_without_an_orchestrator(dense: Node) -> None:
    version = ensure_published(dense)
    time.sleep(SILENCE_ENDS_S)
    assert (
        dense.prompt_logprobs(f"tiny@{version}").numel() and dense.get("/health").status_code == 200
    )
    dense.publish(version + 1, dense.base)


def test_a_vllm_that_dies_before_it_takes_a_call_is_noticed_at_once(dense: Node) -> None:
    """The call then waits in the queue of the listener, which is the node's and does not break; the
    next server must not run it.
    """
    version, count = ensure_published(dense), len(dense.router.ready)
    api = server_of(dense)
    api.suspend()
    request = new(m.ReceiveWeights, version=version + 1, pause_mode="keep", deadline_s=120.0)
    dense.router.send(request)
    try:
        # "pausing": the call follows at once.
        dense.router.wait(lambda: bool(dense.router.progress.get(request.request_id)), 60.0)
        time.sleep(1.0)
    finally:
        api.kill()
    began = time.monotonic()
    answer = dense.router.outcome(request.request_id).message
    assert (
        answer.kind == "Failed" and answer.code == "node_lost" and time.monotonic() - began < SOON_S
    )
    assert dense.router.unready
    dense.wait_ready(count + 1)
    assert (
        dense.post("/v1/completions", {"model": "tiny", "prompt": [3], "max_tokens": 1}).status_code
        == 503
    )
    dense.join()
    dense.publish(version + 1, dense.base)
    assert (
        dense.prompt_logprobs(f"tiny@{version + 1}") - dense.expected(dense.base)
    ).abs().max() < TAU


def server_of(node: Node) -> psutil.Process:
    """vLLM's API process."""
    children = psutil.Process(node.process.pid).children()
    return next(p for p in children if "inference_node.server" in " ".join(p.cmdline()))


def killed_while_it_starts(node: Node, before: psutil.Process) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(StopIteration, psutil.NoSuchProcess):
            api = server_of(node)
            if api.pid != before.pid:
                time.sleep(1.0)
                api.kill()
                return
        time.sleep(0.05)
    raise AssertionError("it was not started again")


def test_a_dead_vllm_is_restarted_and_serves_nothing_until_published(dense: Node) -> None:
    version = ensure_published(dense)
    count = len(dense.router.ready)
    api = server_of(dense)
    family: list[Any] = [api, *api.children(recursive=True)]
    api.kill()
    _, alive = psutil.wait_procs(family, timeout=15.0)
    assert not alive, "an engine outlived its killed API server"
    killed_while_it_starts(dense, api)
    dense.wait_ready(count + 1)
    assert dense.router.ready[-1].detail["restarted"] >= 1 and dense.router.unready
    refused = dense.post(
        "/v1/completions", {"model": f"tiny@{version}", "prompt": [3], "max_tokens": 1}
    )
    assert refused.status_code == 503 and refused.headers["x-splice-version"] == "none"
    dense.join()
    dense.publish(version + 1, dense.base)
    assert (
        dense.prompt_logprobs(f"tiny@{version + 1}") - dense.expected(dense.base)
    ).abs().max() < TAU
