"""Checks the model folder, tokenizer, parallel sizes and GPUs before any process starts.

It reads config.json and tokenizer.json, and imports neither torch nor transformers.
"""

from __future__ import annotations

import difflib
import json
import os
import socket
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import (
    ALL_LINEAR,
    LM_HEAD,
    InferenceConfig,
    TrainerConfig,
    without_weights,
)
from orchestrator.protocol.exact import model_obstacle
from orchestrator.protocol.messages import Transport
from orchestrator.protocol.topology import check_topology, experts_of, language_part

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
            f"no model at {model}: it has no config.json; "
            "give the path of a Hugging Face checkpoint folder (`splice init --model` downloads "
            "one from the Hub)"
        )
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return config


def check_model(model: Path, *, needs_weights: bool) -> dict[str, Any]:
    """Check for the model's weights and tokenizer; returns the config of its language part.

    Raises:
        ConfigError: names what is missing or mismatched.
    """
    config = read_model_config(model)
    text = language_part(config)
    if "vocab_size" not in text or "num_attention_heads" not in text:
        raise ConfigError(
            f"{model}/config.json names no vocab_size or num_attention_heads; splice trains "
            "language models"
        )
    if needs_weights and not sorted(model.glob("*.safetensors")):
        raise ConfigError(without_weights(model, random='trainer.init = "random"'))
    _check_tokenizer(model, vocab_size=int(text["vocab_size"]))
    return text


def _check_tokenizer(model: Path, *, vocab_size: int) -> None:
    path = model / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"{model} has no tokenizer.json; copy the model's tokenizer files into the folder"
        )
    try:
        tokenizer = json.loads(path.read_text())
        vocabulary = tokenizer["model"]["vocab"]  # unigram models list theirs
        words = range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values()
        largest = max([*words, *(t["id"] for t in tokenizer.get("added_tokens", []))])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"splice cannot read the tokenizer {path}: {error!r}") from error
    if largest >= vocab_size:
        raise ConfigError(
            f"wrong tokenizer: {path} has token ids up to {largest}, "
            f"but {model}/config.json says vocab_size {vocab_size}"
        )


def check_parallel(
    model_config: dict[str, Any], *, trainer: TrainerConfig, inference: Sequence[InferenceConfig]
) -> None:
    """Check that the parallel sizes divide the model.

    Raises:
        ConfigError: names the size, the model's number and the fix.
    """
    check_topology(trainer, model_config)
    model_config = language_part(model_config)
    is_adapted = not trainer.serves_merged and experts_of(model_config)
    if is_adapted and any(i.device == "cpu" for i in inference):
        raise ConfigError(
            "vLLM serves no mixture of experts with adapters on a CPU; set "
            'publication.rollout_weights = "merged"'
        )
    heads = int(model_config["num_attention_heads"])
    kv_heads = int(model_config.get("num_key_value_heads") or heads)
    for tensor in (i.tensor_parallel for i in inference):
        if heads % tensor:
            raise ConfigError(
                f"inference tensor parallel size {tensor} does not divide "
                f"the model's {heads} attention heads"
            )
        if kv_heads % tensor and tensor % kv_heads:
            raise ConfigError(
                f"inference tensor parallel size {tensor} does not fit "
                f"the model's {kv_heads} key/value heads"
            )


def check_adapter(adapter: Path | None) -> None:
    """Check that initial adapters are in PEFT's files.

    Raises:
        ConfigError: names what is missing.
    """
    if adapter is None:
        return
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (adapter / name).is_file():
            raise ConfigError(
                f"trainer.adapter: {adapter} has no {name}; give the folder of a PEFT adapter, "
                "such as RUN_DIR/versions/N/adapter"
            )


def check_targets(trainer: TrainerConfig) -> None:
    """Check that each target is in the name of a tensor, as far as the folder names them. The
    trainer knows exactly.

    Raises:
        ConfigError: names the target, and the nearest names.
    """
    names = _tensor_names(trainer.model)
    if trainer.finetuning_type != "lora" or not names:
        return
    leaves = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in names})
    for target in set(trainer.lora.targets) - {ALL_LINEAR, LM_HEAD}:
        leaf = target.rpartition(".")[2]
        if not any(leaf in name for name in names):
            near = difflib.get_close_matches(leaf, leaves, n=4, cutoff=0.3) or leaves
            raise ConfigError(
                f"trainer.lora.targets: {target!r} matches nothing in {trainer.model}; the nearest "
                f"names are {', '.join(near)}"
            )


def _tensor_names(model: Path) -> list[str]:
    """Names of an HF checkpoint's tensors, from its index or its file's head. None are known of a
    folder without either."""
    index, single = model / "model.safetensors.index.json", model / "model.safetensors"
    try:
        if index.is_file():
            return list(json.loads(index.read_text())["weight_map"])
        if single.is_file():
            with single.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                return [name for name in json.loads(file.read(size)) if name != "__metadata__"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"the weights in {model} cannot be read: {error}") from error
    return []


def check_quantization(inference: InferenceConfig) -> None:
    """Check that quantised weights and caches come with bfloat16: vLLM takes float32 for none of
    them, and the canary allows only float32's rounding.

    Raises:
        ConfigError: names what is quantised.
    """
    if inference.dtype != "float32":
        return
    options = " ".join(inference.extra_args).replace("=", " ").split()
    asked = [
        f"{option} {value}"
        for option, value in pairwise(options)
        if option in ("--quantization", "-q", "--kv-cache-dtype") and value != "auto"
    ]
    if read_model_config(inference.model).get("quantization_config"):
        asked.append(f"quantization_config in {inference.model / 'config.json'}")
    if asked:
        raise ConfigError(
            f"inference.dtype is float32, but {asked[0]} needs bfloat16; set dtype to "
            '"bfloat16" (in run.toml at the top, for both roles)'
        )


def check_length(inference: InferenceConfig) -> None:
    """Check that sequences fit the model, where its config says so without rope scaling.

    Raises:
        ConfigError: names both lengths.
    """
    model = language_part(read_model_config(inference.model))
    own = model.get("model_max_length") or model.get("max_position_embeddings")
    asked, rope = inference.max_model_len, model.get("rope_scaling") or model.get("rope_parameters")
    is_plain = rope is None or (
        isinstance(rope, dict)
        and rope.get("rope_type", rope.get("type", "default")) == "default"
        and not rope.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    )
    given = " ".join(inference.extra_args).replace("_", "-")
    decides = any(option in given for option in ("--hf", "--max-model-len", "--config"))
    if not is_plain or decides or os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1":
        return
    if isinstance(own, int) and asked != "auto" and asked > own:
        raise ConfigError(
            f"inference.max_model_len is {asked}, but the model's sequences have at most {own} "
            '(max_position_embeddings in its config.json); take at most that, or "auto", or '
            "extend them with YaRN (docs/long-sequences.md)"
        )


def check_cpu_attention(model_config: dict[str, Any]) -> None:
    """Check the head size: vLLM's CPU attention lacks kernels for some and dies at a request.

    Raises:
        ConfigError: names the head size.
    """
    model_config = language_part(model_config)
    if model_config.get("kv_lora_rank"):
        return  # multi-latent attention has its own kernels
    head_dim = model_config.get("head_dim") or int(model_config["hidden_size"]) // int(
        model_config["num_attention_heads"]
    )
    if head_dim not in CPU_HEAD_SIZES:
        raise ConfigError(
            f"vLLM cannot serve head size {head_dim} on the CPU; "
            f"it has kernels for {', '.join(map(str, CPU_HEAD_SIZES))}"
        )


def check_exact(trainer: TrainerConfig, model_config: dict[str, Any]) -> None:
    """Check that `numerics = "exact"` knows every operation of the model.

    Raises:
        ConfigError: names the operation.
    """
    if trainer.numerics != "exact":
        return
    parts = trainer.sampler_parallel
    if found := model_obstacle(language_part(model_config), trainer.device, parts=parts):
        raise ConfigError(
            f"trainer.numerics = 'exact' does not go with {found[0]}, {found[1]}; use 'served' or "
            "'adapters' (docs/exactness.md)"
        )


def check_gpus(
    *,
    trainer_gpus: Sequence[int],
    inference_gpus: Sequence[Sequence[int]],
    available: int,
    transport: Transport,
) -> None:
    """Check that no GPU is used twice, and that each is one of the `available` GPUs. With tcp both
    sides may have the same single GPU (`share_a_gpu`).

    Raises:
        ConfigError: names the GPUs.
    """
    if not available:
        raise ConfigError(
            "device is cuda, but NVML lists no GPU on this host (nvidia-smi asks it too): install "
            'NVIDIA\'s driver, give a container its GPUs, or set device = "cpu"'
        )
    used: dict[int, str] = {}
    is_shared = transport == "tcp" and share_a_gpu(trainer_gpus, inference_gpus)
    groups = [
        ("trainer", trainer_gpus),
        *((f"inference-{i}", g) for i, g in enumerate(inference_gpus)),
    ]
    for owner, gpus in groups:
        for gpu in gpus:
            if gpu in used and not is_shared:
                raise ConfigError(
                    f"GPU {gpu} is assigned to {used[gpu]} and to {owner}; "
                    'each of them needs its own GPUs. (With transport = "tcp" one trainer rank and '
                    "one vLLM worker may share a GPU, to try splice.)"
                )
            if not 0 <= gpu < available:
                raise ConfigError(f"GPU {gpu} ({owner}) does not exist; this host has {available}")
            used[gpu] = owner


def share_a_gpu(trainer_gpus: Sequence[int], inference_gpus: Sequence[Sequence[int]]) -> bool:
    """Whether one trainer rank and one vLLM worker are on the same GPU, to try splice there.

    NCCL refuses two ranks on one GPU, so the transport is then tcp.
    """
    return len(trainer_gpus) == 1 and [list(g) for g in inference_gpus] == [list(trainer_gpus)]


def check_port_free(host: str, port: int) -> None:
    """Check that the port is free (0 always is).

    Raises:
        ConfigError: the port is in use.
    """
    if port == 0:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} on {host} is in use ({error.strerror}); "
                "choose another port, or 0 for any free one"
            ) from error
