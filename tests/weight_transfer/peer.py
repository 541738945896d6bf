"""The other end of a transfer, as a process of its own: `python peer.py receive|send ...`. Prints one JSON line per event."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator

import torch

from orchestrator.errors import SpliceError
from orchestrator.protocol.messages import Manifest, Rendezvous, TensorSpec
from weight_transfer.digest import tensor_digest
from weight_transfer.groups import join_tcp, open_listener
from weight_transfer.layout import as_bytes, torch_dtype
from weight_transfer.receiver import receive_weights
from weight_transfer.sender import WeightSender


def mixed_manifest() -> Manifest:
    """Odd sizes, mixed dtypes (so that offsets are unaligned), a scalar, an empty tensor, one far larger than small buckets."""
    rows = [
        ("uint8", (3,)), ("bfloat16", (5, 7)), ("float32", (300, 41)), ("int64", ()), ("float16", (1,)), ("float32", (0, 4)),
        ("float64", (9,)), ("uint8", (1,)), ("float32", (3, 3, 3)), ("int32", (17,)), ("bfloat16", (64, 129)), ("float32", (1,)),
    ]  # fmt: skip
    return Manifest(tensors=tuple(TensorSpec(name=f"layers.{n}", dtype=d, shape=s) for n, (d, s) in enumerate(rows)))  # type: ignore[arg-type]


def big_manifest(*, tensors: int = 64, mib_each: int = 4) -> Manifest:
    return Manifest(tensors=tuple(TensorSpec(name=f"big.{n}", dtype="uint8", shape=(mib_each << 20,)) for n in range(tensors)))


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

            def load(tensors: list[tuple[str, torch.Tensor]], got: dict[str, torch.Tensor] = got) -> None:
                got.update(tensors)
                say("bucket", names=[name for name, _ in tensors])
                time.sleep(arguments.load_s)

            report = receive_weights(
                group=group,
                manifest=manifest,
                bucket_bytes=rendezvous.bucket_bytes,
                device="cpu",
                deadline_s=arguments.deadline_s,
                load=load,
            )
            shapes_fit = all(
                got[s.name].shape == s.shape and got[s.name].dtype == torch_dtype(s.dtype) for s in manifest.tensors
            )
            say(
                "received",
                nbytes=report.nbytes,
                seconds=report.seconds,
                shapes_fit=shapes_fit,
                sha256={name: sha256(t) for name, t in got.items()} if arguments.hash else {},
                digests=[int(tensor_digest(got[s.name])) for s in manifest.tensors] if arguments.hash else [],
            )
    finally:
        group.close()


def send(arguments: argparse.Namespace) -> None:
    """Announce a group, then send slowly, `load_s` per tensor."""
    manifest = Manifest.model_validate_json(sys.stdin.readline())
    listener = open_listener(transport="tcp", host="127.0.0.1", world_size=2, bucket_bytes=arguments.bucket_bytes, device="cpu")
    say("listening", rendezvous=listener.rendezvous.model_dump_json())
    group = listener.join(deadline_s=arguments.join_s)
    sender = WeightSender(groups={"replica": group}, manifest=manifest, bucket_bytes=arguments.bucket_bytes, device="cpu")
    try:
        say("sending")

        def slowly() -> Iterator[tuple[str, torch.Tensor]]:
            for spec in manifest.tensors:
                time.sleep(arguments.load_s)
                yield spec.name, values(spec)

        sender.send(slowly(), deadline_s=arguments.deadline_s)
    finally:
        sender.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["receive", "send"])
    parser.add_argument("--rendezvous", default="")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--bucket-bytes", type=int, default=1 << 20)
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
