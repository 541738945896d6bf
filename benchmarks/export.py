"""The trainer's merged tensors as bytes in memory, against Megatron-Bridge's own export of the same
model, in the same run.

    export/SHAPE/wire      the plan that publications reuse: chunks of tensors merged straight into
                           two buffers (`WireExport`)
    export/SHAPE/manifest  one tensor after the other: Bridge's stream, each merged and copied into
                           a buffer (`Exporter`)

Both have adapters of random values on every linear. The peer exports the model *without* adapters,
which is less work: Bridge's `stream_weights_megatron_to_hf`, which `export_hf_weights` is made of,
every tensor copied into a buffer; its conversion tasks once kept from before (`Bridge, tasks
kept`), once made again each time (`Bridge`). What the plan writes is compared with `Exporter`'s
bytes first. `peak_bytes`, on CUDA only, is memory beyond the model during a pass, the two buffers
included. Each shape has its own process. Axes: B = bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import memory
from benchmarks.clusters import make_model
from benchmarks.harness import Case
from benchmarks.timing import seconds
from orchestrator.protocol.config import LoraConfig, TrainerConfig
from orchestrator.protocol.messages import Manifest

CHUNK_BYTES = 512 * 2**20
TIMEOUT_S = 540.0


def run(*, device: str, small: bool) -> list[Case]:
    """Seconds and peak bytes of each way. Shapes from SPLICE_BENCH_SHAPES (default 8b,30b-a3b on
    cuda, tiny on the cpu).
    """
    usual = "tiny" if small or device == "cpu" else "8b,30b-a3b"
    shapes = usual if small else os.environ.get("SPLICE_BENCH_SHAPES", usual)
    cases: list[Case] = []
    for shape in shapes.split(","):
        with TemporaryDirectory() as folder:
            make_model(shape, Path(folder))
            argv = [
                sys.executable,
                "-m",
                "benchmarks.export",
                folder,
                device,
                str(3 if small else 5),
            ]
            done = subprocess.run(
                argv, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True
            )
            cases += _cases(shape, json.loads(done.stdout.splitlines()[-1]))
    return cases


def _cases(shape: str, found: dict[str, Any]) -> list[Case]:
    settings, ways = found["settings"], found["ways"]
    kept, anew = "Bridge, tasks kept, no merge", "Bridge, no merge"
    cases = []
    for way in ("wire", "manifest"):
        for peer, key in ((kept, "bridge_kept"), (anew, "bridge")):
            cases.append(
                Case(
                    name=f"export/{shape}/{way}" + ("" if key == "bridge_kept" else "-to-uncached"),
                    metric="seconds",
                    unit="s",
                    samples=tuple(ways[way]["seconds"]),
                    peer=peer,
                    peer_samples=tuple(ways[key]["seconds"]),
                    settings=settings,
                )
            )
        if "peak_bytes" in ways[way]:
            cases.append(
                Case(
                    name=f"export/{shape}/{way}",
                    metric="peak_bytes",
                    unit="B",
                    samples=(ways[way]["peak_bytes"],),
                    peer=kept,
                    peer_samples=(ways["bridge_kept"]["peak_bytes"],),
                    settings={"measured": "torch.cuda.max_memory_allocated"},
                )
            )
    cases.append(
        Case(
            name=f"export/{shape}/plan",
            metric="seconds",
            unit="s",
            samples=(found["plan_s"],),
            peer="Bridge's conversion tasks",
            peer_samples=(found["tasks_s"],),
            settings={"note": "made once, kept while the model's structure stands"},
        )
    )
    return cases


# ------------------------------------------------------------ the process that has the model


def _measure(model: Path, device: str, repeats: int) -> dict[str, Any]:
    from trainer_node.training.start import start

    torch.set_num_threads(1)
    config = TrainerConfig(
        model=model,
        init="random",
        device=device,
        dtype="bfloat16" if device == "cuda" else "float32",  # type: ignore[arg-type]
        lora=LoraConfig(rank=16, alpha=32),
        transport="nccl" if device == "cuda" else "tcp",
    )
    built = start(config).model
    try:
        return _measure_ways(built, device, repeats)
    finally:
        built.close()


def _measure_ways(model: Any, device: str, repeats: int) -> dict[str, Any]:
    from trainer_node.export.merged import Exporter
    from trainer_node.export.wire_export import WireExport

    _randomise(model)
    exporter = Exporter(model)
    manifest = exporter.manifest()
    began = time.perf_counter()
    model.bridge.build_conversion_tasks(model.checkpoint, model.modules)
    tasks_s = time.perf_counter() - began
    order = _order(manifest)
    began = time.perf_counter()
    export = WireExport(model, manifest, order)
    plan_s = time.perf_counter() - began
    _check(export, exporter, manifest, order, model.device)
    ways: dict[str, Callable[[], None]] = {
        "wire": lambda: _fill(export, model.device),
        "manifest": lambda: _copy(exporter.merged_tensors(), manifest, model.device),
        "bridge_kept": lambda: _copy(_bridge(model, kept=True), manifest, model.device),
        "bridge": lambda: _copy(_bridge(model, kept=False), manifest, model.device),
    }
    settings = {
        "bytes": manifest.nbytes,
        "num_tensors": len(manifest.tensors),
        "lora_rank": 16,
        "lora_targets": "all",
        "chunks": len(order),
        "chunk_bytes": CHUNK_BYTES,
        "dtype": model.config.dtype,
        "threads": torch.get_num_threads(),
    }
    return {
        "ways": {name: _timed(way, device, repeats) for name, way in ways.items()},
        "settings": settings,
        "plan_s": plan_s,
        "tasks_s": tasks_s,
    }


@torch.no_grad()
def _randomise(model: Any) -> None:
    """B is zero at the start; with other values the comparison of bytes can fail."""
    torch.manual_seed(0)
    for adapter in model.adapters.adapters:
        for matrix in adapter.lora_B.values():
            matrix.normal_(0.0, 0.02)


def _order(manifest: Manifest) -> list[list[int]]:
    """Manifest order in chunks of at most `CHUNK_BYTES`, or of one tensor."""
    order: list[list[int]] = []
    size = 0
    for n, spec in enumerate(manifest.tensors):
        if not order or size + spec.nbytes > CHUNK_BYTES:
            order.append([])
            size = 0
        order[-1].append(n)
        size += spec.nbytes
    return order


def _fill(export: Any, device: torch.device) -> None:
    ring = _ring(max(map(export.chunk_nbytes, range(export.num_chunks))), device)
    for c in range(export.num_chunks):
        export.fill(c, ring[c % 2][: export.chunk_nbytes(c)])


def _copy(
    tensors: Iterable[tuple[str, torch.Tensor]], manifest: Manifest, device: torch.device
) -> None:
    """Each tensor into one of two buffers, as a sender would."""
    ring = _ring(max(spec.nbytes for spec in manifest.tensors), device)
    count = 0
    for count, (_, tensor) in enumerate(tensors, 1):
        flat_B = tensor.contiguous().reshape(-1).view(torch.uint8)
        ring[count % 2][: flat_B.numel()].copy_(flat_B)
    if count != len(manifest.tensors):
        raise AssertionError(f"{count} tensors instead of {len(manifest.tensors)}")


def _ring(nbytes: int, device: torch.device) -> list[torch.Tensor]:
    return [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]


@torch.no_grad()
def _bridge(model: Any, *, kept: bool) -> Iterable[tuple[str, torch.Tensor]]:
    pairs = model.bridge.stream_weights_megatron_to_hf(
        model.modules,
        model.checkpoint,
        cpu=False,
        show_progress=False,
        conversion_tasks=model.conversion_tasks if kept else None,
        merge_adapter_weights=False,
    )
    for name, tensor in pairs:  # Bridge leaves Megatron's padding of the vocabulary on
        is_vocab = name in model.checkpoint.vocab_tensors
        yield name, tensor[: model.vocab_size] if is_vocab else tensor


def _check(
    export: Any, exporter: Any, manifest: Manifest, order: list[list[int]], device: torch.device
) -> None:
    """What is measured is right: `Exporter`'s bytes."""
    place = {
        n: (c, sum(manifest.tensors[m].nbytes for m in chunk[:i]))
        for c, chunk in enumerate(order)
        for i, n in enumerate(chunk)
    }
    filled, chunk_B = -1, torch.empty(0)
    for n, (name, wanted) in enumerate(exporter.merged_tensors()):
        c, at = place[n]
        if c != filled:
            chunk_B, filled = (
                torch.empty(export.chunk_nbytes(c), dtype=torch.uint8, device=device),
                c,
            )
            export.fill(c, chunk_B)
        got = (
            chunk_B[at : at + manifest.tensors[n].nbytes]
            .clone()
            .view(wanted.dtype)
            .view(wanted.shape)
        )
        unequal = int((got != wanted).sum())
        if unequal:
            raise AssertionError(f"{name}: {unequal} elements differ from the export's")


def _timed(way: Callable[[], None], device: str, repeats: int) -> dict[str, Any]:
    """Seconds of each of `repeats` passes after one untimed; on CUDA the allocator's peak in one
    more.
    """
    samples = [seconds(way, device) for _ in range(repeats + 1)][1:]
    return {"seconds": samples} | (
        {"peak_bytes": memory.allocated_beyond(way)} if device == "cuda" else {}
    )


def _main() -> None:
    watchdog = threading.Timer(TIMEOUT_S, os._exit, args=(9,))
    watchdog.daemon = True
    watchdog.start()
    print(json.dumps(_measure(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))), flush=True)
    os._exit(0)  # NCCL and Megatron have nothing to tidy up that this process must wait for


if __name__ == "__main__":
    _main()
