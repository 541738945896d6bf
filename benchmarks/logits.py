"""Log-probs and entropy of a language-model head, forward and backward: memory and time with a
chunk of logits at a time and with all of them.

Qwen3's vocabulary of 151,936. Peer in the same run: `hidden @ weight.T`, then log_softmax, as a
head written down plainly. Memory is the peak over what the inputs take; each case runs in a process
of its own, so that no other case's memory is in it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.harness import Case
from trainer_node.training.head import LOGITS_PER_CHUNK, linear_statistics

VOCAB, HIDDEN, TIMEOUT_S = 151_936, 128, 300.0
REPEATS = 1


def run(*, device: str, small: bool) -> list[Case]:
    """Peak bytes and seconds for two numbers of positions: the peer's memory grows with them, ours
    does not.
    """
    vocab = 32_000 if small else VOCAB
    per_chunk = 2**22 if small else 2**24
    cases = []
    for positions in (256,) if small else (512, 1536):
        found = {
            name: _in_a_process(device, positions, vocab, chunk)
            for name, chunk in (("chunked", per_chunk), ("default", LOGITS_PER_CHUNK), ("full", 0))
        }
        for name, chunk in (("chunked", per_chunk), ("default", LOGITS_PER_CHUNK)):
            settings = {
                "positions": positions,
                "vocab": vocab,
                "hidden": HIDDEN,
                "logits_per_chunk": chunk,
                "dtype": "float32",
            }
            for metric, unit in (("peak_bytes", "B"), ("seconds", "s")):
                cases.append(
                    Case(
                        name=f"logits/{name}-{positions}",
                        metric=metric,
                        unit=unit,
                        samples=tuple(found[name][metric]),
                        peer="all logits at once",
                        peer_samples=tuple(found["full"][metric]),
                        settings=settings,
                    )
                )
    return cases


def _in_a_process(device: str, positions: int, vocab: int, chunk: int) -> dict[str, list[float]]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.logits",
        device,
        str(positions),
        str(vocab),
        str(chunk),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    found: dict[str, list[float]] = json.loads(ran.stdout.splitlines()[-1])
    return found


def _measure(device: str, positions: int, vocab: int, chunk: int) -> dict[str, list[float]]:
    """Forward and backward; chunk 0: the peer."""
    hidden = torch.randn(positions, HIDDEN, device=device, requires_grad=True)
    weight = torch.randn(vocab, HIDDEN, device=device).mul_(HIDDEN**-0.5)
    targets = torch.arange(positions, device=device) % vocab
    before, seconds = _memory(device, peak=False), []
    for _ in range(REPEATS):
        started = time.perf_counter()
        if chunk:
            log_probs, entropy = linear_statistics(
                hidden, weight, targets, vocab_size=vocab, logits_per_chunk=chunk
            )
        else:
            table = (hidden @ weight.T).log_softmax(-1)
            log_probs, entropy = (
                table.gather(1, targets[:, None])[:, 0],
                -(table.exp() * table).sum(-1),
            )
            del table
        (log_probs.sum() + entropy.sum()).backward()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return {"peak_bytes": [_memory(device, peak=True) - before], "seconds": seconds}


def _memory(device: str, *, peak: bool) -> float:
    """Bytes held by this process now, or at most so far."""
    if device == "cuda":
        return float(torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated())
    field = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * int(next(line for line in lines if line.startswith(field)).split()[1])


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], *map(int, sys.argv[2:5]))))
