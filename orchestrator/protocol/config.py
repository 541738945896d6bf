"""Configuration of the two nodes: written to a JSON file by whoever launches them, read by the node.

Plain data, so that bad input is refused before anything heavy is imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from orchestrator.protocol.messages import Message, Transport

Device = Literal["cpu", "cuda"]
FinetuningType = Literal["lora", "full"]
MemoryMode = Literal["resident", "offload", "exit"]
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def check_alias_name(name: str) -> str:
    """The name, if it can be an alias: versions of it are served as name@N.

    Raises:
        ValueError: it cannot; says why.
    """
    if not name or any(char in "@/" or char.isspace() for char in name):
        raise ValueError(f"{name!r} cannot be the served name: it must not be empty, nor contain '@', '/' or white space")
    return name


class LoraConfig(Message):
    """PEFT's semantics: one A and one B for each HF linear layer, experts included; delta = (alpha / rank) * B @ A."""

    rank: int = Field(default=8, ge=1)
    alpha: float = Field(default=16.0, gt=0)
    targets: tuple[str, ...] = LORA_TARGETS
    """Last component of the HF module names that get an adapter."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability that an element of an adapter's input is dropped, in training passes only: never in `Forward`, nor in a KL term's
    reference, nor in what is exported."""

    @field_validator("targets")
    @classmethod
    def _known(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        unknown = sorted(set(targets) - set(LORA_TARGETS))
        if unknown or not targets:
            raise ValueError(f"lora targets must be some of {LORA_TARGETS}; got {targets}")
        return targets


class ParallelConfig(Message):
    """Megatron's parallel sizes. The world size must be a multiple of tensor * pipeline * context."""

    tensor: int = Field(default=1, ge=1)
    pipeline: int = Field(default=1, ge=1)
    expert: int = Field(default=1, ge=1)
    sequence: bool = True
    """Sequence parallelism: tensor ranks share the tokens between their linears. Has no effect where tensor is 1."""
    context: int = Field(default=1, ge=1)
    """Ranks that share each sequence, for long ones: every rank has two chunks of it, and attention passes keys and values around."""
    expert_tensor: int = Field(default=1, ge=1)
    """Ranks that share each expert, whatever `tensor` is: its rows of gate and up, its columns of down."""
    world_size: int = Field(default=1, ge=1)

    @property
    def splits_the_model(self) -> bool:
        """Whether no rank has all of it."""
        return self.tensor * self.pipeline * self.expert * self.expert_tensor > 1

    @model_validator(mode="after")
    def _divides(self) -> ParallelConfig:
        if self.world_size % (self.tensor * self.pipeline * self.context):
            raise ValueError(
                f"world_size {self.world_size} is not a multiple of tensor {self.tensor} * pipeline {self.pipeline} * context {self.context}"
            )
        if (self.world_size // self.pipeline) % (self.expert * self.expert_tensor):
            raise ValueError(
                f"expert {self.expert} * expert_tensor {self.expert_tensor} does not divide world_size / pipeline = "
                f"{self.world_size // self.pipeline}"
            )
        return self


class TrainerConfig(Message):
    """The trainer node: model, adapters, parallelism."""

    model: Path
    """HF checkpoint folder (config.json, tokenizer, safetensors); with init="random" config.json alone is enough. Or a hub id, org/name or
    org/name@revision, which is fetched once on each host."""
    model_fetch_timeout_s: float = Field(default=3600.0, gt=0)
    """Deadline of that."""
    init: Literal["hf", "random"] = "hf"
    device: Device = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    finetuning_type: FinetuningType = "lora"
    """What trains: adapters on the frozen model, or every parameter of it (`lora` is then not used). Of bf16 parameters AdamW keeps fp32
    masters."""
    lora: LoraConfig = LoraConfig()
    adapter: Path | None = None
    """A PEFT adapter folder to start from, on every host; its r, lora_alpha and target_modules must be those of `lora`. None: PEFT's
    initial values (B is zero)."""
    parallel: ParallelConfig = ParallelConfig()
    transport: Transport = "tcp"
    host: str = "127.0.0.1"
    """Address that inference workers reach the trainer at."""
    micro_batch_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Most tokens that go through a rank's model at once: sequences are packed up to it, without seeing each other; a longer sequence
    goes alone. Context-parallel ranks share them. Memory and speed, not numbers, depend on it. auto: on a GPU as many as its memory takes, measured at the start
    (at most 65,536), the same on all ranks; on a CPU 4096."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations made again in the backward pass instead of kept: none, core attention's, or everything but each layer's input."""
    compile: bool = False
    """torch.compile each decoder layer; the first steps are slow."""
    loss_modules: tuple[str, ...] = ()
    """Python modules imported at the start, which register losses of the user's own (`trainer_node.losses.register_loss`)."""
    memory: MemoryMode = "resident"
    """What the trainer holds between jobs. resident: everything, nothing is rebuilt or moved. offload: weights, adapters, optimizer state and
    pending gradients lie in (pinned) host memory until the next request needs them. exit: its processes end after each job, so that all
    GPU memory is free; `splice trainer` starts them again for the next one, from the last durable state. `ForwardBackward` is refused then."""
    seed: int = 1234
    collective_timeout_s: float = Field(default=120.0, gt=0)
    """How long ranks wait for each other. Where the model is split over ranks and goes out in manifest order, a publication may take four fifths of it."""


class InferenceConfig(Message):
    """One inference node: a vLLM server and its supervisor."""

    model: Path
    name: Annotated[str, AfterValidator(check_alias_name)]
    """The alias; versions are served as name@N."""
    device: Device = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    load_format: Literal["auto", "dummy"] = "auto"
    tensor_parallel: int = Field(default=1, ge=1)
    gpus: tuple[int, ...] = ()
    """CUDA device indices of this node; empty on the CPU."""
    transport: Transport = "tcp"
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the OpenAI API; 0 lets the kernel choose (the socket is bound and handed on, never released)."""
    max_body_bytes: int = Field(default=16 * 2**20, ge=2**16)
    """Largest body of a request to the OpenAI API; a larger one is answered 413. The default takes two million tokens as a list."""
    max_model_len: int = Field(default=512, ge=16)
    max_num_seqs: int = Field(default=64, ge=1)
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    cpu_kv_cache_gb: float = Field(default=0.5, gt=0)
    enforce_eager: bool = True
    extra_args: tuple[str, ...] = ()
    """More arguments for vLLM's server."""
    startup_timeout_s: float = Field(default=600.0, gt=0)
    receive_timeout_s: float = Field(default=300.0, gt=0)
    log_file: Path | None = None
    """Where vLLM's output goes; None: the supervisor's own stderr."""
