"""Peak memory: of a call in this process (CUDA), and of other processes or whole GPUs while
something happens to them.

A GPU's figure is what the driver says is in use, so it has everything: communicators, contexts,
caches of allocators. A process's figure on a
CPU is its resident bytes, which also grow when a page is touched for the first time: an upper
bound, and with small models mostly that.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import torch

from orchestrator.processes.child import descendants


def allocated_beyond(call: Callable[[], object]) -> int:
    """Bytes of CUDA memory that this process had allocated at most during the call, over what it
    had before.
    """
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated()) - before


@dataclass(slots=True)
class Peak:
    """What was held at the beginning, and at most since then."""

    before: int = 0
    most: int = 0

    @property
    def beyond(self) -> int:
        """Bytes."""
        return self.most - self.before


@contextlib.contextmanager
def watched(readers: dict[str, Callable[[], int]], *, poll_s: float) -> Iterator[dict[str, Peak]]:
    """Poll the readers on a thread until the block ends; a peak shorter than `poll_s` may be
    missed.
    """
    peaks = {name: Peak() for name in readers}
    for name, read in readers.items():
        peaks[name].before = peaks[name].most = read()
    stop = threading.Event()

    def poll() -> None:
        while not stop.wait(poll_s):
            for name, read in readers.items():
                peaks[name].most = max(peaks[name].most, read())

    thread = threading.Thread(target=poll, name="splice-memory", daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        stop.set()
        thread.join(timeout=30)


def process_tree(pid: int) -> Callable[[], int]:
    """A reader of the resident bytes of a process and all its descendants."""

    def read() -> int:
        total = 0
        for process in descendants(pid, and_self=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    return read


def gpus(indices: tuple[int, ...]) -> Callable[[], int]:
    """A reader of the used bytes of whole GPUs, which nobody else should be using."""
    command = [
        "nvidia-smi",
        f"--id={','.join(map(str, indices))}",
        "--query-gpu=memory.used",
        "--format=csv,noheader,nounits",
    ]

    def read() -> int:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return sum(2**20 * int(line) for line in listed.stdout.split())

    return read
