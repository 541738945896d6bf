"""Router replay on a MoE: how far the trainer's log-probs are from the sampler's, with and without
the experts that vLLM chose.

    logprob_gap_mean, logprob_gap_max    nats, over the answers' tokens of a step
    train_s                              the optimizer step
    tokens_per_s                         prompt and answer tokens of a step over wall-clock

Steps are strictly on-policy, so trainer and sampler differ by rounding and the experts chosen. The
peer is the same run without replay, before it; the learning rate is so small that the weights stay
what they are. Shape from SPLICE_BENCH_SHAPES (30b-a3b/lora-attn), prompts
from SPLICE_BENCH_PROMPTS (8), steps from SPLICE_BENCH_SAMPLES (4), tokens as in `loop`. On GPUs
only, with vLLM 0.28 or newer.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import clusters, loop, turns
from benchmarks.harness import Case
from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import InitialSync
from splice.cluster import Cluster
from splice.rl import Step

FLAGS = ("--enable-return-routed-experts", "--enable-scale-out")
PROMPTS, WARM_STEPS, STEPS, LR = 8, 2, 4, 1e-9


def run(*, device: str, small: bool) -> list[Case]:
    """One trainer and one inference GPU."""
    if device != "cuda" or small:
        raise ConfigError("vLLM returns routed experts on GPUs only: --device cuda, no --small")
    shape, _, lora = os.environ.get("SPLICE_BENCH_SHAPES", "30b-a3b/lora-attn").partition("/")
    lora = lora or "lora-all"
    prompts = int(os.environ.get("SPLICE_BENCH_PROMPTS", PROMPTS))
    count = WARM_STEPS + int(os.environ.get("SPLICE_BENCH_SAMPLES", STEPS))
    config = loop.loop_config(device, 0, prompts)
    rows = loop.make_rows(prompts, int(os.environ.get("SPLICE_BENCH_PROMPT_TOKENS", "0")))
    with TemporaryDirectory(prefix="splice-bench-") as name:
        folder = Path(name)
        wanted = clusters.cluster_config(
            shape,
            folder,
            device=device,
            lora=lora,
            max_num_seqs=loop.GROUP_SIZE * prompts,
            vllm=FLAGS,
        )
        with turns.started(Cluster(wanted)) as cluster, turns.alone():
            cluster.client.run(InitialSync())
            without, replayed = (
                loop.first_steps(
                    cluster.client,
                    folder / f"replay-{replay}",
                    config.model_copy(update={"router_replay": replay}),
                    rows,
                    count,
                    lr=LR,
                )[WARM_STEPS:]
                for replay in (False, True)
            )
    settings = config.model_dump(mode="json") | {"router_replay": True, "flags": FLAGS}
    return [
        Case(
            name=f"{shape}/{lora}",
            metric=metric,
            unit=unit,
            samples=tuple(_value(step, metric) for step in replayed),
            peer="without router replay",
            peer_samples=tuple(_value(step, metric) for step in without),
            settings=settings if metric == "logprob_gap_mean" else {},
        )
        for metric, unit in {
            "logprob_gap_mean": "nats",
            "logprob_gap_max": "nats",
            "train_s": "s",
            "tokens_per_s": "tokens/s",
        }.items()
    ]


def _value(step: Step, metric: str) -> float:
    if metric == "train_s":
        return step.seconds["job.train"]
    if metric == "tokens_per_s":
        return loop.tokens_of(step) / step.seconds["step"]
    return float(step.metrics[metric])
