"""Models by hub id, out of a cache laid out by hand as Hugging Face lays it out; and a trainer on
two hosts, as far as one host can show.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from orchestrator.protocol.config import ParallelConfig
from orchestrator.protocol.hub import is_hub_id
from orchestrator.protocol.messages import Forward, forward_specs
from tests.hub_cache import COMMIT, make_cache
from tests.orchestrator.run import Run
from tests.trainer_node import bounds
from tests.trainer_node.conftest import REPO, child_env
from tests.trainer_node.data import arrays
from tests.trainer_node.launched import ranks, trainer

FETCH = """
import json, sys
from pathlib import Path
from orchestrator.protocol.hub import fetch
for model in sys.argv[1:]:
    try:
        print(json.dumps(str(fetch(Path(model)))))
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
"""


def fetch(*models: str, cache: Path, **env: str) -> list[str]:
    """What comes of each, in its own process, because huggingface_hub reads the environment
    when it is imported.
    """
    ran = subprocess.run(
        [sys.executable, "-c", FETCH, *models],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**child_env(), "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", **env},
    )
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_out_of_the_cache(models, tmp_path: Path) -> None:
    snapshot = make_cache(models["dense_tied"], tmp_path, repo="models--tiny--dense")
    partial = make_cache(models["dense_tied"], tmp_path, repo="models--tiny--partial")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (partial / "model.safetensors.index.json").write_text(json.dumps(index))
    asked = ("tiny/dense", f"tiny/dense@{COMMIT}", "tiny/other", "tiny/partial")
    plain, by_commit, other, part = fetch(*asked, cache=tmp_path)
    assert plain == by_commit == str(snapshot)
    for words in (
        "ConfigError: tiny/other is not a local folder, and the Hub download failed: ",
        "HF_HUB_OFFLINE is set",
        str(tmp_path),
        "hf download tiny/other",
    ):
        assert words in other, other
    assert "has no model-2.safetensors; download it again" in part, part
    (online,) = fetch(
        "tiny/other", cache=tmp_path, HF_HUB_OFFLINE="0", HF_ENDPOINT="http://127.0.0.1:9"
    )
    assert "not a local folder" in online and "HF_HUB_OFFLINE" not in online, online


def test_what_is_a_hub_id(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [is_hub_id(Path(m)) for m in ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B@main")] == [True, True]
    assert not any(
        is_hub_id(Path(m)) for m in ("/models/qwen", "../a/b", "qwen", "runs/models/tiny", "~/qwen")
    )
    (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    assert not is_hub_id(Path("Qwen/Qwen3-8B"))


def test_two_hosts_a_hub_id_and_a_prefix(models, tmp_path: Path, monkeypatch) -> None:
    """Two launchers, one with a template, over loopback; the model comes from the cache; on both no
    rank is left at the end.
    """
    from tests.trainer_node.tiny import hf_model

    make_cache(models["dense_tied"], tmp_path / "cache", repo="models--tiny--dense")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    values = arrays()
    tokens, lengths = values["tokens"], values["sequence_lengths"]
    specs = forward_specs(num_sequences=len(lengths), num_tokens=len(tokens))
    options = {
        "parallel": ParallelConfig(world_size=2),
        "memory": "exit",
        "model_fetch_timeout_s": 60.0,
    }
    with Run(tmp_path) as run:
        run.orchestrator._trainer._ready_timeout_s = 120.0
        port = free_port()
        common = [
            "--nodes",
            "2",
            "--rendezvous",
            f"127.0.0.1:{port}",
            "--prefix",
            "env SPLICE_PREFIXED='a b'",
        ]
        for host in ("zero", "one"):
            (tmp_path / host).mkdir()
        model = Path("tiny/dense")
        with (
            trainer(run, model, tmp_path / "zero", *common, "--node-rank", "0", **options) as zero,
            trainer(
                run,
                model,
                tmp_path / "one",
                *common,
                "--node-rank",
                "1",
                "--no-template",
                **options,
            ) as one,
        ):
            seen = []

            def look(progress) -> None:
                if progress.phase == "forward":
                    seen.extend(environment(zero) + environment(one))

            result = run.client.run(
                Forward(tensors=specs),
                buffers=[tokens.tobytes(), lengths.tobytes()],
                timeout_s=150,
                on_progress=look,
            )
            assert ranks(zero) == ranks(one) == []
    assert sorted(seen) == [("splice-rank-0", "a b"), ("splice-rank-1", "a b")]
    found = np.frombuffer(result.logprobs, np.float32)
    theirs = hf_model(models["dense_tied"])
    start = 0
    for length in lengths:
        ids = torch.from_numpy(tokens[start : start + length].astype(np.int64))
        with torch.no_grad():
            scored = (
                theirs(input_ids=ids[None])
                .logits[0, :-1]
                .log_softmax(-1)
                .gather(-1, ids[1:, None])[:, 0]
            )
        assert np.abs(scored.numpy() - found[start + 1 : start + length]).max() <= bounds.scores()
        start += length


def environment(launcher: subprocess.Popen) -> list[tuple[str, str]]:
    """(name, the prefix's variable) of the launcher's ranks."""
    return [(p.name(), p.environ()["SPLICE_PREFIXED"]) for p in ranks(launcher)]


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
