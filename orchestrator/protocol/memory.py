"""Memory in use by a node: of its GPUs, or of its processes on a CPU.

NVML asks the driver and needs no CUDA context. A driver that hangs holds its caller up, so a
separate thread asks. Heartbeats carry the thread's last answer, and never wait for it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial

import psutil
import pynvml

from orchestrator.processes.child import descendants
from orchestrator.protocol.config import Device
from orchestrator.protocol.messages import MemoryUse

EVERY_S = 5.0
"""Seconds between two measurements."""


def visible_gpus(gpus: Sequence[int] = ()) -> tuple[str, ...]:
    """Return these GPUs, or those of CUDA_VISIBLE_DEVICES; empty: all of the host."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return tuple(map(str, gpus)) or tuple(v.strip() for v in visible if v.strip())


def of_gpus(gpus: Sequence[str]) -> tuple[MemoryUse, ...]:
    """Return the memory in use on these GPUs, by index or UUID; on all if none is named.

    What other processes use is part of it. Empty where NVML cannot tell.
    """
    found = []
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for gpu in gpus or map(str, range(pynvml.nvmlDeviceGetCount())):
            handle = (
                pynvml.nvmlDeviceGetHandleByIndex(int(gpu))
                if gpu.isdecimal()
                else pynvml.nvmlDeviceGetHandleByUUID(gpu)
            )
            info = pynvml.nvmlDeviceGetMemoryInfo(handle)
            use = MemoryUse(device=f"GPU {gpu}", used_bytes=info.used, total_bytes=info.total)
            found.append(use)
    return tuple(found)


def of_processes() -> tuple[MemoryUse, ...]:
    """Return the memory of this process and its descendants; pages that they share count once."""
    used = 0
    for process in descendants(os.getpid(), and_self=True):
        with contextlib.suppress(psutil.Error):
            info = process.memory_full_info()
            used += getattr(info, "pss", info.rss)
    total = psutil.virtual_memory().total
    return (MemoryUse(device="host", used_bytes=used, total_bytes=total),)


def meter(device: Device, gpus: Sequence[int] = ()) -> Meter:
    """Measure the GPUs on `device` "cuda" (see `visible_gpus`), else this process's family."""
    on_gpus = device == "cuda"
    return Meter(partial(of_gpus, visible_gpus(gpus)) if on_gpus else of_processes)


class Meter:
    """Calls `measure` now and then, on a daemon thread that ends with the process."""

    def __init__(self, measure: Callable[[], tuple[MemoryUse, ...]]) -> None:
        self._measure = measure
        self.latest: tuple[MemoryUse, ...] = ()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="splice-memory", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            self.latest = self._measure()
            self._ended.wait(EVERY_S)

    def close(self) -> None:
        """End the thread, unless the driver holds it up."""
        self._ended.set()
        self._thread.join(timeout=1.0)
