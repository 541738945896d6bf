"""Training: tokens per second of a LoRA step, next to a bare Megatron-Bridge loop and transformers
+ PEFT, on the same tokens.

Every contender runs in its own process (`benchmarks.train_worker`), with the same sequences of
mixed length, adapters of rank 16 on all linear layers, random weights and AdamW; sequences, losses
and what each contender does with them are said there. Shapes from SPLICE_BENCH_SHAPES (8b,30b-a3b),
losses from SPLICE_BENCH_KINDS (rl,sft), peers from SPLICE_BENCH_PEERS (bridge,peft; empty: ours
alone), our numerics from SPLICE_BENCH_NUMERICS (adapters), steps from SPLICE_BENCH_SAMPLES (5),
tokens of a step from SPLICE_BENCH_TOKENS (65536); a contender gets SPLICE_BENCH_TIMEOUT_S (570).
SPLICE_BENCH_PROFILE names a file for the kernels of one more step of ours. With several
SPLICE_BENCH_TRAIN_GPUS (0) the contenders run side by side, each on one of them.

    SHAPE/lora-KIND/1           one rank, next to the peers
    SHAPE/lora-KIND/TOPOLOGY    SPLICE_BENCH_TOPOLOGIES (dp2, ep2, tp2, dp4, ep4, tp2dp2; none): N
                                ranks with N times the tokens, next to one rank

`flops_per_s` counts, for each token: 4 FLOP for every frozen weight that it passes (the product
forward, and the gradient of the input; a frozen weight has no gradient of its own), 6 for every
adapter weight, and causal attention's 12 x heads x head_dim x mean context in each layer; the head
only where there is loss. `matmul_flops_per_s` is what one large product reaches on the same device:
the peak that can be had. Only of shapes whose attention and experts the formula knows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.clusters import make_model
from benchmarks.harness import Case, torchrun
from orchestrator.errors import ConfigError

PEERS = {
    "bridge": "bare loop on Megatron-Bridge's LoRA (fewer adapters: they mean something else)",
    "peft": "transformers + PEFT",
}
WORKER_TIMEOUT_S = float(os.environ.get("SPLICE_BENCH_TIMEOUT_S", "570"))
TOPOLOGIES: dict[str, tuple[int, dict[str, int]]] = {
    "dp2": (2, {}),
    "ep2": (2, {"expert": 2}),
    "tp2": (2, {"tensor": 2}),
    "dp4": (4, {}),
    "ep4": (4, {"expert": 4}),
    "tp2dp2": (4, {"tensor": 2}),
}
"""Ranks, and what is not data parallel of them."""


def run(*, device: str, small: bool) -> Iterator[Case]:
    """One GPU, or the CPU."""
    shapes = (
        ["tiny-dense"] if small else os.environ.get("SPLICE_BENCH_SHAPES", "8b,30b-a3b").split(",")
    )
    steps = int(os.environ.get("SPLICE_BENCH_SAMPLES", "2" if small else "5"))
    tokens = int(os.environ.get("SPLICE_BENCH_TOKENS", "256" if small else "65536"))
    topologies = [
        t for t in os.environ.get("SPLICE_BENCH_TOPOLOGIES", "").split(",") if t and not small
    ]
    if unknown := set(topologies) - set(TOPOLOGIES):
        raise ConfigError(
            f"SPLICE_BENCH_TOPOLOGIES: no topology {', '.join(sorted(unknown))}; there are "
            f"{', '.join(TOPOLOGIES)}"
        )
    for shape in shapes:
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(shape, Path(folder))
            for kind in (
                ("rl",) if small else os.environ.get("SPLICE_BENCH_KINDS", "rl,sft").split(",")
            ):
                if not topologies:
                    yield from _cases(
                        f"{shape}/lora-{kind}/1",
                        model,
                        kind=kind,
                        device=device,
                        steps=steps,
                        tokens=tokens,
                    )
                else:
                    yield from _scaling(
                        f"{shape}/lora-{kind}",
                        topologies,
                        model,
                        kind=kind,
                        device=device,
                        steps=steps,
                        tokens=tokens,
                    )


def _scaling(
    name: str,
    topologies: Sequence[str],
    model: Path,
    *,
    kind: str,
    device: str,
    steps: int,
    tokens: int,
) -> Iterator[Case]:
    """Tokens per second of N ranks next to one, which has an Nth of the tokens."""

    def measured(what: str, tokens: int, **more: Any) -> dict[str, Any]:
        result = _worker(
            "splice", model, kind=kind, device=device, steps=steps, tokens=tokens, **more
        )
        if "error" in result:
            raise RuntimeError(f"{name}/{what}: {result['error']}")
        return result

    one = measured("1", tokens)
    for topology in topologies:
        ranks, sizes = TOPOLOGIES[topology]
        many = measured(topology, ranks * tokens, ranks=ranks, sizes=sizes)
        settings = {k: v for k, v in many.items() if k != "seconds"} | {
            "ranks": ranks,
            "one_rank": {k: v for k, v in one.items() if k != "seconds"},
        }
        yield Case(
            name=f"{name}/{topology}",
            metric="tokens_per_s",
            unit="tokens/s",
            samples=tuple(many["tokens"] / s for s in many["seconds"]),
            peer="one rank",
            peer_samples=tuple(one["tokens"] / s for s in one["seconds"]),
            settings=settings,
        )


def _cases(
    name: str, model: Path, *, kind: str, device: str, steps: int, tokens: int
) -> list[Case]:
    """A contender that fails (a peer that does not fit in memory, say) is in the settings with its
    error, not in the samples.
    """
    peers = [p for p in os.environ.get("SPLICE_BENCH_PEERS", ",".join(PEERS)).split(",") if p]
    contenders, gpus = ("splice", *peers), os.environ.get("SPLICE_BENCH_TRAIN_GPUS", "0").split(",")

    def on_its_gpu(place: int) -> list[dict[str, Any]]:
        run = partial(
            _worker,
            model=model,
            kind=kind,
            device=device,
            steps=steps,
            tokens=tokens,
            gpu=gpus[place],
        )
        return [run(contender) for contender in contenders[place :: len(gpus)]]

    with ThreadPoolExecutor(len(gpus)) as pool:
        done = list(pool.map(on_its_gpu, range(len(gpus))))
    found = {
        contender: done[i % len(gpus)][i // len(gpus)] for i, contender in enumerate(contenders)
    }
    ours = found["splice"]
    if "error" in ours:
        raise RuntimeError(f"{name}: {ours['error']}")
    settings = {k: v for k, v in ours.items() if k != "seconds"}

    def rate(result: dict[str, Any], amount: str) -> tuple[float, ...]:
        return tuple(result[amount] / s for s in result.get("seconds", ()))

    cases = [
        Case(
            name=f"{name}/{peer}",
            metric="tokens_per_s",
            unit="tokens/s",
            samples=rate(ours, "tokens"),
            peer=label,
            peer_samples=rate(found[peer], "tokens"),
            settings={**settings, "peer": {k: v for k, v in found[peer].items() if k != "seconds"}},
        )
        for peer, label in PEERS.items()
        if peer in peers
    ]
    if not peers:
        cases.append(
            Case(
                name=name,
                metric="tokens_per_s",
                unit="tokens/s",
                samples=rate(ours, "tokens"),
                settings=settings,
            )
        )
    cases += [
        Case(
            name=name,
            metric="flops_per_s",
            unit="FLOP/s",
            samples=rate(ours, "flops"),
            peer="one large product on the same device",
            peer_samples=(ours["matmul_flops_per_s"],),
        )
        for _ in range("flops" in ours)
    ]
    peaks = {peer: found[peer]["peak_bytes"] for peer in peers if "peak_bytes" in found[peer]}
    cases.append(
        Case(
            name=name,
            metric="peak_memory_bytes",
            unit="B",
            samples=(ours["peak_bytes"],),
            peer=PEERS["bridge"],
            peer_samples=(peaks["bridge"],) if "bridge" in peaks else (),
        )
    )
    return cases


def _worker(
    contender: str,
    model: Path,
    *,
    kind: str,
    device: str,
    steps: int,
    tokens: int,
    ranks: int = 1,
    sizes: dict[str, int] | None = None,
    gpu: str | None = None,
) -> dict[str, Any]:
    argv = [
        sys.executable,
        *torchrun(ranks),
        "-m",
        "benchmarks.train_worker",
        contender,
        "--model",
        str(model),
        "--kind",
        kind,
        "--device",
        device,
    ]
    argv += ["--steps", str(steps), "--tokens", str(tokens)]
    if contender == "splice" and (profile := os.environ.get("SPLICE_BENCH_PROFILE")):
        argv += ["--profile", profile]
    argv += [word for name, size in (sizes or {}).items() for word in (f"--{name}", str(size))]
    try:
        # As torchrun sets it: what little the CPU does per step, a large host's thread pool only
        # delays.
        env = (
            {"OMP_NUM_THREADS": "1"}
            | os.environ
            | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu and device == "cuda" else {})
        )
        ran = subprocess.run(
            argv, env=env, capture_output=True, text=True, timeout=WORKER_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no end within {WORKER_TIMEOUT_S} s"}
    if ran.returncode != 0:
        return {"error": (ran.stdout + ran.stderr)[-1500:]}
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    print(
        f"{contender} {kind} on {ranks} {sizes or ''}: "
        f"{[round(result['tokens'] / s) for s in result['seconds']]} tokens/s",
        flush=True,
    )
    return result
