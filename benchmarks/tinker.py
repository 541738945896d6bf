"""A training cycle through `splice tinker` and its SDK, against the same by `SpliceClient`:
log-probs and gradients of a batch, an optimizer step, a publication.

    cycle_s             all three
    forward_backward_s  importance sampling on every answer token; log-probs come back
    optim_step_s        AdamW
    publish_s           save_weights_and_get_sampling_client, and publish

Both take turns on one cluster, with the same tokens, so each has the other's machine. Shapes from
SPLICE_BENCH_SHAPES (8b on cuda, tiny-dense else), sequences from SPLICE_BENCH_PROMPTS (16; 8 on a
CPU), tokens of each from SPLICE_BENCH_ANSWER_TOKENS (4096; 128 on a CPU), samples from
SPLICE_BENCH_SAMPLES (7).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import clusters, turns
from benchmarks.harness import Case
from orchestrator.processes.launch import NodeProcess
from orchestrator.protocol.messages import InitialSync, LossSpec, OptimParams
from splice.client.batches import Batch
from splice.client.clients import SpliceClient
from splice.cluster import Cluster

WARM_CYCLES = 2
LR, LOGPROB = 1e-6, -1.0
PHASES = ("forward_backward", "optim_step", "publish")
START_S, WAIT_S = 600.0, 600.0
Cycle = dict[str, float]


def run(*, device: str, small: bool) -> list[Case]:
    """One trainer and one inference GPU, or the CPU."""
    usual = "tiny-dense" if small or device == "cpu" else "8b"
    shapes = usual if small else os.environ.get("SPLICE_BENCH_SHAPES", usual)
    count = 3 if small else int(os.environ.get("SPLICE_BENCH_SAMPLES", "7"))
    cases: list[Case] = []
    for shape in shapes.split(","):
        with TemporaryDirectory(prefix="splice-bench-") as name:
            config = clusters.cluster_config(shape, Path(name), device=device)
            with turns.started(Cluster(config)) as cluster, turns.alone():
                cluster.client.run(InitialSync())
                cases += _cases(shape, *_measure(cluster, config.run_dir, device, count))
    return cases


def _measure(
    cluster: Cluster, run_dir: Path, device: str, count: int
) -> tuple[list[Cycle], list[Cycle], dict[str, Any]]:
    """Cycles through the server, cycles by the client, and what both did."""
    sequences = int(os.environ.get("SPLICE_BENCH_PROMPTS", 16 if device == "cuda" else 8))
    length = int(os.environ.get("SPLICE_BENCH_ANSWER_TOKENS", 4096 if device == "cuda" else 128))
    batch = clusters.random_batch(sequences, length, logprob=LOGPROB)
    tokens_SL = np.frombuffer(batch.buffers[0], "<i4").reshape(sequences, length)
    through, direct = [], []
    with _server(run_dir) as url, _sdk(url, run_dir) as sdk:
        phases = _sdk_phases(sdk, tokens_SL), _client_phases(cluster.client, batch)
        for number in range(WARM_CYCLES + count):
            for taken, steps in zip((through, direct), phases, strict=True):
                cycle = _timed(steps)
                taken += [cycle] if number >= WARM_CYCLES else []
    settings = {"sequences": sequences, "tokens_each": length, "loss": "importance_sampling"}
    return through, direct, settings


def _timed(steps: dict[str, Callable[[], Any]]) -> Cycle:
    seconds = {}
    for name, step in steps.items():
        started = time.perf_counter()
        step()
        seconds[name] = time.perf_counter() - started
    return {**seconds, "cycle": sum(seconds.values())}


# ---------------------------------------------------------------- both ways


def _client_phases(client: SpliceClient, batch: Batch) -> dict[str, Callable[[], Any]]:
    loss = LossSpec(name="importance_sampling", normalize_by=1.0)
    optim = OptimParams(lr=LR, max_grad_norm=None)
    return {
        "forward_backward": lambda: client.forward_backward(batch, loss, returns_logprobs=True),
        "optim_step": lambda: client.optim_step(optim),
        "publish": client.publish,
    }


def _sdk_phases(trainer: Any, tokens_SL: Any) -> dict[str, Callable[[], Any]]:
    from tinker import types

    ones = [1.0] * (tokens_SL.shape[1] - 1)
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1].tolist()),
            loss_fn_inputs={
                "target_tokens": row[1:].tolist(),
                "logprobs": [LOGPROB * one for one in ones],
                "advantages": ones,
            },
        )
        for row in tokens_SL
    ]
    adam = types.AdamParams(learning_rate=LR)
    return {
        "forward_backward": lambda: trainer.forward_backward(data, "importance_sampling").result(
            timeout=WAIT_S
        ),
        "optim_step": lambda: trainer.optim_step(adam).result(timeout=WAIT_S),
        "publish": lambda: trainer.save_weights_and_get_sampling_client().result(timeout=WAIT_S),
    }


# ---------------------------------------------------------------- the server


@contextlib.contextmanager
def _server(run_dir: Path) -> Iterator[str]:
    """`splice tinker` as a process; yields its URL."""
    node = NodeProcess(
        name="tinker",
        argv=[sys.executable, "-m", "splice", "tinker", str(run_dir), "--port", "0"],
        env={},
        log_file=run_dir / "logs" / "tinker.log",
    )
    node.start()
    try:
        url, deadline_s = run_dir / "tinker" / "url", time.monotonic() + START_S
        while not url.exists():
            if node.died() or time.monotonic() > deadline_s:
                raise RuntimeError(f"no server within {START_S:.0f} s:\n{node.log_tail()}")
            time.sleep(0.05)
        yield url.read_text().strip()
    finally:
        node.stop(grace_s=10.0)


@contextlib.contextmanager
def _sdk(url: str, run_dir: Path) -> Iterator[Any]:
    """The SDK's client of one model."""
    import tinker

    key = (run_dir / "tinker" / "api_key").read_text().strip()
    service = tinker.ServiceClient(base_url=url, api_key=key)
    model = service.create_lora_training_client(base_model=clusters.NAME, rank=clusters.RANK)
    yield model.result(timeout=WAIT_S)
    service.close("success").result(timeout=WAIT_S)


def _cases(
    shape: str, through: list[Cycle], direct: list[Cycle], settings: dict[str, Any]
) -> list[Case]:
    return [
        Case(
            name=f"{shape}/lora-all/1to1",
            metric=f"{phase}_s",
            unit="s",
            samples=tuple(cycle[phase] for cycle in through),
            peer="SpliceClient",
            peer_samples=tuple(cycle[phase] for cycle in direct),
            settings=settings if phase == "cycle" else {},
        )
        for phase in ("cycle", *PHASES)
    ]
