"""Joins a trainer's ranks, through a store that listens on one address only."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.errors import NodeLost
from orchestrator.protocol.config import TrainerConfig
from trainer_node.ranks.store import STORE_FD, listen


def join(config: TrainerConfig) -> None:
    """Make the default process group from the environment that `ranks` or torchrun set.

    A lone process makes its own. A second call does nothing.

    Raises:
        NodeLost: the other ranks were not there within `collective_timeout_s`.
    """
    if dist.is_initialized():
        return
    timeout = datetime.timedelta(seconds=config.collective_timeout_s)
    backend = "gloo" if config.device == "cpu" else "nccl"
    if "RANK" not in os.environ:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)
        return
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            dist.init_process_group(backend, timeout=timeout)
            return
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            backend,
            timeout=timeout,
            store=_store(rank, world_size, timeout),
            rank=rank,
            world_size=world_size,
        )
    except RuntimeError as error:
        raise NodeLost(
            f"the trainer's ranks did not come together within {timeout.total_seconds():.0f} s: "
            f"{error}"
        ) from error


@contextlib.contextmanager
def patient_group(config: TrainerConfig, *, timeout_s: float) -> Iterator[Any]:
    """A gloo group of all ranks whose collectives may take `timeout_s`. A collective, also at exit.

    It lets the ranks wait while one of them does what takes longer than `collective_timeout_s`.

    Raises:
        NodeLost: the other ranks were not there within `collective_timeout_s`.
    """
    if config.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    join(config)
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def _store(rank: int, world_size: int, timeout: datetime.timedelta) -> Any:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    handle = None
    if rank == 0:  # a TCPStore's own socket listens on every address of the host
        handle = (
            int(os.environ[STORE_FD]) if STORE_FD in os.environ else listen(host, port).detach()
        )
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        world_size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=handle,
    )
