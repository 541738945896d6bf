"""One shape of `benchmarks.long`: a JSON line for each case.

Axes: T = tokens of all sequences laid end to end.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.timing import seconds
from benchmarks.train_worker import ALPHA, FLOPS_KNOWN, LR, RANK, frozen_and_adapters
from orchestrator.protocol.config import LoraConfig, ParallelConfig, TrainerConfig
from orchestrator.protocol.messages import LossSpec, OptimParams
from trainer_node.ranks import objects
from trainer_node.training.batch import Batch
from trainer_node.training.start import start

if TYPE_CHECKING:
    from trainer_node.training.trainer import Trainer

SHORT = 32_768
"""Tokens of a sequence that is short enough for several steps."""
SHORTEST = 128
"""Tokens of the shortest sequence of mixed lengths."""


def made_up(
    sequences: Sequence[tuple[np.ndarray, np.ndarray]], vocab_size: int, rng: np.random.Generator
) -> Batch:
    """A batch of prompts with answers: the answers carry loss, with made-up advantages and
    log-probs."""
    tokens = np.concatenate([part for sequence in sequences for part in sequence])
    mask = np.concatenate([np.r_[np.zeros(len(p)), np.ones(len(a))] for p, a in sequences])
    advantages = rng.standard_normal(len(tokens)) * mask
    return Batch(
        tokens_T=torch.from_numpy(tokens),
        loss_mask_T=torch.from_numpy(mask.astype(np.float32)),
        advantages_T=torch.from_numpy(advantages.astype(np.float32)),
        sampler_logprobs_T=torch.from_numpy((-np.log(vocab_size) * mask).astype(np.float32)),
        lengths=tuple(len(p) + len(a) for p, a in sequences),
    )


def mixed_lengths(steps: int, sequences: int, longest: int) -> list[list[int]]:
    """Lengths of each step's sequences: log-uniform from SHORTEST to `longest`.

    Each length is from its own one of equal parts of the logarithm, so that few steps have all
    kinds too. The order is random, the same every time.
    """
    rng, count = np.random.default_rng(11), steps * sequences
    places = (rng.permutation(count) + rng.random(count)) / count
    lengths = np.rint(SHORTEST * (longest / SHORTEST) ** places).astype(int)
    return [list(map(int, part)) for part in lengths.reshape(steps, sequences)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sequences with a common prompt, and loss on the rest."""

    count: int
    answer: int
    prompt: int

    @staticmethod
    def of(text: str) -> Shape:
        """From NxANSWER+PROMPT."""
        count, rest = text.split("x")
        answer, prompt = rest.split("+")
        return Shape(count=int(count), answer=int(answer), prompt=int(prompt))

    def batch(self, vocab_size: int) -> Batch:
        """Made-up tokens."""
        rng = np.random.default_rng(7)
        prompt = rng.integers(0, vocab_size, self.prompt)
        answers = [rng.integers(0, vocab_size, self.answer) for _ in range(self.count)]
        return made_up([(prompt, answer) for answer in answers], vocab_size, rng)

    def flops(self, config: dict[str, Any], *, shared: bool) -> float:
        """By the formula of `benchmarks.train`."""
        weights = frozen_and_adapters(config)
        prompts = 1 if shared else self.count
        whole = self.prompt + self.answer

        def contexts(length: int) -> float:
            return length * (length + 1) / 2

        tokens = prompts * self.prompt + self.count * self.answer
        attended = self.count * (contexts(whole) - contexts(self.prompt))
        attended += prompts * contexts(self.prompt)
        heads = config["num_attention_heads"] * config["head_dim"]
        head = 4 * config["hidden_size"] * config["vocab_size"] * self.count * self.answer
        return (
            tokens * (4 * weights[0] + 6 * weights[1])
            + config["num_hidden_layers"] * 12 * heads * attended
            + head
        )


class Bench:
    """A trainer with its defaults."""

    def __init__(self, model: Path, device: str) -> None:
        self.device = device
        world = int(os.environ.get("WORLD_SIZE", "1"))
        self.config = json.loads((model / "config.json").read_text())
        self.trainer: Trainer = start(
            TrainerConfig(
                model=model,
                init="random",
                device=device,  # type: ignore[arg-type]
                dtype="bfloat16" if device == "cuda" else "float32",
                lora=LoraConfig(rank=RANK, alpha=ALPHA),
                recompute=os.environ.get("SPLICE_BENCH_RECOMPUTE", "auto"),  # type: ignore[arg-type]
                parallel=ParallelConfig(context=world, world_size=world),
            )
        )

    def steps(
        self, batch: Batch, count: int, *, warm: bool
    ) -> tuple[list[float], dict[str, float]]:
        """Seconds of each step, and the last one's metrics."""
        loss, metrics = LossSpec(name="importance_sampling"), dict[str, float]()

        def step() -> None:
            self.trainer.begin_peak()
            metrics.update(self.trainer.train_step(batch, loss, OptimParams(lr=LR)))

        for _ in range(warm):
            step()
        return [seconds(step, self.device) for _ in range(count)], metrics

    def measure(self, name: str, shape: Shape, count: int, *, is_tree: bool) -> dict[str, Any]:
        """A case's line."""
        batch = shape.batch(self.config["vocab_size"])
        is_short = max(batch.lengths) <= SHORT
        taken, metrics = self.steps(batch, count if is_short else 1, warm=is_short)
        result: dict[str, Any] = {
            "name": name,
            "seconds": taken,
            "apart": [],
            "tokens": len(batch.tokens_T),
            "pack_tokens": self.trainer.micro_batch_tokens,
            "sharing_obstacle": self.trainer.model.sharing_obstacle,
            "longest": self.trainer.longest_trained,
            "is_offloaded": self.offloads(batch),
            **{n: metrics[n] for n in ("peak_memory_bytes", "recomputed_share", "shared_tokens")},
        }
        if self.config["model_type"] in FLOPS_KNOWN:
            flops = shape.flops(self.config, shared=bool(metrics["shared_tokens"]))
            result["flops_per_s"] = flops / min(taken)
            result["ratio_by_flops"] = shape.flops(self.config, shared=False) / flops
        if is_tree:
            result |= self.apart(batch, warm=is_short)
        return result

    def offloads(self, batch: Batch) -> bool:
        """Whether layers' inputs of one of its packs were in host memory."""
        return any(map(self.trainer.offloads, self.trainer._cut(batch).loads))

    def apart(self, batch: Batch, *, warm: bool) -> dict[str, Any]:
        """The same step without sharing, once."""
        model = self.trainer.model
        obstacle, model.sharing_obstacle = model.sharing_obstacle, "measured without"
        taken, metrics = self.steps(batch, 1, warm=warm)
        model.sharing_obstacle = obstacle
        names = ("peak_memory_bytes", "recomputed_share")
        return {"apart": taken, "apart_settings": {n: metrics[n] for n in names}}

    def mixed(self, lengths: Sequence[Sequence[int]], ends_s: float) -> dict[str, Any]:
        """The line of steps with these lengths, one after the other. Stops before `ends_s`, on the
        monotonic clock, if the longest step so far could pass it."""
        rng, vocab_size = np.random.default_rng(13), self.config["vocab_size"]
        taken: list[dict[str, float]] = []
        slowest = 0.0
        for number, step in enumerate(lengths):
            group = self.trainer.model.control_group
            if taken and max(objects.all_gather(time.monotonic(), group=group)) + slowest > ends_s:
                break
            halves = [(n // 2, n - n // 2) for n in step]
            parts = [tuple(rng.integers(0, vocab_size, half) for half in pair) for pair in halves]
            batch = made_up(parts, vocab_size, rng)
            (spent,), metrics = self.steps(batch, 1, warm=False)
            slowest = max(objects.all_gather(max(slowest, spent), group=group))
            taken.append(
                {
                    "tokens": sum(step),
                    "longest": max(step),
                    "seconds": spent,
                    "packs": len(self.trainer._cut(batch)),
                    "is_offloaded": self.offloads(batch),
                    **{n: metrics[n] for n in ("recomputed_share", "peak_memory_bytes")},
                    **_allocator(self.device),
                }
            )
            if int(os.environ.get("RANK", "0")) == 0:
                said = " ".join(f"{name}={value:.6g}" for name, value in taken[-1].items())
                print(f"step {number + 1} of {len(lengths)}: {said}", file=sys.stderr, flush=True)
        return {
            "name": "long/mixed",
            "steps": taken,
            "steps_wanted": len(lengths),
            "pack_tokens": self.trainer.micro_batch_tokens,
            "longest": self.trainer.longest_trained,
            "alloc_conf": os.environ.get("PYTORCH_ALLOC_CONF", ""),
        }


def _allocator(device: str) -> dict[str, float]:
    """What torch holds on the GPU, and how often it had to free what it held to find memory."""
    if device == "cpu":
        return {}
    found = torch.cuda.memory_stats()
    return {
        "reserved_bytes": found["reserved_bytes.all.peak"],
        "retries": found["num_alloc_retries"],
    }


def main() -> None:
    """See `benchmarks.long`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--lengths", required=True)
    parser.add_argument("--trees", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--mixed", type=int, nargs=3, required=True)
    parser.add_argument("--ends-s", type=float, required=True, help="on the monotonic clock")
    a = parser.parse_args()
    bench = Bench(a.model, a.device)
    cases: list[Callable[[], dict[str, Any]]] = []
    for text in filter(None, a.trees.split(",")):
        tree = Shape.of(text)
        cases.append(lambda n=f"tree/{text}", s=tree: bench.measure(n, s, a.steps, is_tree=True))
    for text in filter(None, a.lengths.split(",")):
        half = int(text) // 2
        one = Shape(count=1, answer=int(text) - half, prompt=half)
        cases.append(lambda n=f"long/{text}", s=one: bench.measure(n, s, a.steps, is_tree=False))
    if a.mixed[0]:
        cases.append(lambda: bench.mixed(mixed_lengths(*a.mixed), a.ends_s))
    failed = 0
    for case in cases:
        try:
            result = case()
            if int(os.environ.get("RANK", "0")) == 0:
                print(json.dumps(result), flush=True)
        except torch.OutOfMemoryError as error:  # the others still count
            failed = 1
            print(f"a case found no memory: {error}", file=sys.stderr, flush=True)
        if failed:  # outside of the handler, whose traceback holds the pack
            bench.trainer.drop_pending()
            gc.collect()
            torch.cuda.empty_cache()
    bench.trainer.model.close()
    sys.exit(failed)


if __name__ == "__main__":
    main()
