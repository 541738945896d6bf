"""Publications of a whole model, splice against vLLM's unmodified `nccl` engine, both under a running stream.

`pause_to_resume_s` is the largest gap between tokens of the running stream: from the last token before the pause to the first one after the
resume, so re-prefill and verification are inside. Ours exports, merges and verifies; the peer only sends random bytes and checks nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Case
from benchmarks.stream import TokenStream
from orchestrator.cluster import Cluster, ClusterConfig
from orchestrator.protocol.config import InferenceConfig, LoraConfig, TrainerConfig
from orchestrator.protocol.messages import InitialSyncJob, Manifest, ResyncJob, TensorSpec

SHAPES = {"30b-a3b": ("qwen3_moe", "qwen3-30b-a3b"), "8b": ("qwen3", "qwen3-8b"), "tiny": ("qwen3_moe", "tiny")}


def run(*, device: str, small: bool) -> list[Case]:
    """Shapes from SPLICE_BENCH_SHAPES (comma-separated; default 30b-a3b, or tiny with --small); samples from SPLICE_BENCH_SAMPLES;
    trainer and inference GPU from SPLICE_BENCH_GPUS (0,1)."""
    shapes = ["tiny"] if small else os.environ.get("SPLICE_BENCH_SHAPES", "30b-a3b").split(",")
    samples = int(os.environ.get("SPLICE_BENCH_SAMPLES", "2" if small else "7"))
    cases: list[Case] = []
    for shape in shapes:
        cases += _shape(shape, device=device, samples=samples)
    return cases


def _shape(shape: str, *, device: str, samples: int) -> list[Case]:
    folder = Path(tempfile.mkdtemp(prefix="splice-bench-"))
    model = folder / "model"
    arch, size = SHAPES[shape]
    trainer_gpu, inference_gpu = (int(g) for g in os.environ.get("SPLICE_BENCH_GPUS", "0,1").split(","))
    argv = [sys.executable, "-m", "trainer_node.make_checkpoint", "--arch", arch, "--shape", size, "--out", str(model)]
    subprocess.run([*argv, *([] if shape == "tiny" else ["--config-only"])], check=True, stdout=subprocess.DEVNULL)
    ours, phases, manifest = _ours(
        model, folder, device=device, samples=samples, is_random=shape != "tiny", gpus=(trainer_gpu, inference_gpu)
    )
    settings = {
        "bytes_sent": manifest["bytes_sent"], "num_tensors": manifest["num_tensors"], "lora_rank": 16, "verification": "on", "phases": phases,
        "unverified": manifest["unverified"], "layout": manifest["layout"],
    }  # fmt: skip
    peer_samples: tuple[float, ...] = ()
    if device == "cuda":
        peer_samples, settings["peer_phases"] = _stock(
            model, folder, size=size, samples=samples, gpus=(trainer_gpu, inference_gpu)
        )
    name = f"{shape}/lora-all/1to1"
    return [
        Case(name=name, metric="pause_to_resume_s", unit="s", samples=tuple(ours), peer="stock nccl" if peer_samples else None,
             peer_samples=peer_samples, settings=settings),
        Case(name=name, metric="verify_s", unit="s", samples=tuple(p["verify"] for p in phases)),
    ]  # fmt: skip


def _ours(
    model: Path, folder: Path, *, device: str, samples: int, is_random: bool, gpus: tuple[int, int]
) -> tuple[list[float], list[Any], dict[str, Any]]:
    cuda = device == "cuda"
    transport, dtype = ("nccl", "bfloat16") if cuda else ("gloo", "float32")
    trainer = TrainerConfig(
        model=model, init="random" if is_random else "hf", device=device, dtype=dtype, transport=transport, lora=LoraConfig(rank=16, alpha=32)  # type: ignore[arg-type]
    )  # fmt: skip
    inference = InferenceConfig(
        model=model, name="bench", device=device, dtype=dtype, load_format="dummy", gpus=(gpus[1],) if cuda else (), transport=transport,  # type: ignore[arg-type]
        max_model_len=8192 if cuda else 512,
    )  # fmt: skip
    config = ClusterConfig(
        run_dir=folder / "run", name="bench", trainer_python=Path(sys.executable), inference_python=Path(os.environ["SPLICE_INFERENCE_PYTHON"]),
        trainer=trainer, inference=(inference,), trainer_gpus=(gpus[0],) if cuda else (),
    )  # fmt: skip
    gaps, phases, result = [], [], {}
    with Cluster(config) as cluster:
        result = cluster.client.run(InitialSyncJob())
        cluster.client.run(ResyncJob())  # the first one in a layout pays for making its tables
        with TokenStream(base_url=cluster.base_urls[0], model="bench", max_tokens=4000 if cuda else 400) as stream:
            for _ in range(samples):
                time.sleep(0.5)
                began = time.monotonic()
                result = cluster.client.run(ResyncJob())
                ended = time.monotonic()
                stream.wait_for_token_after(ended)
                gaps.append(stream.gap_s(start_s=began, end_s=ended))
                phases.append({k: round(v, 5) for k, v in result["seconds"].items()})
            if stream.errors:
                raise RuntimeError(f"the stream broke: {stream.errors}")
    log = (folder / "run/logs/orchestrator.log").read_text()
    result["layout"] = next((line.split("layout: ")[1] for line in log.splitlines() if "layout: " in line), "")
    return gaps, phases, result


def _stock(
    model: Path, folder: Path, *, size: str, samples: int, gpus: tuple[int, int]
) -> tuple[tuple[float, ...], list[dict[str, float]]]:
    from benchmarks.stock import StockSender, StockServer
    from trainer_node.make_checkpoint import REAL_SHAPES, tensor_shapes

    shapes = tensor_shapes(REAL_SHAPES[size])
    manifest = Manifest(tensors=tuple(TensorSpec(name=n, dtype="bfloat16", shape=s) for n, s in shapes.items()))
    with StockServer(
        python=Path(os.environ["SPLICE_INFERENCE_PYTHON"]), model=model, gpu=gpus[1], log=folder / "stock.log"
    ) as server:
        sender = StockSender(server, manifest, device=f"cuda:{gpus[0]}")
        gaps, phases = [], []
        try:
            sender.publish()
            with TokenStream(base_url=server.base_url, model="stock") as stream:
                for _ in range(samples):
                    time.sleep(0.5)
                    began = time.monotonic()
                    phases.append({k: round(v, 5) for k, v in sender.publish().items()})
                    ended = time.monotonic()
                    stream.wait_for_token_after(ended)
                    gaps.append(stream.gap_s(start_s=began, end_s=ended))
        finally:
            sender.close()
    return tuple(gaps), phases
