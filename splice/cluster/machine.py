"""`splice init`: looks at this host and the model, and writes a run.toml with sizes that fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.processes.python import python_command, python_environment
from orchestrator.protocol.config import check_alias_name, check_model_folder
from orchestrator.protocol.hub import is_hub_id
from orchestrator.protocol.topology import language_part
from splice.client.run_file import BY_DEVICE, FILE_NAME, R
from splice.cluster.doctor import Gpu
from splice.cluster.preflight import read_model_config

TRAINER_SHARE, SERVER_SHARE = 0.5, 0.6
"""Most of a GPU's memory that weights may take, for the trainer and for vLLM. The rest is for
activations and states, or for the KV cache."""
SHARED_SHARE = 0.2
"""The same for each side where both are on one GPU."""
SHARED = """\
transport = "tcp"                # NCCL refuses two processes on one GPU
gpu_memory_utilization = 0.4     # the trainer has the rest
"""
_INFERENCE = Path(".venv-inference/bin/python")
FETCH = """
import sys
from pathlib import Path
from orchestrator.protocol.hub import fetch
print(fetch(Path(sys.argv[1]), weights=sys.argv[2] == "True"))
"""
TEMPLATE = """\
# A run of splice: `splice up`, `splice status`, `splice logs`, `splice stop` read this file.
# `splice config schema` prints every key. Relative paths are relative to this file.

name = {name}        # the served alias; versions are name@0, name@1, ...
model = {model}
run_dir = "run"      # journal, endpoint, token, logs and versions of the run
device = {device}
dtype = {dtype}

[orchestrator]
endpoint = "tcp://127.0.0.1:0"   # port 0: any; beyond loopback, set curve_dir (`splice keys`)
keep_versions = 2                # checkpoints of versions on disk; 0: all

[publication]
mode = "in_place"    # or "shadow": receive next to the live weights, then swap
pause_mode = "keep"  # what a swap does to running requests: keep, keep_kv, wait, abort

[trainer]
python = {trainer_python}
gpus = {trainer_gpus}
finetuning_type = "lora"         # or "full"
lora = {{ rank = {lora_rank}, alpha = {lora_alpha} }}
parallel = {{ tensor = {trainer_tensor}, world_size = {world_size} }}
{trainer_shared}
[inference]
python = {inference_python}
gpus = {inference_gpus}
tensor_parallel = {inference_tensor}
replicas = {replicas}
port = 0                         # of the OpenAI API; 0: any
max_model_len = {max_model_len}             # "auto": the model's own, or what the KV cache holds
load_format = "dummy"            # the trainer sends every weight with the first version
enforce_eager = {enforce_eager}            # false: CUDA graphs
{inference_shared}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """GPUs and parallel sizes of both sides. Without GPUs both run on the CPU."""

    trainer_gpus: tuple[int, ...] = ()
    inference_gpus: tuple[int, ...] = ()
    trainer_tensor: int = 1
    inference_tensor: int = 1

    @property
    def replicas(self) -> int:
        """Number of inference nodes."""
        return max(1, len(self.inference_gpus) // self.inference_tensor)


def inference_python() -> Path:
    """`make envs`' second interpreter: in this folder, or next to the environment that runs."""
    near = Path(sys.prefix).parent / _INFERENCE
    return near if near.exists() and not _INFERENCE.exists() else _INFERENCE


def choose_sizes(
    model_config: dict[str, Any], *, weight_bytes: int, gpus: Sequence[int], memory_bytes: int
) -> Sizes:
    """Split the GPUs, and take the smallest tensor parallel sizes whose weights fit. One GPU is
    shared by both sides, which is for trying splice with a small model.

    Args:
        weight_bytes: the model in bfloat16.
        memory_bytes: memory of the smallest GPU.

    Raises:
        ConfigError: the weights do not fit.
    """
    if not gpus:
        return Sizes()
    if len(gpus) == 1:
        if weight_bytes > SHARED_SHARE * memory_bytes:
            raise ConfigError(
                f"{weight_bytes / 1e9:.0f} GB of weights do not fit twice on one GPU of "
                f"{memory_bytes / 1e9:.0f} GB with their training; take two GPUs, a smaller "
                "model, or --gpus '' for a run on the CPU"
            )
        return Sizes(trainer_gpus=tuple(gpus), inference_gpus=tuple(gpus))
    half = len(gpus) // 2
    heads = int(model_config["num_attention_heads"])
    kv_heads = int(model_config.get("num_key_value_heads") or heads)
    sizes = {}
    for side, share in (("trainer", TRAINER_SHARE), ("inference", SERVER_SHARE)):
        fits = [
            t
            for t in range(1, half + 1)
            if half % t == 0
            and heads % t == 0
            and (kv_heads % t == 0)
            and weight_bytes / t <= share * memory_bytes
        ]
        if not fits:
            raise ConfigError(
                f"{weight_bytes / 1e9:.0f} GB of weights do not fit {half} GPUs of "
                f"{memory_bytes / 1e9:.0f} GB for the {side}; take more GPUs, or write sizes with "
                "pipeline or expert parallelism by hand"
            )
        sizes[side] = fits[0]
    return Sizes(
        trainer_gpus=tuple(gpus[:half]),
        inference_gpus=tuple(gpus[half : 2 * half]),
        trainer_tensor=sizes["trainer"],
        inference_tensor=sizes["inference"],
    )


def write_run_file(
    folder: Path,
    *,
    model: Path,
    name: str,
    gpus: Sequence[Gpu],
    trainer_python: Path,
    inference_python: Path,
    lora_rank: int = 8,
    max_model_len: int | None = None,
    training: str = "",
) -> tuple[Path, str]:
    """Write the file; returns its path and one sentence on what was chosen.

    Args:
        max_model_len: at most the model's own. None: by the device.
        training: tables of what the run trains.

    Raises:
        ConfigError: the file exists, the model is unusable, or it does not fit the GPUs.
    """
    path = folder / FILE_NAME
    if path.exists():
        raise ConfigError(f"{path} exists; edit it, or choose another folder")
    try:
        check_alias_name(name)  # before a download
    except ValueError as error:
        raise ConfigError(f"--name: {error}") from error
    model = local_model(model, python=trainer_python)
    whole_config = read_model_config(model)
    model_config = language_part(whole_config)
    weight_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    if model_config.get("torch_dtype", model_config.get("dtype")) == "float32":
        weight_bytes //= 2
    sizes = choose_sizes(
        model_config,
        weight_bytes=weight_bytes,
        gpus=[gpu.index for gpu in gpus],
        memory_bytes=min((gpu.memory_mib for gpu in gpus), default=0) * 2**20,
    )
    by_device = BY_DEVICE["cuda" if gpus else "cpu"]
    dtype = by_device[""]["dtype"]
    if whole_config.get("quantization_config"):
        dtype = "bfloat16"  # vLLM computes with quantised weights only in it
    own_len = model_config.get("max_position_embeddings")
    max_model_len = max_model_len or by_device["inference"]["max_model_len"]
    if own_len is not None and max_model_len != "auto":
        max_model_len = min(int(own_len), max_model_len)
    text = TEMPLATE.format(
        name=_toml(name),
        model=_toml(str(model)),
        device=_toml("cuda" if gpus else "cpu"),
        dtype=_toml(dtype),
        trainer_python=_toml(str(trainer_python)),
        trainer_gpus=list(sizes.trainer_gpus),
        trainer_tensor=sizes.trainer_tensor,
        world_size=max(1, len(sizes.trainer_gpus)),
        inference_python=_toml(str(inference_python)),
        inference_gpus=list(sizes.inference_gpus),
        inference_tensor=sizes.inference_tensor,
        replicas=sizes.replicas,
        max_model_len=json.dumps(max_model_len),
        enforce_eager=json.dumps(by_device["inference"]["enforce_eager"]),
        trainer_shared=SHARED.splitlines(keepends=True)[0] if len(gpus) == 1 else "",
        inference_shared=SHARED if len(gpus) == 1 else "",
        lora_rank=lora_rank,
        lora_alpha=2.0 * lora_rank,
    )
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(text + training)
    if not gpus:
        return path, f"{model} on the CPU, in {dtype}: one trainer rank and one vLLM server"
    if len(gpus) == 1:
        return path, (
            f"{model}: trainer and vLLM share GPU {gpus[0].index}, to try splice; NCCL and the "
            "measured speed need a GPU for each side"
        )
    return path, (
        f"{model}: the trainer on GPUs {list(sizes.trainer_gpus)} (tensor parallel "
        f"{sizes.trainer_tensor}), {sizes.replicas} vLLM server(s) on GPUs "
        f"{list(sizes.inference_gpus)} (tensor parallel {sizes.inference_tensor})"
    )


def local_model(model: Path, *, python: str | Path, weights: bool = True) -> Path:
    """Return the model's folder. A Hub id is downloaded with this environment's huggingface_hub.

    Args:
        weights: False: config and tokenizer are enough.

    Raises:
        ConfigError: it is neither, or the download failed.
    """
    check_model_folder(model)
    if (model / "config.json").is_file():
        return model.absolute()
    argv = python_command(python, "-c", FETCH, model, str(weights))
    env = python_environment(os.environ)
    try:
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError(f"cannot run {python} to download {model}: {error.strerror}") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(last.partition(": ")[2] or last)
    return Path(done.stdout.strip().splitlines()[-1])


def with_local_models(run: R, *, weights: bool = True) -> R:
    """Return the run with a folder in place of each Hub id, downloaded with the trainer's
    environment.

    Raises:
        ConfigError: see `local_model`.
    """
    python, found = run.trainer.python, dict[Path, Path]()

    def local(model: Path) -> Path:
        if is_hub_id(model):
            if model not in found:
                found[model] = local_model(model, python=python, weights=weights)
            return found[model]
        return model

    sections = {
        role: section.model_copy(update={"model": local(section.model)})
        for role, section in (("trainer", run.trainer), ("inference", run.inference))
    }
    # The model at the top may be named for neither role.
    return run.model_copy(update={**sections, "model": found.get(run.model, run.model)})


def _toml(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
