"""One URL in front of two real vLLM servers, one of which is killed."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from splice import SpliceClient, TrainMerged, batch_specs
from tests.e2e.batches import PROMPT, as_batch
from tests.e2e.commands import processes_of, splice
from tests.e2e.conftest import INFERENCE_PYTHON

pytestmark = pytest.mark.timeout(1800)
BACK_S = 600


def test_a_pinned_version_is_found_and_a_lost_replica_gets_nothing(models, tmp_path):
    folder, run_dir = tmp_path / "mine", tmp_path / "mine" / "run"
    options = ["--model", models["qwen3"], "--name", "tiny", "--gpus", ""]
    splice("init", folder, *options, "--inference-python", INFERENCE_PYTHON)
    sets = ["--set", "inference.replicas=2", "--set", "inference.cpu_kv_cache_gb=0.1"]
    facts = json.loads(splice("up", folder, *sets, "--json"))
    try:
        (url,) = facts["openai_urls"]
        assert url not in facts["replica_urls"] and len(facts["replica_urls"]) == 2
        assert set(ask(url, "tiny@0", 8)) == {"inference-0", "inference-1"}
        assert streamed(url, "tiny") == "tiny@0"
        assert router_of(folder)["state"] == "ready"

        the_vllm_of(run_dir, "inference-1").kill()
        assert set(ask(url, "tiny@0", 8)) == {"inference-0"}, "not one request failed"
        with SpliceClient.of_run(run_dir) as client:
            specs = batch_specs(num_sequences=1, num_tokens=len(PROMPT) + 2)
            result = client.run(TrainMerged(tensors=specs), buffers=as_batch([3, 4]))
        assert result.alias == "tiny@1" and result.replicas == ["inference-0"]
        assert set(ask(url, "tiny@1", 8)) == {"inference-0"}
        assert streamed(url, "tiny@1") == "tiny@1"
        answer = complete(url, "tiny@0")
        assert answer.status_code == 404 and "tiny@1" in answer.text, answer.text

        deadline_s = time.monotonic() + BACK_S
        while len(set(ask(url, "tiny@1", 4))) < 2:
            assert time.monotonic() < deadline_s, router_of(folder)
            time.sleep(0.5)

        (router,) = [p for p in processes_of(run_dir) if "splice.replica_router" in p.cmdline()]
        router.kill()
        deadline_s = time.monotonic() + 60
        while router_of(folder)["state"] != "ready":
            assert time.monotonic() < deadline_s, router_of(folder)
            time.sleep(0.5)
        assert ask(url, "tiny@1", 2), "it is back at its URL"
        assert "router" in splice("status", folder)
    finally:
        splice("stop", folder)
    assert processes_of(folder) == []


def complete(url: str, model: str, **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 4, **more}
    return httpx.post(f"{url}/completions", json=body, timeout=60.0, trust_env=False)


def ask(url: str, model: str, count: int) -> Counter[str]:
    """The replicas that answered, each request with 200."""
    found: Counter[str] = Counter()
    for _ in range(count):
        answer = complete(url, model)
        assert answer.status_code == 200, answer.text
        found[answer.headers["x-splice-replica"]] += 1
    return found


def streamed(url: str, model: str) -> str:
    """The version that a stream of four tokens names."""
    events = complete(url, model, stream=True).text.split("\n\n")
    assert events[-2] == "data: [DONE]" and len(events) >= 4, events
    return str(json.loads(events[0].removeprefix("data: "))["model"])


def router_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads(splice("status", folder, "--json"))["router"])


def the_vllm_of(run_dir: Path, node: str) -> psutil.Process:
    (one,) = [p for p in processes_of(run_dir) if node in p.cmdline()]
    return next(p for p in one.children(recursive=True) if "inference_node.server" in p.cmdline())
