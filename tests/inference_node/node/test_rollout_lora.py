"""A real node whose vLLM has room for an adapter: only the adapter travels, and requests in flight,
failures and restarts go as with whole weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.inference_node import tiny
from tests.inference_node.adapters import LINEARS, PREFIX, adapter, merged
from tests.inference_node.failing import fail_update
from tests.inference_node.harness import TAU, Node
from tests.inference_node.long_requests import LONG, Request
from tests.inference_node.partial_updates import plan, publish_part

Tensors = dict[str, torch.Tensor]


class LoraNode(Node):
    """Its weights are a base and an adapter."""

    def expected(self, tensors: Tensors) -> torch.Tensor:
        matrices = {n: t for n, t in tensors.items() if n.startswith(PREFIX)}
        base = {n: t for n, t in tensors.items() if n not in matrices}
        return super().expected(merged(base, matrices))

    def with_adapter(self, seed: int) -> Tensors:
        base = {n: t for n, t in self.base.items() if not n.startswith(PREFIX)}
        return base | adapter(base, LINEARS, rank=4, seed=seed)

    def publish_adapter(self, seed: int) -> Tensors:
        """On top of the version before."""
        assert self.version is not None
        version, tensors = self.version + 1, self.with_adapter(seed)
        part = plan(self, version, lambda name: name.startswith(PREFIX))
        assert all(self.manifest.tensors[i].name.startswith(PREFIX) for i in part.tensors)
        publish_part(self, version, part, tensors)
        return tensors

    def check(self, tensors: Tensors) -> None:
        for name in ("tiny", f"tiny@{self.version}"):
            assert (self.prompt_logprobs(name) - self.expected(tensors)).abs().max() < TAU


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoraNode]:
    room = ("--enable-lora", "--max-loras", "1", "--max-lora-rank", "8")
    node = LoraNode(tmp_path_factory.mktemp("lora"), "dense", vllm=room)
    try:
        node.base = node.with_adapter(0)
        node.manifest = tiny.manifest_of(node.base)
        node.wait_ready()
        node.join()
        node.publish(0, node.base)
        yield node
    finally:
        node.close()


def test_only_the_adapter_travels(node: LoraNode) -> None:
    node.check(node.base)
    node.join()
    for seed in (1, 2):
        before = node.prompt_logprobs()
        node.check(node.publish_adapter(seed))
        assert (node.prompt_logprobs() - before).abs().max() > 0.1, "the versions look alike"


def test_requests_in_flight_span_the_swap_and_say_so(node: LoraNode) -> None:
    node.join()
    for seed in range(3, 9):
        old = node.version
        assert old is not None
        stream, plain = Request(node, "tiny", stream=True), Request(node, "tiny", stream=False)
        pinned = Request(node, f"tiny@{old}", stream=True)
        assert stream.first.wait(20.0) and pinned.first.wait(20.0)
        tensors = node.publish_adapter(seed)
        for request in (stream, plain, pinned):
            request.join(60.0)
        versions = [int(e["model"].removeprefix("tiny@")) for e in stream.events]
        assert stream.done and set(versions) <= {old, old + 1} and versions == sorted(versions)
        assert {e["model"] for e in pinned.events if "model" in e} <= {f"tiny@{old}"}
        assert plain.json["usage"]["completion_tokens"] == LONG["max_tokens"]
        node.check(tensors)
        if len(set(versions)) == 2:
            return
    raise AssertionError("no request spanned a swap")


def test_a_failed_update_of_the_adapter_leaves_nothing_half_served(node: LoraNode) -> None:
    """Before its first byte the old version continues; after a torn one, a whole update mends."""
    node.join()
    served = node.publish_adapter(10)
    failed, _ = fail_update(node, node.with_adapter(11), after=0)
    assert failed.code == "transfer_aborted"
    node.check(served)
    failed, _ = fail_update(node, node.with_adapter(12), after=2)
    refused = node.post("/v1/completions", {"model": "tiny", "prompt": [3], "max_tokens": 1})
    assert failed.code == "transfer_aborted" and refused.status_code == 503
    node.join()
    node.publish(node.version + 1, node.with_adapter(13))
    node.check(node.with_adapter(13))


def test_a_larger_rank_than_there_is_room_for_is_refused(node: LoraNode) -> None:
    before, version = node.prompt_logprobs(), node.version
    base = {n: t for n, t in node.base.items() if not n.startswith(PREFIX)}
    larger = base | adapter(base, LINEARS, rank=16, seed=1)
    refused = node.prepare(version + 1, tiny.manifest_of(larger))
    assert (
        refused.code == "plan_refused"
        and "its rank is 16, and vLLM has room for 8" in refused.message
    )
    assert torch.equal(node.prompt_logprobs(f"tiny@{version}"), before)


def test_a_vllm_that_was_restarted_takes_base_and_adapter(node: LoraNode) -> None:
    count = len(node.router.ready)
    next(p for p in node.family if "inference_node.server" in p.cmdline()).kill()
    node.wait_ready(count + 1)
    node.join()
    node.publish(node.version + 1, node.with_adapter(14))
    node.check(node.with_adapter(14))
    node.join()
    node.check(node.publish_adapter(15))
