"""The plan of edges over throttled links: seconds until every worker has what it keeps, against the
plan's arithmetic.

Each rank and each worker is a process in its own network namespace, with one link of
SPLICE_BENCH_LINK_MB megabytes a second (20) in each direction. They are stand-ins: a rank sends
zeros through the real sender, group and plan, over TCP, and a worker receives into buffers. Names
as in `clusters.Topology`: 4-tp4-rep2 are four ranks and two replicas of four workers. The peer is
the arithmetic: the bytes of the busiest link over its rate. Free cores are needed: 24 processes
carry up to 320 MB a second.

It needs Linux, root, `ip` and `tc`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.queues import Queue
from typing import Any

import torch

from benchmarks.harness import Case
from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import Manifest, Rendezvous, TensorSpec
from weight_transfer import edges
from weight_transfer.boxes import Box
from weight_transfer.chunks import ChunkSender
from weight_transfer.groups import TransferGroup, join_tcp, open_listener

BRIDGE, SUBNET = "splice-br", "10.213.7"
STEP_BYTES = 4 * 2**20
DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class Topology:
    """Ranks, workers of a replica, replicas."""

    ranks: int
    workers: int
    replicas: int

    @property
    def name(self) -> str:
        """As in cases."""
        more = f"-rep{self.replicas}" if self.replicas > 1 else ""
        return f"{self.ranks}-tp{self.workers}{more}"


TOPOLOGIES = (
    Topology(2, 2, 1), Topology(4, 4, 1), Topology(4, 4, 2), Topology(8, 4, 1), Topology(8, 4, 2),
    Topology(8, 4, 4),
)  # fmt: skip


def run(*, device: str, small: bool) -> Iterator[Case]:
    """Every topology, or with `small` the first one with less to send."""
    del device
    if os.geteuid() or not (sys.platform == "linux" and shutil.which("ip") and shutil.which("tc")):
        raise ConfigError("this benchmark makes network namespaces: it needs root, `ip` and `tc`")
    rate = 1e6 * float(os.environ.get("SPLICE_BENCH_LINK_MB", "20"))
    samples = int(os.environ.get("SPLICE_BENCH_SAMPLES", "1" if small else "3"))
    for topology in TOPOLOGIES[:1] if small else TOPOLOGIES:
        tensors = 8 if small else 80
        specs, planned = _plan(topology, tensors)
        sent, received = edges.bytes_of(
            planned, specs, ranks=topology.ranks, workers=topology.workers
        )
        busiest = max(max(sent) * topology.replicas, max(received))
        with _links(topology.ranks + topology.workers * topology.replicas, rate):
            seconds = _measure(topology, tensors, samples)
        yield Case(
            name=topology.name,
            metric="receive_s",
            unit="s",
            samples=tuple(seconds),
            peer="bytes of the busiest link over its rate",
            peer_samples=(busiest / rate,),
            settings={
                "link_bytes_per_s": rate,
                "bytes": sum(s.nbytes for s in specs),
                "sent_by_the_busiest_rank": max(sent) * topology.replicas,
                "received_by_the_busiest_worker": max(received),
                "steps": len(planned),
            },
        )


def _plan(topology: Topology, tensors: int) -> tuple[list[TensorSpec], edges.Edges]:
    """Matrices of 2 MB: half of them lie on one rank each, as experts do, half are copies."""
    specs = [TensorSpec(name=f"t{n}", dtype="bfloat16", shape=(1024, 1024)) for n in range(tensors)]
    whole, everyone = Box(0, 1024, 0, 1024), tuple(range(topology.ranks))
    holders = [[((n // 2 % topology.ranks,) if n % 2 else everyone, whole)] for n in range(tensors)]
    height = 1024 // topology.workers
    keeps = [
        {n: [Box(height * w, height, 0, 1024)] for n in range(tensors)}
        for w in range(topology.workers)
    ]
    planned = edges.plan(
        specs,
        holders,
        keeps,
        order=range(tensors),
        ranks=topology.ranks,
        step_bytes=STEP_BYTES,
    )
    return specs, planned


# ------------------------------------------------------------ links


def _namespace(n: int) -> str:
    return f"splice-{n}"


def _address(n: int) -> str:
    return f"{SUBNET}.{n + 10}"


@contextlib.contextmanager
def _links(count: int, rate: float) -> Iterator[None]:
    """Namespaces on one bridge, each with a link of this rate in both directions."""
    throttle = f"root tbf rate {int(8 * rate)}bit burst 128kb latency 100ms"
    try:
        _do(f"ip link add {BRIDGE} type bridge", f"ip link set {BRIDGE} up")
        for n in range(count):
            name, end = _namespace(n), f"sp{n}"
            inside = f"ip netns exec {name}"
            _do(
                f"ip netns add {name}",
                f"ip link add {end} type veth peer name eth0 netns {name}",
                f"ip link set {end} master {BRIDGE} up",
                f"{inside} ip addr add {_address(n)}/24 dev eth0",
                f"{inside} ip link set eth0 up",
                f"{inside} ip link set lo up",
                f"tc qdisc add dev {end} {throttle}",
                f"{inside} tc qdisc add dev eth0 {throttle}",
            )
        yield
    finally:
        for n in range(count):
            subprocess.run(["ip", "netns", "del", _namespace(n)], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", BRIDGE], check=False, capture_output=True)


def _do(*commands: str) -> None:
    for command in commands:
        done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(f"{command!r} failed: {done.stderr.strip()}")


# ------------------------------------------------------------ processes


def _measure(topology: Topology, tensors: int, samples: int) -> list[float]:
    """Seconds of each transfer: from the first worker's start to the last one's end."""
    fork = get_context("fork")
    torch.set_num_threads(1)
    count = topology.ranks + topology.workers * topology.replicas
    boxes: list[Any] = [fork.Queue() for _ in range(count)]
    answers, start = fork.Queue(), fork.Barrier(count)
    processes = [
        fork.Process(
            target=_participant,
            args=(topology, tensors, samples, n, boxes, answers, start),
            daemon=True,
        )
        for n in range(count)
    ]
    for process in processes:
        process.start()
    try:
        spans = [answers.get(timeout=DEADLINE_S) for _ in range(count)]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [
        max(ends[k] for _, ends in spans) - min(begins[k] for begins, _ in spans)
        for k in range(samples)
    ]


def _participant(
    topology: Topology,
    tensors: int,
    samples: int,
    n: int,
    boxes: Sequence[Queue[Any]],
    answers: Queue[Any],
    start: Any,
) -> None:
    """Process n: a rank, or a worker of a replica, in its namespace."""
    with open(f"/run/netns/{_namespace(n)}") as namespace:
        os.setns(namespace.fileno(), os.CLONE_NEWNET)
    specs, planned = _plan(topology, tensors)
    if n < topology.ranks:
        act = _rank(topology, specs, planned, n, boxes)
    else:
        act = _worker(topology, specs, planned, n, boxes)
    begins, ends = [], []
    for _ in range(samples):
        start.wait(DEADLINE_S)
        begins.append(time.monotonic())
        act()
        ends.append(time.monotonic())
    answers.put((begins, ends))
    start.wait(DEADLINE_S)  # nobody closes a connection that another one reads


def _rank(
    topology: Topology,
    specs: Sequence[TensorSpec],
    planned: edges.Edges,
    rank: int,
    boxes: Sequence[Queue[Any]],
) -> Callable[[], object]:
    listeners = [
        open_listener(
            transport="tcp",
            host=_address(rank),
            world_size=topology.ranks + topology.workers,
            device="cpu",
            senders=topology.ranks,
            rank=rank,
        )
        for _ in range(topology.replicas)
    ]
    mine = [one.rendezvous.model_dump(mode="python") for one in listeners]
    for other in range(topology.ranks):
        boxes[other].put((rank, mine))
    found = dict(boxes[rank].get(timeout=DEADLINE_S) for _ in range(topology.ranks))
    groups: dict[str, TransferGroup] = {}
    for replica, listener in enumerate(listeners):
        everyones = [Rendezvous.model_validate(found[r][replica]) for r in range(topology.ranks)]
        where = listener.meet(everyones)
        if rank == 0:
            for worker in range(topology.workers):
                place = topology.ranks + replica * topology.workers + worker
                boxes[place].put(where.model_dump(mode="python"))
        groups[str(replica)] = listener.join(DEADLINE_S)
    sender = ChunkSender(
        groups=edges.in_turn(groups, rank),
        manifest=Manifest(tensors=tuple(specs)),
        chunks=[range(len(specs))],
        fill=lambda _k, _out_B: None,
        device="cpu",
        steps=edges.steps_of_rank(planned, rank, specs),
    )
    return lambda: sender.send(deadline_s=DEADLINE_S)


def _worker(
    topology: Topology,
    specs: Sequence[TensorSpec],
    planned: edges.Edges,
    n: int,
    boxes: Sequence[Queue[Any]],
) -> Callable[[], object]:
    position = (n - topology.ranks) % topology.workers
    where = Rendezvous.model_validate(boxes[n].get(timeout=DEADLINE_S))
    group = join_tcp(where, rank=topology.ranks + position, deadline_s=DEADLINE_S)
    steps = edges.steps_of_worker(edges.table_of(planned, position), specs)
    buffer_B = torch.empty(max(step.nbytes for step in steps), dtype=torch.uint8)

    def receive() -> None:
        for step in steps:
            edges.receive_into(buffer_B, step.deliveries, group=group, deadline_s=DEADLINE_S)

    return receive
