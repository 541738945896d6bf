"""On GPUs: Triton's digests are the torch path's, fast enough for 61 GB; NCCL carries every byte,
and its failures are bounded.

`-m gpu1` needs one GPU, `-m gpu2` two and cupy. Timings are printed (`-s`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from orchestrator.errors import TransferAborted, TransferError, TransferTimeout
from orchestrator.protocol.messages import Manifest, TensorSpec
from tests.weight_transfer.conftest import Peer
from tests.weight_transfer.peer import big_manifest, mixed_manifest, sender_to, sha256, values
from weight_transfer import digest, launches
from weight_transfer.digest import PreparedDigest, region_digest, tensor_digest
from weight_transfer.groups import TransferGroup, join_tcp, open_listener

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8]
CUDA = torch.device("cuda", 0)
ROOT = Path(__file__).resolve().parents[2]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    return (
        torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
        .view(dtype)
        .view(shape)
    )


@pytest.mark.gpu1
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(), (1,), (4095,), (4097,), (3, 5000), (70_001, 3), (17, 33, 65)], ids=str
)
def test_triton_is_the_torch_path(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert launches.kernels("digest_kernels") is not None, "this test wants Triton"
    t = random_bits(shape, dtype)
    assert int(tensor_digest(t.to(CUDA))) == int(tensor_digest(t))


@pytest.mark.gpu1
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_triton_regions_are_the_torch_paths(dtype: torch.dtype) -> None:
    t = random_bits((300, 200), dtype)
    on_gpu = t.to(CUDA)
    regions = [
        (slice(0, 300), slice(0, 200), (200, 1)),
        (slice(17, 211), slice(3, 77), (200, 1)),
        (slice(1, 300, 2), slice(0, 200, 3), (400, 3)),
        (slice(5, 6), slice(0, 200), (200, 1)),
        (slice(0, 300), slice(9, 10), (200, 1)),
        (slice(0, 0), slice(0, 10), (200, 1)),
    ]
    for rows, columns, strides in regions:
        first = (rows.start or 0) * 200 + (columns.start or 0) + 2**33
        wanted = region_digest(t[rows, columns], first_index=first, index_strides=strides)
        assert int(
            region_digest(on_gpu[rows, columns], first_index=first, index_strides=strides)
        ) == int(wanted)
    cube, cube_strides = (
        random_bits((6, 7, 8), dtype),
        (1000, 13, 200),
    )  # does not merge to two dimensions
    wanted = region_digest(cube, first_index=3, index_strides=cube_strides)
    assert int(region_digest(cube.to(CUDA), first_index=3, index_strides=cube_strides)) == int(
        wanted
    )
    transposed = region_digest(t.t(), first_index=0, index_strides=(1, 200))
    assert (
        int(region_digest(on_gpu.t(), first_index=0, index_strides=(1, 200)))
        == int(transposed)
        == int(tensor_digest(t))
    )


def many(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The digests of whole tensors, in a few launches."""
    out_N = torch.zeros(len(tensors), dtype=torch.int64, device=CUDA)
    whole = [t.contiguous() for t in tensors]
    PreparedDigest(whole, rows=range(len(tensors))).launch(out_N)
    torch.cuda.synchronize()
    return out_N


@pytest.mark.gpu1
def test_more_than_2_to_31_elements() -> None:
    t = torch.randint(0, 256, (2**31 + 5000,), dtype=torch.uint8, device=CUDA)
    half = 2**30 + 77
    bits = t.view(torch.uint8)
    by_torch = digest._sum_of_terms(bits[:half], 0, (1,)) + digest._sum_of_terms(
        bits[half:], half, (1,)
    )
    assert int(tensor_digest(t)) == int(by_torch) == int(many([t])[0])


@pytest.mark.gpu1
def test_many_is_one_by_one_and_strided_ones_too() -> None:
    tensors = [random_bits((n * 700 + 1, 3), DTYPES[n % len(DTYPES)], n) for n in range(24)]
    on_gpu = [t.to(CUDA) for t in tensors] + [
        tensors[0].to(CUDA).t(),
        torch.zeros(0, 3, device=CUDA),
    ]
    wanted = [int(tensor_digest(t)) for t in tensors] + [int(tensor_digest(tensors[0].t())), 0]
    assert many(on_gpu).tolist() == wanted


def qwen3_30b_manifest() -> Manifest:
    from trainer_node.tools.make_checkpoint import REAL_SHAPES, tensor_shapes

    shapes = tensor_shapes(REAL_SHAPES["qwen3-30b-a3b"])
    return Manifest(
        tensors=tuple(TensorSpec(name=n, dtype="bfloat16", shape=s) for n, s in shapes.items())
    )


def views_of_61_gb(manifest: Manifest) -> list[torch.Tensor]:
    flat = torch.zeros(manifest.nbytes // 2, dtype=torch.bfloat16, device=CUDA)
    flat.view(torch.int16).random_()
    views, at = [], 0
    for spec in manifest.tensors:
        views.append(flat[at : at + spec.numel].view(spec.shape))
        at += spec.numel
    return views


@pytest.mark.gpu1
def test_digests_of_61_gb_do_not_depend_on_how_many_are_asked_for_at_once() -> None:
    """The seconds are printed; what they are worth in a publication is `verify_s` of
    `benchmarks/sync.py`.
    """
    manifest = qwen3_30b_manifest()
    views = views_of_61_gb(manifest)
    many(views[:100])
    tensor_digest(views[0])
    found = []
    for name, run in {
        "all at once": lambda: many(views),
        "60 calls": lambda: torch.cat(
            [many(views[a : a + 315]) for a in range(0, len(views), 315)]
        ),
        "one by one": lambda: torch.stack([tensor_digest(v) for v in views]),
    }.items():
        torch.cuda.synchronize()
        began = time.monotonic()
        found.append(run())
        queued = time.monotonic() - began
        torch.cuda.synchronize()
        took = time.monotonic() - began
        print(
            f"\n{manifest.nbytes / 1e9:.2f} GB, {len(views)} tensors, {name}: {took:.3f} s (queued "
            f"{queued:.3f} s)"
        )
    at_once, in_calls, one_by_one = found
    assert at_once.shape == (len(views),)
    assert torch.equal(at_once, in_calls) and torch.equal(at_once, one_by_one)


@pytest.mark.gpu1
def test_filling_61_gb() -> None:
    """The sender without a wire: fill and digest."""
    manifest = qwen3_30b_manifest()
    views = views_of_61_gb(manifest)
    by_name = dict(zip((s.name for s in manifest.tensors), views, strict=True))
    sender = sender_to({}, manifest, 192 << 20, tensor=lambda spec: by_name[spec.name], device=CUDA)
    for _ in range(2):
        report = sender.send(deadline_s=60)
    print("\nfill 61 GB:", {k: round(v, 3) for k, v in report.seconds.items()})
    assert report.digests_N.tolist() == many(views).tolist()
    sender.close()


# ------------------------------------------------------------ NCCL, two GPUs


class NcclPeer(Peer):
    """nccl_peer.py on the second GPU."""

    def __init__(self, *, rendezvous_json: str, manifest_json: str, chunk_bytes: int) -> None:
        super().__init__(
            "",
            manifest_json=manifest_json,
            command=[
                sys.executable,
                str(ROOT / "tests" / "weight_transfer" / "nccl_peer.py"),
                rendezvous_json,
                str(chunk_bytes),
            ],
            env={
                **os.environ,
                "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[1],
                "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            },
        )

    def receive(self) -> None:
        self.stdin.sendall(b"receive\n")


@pytest.fixture
def nccl_pair() -> Iterator[Callable[..., tuple[NcclPeer, TransferGroup]]]:
    opened: list[Any] = []

    def connect(manifest: Manifest, *, chunk_bytes: int) -> tuple[NcclPeer, TransferGroup]:
        listener = open_listener(transport="nccl", host="127.0.0.1", world_size=2, device=CUDA)
        peer = NcclPeer(
            rendezvous_json=listener.rendezvous.model_dump_json(),
            manifest_json=manifest.model_dump_json(),
            chunk_bytes=chunk_bytes,
        )
        opened.append(peer)
        group = listener.join(60)
        opened.append(group)
        peer.wait_for("joined", timeout_s=60)
        return peer, group

    yield connect
    for thing in reversed(opened):
        (thing.end if isinstance(thing, Peer) else thing.close)()


def zeros(spec: TensorSpec) -> torch.Tensor:
    return torch.zeros(spec.shape, dtype=torch.uint8, device=CUDA)


@pytest.mark.gpu2
@pytest.mark.parametrize("chunk_bytes", [1000, 1 << 20])
def test_nccl_carries_every_byte(nccl_pair: Callable[..., Any], chunk_bytes: int) -> None:
    manifest = mixed_manifest()
    peer, group = nccl_pair(manifest, chunk_bytes=chunk_bytes)
    sender = sender_to(
        {"r": group}, manifest, chunk_bytes, tensor=lambda spec: values(spec).to(CUDA), device=CUDA
    )
    for _ in range(2):
        peer.receive()
        report = sender.send(deadline_s=30)
        got = peer.wait_for("received", timeout_s=30)
        assert got["sha256"] == {s.name: sha256(values(s)) for s in manifest.tensors}
        assert got["digests"] == report.digests_N.tolist()
    sender.close()


@pytest.mark.gpu2
@pytest.mark.parametrize("how", ["stop", "kill"])
def test_abort_frees_a_sender_whose_nccl_peer_is_gone(
    nccl_pair: Callable[..., Any], how: str
) -> None:
    manifest = big_manifest(tensors=64, mib_each=64)
    peer, group = nccl_pair(manifest, chunk_bytes=64 << 20)
    peer.receive()
    aborted_at: list[float] = []

    def abort() -> None:
        aborted_at.append(time.monotonic())
        sender.abort("watchdog: no progress")

    def strike(chunk: int) -> None:
        if chunk == 4:
            (peer.stop if how == "stop" else peer.kill)()
            threading.Timer(2.0, abort).start()

    sender = sender_to({"r": group}, manifest, 64 << 20, tensor=zeros, before=strike, device=CUDA)
    with pytest.raises((TransferAborted, TransferError)) as caught:
        sender.send(deadline_s=60)
    freed_s = time.monotonic() - aborted_at[0] if aborted_at else 0.0
    print(f"\n{how}: {type(caught.value).__name__} {freed_s:.3f} s after the abort")
    assert freed_s < 1.0
    began = time.monotonic()
    sender.close()
    torch.cuda.synchronize()
    assert time.monotonic() - began < 5.0, "the kernel must have ended with the communicator"


@pytest.mark.gpu2
def test_nccl_deadline(nccl_pair: Callable[..., Any]) -> None:
    """The peer never receives."""
    manifest = big_manifest(tensors=16, mib_each=64)
    _, group = nccl_pair(manifest, chunk_bytes=64 << 20)
    sender = sender_to({"r": group}, manifest, 64 << 20, tensor=zeros, device=CUDA)
    began = time.monotonic()
    with pytest.raises(TransferTimeout, match="'r'"):
        sender.send(deadline_s=3)
    assert time.monotonic() - began < 5
    sender.close()


@pytest.mark.gpu2
def test_a_process_whose_nccl_join_failed_can_exit() -> None:
    script = """
import torch
from orchestrator.errors import TransferTimeout
from weight_transfer.groups import open_listener
listener = open_listener(transport="nccl", host="127.0.0.1", world_size=2, device="cuda:0")
try:
    listener.join(2)
except TransferTimeout as error:
    print("timed out")
"""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
        env=environment,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "timed out"), done.stderr[-2000:]


@pytest.mark.gpu2
def test_nccl_61_gb(nccl_pair: Callable[..., Any]) -> None:
    """Through the ring; the receiver drops what it gets (it would not fit next to its copy
    otherwise).
    """
    manifest = big_manifest(tensors=61, mib_each=1000)
    peer, group = nccl_pair(manifest, chunk_bytes=192 << 20)
    source = torch.zeros(1000 << 20, dtype=torch.uint8, device=CUDA)
    sender = sender_to({"r": group}, manifest, 192 << 20, tensor=lambda _: source, device=CUDA)
    peer.receive()
    report = sender.send(deadline_s=60)
    print(
        f"\n{report.nbytes / 1e9:.1f} GB over NCCL:",
        json.dumps({k: round(v, 3) for k, v in report.seconds.items()}),
    )
    sender.close()


@pytest.mark.gpu2
@pytest.mark.parametrize(("senders", "workers"), [(1, 1), (1, 2), (2, 2)])
def test_nccl_carries_messages_from_senders_to_workers(senders: int, workers: int) -> None:
    """More than two share both GPUs: NCCL takes each process for another host."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    ranks = []
    for rank in range(senders + workers):
        gpu = gpus[rank % 2]
        path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "PYTHONPATH": path}
        if senders + workers > 2:
            environment |= {"NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
        arguments = [rank, senders, workers, store.port]
        command = [sys.executable, "-m", "tests.weight_transfer.nccl_ranks", *map(str, arguments)]
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment))
    try:
        assert [process.wait(180) for process in ranks] == [0] * len(ranks)
    finally:
        for process in ranks:
            process.kill()
            process.wait(10)


@pytest.mark.gpu1
def test_tcp_carries_messages_of_cuda_through_the_host() -> None:
    """Of several sizes in one call: each has its place in the host's memory."""
    listener = open_listener(transport="tcp", host="127.0.0.1", world_size=2, device="cuda")
    sizes = (5, 64 << 20, 3)
    sent = [(0, random_bits((size,), torch.uint8, size).to(CUDA)) for size in sizes]
    got = [(0, torch.zeros(size, dtype=torch.uint8, device=CUDA)) for size in sizes]
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join_tcp, listener.rendezvous, rank=1, deadline_s=30)
        sender = listener.join(deadline_s=30)
        receiver = joining.result()
        try:
            receiving = pool.submit(receiver.receive, got, deadline_s=30)
            sender.send(sent, deadline_s=30)
            receiver.synchronize(receiving.result(), deadline_s=30)
            assert all(torch.equal(a[1], b[1]) for a, b in zip(sent, got, strict=True))
        finally:
            sender.close()
            receiver.close()


@pytest.mark.gpu1
def test_tcp_carries_cuda_buffers_through_the_host() -> None:
    """Also a smaller buffer after a larger one, and one that the sender's stream still makes."""
    listener = open_listener(transport="tcp", host="127.0.0.1", world_size=2, device="cuda")
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join_tcp, listener.rendezvous, rank=1, deadline_s=30)
        sender = listener.join(deadline_s=30)
        receiver = joining.result()
        try:
            for seed, nbytes in enumerate((1, 64 << 20, 3)):
                sent_B = random_bits((nbytes,), torch.uint8, seed).to(CUDA)
                got_B = torch.zeros_like(sent_B)
                receiving = pool.submit(receiver.broadcast, got_B, deadline_s=30)
                with torch.cuda.stream(torch.cuda.Stream()):
                    torch.cuda._sleep(10_000_000)
                    late_B = sent_B ^ 255
                    sender.broadcast(late_B, deadline_s=30)
                receiver.synchronize(receiving.result(), deadline_s=30)
                assert torch.equal(got_B, sent_B ^ 255)
        finally:
            sender.close()
            receiver.close()
