"""Publications of changed elements: the bytes of a pretrained model's real steps, and their seconds
over slow links.

    bytes_over_floor  encoded bytes, over the entropy of what changed: for each tensor N * H(p) of
                      the positions, and changed * H(step) of the values; the peer is all tensors
    encode_rate       bytes of adapted tensors that a second encodes, with both merges and digests;
                      the peer is only one merge
    publish_s         encoding, transfer and verification over a link, by a real trainer and a real
                      vLLM; the peer is a resync of all tensors
    pause_s           the pause of the same publications

SPLICE_BENCH_MODEL is the model's folder, SPLICE_BENCH_STEPS (5) the steps at each learning rate and
link, SPLICE_BENCH_PARTS (bytes,links) what runs, SPLICE_BENCH_LINKS (10,100,1000) the links in
Mbit/s, SPLICE_BENCH_MODES (in_place,shadow). For links the cluster runs in a network namespace of
its own, whose loopback `tc` throttles. That needs Linux, root, `ip` and `tc`. Bytes do not depend
on the load of the machine; seconds do.

SPLICE_BENCH_SHAPE (8b, 30b-a3b, ...) measures only how fast a shape with random weights is encoded:

    SPLICE_BENCH_SHAPE=8b python -m benchmarks delta --device cuda

It trains on random tokens, so bytes say little and have no floor. SPLICE_BENCH_RATES (1e-06,1e-05,
0.0001) are the learning rates. SPLICE_BENCH_PROFILE names a file for the kernels of one encoding.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks import clusters, kernel_profile
from benchmarks.harness import Case, inference_python
from benchmarks.timing import seconds, wait
from orchestrator.errors import ConfigError
from orchestrator.protocol.config import LoraConfig, TrainerConfig
from orchestrator.protocol.messages import (
    InitialSync,
    LossSpec,
    Manifest,
    OptimParams,
    Resync,
    TrainMerged,
)
from splice.client.batches import Batch, Completion, sft_batch
from splice.client.run_file import RunFile
from splice.cluster import Cluster
from weight_transfer import changes
from weight_transfer.layout import views_of

RATES = (1e-6, 1e-5, 1e-4)
WARM_UP = 2
"""Steps that are not measured: the first one moves only half of each adapter."""
LINK_RATE = 1e-5
"""Learning rate of the publications over links."""
TIMEOUT_S = 1800.0
QUESTIONS = 16
"""Sums in a batch."""
CHUNK_BYTES = 192 * 2**20


def run(*, device: str, small: bool) -> Iterator[Case]:
    """Bytes at each learning rate, then seconds over each link; `small` has a tiny model."""
    shape = os.environ.get("SPLICE_BENCH_SHAPE")
    parts = os.environ.get("SPLICE_BENCH_PARTS", "bytes" if shape else "bytes,links").split(",")
    steps = int(os.environ.get("SPLICE_BENCH_STEPS", "1" if small else "5"))
    links = os.environ.get("SPLICE_BENCH_LINKS", "1000" if small else "10,100,1000")
    modes = os.environ.get("SPLICE_BENCH_MODES", "in_place" if small else "in_place,shadow")
    with TemporaryDirectory() as name:
        folder, given = Path(name), os.environ.get("SPLICE_BENCH_MODEL")
        if given is None and shape is None and not small:
            why = "set SPLICE_BENCH_MODEL to the folder of a pretrained model"
            raise ConfigError(f"{why}, or SPLICE_BENCH_SHAPE to a shape with random weights")
        made = folder / (shape or "model")
        model = Path(given) if given else clusters.make_model(shape or "tiny-dense", made)
        if "bytes" in parts:
            yield from _bytes(model, device, steps, is_random=shape is not None)
        if "links" in parts:
            _enter_namespace()
            for mode in modes.split(","):
                with Cluster(_config(model, folder / mode, mode, device)) as cluster:
                    runs = _Runs(cluster, model)
                    runs.begin()
                    for link in map(float, links.split(",")):
                        yield from runs.over(link, mode, steps)


def _job(model: Path, seed: int, lr: float) -> tuple[TrainMerged, Batch]:
    """One step on new sums with their answers."""
    dice, tokenizer = random.Random(seed), AutoTokenizer.from_pretrained(model)
    answers = []
    for _ in range(QUESTIONS):
        a, b = dice.randrange(100, 999), dice.randrange(100, 999)
        prompt = tokenizer.encode(f"Question: What is {a} plus {b}?\nAnswer:")
        answer = tokenizer.encode(f" {a} + {b} = {a + b}", add_special_tokens=False)
        zeros = (0.0,) * len(answer)
        answers.append(
            Completion(prompt_ids=tuple(prompt), answer_ids=tuple(answer), logprobs=zeros)
        )
    batch = sft_batch(answers)
    loss, optim = LossSpec(name="cross_entropy"), OptimParams(lr=lr)
    return TrainMerged(loss=loss, optim=optim, tensors=batch.specs), batch


# ------------------------------------------------------------ bytes: a process with the trainer


def _bytes(model: Path, device: str, steps: int, *, is_random: bool) -> Iterator[Case]:
    argv = [sys.executable, "-m", "benchmarks.delta", str(model), device, str(steps)]
    argv += ["random"] if is_random else []
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    whole, part = found["bytes"], found["part_bytes"]
    for lr, lines in found["steps"].items():
        common = {"lr": float(lr), "model_bytes": whole, "part_bytes": part}
        if not is_random:
            yield Case(
                name=f"{model.name}/lr{float(lr):g}",
                metric="bytes_over_floor",
                unit="ratio",
                samples=tuple(line["bytes"] / line["floor"] for line in lines),
                peer="all tensors",
                peer_samples=tuple(whole / line["floor"] for line in lines),
                settings={**common, "steps": lines},
            )
        yield Case(
            name=f"{model.name}/lr{float(lr):g}",
            metric="encode_rate",
            unit="GB/s",
            samples=tuple(part / line["encode_s"] / 1e9 for line in lines),
            peer="merge",
            peer_samples=tuple(part / line["merge_s"] / 1e9 for line in lines),
            settings={**common, "steps": lines} if is_random else common,
        )


def _measure(model: Path, device: str, steps: int, *, is_random: bool) -> dict[str, Any]:
    from trainer_node.training.start import start

    config = TrainerConfig(
        model=model,
        init="random" if is_random else "hf",
        device="cuda" if device == "cuda" else "cpu",
        dtype="bfloat16",
        lora=LoraConfig(rank=clusters.RANK, alpha=2 * clusters.RANK),
        transport="nccl" if device == "cuda" else "tcp",
    )
    trainer = start(config)
    # Late: on a CPU, Megatron can be imported only after `start` has applied the shims.
    from trainer_node.export.changes import Layout, Published, encode
    from trainer_node.export.merged import Exporter
    from trainer_node.export.wire_export import WireExport
    from trainer_node.training import steps as training

    manifest = Exporter(trainer.model).manifest()
    part = manifest.part(manifest.changed or ())
    order = _order(part)
    layout = Layout(
        export=WireExport(trainer.model, part, order),
        steps=None,
        manifest=part,
        order=order,
        unsigned=frozenset(),
        unread=frozenset(),
        device=trainer.model.device,
    )
    published, seed = Published(trainer.model, most_bytes=0), 0
    looked_at = sorted({0, layout.count - 1}) if is_random else list(range(layout.count))
    rates = os.environ.get("SPLICE_BENCH_RATES")
    found: dict[str, list[dict[str, float]]] = {}
    for lr in map(float, rates.split(",")) if rates else RATES:
        for number in range(WARM_UP + steps):
            seed += 1
            old = _filled(layout, looked_at)
            published.remember(seed, None)
            job, batch = (_random_job if is_random else _job)(model, seed, lr)
            trainer.forward_backward(training.batch_of(trainer, job, batch.buffers), job.loss)
            trainer.optim_step(job.optim)
            merge_s = seconds(lambda: _merge(layout), device)
            wait(device)
            began = time.perf_counter()
            encoded = encode(layout, published, version=seed, most_bytes=manifest.nbytes)
            encode_s = time.perf_counter() - began
            if number < WARM_UP:  # Triton has compiled, and memory is pinned
                continue
            new = _filled(layout, looked_at)
            _check(old, new, [encoded.buffers[k] for k in looked_at])
            line: dict[str, float] = {"bytes": encoded.nbytes, "changed": encoded.elements}
            if not is_random:
                line["floor"], line["changed"] = _floor(layout, old, new)
            line["share_of_model"] = line["changed"] / sum(s.numel for s in manifest.tensors)
            line |= {"encode_s": encode_s, "merge_s": merge_s}
            found.setdefault(str(lr), []).append(line)
    if profile := os.environ.get("SPLICE_BENCH_PROFILE"):
        again = functools.partial(encode, layout, published, version=seed, most_bytes=part.nbytes)
        Path(profile).write_text(kernel_profile.table_of(again, device))
    return {"bytes": manifest.nbytes, "part_bytes": part.nbytes, "steps": found}


def _random_job(model: Path, seed: int, lr: float) -> tuple[TrainMerged, Batch]:
    """One step on random tokens."""
    is_tiny = (model / "model.safetensors").exists()
    sequences, length = (4, 64) if is_tiny else (16, 512)
    batch = clusters.random_batch(sequences, length, seed=seed)
    loss, optim = LossSpec(name="cross_entropy"), OptimParams(lr=lr)
    return TrainMerged(loss=loss, optim=optim, tensors=batch.specs), batch


def _order(manifest: Manifest) -> list[list[int]]:
    """Manifest order in chunks of the usual size."""
    order: list[list[int]] = [[]]
    for n, spec in enumerate(manifest.tensors):
        if sum(manifest.tensors[i].nbytes for i in order[-1]) + spec.nbytes > CHUNK_BYTES:
            order.append([])
        order[-1].append(n)
    return [chunk for chunk in order if chunk]


def _filled(layout: Any, which: Sequence[int]) -> list[torch.Tensor]:
    return [layout.filled(k).cpu().clone() for k in which]


def _merge(layout: Any) -> None:
    """Every buffer, once."""
    room_B = layout.room()
    for k in range(layout.count):
        layout.filled(k, room_B)


def _check(
    old: Sequence[torch.Tensor], new: Sequence[torch.Tensor], buffers: changes.Buffers
) -> None:
    """What is measured is right: the codes make the new bytes of the old ones."""
    for old_B, new_B, messages in zip(old, new, buffers, strict=True):
        there_B = old_B.clone()
        bodies = [m if m.body_B is not None else replace(m, body_B=new_B) for m in messages]
        changes.restore(bodies, there_B)
        if not torch.equal(there_B, new_B):
            raise AssertionError("the decoded buffer is not what would have been sent")


def _floor(
    layout: Any, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]
) -> tuple[float, int]:
    """Bytes that the changes take at least, and their number."""
    bits, total = 0.0, 0
    for k in range(layout.count):
        specs = [layout.manifest.tensors[i] for i in layout.order[k]]
        for pair in zip(views_of(old[k], specs), views_of(new[k], specs), strict=True):
            before, after = (t.view(torch.int16).int() for t in pair)
            differs = before != after
            changed, count = int(differs.sum()), differs.numel()
            if changed:
                first, last = (torch.where(w < 0, w ^ 0x7FFF, w)[differs] for w in (before, after))
                bits += count * _bits(torch.tensor([changed, count - changed]))
                bits += changed * _bits((last - first).unique(return_counts=True)[1])
                total += changed
    return bits / 8, total


def _bits(counts: torch.Tensor) -> float:
    """Entropy of a choice, in bits."""
    shares = counts.double() / counts.sum()
    shares = shares[shares > 0]
    return float(-(shares * shares.log2()).sum())


# ------------------------------------------------------------ seconds: a cluster


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
    seed: int = 0

    def begin(self) -> None:
        """The first publication, and steps that are not measured."""
        self.cluster.client.run(InitialSync(), timeout_s=TIMEOUT_S)
        for _ in range(WARM_UP):
            self.train()

    def train(self) -> Any:
        """One step, and its publication."""
        self.seed += 1
        job, batch = _job(self.model, self.seed, LINK_RATE)
        return self.cluster.client.run(job, buffers=batch.buffers, timeout_s=TIMEOUT_S)

    def over(self, mbit: float, mode: str, steps: int) -> Iterator[Case]:
        """Publications over a link, next to a resync."""
        _do(f"tc qdisc replace dev lo root tbf rate {int(mbit * 1e6)}bit burst 256kb latency 200ms")
        try:
            results = [self.train() for _ in range(steps)]
            full = self.cluster.client.run(Resync(), timeout_s=TIMEOUT_S)
        finally:
            _do("tc qdisc del dev lo root")
        for metric, key in (("publish_s", "publish"), ("pause_s", "pause")):
            yield Case(
                name=f"{self.model.name}/{mbit:g}Mbit/{mode}",
                metric=metric,
                unit="s",
                samples=tuple(float(r.seconds[key]) for r in results),
                peer="all tensors",
                peer_samples=(float(full.seconds[key]),),
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


def _enter_namespace() -> None:
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        raise ConfigError("links need a network namespace: run as root, with `ip` and `tc`")
    os.unshare(os.CLONE_NEWNET)
    _do("ip link set lo mtu 1500 up")


def _do(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{command!r} failed: {done.stderr.strip()}")


if __name__ == "__main__":
    measured = _measure(
        Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), is_random=sys.argv[4:] == ["random"]
    )
    print(json.dumps(measured), flush=True)
    os._exit(0)  # nothing is left that this process must wait for
