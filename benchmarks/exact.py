"""`trainer.numerics = "exact"` next to `"served"`: the same steps of the strict loop on a cluster
of each, and single operations.

    max_logprob_difference  of a step's tokens, trainer against sampler: 0.0, or the switch is
                            broken
    sampling_tokens_per_s   answers of a step over the seconds in which vLLM has requests
    training_tokens_per_s   prompts and answers over the seconds of the training job's passes
    seconds                 of one operation, forward; the peer is torch's

SPLICE_BENCH_MODEL is the folder of a pretrained model; one without weights, or without it
SPLICE_BENCH_SHAPES (tiny-dense), has random ones. SPLICE_BENCH_STEPS (20) steps have
SPLICE_BENCH_PROMPTS (128; 4 on a CPU) prompts of 32 tokens, each with 4 answers of
SPLICE_BENCH_ANSWER_TOKENS (128; 16 on a CPU) tokens: 1.3 million sampled ones on a GPU.
`sampling` is vLLM without a trainer: SPLICE_BENCH_CONCURRENT (64,256; 4 on a CPU) prompts
together. SPLICE_BENCH_PARTS (run,operations) is what runs, and sampling where it says so,
SPLICE_BENCH_PEERS (served; empty: none) the peer. The operations are those of the 8B's shape on a
GPU, and experts those of the 30B's, next to the trainer's own form.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn import functional

from benchmarks import clusters, loop
from benchmarks.harness import Case, inference_python
from benchmarks.timing import seconds
from orchestrator.protocol.messages import InitialSync
from splice.cluster import Cluster
from splice.rl import LoopConfig, SamplingConfig, Step
from trainer_node.model import experts as ordinary
from trainer_node.model.grouped import GateUp
from weight_transfer.exact import experts, kernels

NUMERICS = ("exact", "served") if os.environ.get("SPLICE_BENCH_PEERS", "served") else ("exact",)
PROMPT_TOKENS = 32
WORKER_S = 300.0
SAMPLES = 5


def run(*, device: str, small: bool) -> Iterator[Case]:
    """One trainer and one inference GPU, or the CPU."""
    parts = os.environ.get("SPLICE_BENCH_PARTS", "operations" if small else "run,operations")
    if "operations" in parts:
        yield from _operations(device, small)
    if "sampling" in parts:
        yield from _sampling_only(device)
    if "run" not in parts:
        return
    shape, given = (
        os.environ.get("SPLICE_BENCH_SHAPES", "tiny-dense"),
        os.environ.get("SPLICE_BENCH_MODEL"),
    )
    has_weights = given is not None and any(Path(given).glob("*.safetensors"))
    with TemporaryDirectory(prefix="splice-bench-") as name:
        folder = Path(name)
        if given is not None:
            (folder / "model").symlink_to(Path(given).resolve())
        found = {
            numerics: _steps(folder, shape, numerics, device, is_pretrained=has_weights)
            for numerics in NUMERICS
        }
    yield from _cases(Path(given).name if given else shape, found)


# ---------------------------------------------------------------- a run


def _steps(
    folder: Path, shape: str, numerics: str, device: str, *, is_pretrained: bool
) -> list[Step]:
    """All steps of a new run; the first one loads kernels."""
    cuda = device == "cuda"
    prompts = int(os.environ.get("SPLICE_BENCH_PROMPTS", "128" if cuda else "4"))
    answer = int(os.environ.get("SPLICE_BENCH_ANSWER_TOKENS", "128" if cuda else "16"))
    config = LoopConfig(
        max_staleness=0,
        group_size=loop.GROUP_SIZE,
        groups_per_step=prompts,
        sampling=SamplingConfig(max_tokens=answer, extra={"ignore_eos": True}),
        max_in_flight=loop.GROUP_SIZE * prompts,
    )
    run_file = clusters.cluster_config(
        shape,
        folder,
        device=device,
        run=numerics,
        pause_mode="keep_kv",
        max_num_seqs=loop.GROUP_SIZE * prompts,
        keep_versions=2,
        micro_batch_tokens=16384,
        trainer={"numerics": numerics, "init": "hf" if is_pretrained else "random"},
    )
    with Cluster(run_file) as cluster:
        cluster.client.run(InitialSync())
        rows = loop.make_rows(prompts, PROMPT_TOKENS)
        count = int(os.environ.get("SPLICE_BENCH_STEPS", "20"))
        return loop.first_steps(cluster.client, folder / f"loop-{numerics}", config, rows, count)


def _cases(name: str, found: dict[str, list[Step]]) -> Iterator[Case]:
    exact, served = found["exact"], found.get("served", [])
    shares = [step.metrics["exact_share"] for step in exact]
    settings = {
        "versions": exact[-1].version,
        "sampled_tokens": sum(_answer_tokens(step) for step in exact),
        "exact_share_min": min(shares),
    }
    metrics: dict[str, tuple[str, Callable[[Step], float], Callable[[Step], float]]] = {
        "max_logprob_difference": (
            "nats",
            # No such metric: not one token was compared.
            lambda step: step.metrics.get("exact_gap_max", float("nan")),
            lambda step: step.metrics["logprob_gap_max"],
        ),
        "sampling_tokens_per_s": ("tokens/s", _sampling, _sampling),
        "training_tokens_per_s": ("tokens/s", _training, _training),
    }
    for metric, (unit, ours, theirs) in metrics.items():
        skipped = 0 if unit == "nats" else min(1, len(exact) - 1)
        yield Case(
            name=name,
            metric=metric,
            unit=unit,
            samples=tuple(map(ours, exact[skipped:])),
            peer="served" if served else None,
            peer_samples=tuple(map(theirs, served[skipped:])),
            settings=settings,
        )


def _answer_tokens(step: Step) -> int:
    return sum(len(r.completion.answer_ids) for group in step.groups for r in group)


def _sampling(step: Step) -> float:
    return _answer_tokens(step) / step.seconds["sampling"]


def _training(step: Step) -> float:
    return loop.tokens_of(step) / step.seconds["job.train"]


# ---------------------------------------------------------------- sampling, without a trainer


def _sampling_only(device: str) -> Iterator[Case]:
    cuda = device == "cuda"
    shape = os.environ.get("SPLICE_BENCH_SHAPES", "tiny-dense")
    counts = os.environ.get("SPLICE_BENCH_CONCURRENT", "64,256" if cuda else "4")
    answer = os.environ.get("SPLICE_BENCH_ANSWER_TOKENS", "128" if cuda else "16")
    with TemporaryDirectory(prefix="splice-bench-") as name:
        model = clusters.model_in(Path(name), shape)
        argv = [str(inference_python()), "-m", "benchmarks.sampling_worker", "--model", str(model)]
        argv += ["--device", device, "--prompts", counts, "--tokens", answer]
        argv += ["--prompt-tokens", str(PROMPT_TOKENS)]
        found = dict[str, list[list[float]]]()
        for numerics in NUMERICS:
            ran = subprocess.run(
                [*argv, *["--exact"] * (numerics == "exact")],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                timeout=WORKER_S,
            )
            found[numerics] = json.loads(ran.stdout.splitlines()[-1])
    for place, count in enumerate(counts.split(",")):
        yield Case(
            name=f"{shape}/sampling-{count}",
            metric="tokens_per_s",
            unit="tokens/s",
            samples=tuple(found["exact"][place]),
            peer="served" if "served" in found else None,
            peer_samples=tuple(found["served"][place]) if "served" in found else (),
            settings={"prompt_tokens": PROMPT_TOKENS, "answer_tokens": int(answer)},
        )


# ---------------------------------------------------------------- operations


def _operations(device: str, small: bool) -> Iterator[Case]:
    """Of the 8B's shape, for one long pack and for 64 decoded tokens; small ones on a CPU."""
    cuda = device == "cuda" and not small
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden, inner, heads, groups, size = (4096, 12288, 32, 8, 128) if cuda else (96, 128, 4, 2, 16)
    lengths = [2048] * 4 if cuda else [40, 30]
    torch.manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    rows, starts = bounds[-1], torch.tensor(bounds, dtype=torch.int32, device=device)
    weights = {"qkv": drawn((heads + 2 * groups) * size, hidden), "down": drawn(hidden, inner)}
    query, key, value = (
        drawn(rows, heads, size),
        drawn(rows, groups, size),
        drawn(rows, groups, size),
    )
    gamma, scale = drawn(hidden), size**-0.5
    work: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}
    for count in (rows, min(64, rows)):
        for name, weight in weights.items():
            x = drawn(count, weight.shape[1])
            work[f"product-{name}-{count}"] = (
                lambda x=x, w=weight: kernels.linear(x, w),
                lambda x=x, w=weight: functional.linear(x, w),
            )
        x, gate_up = drawn(count, hidden), drawn(count, 2 * inner)
        work[f"norm-{count}"] = (
            lambda x=x: kernels.rms_norm(x, gamma, 1e-6),
            lambda x=x: functional.rms_norm(x, (hidden,), gamma, 1e-6),
        )
        gate, up = gate_up.chunk(2, dim=-1)
        work[f"swiglu-{count}"] = (
            lambda x=gate_up: kernels.swiglu(x),
            lambda gate=gate, up=up: functional.silu(gate) * up,
        )

    def attended() -> list[torch.Tensor]:
        return [
            functional.scaled_dot_product_attention(
                *(t[a:b].transpose(0, 1)[None] for t in (query, key, value)),
                is_causal=True,
                enable_gqa=True,
            )
            for a, b in pairwise(bounds)
        ]

    work[f"attention-{len(lengths)}x{lengths[0]}"] = (
        lambda: kernels.attend_pack(query, key, value, starts, max(lengths), scale),
        attended,
    )
    for count in (rows, min(64, rows)):
        work[f"experts-{count}"] = _mixture(count, device, dtype, small=not cuda)
    for name, (ours, theirs) in work.items():
        for once in (ours, theirs):
            once()
        yield Case(
            name=f"operation/{name}",
            metric="seconds",
            unit="s",
            samples=tuple(seconds(ours, device) for _ in range(SAMPLES)),
            peer="torch" if not name.startswith("experts") else "served",
            peer_samples=tuple(seconds(theirs, device) for _ in range(SAMPLES)),
            settings={"dtype": str(dtype).removeprefix("torch.")},
        )


def _mixture(
    tokens: int, device: str, dtype: torch.dtype, *, small: bool
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A layer's experts after the router, ours and the trainer's own; without adapters."""
    count, top_k, hidden, inner = (8, 2, 64, 32) if small else (128, 8, 2048, 768)
    kind = {"device": device, "dtype": dtype}
    x, fc1 = torch.randn(tokens, hidden, **kind), torch.randn(count, 2 * inner, hidden, **kind)
    fc2, logits = torch.randn(count, hidden, inner, **kind), torch.randn(tokens, count, **kind)
    chosen = experts.chosen(logits, top_k)
    shares = experts.shares(logits.gather(1, chosen))

    def theirs() -> torch.Tensor:
        per_expert = torch.zeros_like(logits).scatter(1, chosen, 1.0).sum(0).int()
        rows = ordinary.Rows.of(chosen, per_expert)
        y = ordinary.ORDINARY.product(rows.gather(x), fc1, rows.ends_E)
        inner = GateUp(
            y_N2F=y,
            h_N2R=None,
            lora_B_E2F2R=None,
            probs_N=shares.flatten()[rows.choice_N],
            ends_E=rows.ends_E,
        )
        return rows.combine(ordinary.ORDINARY.product(ordinary.swiglu(inner), fc2, rows.ends_E))

    return lambda: experts.mlp(x, shares, chosen, fc1, fc2), theirs
