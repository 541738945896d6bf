"""Long sequences, and prefixes that sequences share: tokens per second of a LoRA step on one GPU.

One process for each shape (`benchmarks.long_worker`) starts the trainer once, with its defaults and
random weights, and takes a step of each case. Shapes from SPLICE_BENCH_SHAPES (8b,30b-a3b), lengths
from SPLICE_BENCH_LENGTHS (16384,32768,65536,131072; empty: none), trees from SPLICE_BENCH_TREES
(16x1024+4096,16x1024+32768: answers x tokens + prompt; empty: none). Sequences of up to 32,768
tokens take SPLICE_BENCH_SAMPLES (3) steps after a first one, longer ones a single step: the start's
probes have loaded the kernels. A shape gets SPLICE_BENCH_TIMEOUT_S (570). SPLICE_BENCH_CONTEXT (1)
ranks share each sequence (`parallel.context`); beyond one, names end in /cpN.

    SHAPE/long/TOKENS           one sequence; its second half carries loss
    SHAPE/tree/NxANSWER+PROMPT  N answers to one prompt, shared and, as the peer, each by itself

A tree's rate counts the tokens of all its sequences, computed or not. Its settings have the ratio
of the FLOP that `benchmarks.train` counts without and with sharing: what it could be at best.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from benchmarks.clusters import make_model
from benchmarks.harness import Case, torchrun

TIMEOUT_S = float(os.environ.get("SPLICE_BENCH_TIMEOUT_S", "570"))


def run(*, device: str, small: bool) -> Iterator[Case]:
    """One GPU, or the CPU."""
    shapes = os.environ.get("SPLICE_BENCH_SHAPES", "8b,30b-a3b")
    lengths = os.environ.get("SPLICE_BENCH_LENGTHS", "16384,32768,65536,131072")
    trees = os.environ.get("SPLICE_BENCH_TREES", "16x1024+4096,16x1024+32768")
    steps = os.environ.get("SPLICE_BENCH_SAMPLES", "3")
    if small:
        shapes, lengths, trees, steps = "tiny-dense", "48", "4x8+32", "1"
    for shape in shapes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(shape, Path(folder))
            yield from _cases(shape, model, device, lengths, trees, steps)


def _cases(
    shape: str, model: Path, device: str, lengths: str, trees: str, steps: str
) -> Iterator[Case]:
    """Each as soon as it is there."""
    ranks = int(os.environ.get("SPLICE_BENCH_CONTEXT", "1"))
    command = [sys.executable, *torchrun(ranks), "-m", "benchmarks.long_worker"]
    command += ["--model", str(model)]
    command += ["--device", device, "--lengths", lengths, "--trees", trees, "--steps", steps]
    env = {"OMP_NUM_THREADS": "1"} | os.environ
    worker = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(TIMEOUT_S, worker.terminate)
    timer.start()
    try:
        assert worker.stdout is not None
        for line in worker.stdout:
            if line.startswith("{"):
                yield _case(shape, json.loads(line), f"/cp{ranks}" if ranks > 1 else "")
        if code := worker.wait():
            raise RuntimeError(f"{shape}: the worker ended with {code}; {TIMEOUT_S:.0f} s at most")
    finally:
        timer.cancel()
        worker.terminate()  # torchrun ends its ranks
        worker.wait()


def _case(shape: str, found: dict, end: str) -> Case:
    rates = {
        name: tuple(found["tokens"] / s for s in found.pop(name)) for name in ("seconds", "apart")
    }
    return Case(
        name=f"{shape}/{found.pop('name')}{end}",
        metric="tokens_per_s",
        unit="tokens/s",
        samples=rates["seconds"],
        peer="each sequence by itself" if rates["apart"] else None,
        peer_samples=rates["apart"],
        settings=found,
    )
