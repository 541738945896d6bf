"""Long sequences, and prefixes that sequences share: tokens per second of a LoRA step on one GPU.

One process for each shape (`benchmarks.long_worker`) starts the trainer once, with its defaults and
random weights, and takes a step of each case. Shapes from SPLICE_BENCH_SHAPES (8b,30b-a3b), lengths
from SPLICE_BENCH_LENGTHS (16384,32768,65536,131072; empty: none), trees from SPLICE_BENCH_TREES
(16x1024+4096,16x1024+32768: answers x tokens + prompt; empty: none). Sequences of up to 32,768
tokens take SPLICE_BENCH_SAMPLES (3) steps after a first one, longer ones a single step: the start's
probes have loaded the kernels. SPLICE_BENCH_RECOMPUTE (auto) is `trainer.recompute`.

SPLICE_BENCH_MIXED (0) steps have sequences of mixed lengths, log-uniform from 128 to
SPLICE_BENCH_MIXED_LONGEST (100000) tokens, SPLICE_BENCH_MIXED_SEQUENCES (2) a step. Two are 30,000
tokens on average, so 50 steps of an 8B on one H200 take five minutes at 5,000 tokens/s.

A shape gets SPLICE_BENCH_TIMEOUT_S (570). SPLICE_BENCH_CONTEXT (1) ranks share each sequence
(`parallel.context`); beyond one, names end in /cpN.

    SHAPE/long/TOKENS           one sequence; its second half carries loss
    SHAPE/tree/NxANSWER+PROMPT  N answers to one prompt, shared and, as the peer, each by itself
    SHAPE/long/mixed            steps of mixed lengths; its settings have each one's tokens,
                                seconds, packs, recomputed layers and memory

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
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.clusters import make_model
from benchmarks.harness import Case, torchrun

TIMEOUT_S = float(os.environ.get("SPLICE_BENCH_TIMEOUT_S", "570"))
CLOSING_S = 15.0
"""Time for the end of a worker, of its TIMEOUT_S."""


def run(*, device: str, small: bool) -> Iterator[Case]:
    """One GPU, or the CPU."""
    shapes = os.environ.get("SPLICE_BENCH_SHAPES", "8b,30b-a3b")
    lengths = os.environ.get("SPLICE_BENCH_LENGTHS", "16384,32768,65536,131072")
    trees = os.environ.get("SPLICE_BENCH_TREES", "16x1024+4096,16x1024+32768")
    steps = os.environ.get("SPLICE_BENCH_SAMPLES", "3")
    mixed = [
        os.environ.get(f"SPLICE_BENCH_MIXED{end}", number)
        for end, number in (("", "0"), ("_SEQUENCES", "2"), ("_LONGEST", "100000"))
    ]
    if small:
        shapes, lengths, trees, steps = "tiny-dense", "48", "4x8+32", "1"
        mixed = ["2", "2", "512"]
    for shape in shapes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(shape, Path(folder))
            options = ["--device", device, "--lengths", lengths, "--trees", trees]
            options += ["--steps", steps, "--mixed", *mixed]
            yield from _cases(shape, model, options)


def _cases(shape: str, model: Path, options: list[str]) -> Iterator[Case]:
    """Each as soon as it is there."""
    ranks = int(os.environ.get("SPLICE_BENCH_CONTEXT", "1"))
    command = [sys.executable, *torchrun(ranks), "-m", "benchmarks.long_worker", *options]
    command += ["--model", str(model), "--ends-s", str(time.monotonic() + TIMEOUT_S - CLOSING_S)]
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
    name = f"{shape}/{found.pop('name')}{end}"
    if isinstance(steps := found.get("steps"), list):
        samples, apart = tuple(step["tokens"] / step["seconds"] for step in steps), ()
    else:
        samples, apart = (
            tuple(found["tokens"] / s for s in found.pop(kind)) for kind in ("seconds", "apart")
        )
    return Case(
        name=name,
        metric="tokens_per_s",
        unit="tokens/s",
        samples=samples,
        peer="each sequence by itself" if apart else None,
        peer_samples=apart,
        settings=found,
    )
