"""One shape of `benchmarks.long`: a JSON line for each case."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.timing import seconds
from benchmarks.train_worker import ALPHA, FLOPS_KNOWN, LR, RANK, frozen_and_adapters
from orchestrator.protocol.config import LoraConfig, ParallelConfig, TrainerConfig
from orchestrator.protocol.messages import LossSpec, OptimParams
from trainer_node.training.batch import Batch
from trainer_node.training.start import start

if TYPE_CHECKING:
    from trainer_node.training.trainer import Trainer

SHORT = 32_768
"""Tokens of a sequence that is short enough for several steps."""


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
        """Made-up tokens, advantages and log-probs."""
        rng = np.random.default_rng(7)
        prompt = rng.integers(0, vocab_size, self.prompt)
        tokens = np.concatenate(
            [
                part
                for _ in range(self.count)
                for part in (prompt, rng.integers(0, vocab_size, self.answer))
            ]
        )
        mask = np.tile(np.r_[np.zeros(self.prompt), np.ones(self.answer)], self.count)
        advantages = rng.standard_normal(len(tokens)) * mask
        return Batch(
            tokens_T=torch.from_numpy(tokens),
            loss_mask_T=torch.from_numpy(mask.astype(np.float32)),
            advantages_T=torch.from_numpy(advantages.astype(np.float32)),
            sampler_logprobs_T=torch.from_numpy((-np.log(vocab_size) * mask).astype(np.float32)),
            lengths=(self.prompt + self.answer,) * self.count,
        )

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
            **{n: metrics[n] for n in ("peak_memory_bytes", "recomputed_share", "shared_tokens")},
        }
        if self.config["model_type"] in FLOPS_KNOWN:
            flops = shape.flops(self.config, shared=bool(metrics["shared_tokens"]))
            result["flops_per_s"] = flops / min(taken)
            result["ratio_by_flops"] = shape.flops(self.config, shared=False) / flops
        if is_tree:
            result |= self.apart(batch, warm=is_short)
        return result

    def apart(self, batch: Batch, *, warm: bool) -> dict[str, Any]:
        """The same step without sharing, once."""
        model = self.trainer.model
        obstacle, model.sharing_obstacle = model.sharing_obstacle, "measured without"
        taken, metrics = self.steps(batch, 1, warm=warm)
        model.sharing_obstacle = obstacle
        names = ("peak_memory_bytes", "recomputed_share")
        return {"apart": taken, "apart_settings": {n: metrics[n] for n in names}}


def main() -> None:
    """See `benchmarks.long`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--lengths", required=True)
    parser.add_argument("--trees", required=True)
    parser.add_argument("--steps", type=int, required=True)
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
