"""One of two ranks of a check that one rank's abort reaches the other: `torchrun ... -m
tests.trainer_node.ranks.abort_signal`.
"""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from trainer_node.ranks.abort_signal import AbortSignal

SOON_S = 20.0


class Heard:
    """Collects the reasons; `wait` returns the first."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self._came = threading.Event()

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)
        self._came.set()

    def wait(self) -> str:
        assert self._came.wait(SOON_S), "nothing was heard"
        return self.reasons[0]


def main() -> None:
    dist.init_process_group("gloo")
    rank, signal = dist.get_rank(), AbortSignal()
    signal.raise_("before there is anything to abort")

    for raiser in (0, 1):  # from another thread of one rank, while both wait
        heard = Heard()
        with signal.watching(heard):
            if rank == raiser:
                threading.Timer(0.1, signal.raise_, [f"rank {raiser} said so"]).start()
            assert heard.wait() == f"rank {raiser} said so"

    heard = Heard()  # one rank fails; the other waits
    if rank == 1:
        with pytest.raises(ValueError, match="a test said so"), signal.watching(heard):
            raise ValueError("a test said so")
    else:
        with signal.watching(heard):
            assert heard.wait() == "rank 1 failed: a test said so"

    heard = Heard()  # the other rank comes later, and the first reason counts
    dist.barrier()
    if rank == 0:
        with signal.watching(heard):
            signal.raise_("first")
            signal.raise_("second")
            heard.wait()
    dist.barrier()
    if rank == 1:
        with signal.watching(heard):
            heard.wait()
    assert heard.reasons == ["first"]

    heard = Heard()  # what was raised before, or after the end of a block, is not of the next
    for n in range(2):
        with signal.watching(heard):
            dist.barrier()
        if n == 0 and rank == 0:
            signal.raise_("too late")
    with signal.watching(heard):
        threading.Event().wait(0.3)
    assert heard.reasons == [] and threading.active_count() == 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
