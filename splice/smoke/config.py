"""Configuration of `splice smoke`, checked before any process starts."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import (
    Device,
    FinetuningType,
    InferenceConfig,
    LoraConfig,
    ParallelConfig,
    TrainerConfig,
)
from orchestrator.publication.config import PublicationConfig
from splice.cluster import ClusterConfig
from splice.preflight import (
    check_cpu_attention,
    check_gpus,
    check_model,
    check_parallel,
    check_port_free,
    check_quantization,
    share_a_gpu,
)

TAU = 1e-4
"""Largest allowed difference, in nats, between a log-prob served in fp32 and the reference's.

It is six standard deviations of fp32 rounding in a decoder with three layers, hidden size 64 and
logits of 10 (`tests/numerics.py`). The tiny models measure 2e-6 to 8e-6. Larger models are served
and judged in bf16.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeConfig:
    """One smoke run."""

    run_dir: Path
    model: Path
    trainer_python: Path
    inference_python: Path
    report: Path | None = None
    name: str = "tiny"
    device: Device = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    steps: int = 2
    random_init: bool = False
    proof: bool = True
    finetuning_type: FinetuningType = "lora"
    lora: LoraConfig = field(default_factory=LoraConfig)
    lr: float = 5e-3
    num_prompts: int = 8
    group_size: int = 8
    max_tokens: int = 3
    trainer_parallel: ParallelConfig = field(default_factory=ParallelConfig)
    inference_tensor_parallel: int = 1
    trainer_gpus: tuple[int, ...] = ()
    inference_gpus: tuple[int, ...] = ()
    port: int = 0
    publication: PublicationConfig = field(default_factory=PublicationConfig)
    """`device` decides its `transport`."""
    gpu_memory_utilization: float = 0.85
    enforce_eager: bool = True
    inference_env: dict[str, str] = field(default_factory=dict)
    trainer_module: str = "trainer_node"

    @property
    def tau(self) -> float:
        """The fp32 proof's tolerance in nats."""
        return TAU


def check(config: SmokeConfig) -> tuple[ClusterConfig, dict[str, Any]]:
    """Check the input; returns the cluster to start and the model's config. Starts nothing.

    Raises:
        ConfigError: names the mistake and its remedy.
    """
    if config.steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {config.steps}")
    if config.group_size < 2:
        raise ConfigError(
            "--group-size must be at least 2 (advantages are relative to the group), "
            f"got {config.group_size}"
        )
    if config.proof and config.random_init:
        raise ConfigError(
            "the reference needs a checkpoint's weights; with --random-init pass --no-proof"
        )
    model_config = check_model(config.model, needs_weights=not config.random_init)
    trainer, inference = node_configs(config)
    check_parallel(model_config, trainer=trainer, inference=[inference])
    check_quantization(inference)
    if config.device == "cpu" and config.dtype != "float32":
        raise ConfigError(
            "on a CPU smoke compares float32 with float32: use --dtype float32. `splice up` takes "
            "bfloat16 there"
        )
    if config.device == "cpu":
        check_cpu_attention(model_config)
    if config.device == "cuda":
        check_gpus(
            trainer_gpus=config.trainer_gpus,
            inference_gpus=[config.inference_gpus],
            available=_count_gpus(),
            transport=trainer.transport,
        )
        if len(config.trainer_gpus) != config.trainer_parallel.world_size:
            raise ConfigError(
                f"{config.trainer_parallel.world_size} trainer ranks need as many GPUs, "
                f"got {config.trainer_gpus}"
            )
        if len(config.inference_gpus) != config.inference_tensor_parallel:
            raise ConfigError(
                f"inference tensor parallel size {config.inference_tensor_parallel} "
                f"needs as many GPUs, got {config.inference_gpus}"
            )
    check_port_free("127.0.0.1", config.port)
    cluster = ClusterConfig(
        run_dir=config.run_dir,
        name=config.name,
        trainer_python=config.trainer_python,
        inference_python=config.inference_python,
        trainer=trainer,
        inference=(inference,),
        trainer_gpus=config.trainer_gpus,
        trainer_module=config.trainer_module,
        inference_env=config.inference_env,
        publication=config.publication,
    )
    return cluster, model_config


def node_configs(config: SmokeConfig) -> tuple[TrainerConfig, InferenceConfig]:
    """Configurations of the trainer and the inference node."""
    shared = share_a_gpu(config.trainer_gpus, [config.inference_gpus])
    transport: Literal["tcp", "nccl"] = "nccl" if config.device == "cuda" and not shared else "tcp"
    trainer = TrainerConfig(
        model=config.model.absolute(),
        init="random" if config.random_init else "hf",
        admission="skip" if config.proof else "check",  # the proof compares more
        device=config.device,
        dtype=config.dtype,
        finetuning_type=config.finetuning_type,
        lora=config.lora,
        parallel=config.trainer_parallel,
        transport=transport,
    )
    inference = InferenceConfig(
        model=config.model.absolute(),
        name=config.name,
        device=config.device,
        dtype=config.dtype,
        # The trainer sends every weight with @0, so vLLM need not read the checkpoint.
        load_format="dummy",
        tensor_parallel=config.inference_tensor_parallel,
        gpus=config.inference_gpus,
        transport=transport,
        port=config.port,
        gpu_memory_utilization=config.gpu_memory_utilization * (0.5 if shared else 1.0),
        enforce_eager=config.enforce_eager,
    )
    return trainer, inference


def _count_gpus() -> int | None:
    if shutil.which("nvidia-smi") is None:
        raise ConfigError(
            "--device cuda, but there is no nvidia-smi on this host; use --device cpu"
        )
    listed = subprocess.run(
        ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False
    )
    return listed.stdout.count("GPU ") if listed.returncode == 0 else None
