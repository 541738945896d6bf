"""A run elsewhere serves another run's versions from a store, under their numbers."""

from __future__ import annotations

import json
import re
import shutil
import time

import boto3
import httpx
import pytest
from moto.server import ThreadedMotoServer

from splice import JobFailed, LossSpec, OptimParams, SpliceClient, TrainMerged, batch_specs
from tests.e2e.batches import PROMPT, as_batch
from tests.e2e.commands import kill_all, processes_of, splice
from tests.e2e.conftest import INFERENCE_PYTHON

pytestmark = pytest.mark.timeout(1800)
FOLLOW = """
[trainer.follow]
store = "{store}"
key = "{key}"
poll_s = 0.5
"""


def train(run_dir) -> None:
    with SpliceClient.of_run(run_dir) as client:
        job = TrainMerged(
            tensors=batch_specs(num_sequences=1, num_tokens=len(PROMPT) + 2),
            loss=LossSpec(name="cross_entropy"),
            optim=OptimParams(lr=0.01),
        )
        client.run(job, buffers=as_batch([3, 4]), timeout_s=120)


def served(folder) -> tuple[set[str], list[float]]:
    """The served names, and the log-probs of a text."""
    with SpliceClient.of_run(folder / "run") as client:
        url = client.base_url()
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        names = {m["id"] for m in http.get("/v1/models").json()["data"]}
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 1}
        (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    found = [max(e.values(), key=lambda x: x["rank"]) for e in choice["prompt_logprobs"] if e]
    return names, [one["logprob"] for one in found]


def wait_served(folder, name: str) -> list[float]:
    deadline_s = time.monotonic() + 180
    while True:
        names, logprobs = served(folder)
        if name in names:
            return logprobs
        log = (folder / "run/logs/trainer.log").read_text()
        assert time.monotonic() < deadline_s, (names, log[-3000:])
        time.sleep(0.5)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[publication]\n", '[publication]\nrollout_weights = "lora"\n'),
        ('finetuning_type = "lora"', 'finetuning_type = "full"'),
    ],
    ids=["adapters", "all-parameters"],
)
def test_a_run_follows_through_s3_whatever_the_other_one_trains_and_serves(
    models, tmp_path, monkeypatch, old, new
):
    origin, there, store = tmp_path / "origin", tmp_path / "there", "s3://bucket/chain"
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    boto3.client("s3").create_bucket(Bucket="bucket")
    options = ["--model", models["qwen3"], "--name", "tiny", "--gpus", ""]
    for folder in (origin, there):
        splice("init", folder, *options, "--inference-python", INFERENCE_PYTHON)
    file = origin / "run.toml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    try:
        splice("up", origin)
        train(origin / "run")
        key = re.search("public key: ([0-9a-f]{64})", splice("mirror", origin, store, "--once"))[1]
        file = there / "run.toml"
        file.write_text(file.read_text() + FOLLOW.format(store=store, key=key))
        splice("up", there)
        for version in (1, 2):
            found = wait_served(there, f"tiny@{version}")
            assert found == pytest.approx(served(origin)[1], abs=1e-4)
            if version == 1:
                train(origin / "run")
                splice("mirror", origin, store, "--once")
    finally:
        splice("stop", there)
        splice("stop", origin)
        server.stop()


def test_a_run_follows_another_one_through_a_store(models, tmp_path):
    """Also past a version that the store has wrong, and after everything was killed."""
    origin, there = tmp_path / "origin", tmp_path / "there"
    store, seen = tmp_path / "store", tmp_path / "seen"
    options = ["--model", models["qwen3"], "--name", "tiny", "--gpus", ""]
    for folder in (origin, there):
        splice("init", folder, *options, "--inference-python", INFERENCE_PYTHON)

    def link_of(version: int) -> dict:
        return json.loads(json.loads((store / f"links/{version:08d}.json").read_text())["link"])

    def written(*more: object, lie: str = "") -> str:
        """Write the newest version, and let the other side see it, perhaps with a wrong part."""
        said = splice("mirror", origin, store, "--once", *more)
        for name in ("parts", "links"):
            shutil.copytree(store / name, seen / name, dirs_exist_ok=True)
        if lie:
            (seen / "parts" / lie[:2] / lie).write_bytes(b"something else")
        shutil.copy(store / "newest", seen / "newest")
        return said

    splice("up", origin)
    try:
        train(origin / "run")
        key = re.search("public key: ([0-9a-f]{64})", written())[1]
        file = there / "run.toml"
        file.write_text(file.read_text() + FOLLOW.format(store=seen, key=key))
        splice("up", there)
        first = wait_served(there, "tiny@1")
        assert first == served(origin)[1]

        train(origin / "run")
        written()
        second = wait_served(there, "tiny@2")
        assert first != second == served(origin)[1]
        link = link_of(2)
        changed = [p for f in link["files"] for p in f["pieces"] if p["part"]]
        assert link["base"] == 1 and changed and all(p["is_code"] for p in changed)

        train(origin / "run")
        splice("mirror", origin, store, "--once")
        part = next(p["part"] for f in link_of(3)["files"] for p in f["pieces"] if p["part"])
        written(lie=part)
        log = there / "run/logs/trainer.log"
        deadline_s = time.monotonic() + 60
        while f"part {part} has other bytes" not in log.read_text():
            assert time.monotonic() < deadline_s, log.read_text()[-3000:]
            time.sleep(0.5)
        assert "tiny@2" in served(there)[0], "what is served stays"
        train(origin / "run")
        written("--full-every", 1)
        expected = wait_served(there, "tiny@4")
        assert expected == served(origin)[1], "a whole version mends it"

        with pytest.raises(JobFailed, match=f"this run follows {seen}: it cannot do TrainMerged"):
            train(there / "run")
        kill_all(there)
        splice("up", there, "--resume")
        assert wait_served(there, "tiny@4") == expected
    finally:
        splice("stop", there)
        splice("stop", origin)
    assert processes_of(there) == [] and processes_of(origin) == []
