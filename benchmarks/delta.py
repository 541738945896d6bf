"""Publications of changed elements over slow links: a pretrained model's real steps, on a real
trainer and a real vLLM.

    bytes_over_floor  bytes that travelled, over the entropy of what changed: for each tensor
                      N * H(p) of the positions, and changed * H(step) of the values
    publish_s         encoding, transfer and verification over a link; the peer is a resync of all
                      tensors
    pause_s           the pause of the same publications

SPLICE_BENCH_MODEL is the model's folder, SPLICE_BENCH_STEPS (5) the steps at each learning rate and
link, SPLICE_BENCH_LINKS (10,100,1000) the links in Mbit/s, SPLICE_BENCH_MODES (in_place,shadow).
The cluster runs in a network namespace of its own, whose loopback `tc` throttles. It needs Linux,
root, `ip` and `tc`. Bytes do not depend on the load of the machine; seconds do.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from benchmarks import clusters
from benchmarks.harness import Case, inference_python
from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import InitialSync, LossSpec, OptimParams, Resync, TrainMerged
from splice.client.batches import Batch, Completion, sft_batch
from splice.client.run_file import RunFile
from splice.cluster import Cluster

RATES = (1e-6, 1e-5, 1e-4)
WARM_UP = 2
"""Steps that are not measured: the first one moves only half of each adapter."""
LINK_RATE = 1e-5
"""Learning rate of the publications over links."""
TIMEOUT_S = 1800.0
QUESTIONS = 16
"""Sums in a batch."""


def run(*, device: str, small: bool) -> Iterator[Case]:
    """Bytes at each learning rate, then seconds over each link; `small` has a tiny model."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        raise ConfigError("this benchmark makes a network namespace: it needs root, `ip` and `tc`")
    os.unshare(os.CLONE_NEWNET)
    _do("ip link set lo mtu 1500 up")
    steps = int(os.environ.get("SPLICE_BENCH_STEPS", "1" if small else "5"))
    links = os.environ.get("SPLICE_BENCH_LINKS", "1000" if small else "10,100,1000")
    modes = os.environ.get("SPLICE_BENCH_MODES", "in_place" if small else "in_place,shadow")
    with TemporaryDirectory() as name:
        folder = Path(name)
        given = os.environ.get("SPLICE_BENCH_MODEL")
        if given is None and not small:
            raise ConfigError("set SPLICE_BENCH_MODEL to the folder of a pretrained model")
        model = Path(given) if given else clusters.make_model("tiny-dense", folder / "model")
        for number, mode in enumerate(modes.split(",")):
            with Cluster(_config(model, folder / mode, mode, device)) as cluster:
                runs = _Runs(cluster, model, folder)
                cluster.client.run(InitialSync(), timeout_s=TIMEOUT_S)
                for lr in RATES if number == 0 else ():
                    yield runs.floor(lr, steps)
                runs.warm_up()
                for link in map(float, links.split(",")):
                    yield from runs.over(link, mode, steps)


def _config(model: Path, folder: Path, mode: str, device: str) -> RunFile:
    return RunFile(
        name="delta",
        model=model,
        run_dir=folder,
        device="cuda" if device == "cuda" else "cpu",
        dtype="bfloat16",
        publication={"send": "elements", "mode": mode},
        trainer={
            "lora": {"rank": clusters.RANK, "alpha": 2 * clusters.RANK},
            "admission": "skip",
            "transport": "tcp",
        },
        inference={
            "python": inference_python(),
            "max_model_len": 256,
            "cpu_kv_cache_gb": 0.2,
            "transport": "tcp",
        },
    )


@dataclass(slots=True)
class _Runs:
    """A cluster, and the training jobs on it."""

    cluster: Cluster
    model: Path
    folder: Path
    seed: int = 0

    def train(self, lr: float) -> Any:
        """One step on new sums, and its publication."""
        self.seed += 1
        batch = _sums(self.model, self.seed)
        job = TrainMerged(
            loss=LossSpec(name="cross_entropy"), optim=OptimParams(lr=lr), tensors=batch.specs
        )
        return self.cluster.client.run(job, buffers=batch.buffers, timeout_s=TIMEOUT_S)

    def warm_up(self) -> None:
        """Steps that are not measured."""
        for _ in range(WARM_UP):
            self.train(LINK_RATE)

    def exported(self) -> dict[str, torch.Tensor]:
        """The present weights, with the bytes that are served."""
        out = self.folder / "export"
        self.cluster.client.export_hf(str(out), timeout_s=TIMEOUT_S)
        files = sorted(out.glob("*.safetensors"))
        found = {n: t.clone() for file in files for n, t in load_file(file).items()}
        shutil.rmtree(out)
        return found

    def floor(self, lr: float, steps: int) -> Case:
        """Bytes of each step over the entropy of its changes."""
        for _ in range(WARM_UP):
            self.train(lr)
        old, ratios, lines = self.exported(), [], []
        for _ in range(steps):
            result = self.train(lr)
            new = self.exported()
            floor, changed = _entropy(old, new)
            elements = sum(t.numel() for t in new.values())
            ratios.append(result.bytes_sent / floor)
            lines.append(
                {
                    "sent": result.sent,
                    "bytes_sent": result.bytes_sent,
                    "changed_elements": result.changed_elements,
                    "share_of_model": changed / elements,
                    "bits_per_change": 8 * result.bytes_sent / max(changed, 1),
                    "encode_s": result.seconds.get("encode"),
                }
            )
            old = new
        return Case(
            name=f"{self.model.name}/lr{lr:g}",
            metric="bytes_over_floor",
            unit="ratio",
            samples=tuple(ratios),
            peer="all tensors",
            peer_samples=(sum(t.nbytes for t in old.values()) / floor,),
            settings={"lr": lr, "model_bytes": sum(t.nbytes for t in old.values()), "steps": lines},
        )

    def over(self, mbit: float, mode: str, steps: int) -> Iterator[Case]:
        """Publications over a link, next to a resync."""
        _throttle(mbit)
        try:
            results = [self.train(LINK_RATE) for _ in range(steps)]
            full = self.cluster.client.run(Resync(), timeout_s=TIMEOUT_S)
        finally:
            _do("tc qdisc del dev lo root")
        for metric, of in (("publish_s", _publish_s), ("pause_s", lambda r: r.seconds["pause"])):
            yield Case(
                name=f"{self.model.name}/{mbit:g}Mbit/{mode}",
                metric=metric,
                unit="s",
                samples=tuple(of(r) for r in results),
                peer="all tensors",
                peer_samples=(of(full),),
                settings={
                    "lr": LINK_RATE,
                    "sent": [r.sent for r in results],
                    "mode": [r.mode for r in results],
                    "bytes_sent": [r.bytes_sent for r in results],
                    "full_bytes": full.bytes_sent,
                    "seconds": [r.seconds for r in results],
                    "full_seconds": full.seconds,
                },
            )


def _publish_s(result: Any) -> float:
    return float(result.seconds["publish"])


def _entropy(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> tuple[float, int]:
    """Bytes that the changes take at least, and their number."""
    bits, total = 0.0, 0
    for name, tensor in new.items():
        before, after = (t.view(torch.int16).int() for t in (old[name], tensor))
        changes = before != after
        changed, count = int(changes.sum()), changes.numel()
        if not changed:
            continue
        before, after = (torch.where(w < 0, w ^ 0x7FFF, w)[changes] for w in (before, after))
        steps = (after - before).unique(return_counts=True)[1]
        places = torch.tensor([changed, count - changed])
        bits += count * _bits(places) + changed * _bits(steps)
        total += changed
    return bits / 8, total


def _bits(counts: torch.Tensor) -> float:
    """Entropy of a choice, in bits."""
    shares = counts.double() / counts.sum()
    shares = shares[shares > 0]
    return float(-(shares * shares.log2()).sum())


def _sums(model: Path, seed: int) -> Batch:
    """Sums with their answers."""
    dice, tokenizer = random.Random(seed), AutoTokenizer.from_pretrained(model)
    pairs = [(dice.randrange(100, 999), dice.randrange(100, 999)) for _ in range(QUESTIONS)]
    answers = []
    for a, b in pairs:
        prompt = tokenizer.encode(f"Question: What is {a} plus {b}?\nAnswer:")
        answer = tokenizer.encode(f" {a} + {b} = {a + b}", add_special_tokens=False)
        zeros = (0.0,) * len(answer)
        answers.append(
            Completion(prompt_ids=tuple(prompt), answer_ids=tuple(answer), logprobs=zeros)
        )
    return sft_batch(answers)


def _throttle(mbit: float) -> None:
    """Limit the loopback of this namespace."""
    _do(f"tc qdisc replace dev lo root tbf rate {int(mbit * 1e6)}bit burst 256kb latency 200ms")


def _do(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{command!r} failed: {done.stderr.strip()}")
