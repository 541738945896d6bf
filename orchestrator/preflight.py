"""Bad input found before anything starts: model folder, tokenizer, parallel sizes, GPUs. Reads config.json, imports nothing heavy."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import InferenceConfig, TrainerConfig

SUPPORTED_MODEL_TYPES = ("qwen3", "qwen3_moe")
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""vLLM 0.32, `v1/attention/backends/cpu_attn.py`."""


def read_model_config(model: Path) -> dict[str, Any]:
    """config.json of an HF checkpoint folder.

    Raises:
        ConfigError: no such folder, no config.json, or not JSON.
    """
    path = model / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"no model at {model}: there is no config.json in it; give the path of a Hugging Face checkpoint folder"
        )
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return config


def check_model(model: Path, *, needs_weights: bool) -> dict[str, Any]:
    """A supported model with weights and a tokenizer that fits it; returns its config.

    Raises:
        ConfigError: says what is missing or does not fit.
    """
    config = read_model_config(model)
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ConfigError(f"{model} is a {model_type!r} model; splice knows {', '.join(SUPPORTED_MODEL_TYPES)}")
    if needs_weights and not sorted(model.glob("*.safetensors")):
        raise ConfigError(f"{model} holds no *.safetensors; use --random-init for a model that has only a config.json")
    _check_tokenizer(model, vocab_size=int(config["vocab_size"]))
    return config


def _check_tokenizer(model: Path, *, vocab_size: int) -> None:
    path = model / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{model} has no tokenizer.json; copy the model's tokenizer files into the folder")
    try:
        tokenizer = json.loads(path.read_text())
        ids = list(tokenizer["model"]["vocab"].values()) + [t["id"] for t in tokenizer.get("added_tokens", [])]
        largest = max(ids)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a tokenizer that splice can read: {error!r}") from error
    if largest >= vocab_size:
        raise ConfigError(
            f"wrong tokenizer: {path} has token ids up to {largest}, but {model}/config.json says vocab_size {vocab_size}"
        )


def check_parallel(model_config: dict[str, Any], *, trainer: TrainerConfig, inference: Sequence[InferenceConfig]) -> None:
    """Parallel sizes divide the model.

    Raises:
        ConfigError: names the size, the model's number and the fix.
    """
    heads, kv_heads = int(model_config["num_attention_heads"]), int(model_config.get("num_key_value_heads", 1))
    layers = int(model_config["num_hidden_layers"])
    experts = int(model_config.get("num_experts") or model_config.get("num_local_experts") or 0)
    parallel = trainer.parallel
    for what, tensor in [("trainer", parallel.tensor), *(("inference", i.tensor_parallel) for i in inference)]:
        if heads % tensor:
            raise ConfigError(f"{what} tensor parallel size {tensor} does not divide the model's {heads} attention heads")
        if kv_heads % tensor and tensor % kv_heads:
            raise ConfigError(f"{what} tensor parallel size {tensor} does not fit the model's {kv_heads} key/value heads")
    if kv_heads % parallel.tensor:
        raise ConfigError(
            f"trainer tensor parallel size {parallel.tensor} does not divide the model's {kv_heads} key/value heads"
        )
    if layers % parallel.pipeline:
        raise ConfigError(f"pipeline parallel size {parallel.pipeline} does not divide the model's {layers} layers")
    if parallel.expert > 1 and (experts == 0 or experts % parallel.expert):
        raise ConfigError(f"expert parallel size {parallel.expert} does not divide the model's {experts} experts")
    width = int(model_config.get("moe_intermediate_size") or 0) if experts else 0
    if parallel.expert_tensor > 1 and (width == 0 or width % parallel.expert_tensor):
        raise ConfigError(
            f"expert tensor parallel size {parallel.expert_tensor} does not divide the {width} hidden features of the model's {experts} experts"
        )


def check_cpu_attention(model_config: dict[str, Any]) -> None:
    """vLLM's CPU attention has kernels for some head sizes only, and says so with the first request, by dying.

    Raises:
        ConfigError: names the head size.
    """
    head_dim = model_config.get("head_dim") or int(model_config["hidden_size"]) // int(model_config["num_attention_heads"])
    if head_dim not in CPU_HEAD_SIZES:
        raise ConfigError(
            f"vLLM cannot serve head size {head_dim} on the CPU; it has kernels for {', '.join(map(str, CPU_HEAD_SIZES))}"
        )


def check_gpus(*, trainer_gpus: Sequence[int], inference_gpus: Sequence[Sequence[int]], available: int | None) -> None:
    """No GPU has two masters, and every one exists (where `available` is known).

    Raises:
        ConfigError: names the GPUs.
    """
    used: dict[int, str] = {}
    groups = [("trainer", trainer_gpus), *((f"inference-{i}", g) for i, g in enumerate(inference_gpus))]
    for owner, gpus in groups:
        for gpu in gpus:
            if gpu in used:
                raise ConfigError(
                    f"GPU {gpu} is given to {used[gpu]} and to {owner}; trainer and inference need GPUs of their own"
                )
            if available is not None and not 0 <= gpu < available:
                raise ConfigError(f"GPU {gpu} ({owner}) does not exist; this host has {available}")
            used[gpu] = owner


def check_port_free(host: str, port: int) -> None:
    """The port can be bound now (0 always can).

    Raises:
        ConfigError: it is in use.
    """
    if port == 0:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} on {host} is in use ({error.strerror}); choose another one, or 0 for any"
            ) from error
