"""What the benchmarks that start a cluster share: models, configurations, who holds
which memory.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np

from benchmarks import memory
from benchmarks.harness import inference_python
from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import PauseMode, PublicationMode, batch_specs
from splice.client.batches import Batch
from splice.client.run_file import RunFile
from splice.cluster import Cluster
from splice.cluster.preflight import share_a_gpu

SHAPES = {
    "30b-a3b": ("qwen3_moe", "qwen3-30b-a3b"),
    "8b": ("qwen3", "qwen3-8b"),
    "14b": ("qwen3", "qwen3-14b"),
    "llama-8b": ("llama", "llama-3.1-8b"),
    "gpt-oss-20b": ("gpt_oss", "gpt-oss-20b"),
    "glm-4.7-flash": ("glm4_moe_lite", "glm-4.7-flash"),
    "qwen3.5-35b-a3b": ("qwen3_5_moe", "qwen3.5-35b-a3b"),
    "tiny": ("qwen3_moe", "tiny"),
    "tiny-dense": ("qwen3", "tiny"),
}
BLOCKS = "blocks"
"""Of SPLICE_BENCH_QUANTIZATION: our servers have a checkpoint in block-scaled FP8."""
TARGETS = {"lora-all": ("all-linear",), "lora-attn": ("q_proj", "k_proj", "v_proj", "o_proj")}
NAME, RANK = "bench", 16


def make_model(shape: str, out: Path, *, fp8: bool = False) -> Path:
    """Make a checkpoint folder: tiny shapes have weights, others a config and a tokenizer.

    With `fp8` its projections are block-scaled FP8, of a Qwen3 only.
    """
    arch, size = SHAPES[shape]
    argv = [
        sys.executable,
        "-m",
        "trainer_node.tools.make_checkpoint",
        "--shape",
        size,
        "--out",
        str(out),
    ]
    argv += ["--arch", arch] if size == "tiny" else ["--config-only"]
    argv += ["--fp8-blocks"] if fp8 else []
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, timeout=120)
    return out


def model_in(folder: Path, shape: str) -> Path:
    """The shape's checkpoint folder in `folder`, made if it is not there."""
    model = folder / "model"
    return model if model.exists() else make_model(shape, model)


@dataclass(frozen=True, slots=True)
class Topology:
    """Ranks of the trainer and workers of the replicas, by a name such as ep2-tp2 or 1-rep3.

    Before the dash 1, tpN, epN, cpN or dpN; after it 1, tpN or repN. `1to1` is 1-1.
    """

    name: str = "1to1"

    @property
    def parallel(self) -> dict[str, int]:
        """The trainer's `parallel`.

        Raises:
            ConfigError: the name is not a topology's.
        """
        size, count = self._sides()[0]
        keys = {"tp": "tensor", "ep": "expert", "cp": "context", "dp": "world_size", "": "tensor"}
        if size not in keys:
            raise ConfigError(f"a trainer's topology is 1, tpN, epN, cpN or dpN, not {self.name}")
        return {keys[size]: count}

    @property
    def ranks(self) -> int:
        """The trainer's."""
        return self._sides()[0][1]

    @property
    def served(self) -> tuple[int, int]:
        """Replicas, and tensor parallel workers of each."""
        size, count = self._sides()[1]
        if size not in ("", "tp", "rep"):
            raise ConfigError(f"replicas are 1, tpN or repN, not {self.name}")
        return (count, 1) if size == "rep" else (1, count)

    def _sides(self) -> list[tuple[str, int]]:
        sides = "1-1" if self.name == "1to1" else self.name
        found = re.fullmatch(r"([a-z]*)(\d+)-([a-z]*)(\d+)", sides)
        if found is None:
            raise ConfigError(f"{self.name!r} is no topology; one is ep2-tp2")
        trainer, ranks, inference, workers = found.groups()
        return [(trainer, int(ranks)), (inference, int(workers))]


def gpus_of(topology: Topology) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The trainer's and the inference GPUs: of one rank and one worker those of `gpus`."""
    if topology.name == "1to1":
        trainer, inference = gpus()
        return (trainer,), (inference,)
    replicas, workers = topology.served
    everything = range(topology.ranks + replicas * workers)
    return tuple(everything[: topology.ranks]), tuple(everything[topology.ranks :])


def gpus() -> tuple[int, int]:
    """Trainer's and inference's GPU from SPLICE_BENCH_GPUS (0,1); 0,0: both share one, over tcp."""
    trainer, inference = os.environ.get("SPLICE_BENCH_GPUS", "0,1").split(",")
    return int(trainer), int(inference)


def rounding() -> Literal["stochastic", "nearest"]:
    """The trainer's rounding, from SPLICE_BENCH_ROUNDING; else its default.

    Raises:
        ConfigError: there is no such rounding.
    """
    given = os.environ.get("SPLICE_BENCH_ROUNDING", "stochastic")
    if given not in ("stochastic", "nearest"):
        raise ConfigError(f"SPLICE_BENCH_ROUNDING is stochastic or nearest, not {given!r}")
    return given  # type: ignore[return-value]


def quantization() -> str:
    """vLLM's `--quantization` of our servers, or BLOCKS, from SPLICE_BENCH_QUANTIZATION; empty:
    bf16.
    """
    return os.environ.get("SPLICE_BENCH_QUANTIZATION", "")


def is_eager(device: str) -> bool:
    """Whether vLLM runs without compiling and CUDA graphs: on a CPU, and with SPLICE_BENCH_EAGER=1;
    its own default is with both.
    """
    return device == "cpu" or os.environ.get("SPLICE_BENCH_EAGER", "0") == "1"


def kv_cache_bytes() -> int | None:
    """Size of each server's KV cache on a GPU, from SPLICE_BENCH_KV_GB. None: vLLM takes what is
    free, so only one server is on the GPU.
    """
    given = os.environ.get("SPLICE_BENCH_KV_GB")
    return int(float(given) * 2**30) if given else None


def random_batch(sequences: int, length: int, *, logprob: float = -1.0, seed: int = 1) -> Batch:
    """Random tokens, [sequences, length], with loss on all but the first of each."""
    tokens_SL = np.random.default_rng(seed).integers(10, 200, (sequences, length))
    mask_SL = np.ones((sequences, length), "<f4")
    mask_SL[:, 0] = 0
    rows = [tokens_SL.astype("<i4"), np.full(sequences, length, "<i4")]
    rows += [mask_SL, mask_SL, logprob * mask_SL]
    return Batch(
        specs=batch_specs(num_sequences=sequences, num_tokens=tokens_SL.size),
        buffers=tuple(row.tobytes() for row in rows),
    )


def cluster_config(
    shape: str,
    folder: Path,
    *,
    device: str,
    run: str = "run",
    lora: str = "lora-all",
    pause_mode: PauseMode = "keep",
    mode: PublicationMode = "in_place",
    max_model_len: int | None = None,
    max_num_seqs: int = 64,
    micro_batch_tokens: int | Literal["auto"] = 4096,
    vllm: Sequence[str] = (),
    keep_versions: int = 0,
    max_restarts: int = 2,
    loss_modules: Sequence[str] = (),
    topology: Topology = Topology(),
    trainer: Mapping[str, object] = MappingProxyType({}),
) -> RunFile:
    """One trainer rank and one vLLM unless the topology says more, LoRA of rank 16; makes the model
    in `folder` if it is not there.

    Args:
        run: name of the run's folder in `folder`; a new one for each cluster.
        lora: key of `TARGETS`.
        vllm: more arguments of its server.
        keep_versions, max_restarts, loss_modules: the orchestrator's, the trainer's.
        trainer: more of its settings.
    """
    model = model_in(folder, shape)
    cuda = device == "cuda"
    served, options = model, ("--quantization", quantization()) if quantization() else ()
    if quantization() == BLOCKS:
        served, options = folder / "model-fp8", ()
        if not served.exists():
            make_model(shape, served, fp8=True)
    kv_cache = kv_cache_bytes() if cuda else None
    options += ("--kv-cache-memory-bytes", str(kv_cache)) if kv_cache else ()
    options += (*shlex.split(os.environ.get("SPLICE_BENCH_VLLM_ARGS", "")), *vllm)
    trainer_gpus, inference_gpus = gpus_of(topology)
    replicas, workers = topology.served
    shared = share_a_gpu(trainer_gpus, [inference_gpus])
    transport = {"transport": "nccl" if cuda and not shared else "tcp"}
    return RunFile(
        name=NAME,
        model=model,
        run_dir=folder / run,
        device="cuda" if cuda else "cpu",
        orchestrator={
            "keep_versions": keep_versions,
            "ready_timeout_s": float(os.environ.get("SPLICE_BENCH_READY_S", "600")),
        },
        publication={
            "pause_mode": pause_mode,
            "mode": mode,
            "rounding": rounding(),
            "chain": os.environ.get("SPLICE_BENCH_CHAIN", "0") == "1",
        },
        trainer={
            "init": "hf" if shape == "tiny" else "random",
            "lora": {"rank": RANK, "alpha": 2 * RANK, "targets": TARGETS[lora]},
            "micro_batch_tokens": micro_batch_tokens,
            "admission": "skip",
            "gpus": trainer_gpus if cuda else (),
            "parallel": topology.parallel,
            "max_restarts": max_restarts,
            "loss_modules": tuple(loss_modules),
            **transport,
            **trainer,
        },
        inference={
            "python": inference_python(),
            "model": served,
            "load_format": "dummy",
            "gpus": inference_gpus if cuda else (),
            "replicas": replicas,
            "tensor_parallel": workers,
            "max_model_len": max_model_len
            or (8192 if cuda and SHAPES[shape][1] != "tiny" else 512),
            "max_num_seqs": max_num_seqs,
            "gpu_memory_utilization": 0.05 if kv_cache else 0.4 if shared else 0.85,
            "enforce_eager": is_eager(device),
            "extra_args": options,
            **transport,
        },
    )


def restart_orchestrator(cluster: Cluster, *, pause_mode: PauseMode, mode: PublicationMode) -> None:
    """Another way of publishing for a running cluster: the orchestrator is killed and comes back
    with it, as after a crash; its nodes live on.
    """
    node = cluster.launcher.nodes["orchestrator"]
    was = node.pid
    for key, value in (("pause_mode", pause_mode), ("mode", mode)):
        node.argv = [*node.argv, "--set", f"publication.{key}={value}"]
    node.kill()
    deadline_s = time.monotonic() + 60
    while node.pid == was or any(
        n.state != "ready" for n in cluster.client.status(timeout_s=60).nodes if n.role != "client"
    ):
        if time.monotonic() > deadline_s:
            raise TimeoutError(
                f"the orchestrator or a node did not come back within 60 s:\n{node.log_tail()}"
            )
        time.sleep(0.2)


def memory_readers(
    cluster: Cluster,
    device: str,
    topology: Topology = Topology(),
) -> dict[str, Callable[[], int]]:
    """Bytes of "trainer" and "inference" now: of their GPUs, or of their processes on a CPU."""
    if device == "cuda":
        trainer, inference = gpus_of(topology)
        return {"trainer": memory.gpus(trainer), "inference": memory.gpus(inference)}
    processes = {
        name: node.process
        for name, node in cluster.launcher.nodes.items()
        if node.process is not None
    }
    return {
        "trainer": memory.process_tree(processes["trainer"].pid),
        "inference": memory.process_tree(processes["inference-0"].pid),
    }


MEMORY_SETTINGS = {
    "cuda": "used memory of the GPU by nvidia-smi, over what it was when the cluster was ready",
    "cpu": "resident bytes of the node's processes, over those when the cluster was ready; "
    "an upper bound that includes first touches",
}
