"""The other end of a transfer, as a separate process: `python peer.py receive|send ...`. Prints
one JSON line per event.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence

import torch

from orchestrator.errors import SpliceError
from orchestrator.protocol.messages import DTYPE_BYTES, Manifest, Rendezvous, TensorSpec
from weight_transfer.chunks import ChunkSender
from weight_transfer.digest import tensor_digest
from weight_transfer.groups import TransferGroup, join_tcp, open_listener
from weight_transfer.layout import as_bytes, chunk_offsets, torch_dtype, view_of

Order = Sequence[Sequence[int]]


def in_chunks(manifest: Manifest, chunk_bytes: int) -> Order:
    """Manifest order in chunks of at most that size, or of one tensor; wide elements first, so that
    all are aligned.
    """
    order: list[list[int]] = [[]]
    for n, spec in enumerate(manifest.tensors):
        if (
            order[-1]
            and sum(manifest.tensors[i].nbytes for i in order[-1]) + spec.nbytes > chunk_bytes
        ):
            order.append([])
        order[-1].append(n)
    return [sorted(chunk, key=lambda i: -DTYPE_BYTES[manifest.tensors[i].dtype]) for chunk in order]


def sender_to(
    groups: dict[str, TransferGroup],
    manifest: Manifest,
    chunk_bytes: int = 1 << 20,
    *,
    tensor: Callable[[TensorSpec], torch.Tensor] | None = None,
    before: Callable[[int], None] = lambda chunk: None,
    device: torch.device | str = "cpu",
) -> ChunkSender:
    """Sends `tensor` of each spec (random bits if not given); `before` is called with each chunk's
    number before it is filled.
    """
    order = in_chunks(manifest, chunk_bytes)

    def fill(k: int, out_B: torch.Tensor) -> None:
        before(k)
        specs = [manifest.tensors[i] for i in order[k]]
        for spec, begin in zip(specs, chunk_offsets(specs), strict=True):
            out_B[begin : begin + spec.nbytes].copy_(as_bytes((tensor or values)(spec)))

    return ChunkSender(groups=groups, manifest=manifest, chunks=order, fill=fill, device=device)


def receive_chunks(
    group: TransferGroup,
    manifest: Manifest,
    order: Order,
    *,
    deadline_s: float,
    load: Callable[[list[tuple[str, torch.Tensor]]], None],
    device: str = "cpu",
) -> None:
    """What an inference worker does with chunks that it reloads, without vLLM."""
    until = time.monotonic() + deadline_s
    for chunk in order:
        specs = [manifest.tensors[i] for i in chunk]
        chunk_B = torch.empty(sum(s.nbytes for s in specs), dtype=torch.uint8, device=device)
        group.broadcast(chunk_B, deadline_s=max(0.001, until - time.monotonic()))
        load(
            [
                (s.name, view_of(chunk_B, s, begin))
                for s, begin in zip(specs, chunk_offsets(specs), strict=True)
            ]
        )


def mixed_manifest() -> Manifest:
    """Odd sizes, mixed dtypes, a scalar, an empty tensor, one far larger than small chunks."""
    rows = [
        ("uint8", (3,)),
        ("bfloat16", (5, 7)),
        ("float32", (300, 41)),
        ("int64", ()),
        ("float16", (1,)),
        ("float32", (0, 4)),
        ("float64", (9,)),
        ("uint8", (1,)),
        ("float32", (3, 3, 3)),
        ("int32", (17,)),
        ("bfloat16", (64, 129)),
        ("float32", (1,)),
    ]
    return Manifest(
        tensors=tuple(
            TensorSpec(name=f"layers.{n}", dtype=d, shape=s) for n, (d, s) in enumerate(rows)
        )
    )  # type: ignore[arg-type]


def big_manifest(*, tensors: int = 64, mib_each: int = 4) -> Manifest:
    return Manifest(
        tensors=tuple(
            TensorSpec(name=f"big.{n}", dtype="uint8", shape=(mib_each << 20,))
            for n in range(tensors)
        )
    )


def values(spec: TensorSpec, *, seed: int = 0) -> torch.Tensor:
    """Random bits: NaN payloads, -0.0 and subnormals included."""
    generator = torch.Generator().manual_seed(seed * 10_007 + int(spec.name.rpartition(".")[2]))
    raw = torch.randint(0, 256, (spec.nbytes,), dtype=torch.uint8, generator=generator)
    return raw.view(torch_dtype(spec.dtype)).view(spec.shape)


def sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(as_bytes(tensor).numpy().tobytes()).hexdigest()


def say(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def receive(arguments: argparse.Namespace) -> None:
    rendezvous = Rendezvous.model_validate_json(arguments.rendezvous)
    manifest = Manifest.model_validate_json(sys.stdin.readline())
    group = join_tcp(rendezvous, rank=arguments.rank, deadline_s=arguments.join_s)
    say("joined")
    try:
        for _ in range(arguments.rounds):
            got: dict[str, torch.Tensor] = {}

            def load(
                tensors: list[tuple[str, torch.Tensor]], got: dict[str, torch.Tensor] = got
            ) -> None:
                got.update(tensors)
                say("chunk", names=[name for name, _ in tensors])
                time.sleep(arguments.load_s)

            order = in_chunks(manifest, arguments.chunk_bytes)
            receive_chunks(group, manifest, order, deadline_s=arguments.deadline_s, load=load)
            shapes_fit = all(
                got[s.name].shape == s.shape and got[s.name].dtype == torch_dtype(s.dtype)
                for s in manifest.tensors
            )
            say(
                "received",
                shapes_fit=shapes_fit,
                sha256={name: sha256(t) for name, t in got.items()} if arguments.hash else {},
                digests=[int(tensor_digest(got[s.name])) for s in manifest.tensors]
                if arguments.hash
                else [],
            )
    finally:
        group.close()


def send(arguments: argparse.Namespace) -> None:
    """Announce a group, then send slowly, `load_s` per chunk."""
    manifest = Manifest.model_validate_json(sys.stdin.readline())
    listener = open_listener(transport="tcp", host="127.0.0.1", world_size=2, device="cpu")
    say("listening", rendezvous=listener.rendezvous.model_dump_json())
    group = listener.join(deadline_s=arguments.join_s)
    sender = sender_to(
        {"replica": group},
        manifest,
        arguments.chunk_bytes,
        before=lambda _: time.sleep(arguments.load_s),
    )
    try:
        say("sending")
        sender.send(deadline_s=arguments.deadline_s)
    finally:
        sender.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["receive", "send"])
    parser.add_argument("--rendezvous", default="")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--chunk-bytes", type=int, default=1 << 20)
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--join-s", type=float, default=120.0)
    parser.add_argument("--deadline-s", type=float, default=30.0)
    parser.add_argument("--hash", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    try:
        (receive if arguments.role == "receive" else send)(arguments)
    except SpliceError as error:
        say("failed", error=type(error).__name__, text=str(error))
        sys.exit(3)
    say("done")


if __name__ == "__main__":
    main()
