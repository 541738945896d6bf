"""Bandwidth of only the transport (TCP, or NCCL through cupy) for messages of several sizes,
against torch.distributed's broadcast.

Two processes, one message size after the other; rank 0 sends so many messages that a sample is long
enough to be timed. A sample begins and ends at a barrier of both, so that what the receiver has not
got yet is not counted as sent. The peer sends the same buffers over a process group of
torch.distributed with the same backend, between the same two processes. Axes: B = bytes.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import Case
from orchestrator.protocol.messages import Rendezvous
from weight_transfer.groups import TransferGroup, join_tcp, open_listener

MIB = 2**20
SIZES = {
    "small": (MIB // 16, MIB, 8 * MIB),
    "cpu": (MIB, 16 * MIB, 64 * MIB, 256 * MIB),
    "cuda": tuple(MIB << n for n in (4, 6, 8, 9, 10)),
}
PER_SAMPLE = {"small": 8 * MIB, "cpu": 512 * MIB, "cuda": 16 * 1024 * MIB}
"""Bytes of a sample, at least one message."""
TIMEOUT_S = 120.0
Send = Callable[[torch.Tensor], object]


def run(*, device: str, small: bool) -> list[Case]:
    """Bytes per second for each size. Sender's and receiver's GPU from SPLICE_BENCH_GPUS (0,1)."""
    kind = "small" if small else device
    samples = 3 if small else 7
    cuda = device == "cuda"
    gpus = [int(g) for g in os.environ.get("SPLICE_BENCH_GPUS", "0,1").split(",")]
    mine, other = (f"cuda:{gpus[0]}", f"cuda:{gpus[1]}") if cuda else ("cpu", "cpu")
    listener = open_listener(
        transport="nccl" if cuda else "tcp", host="127.0.0.1", world_size=2, device=mine
    )
    store = _store(port=0, is_master=True)
    plan = {
        "device": other,
        "port": store.port,
        "sizes": SIZES[kind],
        "per_sample": PER_SAMPLE[kind],
        "samples": samples,
        "rendezvous": listener.rendezvous.model_dump_json(),
    }
    receiver = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.wire"], stdin=subprocess.PIPE, text=True
    )
    try:
        assert receiver.stdin is not None
        receiver.stdin.write(json.dumps(plan))
        receiver.stdin.close()
        ours, peer = _rank(0, listener.join(TIMEOUT_S), store, plan | {"device": mine})
        if receiver.wait(30):
            raise RuntimeError(f"the receiver ended with {receiver.returncode}")
    finally:
        listener.close()
        receiver.kill()
        receiver.wait()
    name = "nccl" if cuda else "gloo"
    return [
        Case(
            name=f"wire/{_named(size)}",
            metric="bytes_per_s",
            unit="B/s",
            samples=tuple(ours[size]),
            peer=f"torch.distributed {name}",
            peer_samples=tuple(peer[size]),
            settings={
                "message_bytes": size,
                "messages": _messages(size, PER_SAMPLE[kind]),
                "receivers": 1,
            },
        )
        for size in SIZES[kind]
    ]


def _rank(
    rank: int, group: TransferGroup, store: Any, plan: dict[str, Any]
) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
    """Either end: the two transports in turns, so that a slow moment of the machine meets both."""
    device = torch.device(plan["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rates: tuple[dict[int, list[float]], dict[int, list[float]]] = ({}, {})
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=2,
            timeout=datetime.timedelta(seconds=TIMEOUT_S),
        )
        barrier = dist.new_group(backend="gloo")
        sends: tuple[Send, Send] = (
            lambda buffer_B: group.broadcast(buffer_B, deadline_s=TIMEOUT_S),
            lambda buffer_B: dist.broadcast(buffer_B, src=0),
        )
        for size in plan["sizes"]:
            buffer_B = torch.full((size,), 7 if rank == 0 else 0, dtype=torch.uint8, device=device)
            messages = _messages(size, plan["per_sample"])
            for sample in range(
                plan["samples"] + 1
            ):  # the first is not counted: connections, buffers, page faults
                for rate, send in zip(rates, sends, strict=True):
                    seconds = _timed(send, buffer_B, messages, barrier)
                    if sample:
                        rate.setdefault(size, []).append(messages * size / seconds)
                    if rank and int(buffer_B.min()) != 7:
                        raise AssertionError(f"a message of {size} bytes did not arrive")
                    buffer_B.fill_(7 if rank == 0 else 0)
    finally:
        group.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    return rates


def _timed(send: Send, buffer_B: torch.Tensor, messages: int, barrier: Any) -> float:
    _wait(buffer_B.device)
    dist.barrier(barrier)
    began = time.perf_counter()
    for _ in range(messages):
        send(buffer_B)
    _wait(buffer_B.device)
    dist.barrier(barrier)
    return time.perf_counter() - began


class _CupyReceiver:
    """Rank 1 of our NCCL group as a vLLM worker is on the wire: unique id from the rendezvous, one
    all-reduce, broadcasts.
    """

    rank, world_size = 1, 2

    def __init__(self, rendezvous: Rendezvous, device: torch.device) -> None:
        from cupy.cuda import nccl

        assert rendezvous.nccl_unique_id is not None
        self._nccl, self._stream = nccl, torch.cuda.Stream(device)
        self._communicator = nccl.NcclCommunicator(
            rendezvous.world_size, rendezvous.nccl_unique_id, 1
        )
        one = torch.zeros(1, device=device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        pointer = one.data_ptr()
        self._communicator.allReduce(
            pointer, pointer, 1, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, self._stream.cuda_stream
        )
        self._stream.synchronize()

    def broadcast(self, buffer_B: torch.Tensor, *, deadline_s: float) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(buffer_B.device))
        self._communicator.bcast(
            buffer_B.data_ptr(),
            buffer_B.numel(),
            self._nccl.NCCL_UINT8,
            0,
            self._stream.cuda_stream,
        )

    def synchronize(self, event: torch.cuda.Event | None = None, *, deadline_s: float) -> None:
        self._stream.synchronize()

    def abort(self, reason: str) -> None:
        self._communicator.abort()

    def close(self) -> None:
        self._communicator.abort()


def _receive() -> None:
    """The other process: its plan comes on stdin."""
    plan = json.loads(sys.stdin.read())
    device, rendezvous = (
        torch.device(plan["device"]),
        Rendezvous.model_validate_json(plan["rendezvous"]),
    )
    group: TransferGroup
    if device.type == "cuda":
        torch.cuda.set_device(device)  # where cupy makes the communicator
        group = _CupyReceiver(rendezvous, device)
    else:
        group = join_tcp(rendezvous, rank=1, deadline_s=TIMEOUT_S)
    _rank(1, group, _store(port=plan["port"], is_master=False), plan)


def _store(*, port: int, is_master: bool) -> Any:
    options = {"timeout": datetime.timedelta(seconds=TIMEOUT_S), "wait_for_workers": False}
    return dist.TCPStore("127.0.0.1", port, 2, is_master, **options)  # type: ignore[attr-defined]


def _messages(size: int, per_sample: int) -> int:
    return max(1, per_sample // size)


def _named(size: int) -> str:
    return f"{size // MIB}MiB" if size >= MIB else f"{size // 1024}KiB"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    _receive()
