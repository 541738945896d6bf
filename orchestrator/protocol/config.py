"""Configuration of the two nodes: the launcher writes it to a JSON file, which the node reads.

It is plain data, so bad input is refused before any heavy import.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, field_validator, model_validator

from orchestrator.errors import ConfigError
from orchestrator.processes.interfaces import is_wildcard
from orchestrator.protocol import exact
from orchestrator.protocol.messages import Message, Transport

Device = Literal["cpu", "cuda"]
FinetuningType = Literal["lora", "full"]
MemoryMode = Literal["resident", "offload", "exit"]
RoundingMode = Literal["stochastic", "nearest"]
Numerics = Literal["adapters", "served", "exact"]
Tier = Literal["cpu", "cuda", "exact"]
"""Whose modules the trainer's Megatron has: the CPU's stand-ins, TransformerEngine's, or on a GPU
the stand-ins, for `numerics = "exact"`."""
RolloutWeights = Literal["merged", "lora"]
ALL_LINEAR = "all-linear"
"""PEFT's name for every linear but the output layer."""
LM_HEAD = "lm_head"
"""The output layer."""
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM makes room."""
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linears of a decoder layer in many families."""


def without_weights(folder: Path, *, random: str) -> str:
    """What to say of a folder without safetensors.

    Args:
        random: the setting that needs no weights.
    """
    for pattern in ("pytorch_model*.bin", "*.gguf", "*.pt", "*.pth"):
        for found in sorted(folder.glob(pattern)):
            return (
                f"{folder} has its weights in {found.name}, and splice reads *.safetensors; "
                "convert them with transformers: AutoModelForCausalLM.from_pretrained(FOLDER)"
                ".save_pretrained(OTHER), and copy the tokenizer's files"
            )
    return (
        f"{folder} has no *.safetensors; download the model's weights, or set {random} for a "
        "config.json without weights"
    )


def check_alias_name(name: str) -> str:
    """Return the name if it can be an alias, whose versions are served as name@N.

    Raises:
        ValueError: the name cannot be an alias.
    """
    if not name or any(char in "@/" or char.isspace() for char in name):
        raise ValueError(
            f"{name!r} cannot be the served name: "
            "it must not be empty, nor contain '@', '/' or white space"
        )
    return name


def _one_address(host: str) -> str:
    if is_wildcard(host):
        raise ValueError(
            f"{host} means all of this host's addresses; give the one at which the inference "
            "workers reach the trainer"
        )
    return host


HUB_ID = re.compile(
    r"^(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?$"
)
"""A hub's repository, org/name or org/name@revision."""


def check_model_folder(model: Path) -> None:
    """Refuse a model that is neither a checkpoint's folder here nor looks like a hub id.

    Raises:
        ConfigError: names what is missing.
    """
    if (model / "config.json").is_file():
        return
    if model.exists():
        what = "is a file" if model.is_file() else "has no config.json"
        if (model / "adapter_config.json").is_file():
            what = "is an adapter, no model"
        raise ConfigError(f"model {model} {what}; give the folder of a Hugging Face checkpoint")
    if not HUB_ID.match(str(model)):
        raise ConfigError(
            f"model {model} does not exist on this host; give the folder of a Hugging Face "
            "checkpoint, or a hub id such as Qwen/Qwen3-8B"
        )


class Settings(Message):
    """Base of what users write into configuration files. The schema has the fields' docstrings."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class LoraConfig(Settings):
    """LoRA as in PEFT: A and B for each HF linear layer, experts included.

    delta = (alpha / rank) * B @ A
    """

    rank: int = Field(default=8, ge=1)
    """Rows of A and columns of B."""
    alpha: float = Field(default=16.0, gt=0)
    """Scale of an adapter, divided by `rank`."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """HF modules with an adapter, by the ends of their names, as in PEFT.

    all-linear: every linear of the decoder layers, experts included, routers not. `lm_head`, with
    it or others, is the output layer. A tensor that stacks all experts is named with a dot:
    `experts.down_proj`."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of dropping an element of an adapter's input, in training passes only.

    `Forward`, a KL term's reference and exports use no dropout."""

    @field_validator("targets")
    @classmethod
    def _named(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        targets = tuple(t.strip() for t in targets)
        ends = {t.rpartition(".")[2] for t in targets}
        if not targets or "" in ends:
            raise ValueError(
                "lora targets must name linears of the decoder layers, lm_head, or be all-linear; "
                f"got {targets}"
            )
        if "embed_tokens" in ends:
            raise ValueError(f"lora targets {targets}: an embedding can have no adapter")
        more = sorted(set(targets) - {ALL_LINEAR, LM_HEAD})
        if ALL_LINEAR in targets and more:
            raise ValueError(
                f"lora targets: next to all-linear only lm_head can stand, not {', '.join(more)}"
            )
        return targets


class ParallelConfig(Settings):
    """Megatron's parallel sizes. world_size must be a multiple of tensor * pipeline * context.

    Without world_size there are as many ranks as the sizes need.
    """

    tensor: int = Field(default=1, ge=1)
    """Ranks that share each layer's matrices."""
    pipeline: int = Field(default=1, ge=1)
    """Stages of layers, one after the other."""
    expert: int = Field(default=1, ge=1)
    """Ranks over which the experts are spread."""
    sequence: bool = True
    """Sequence parallelism: tensor ranks share the tokens between their linears. No effect
    if tensor is 1."""
    context: int = Field(default=1, ge=1)
    """Ranks that share each sequence. Each has two chunks; attention passes keys and values around.
    """
    expert_tensor: int = Field(default=1, ge=1)
    """Ranks that share each expert, independent of `tensor`: rows of gate and up, columns of down.
    """
    world_size: int = Field(default=1, ge=1)
    """Number of ranks. What the other sizes leave is data parallelism."""

    @property
    def splits_the_model(self) -> bool:
        """Whether no rank holds the whole model."""
        return self.tensor * self.pipeline * self.expert * self.expert_tensor > 1

    @model_validator(mode="before")
    @classmethod
    def _as_many_as_needed(cls, values: Any) -> Any:
        sizes = ("tensor", "context", "expert", "expert_tensor", "pipeline")
        if not isinstance(values, dict) or values.get("world_size") is not None:
            return values
        found = [values.get(size, 1) for size in sizes]
        if not all(isinstance(size, int) and size > 0 for size in found):
            return values
        tensor, context, expert, expert_tensor, pipeline = found
        ranks = pipeline * math.lcm(tensor * context, expert * expert_tensor)
        return {**values, "world_size": ranks}

    @model_validator(mode="after")
    def _divides(self) -> ParallelConfig:
        if self.world_size % (self.tensor * self.pipeline * self.context):
            raise ValueError(
                f"world_size {self.world_size} is not a multiple of tensor {self.tensor} "
                f"* pipeline {self.pipeline} * context {self.context}"
            )
        if (self.world_size // self.pipeline) % (self.expert * self.expert_tensor):
            raise ValueError(
                f"expert {self.expert} * expert_tensor {self.expert_tensor} does not divide "
                f"world_size / pipeline = {self.world_size // self.pipeline}"
            )
        return self


class FollowConfig(Settings):
    """Where the versions of another run come from."""

    store: str
    """A folder or a URL, as `splice mirror` wrote it: s3://bucket/path, https://host/path."""
    key: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """The public key that `splice mirror` printed."""
    name: str = ""
    """The name that the other run serves. Empty: any."""
    poll_s: float = Field(default=10.0, gt=0)
    """Seconds between two looks for a newer version."""


class TrainerConfig(Settings):
    """The trainer node: model, adapters, parallelism."""

    model: Path
    """HF checkpoint folder (config.json, tokenizer, safetensors), or a hub id.

    With init="random", config.json is enough. A hub id, org/name or org/name@revision, is
    downloaded once on each host."""
    model_fetch_timeout_s: float = Field(default=3600.0, gt=0)
    """Timeout for downloading a Hub model, in seconds."""
    init: Literal["hf", "random"] = "hf"
    """hf: the checkpoint's weights. random: only its config.json is read."""
    admission: Literal["check", "skip"] = "check"
    """check: the first start on a model compares a small one of its kind with transformers
    (`splice check`), for half a minute, and keeps the report. skip: start without."""
    device: Device = "cpu"
    """Where the ranks run."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations."""
    finetuning_type: FinetuningType = "lora"
    """lora: train adapters on the frozen model. full: train every parameter; AdamW keeps fp32
    masters of bf16 parameters."""
    lora: LoraConfig = LoraConfig()
    """The adapters, for finetuning_type `lora`."""
    adapter: Path | None = None
    """PEFT folder with initial adapters, on every host. Its r, lora_alpha and target_modules must
    match `lora`. None: PEFT's initial values, where B is zero."""
    parallel: ParallelConfig = ParallelConfig()
    """How the ranks share model and batch."""
    follow: FollowConfig | None = None
    """Train nothing: publish the versions of another run, from a store."""
    transport: Transport = "tcp"
    """How weights travel to the inference nodes; both sides take the same one."""
    host: Annotated[str, AfterValidator(_one_address)] = "127.0.0.1"
    """Address at which inference workers reach the trainer. On Debian a host's own name means
    loopback, so give the address."""
    micro_batch_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Most tokens in one pass of a rank's model.

    Sequences are packed up to this number without attending to each other. A longer sequence has
    its own pass. Context-parallel ranks share the tokens. The number affects memory and speed, not
    results. auto: on a GPU, as many as fit into its memory, measured at the start, at most 65,536,
    and the same on all ranks; on a CPU, 4096."""
    recompute: Literal["auto", "none", "selective", "full", "offload"] = "auto"
    """Activations that the backward pass recomputes.

    auto: in each pass those of as few layers as its tokens need to fit into the GPU's memory,
    measured at the start; offload where even full does not fit. A sequence that fits in no way is
    refused by name. On a CPU, none. selective: those of core attention, which fused kernels do not
    keep anyway. full: all but each layer's input. offload: full, and each layer's input is in
    (pinned) host memory until the backward pass. With a number in micro_batch_tokens, only auto
    measures."""
    shared_prefixes: bool = True
    """Compute a prefix that several sequences of a batch share once, such as the prompt of a group
    of answers. Log-probs and gradients are the same within rounding. Where the model's layers
    cannot, each sequence is computed, and the trainer's log says why."""
    compile: bool = False
    """Compile each decoder layer with torch.compile. The first steps are then slow."""
    loss_modules: tuple[str, ...] = ()
    """Python modules to import at the start, which register the user's losses
    (`splice.losses.register_loss`)."""
    memory: MemoryMode = "resident"
    """What the trainer holds between jobs.

    resident: everything stays on the device.
    offload: weights, adapters, optimizer state and pending gradients move to (pinned) host memory
    until
        the next request needs them.
    exit: the processes end after each job and free all GPU memory. `splice trainer` starts them
    again
        for the next job, from the last durable state. `ForwardBackward` is refused.
    """
    rounding: RoundingMode = "stochastic"
    """How merged weights are rounded to `dtype`. In run.toml `publication.rounding` sets it.

    stochastic: unbiased, so that a version has the whole update, however small. An element goes up
    or down by a threshold that depends on its place and the run's seed only.
    nearest: loses what is below half a unit in the last place of a weight. At learning rates below
    1e-4 that is most of an update."""
    rollout_weights: RolloutWeights = "merged"
    """What the replicas compute with. In run.toml `publication.rollout_weights` sets it.

    merged: the adapters are merged into the weights.
    lora: base and adapters, with vLLM's LoRA kernels. The base travels once, then only adapters.
    Generation is slower. Not for experts, `lm_head`, FP8, finetuning_type `full`, or numerics
    `served`; docs/merging.md compares both."""
    value_head: bool = False
    """Adds a value head, for `loss.value`: one fp32 weight for each hidden feature, initially 0. It
    trains with the model, and checkpoints have it. No publication, adapter or export does."""
    numerics: Numerics = "adapters"
    """What the trainer's forward pass computes with.

    adapters: the base and the adapters' products.
    served: the merged weights, bit for bit those of the next publication. The adapters get the
    gradients of the merge (straight-through). Takes the memory of the adapted weights once more,
    and a merge for each pass. Not with `lora.dropout`, `compile` or finetuning_type `full`.
    exact: as served, and trainer and sampler compute the same bits: the largest log-prob gap of an
    on-policy batch must be 0.0. On a GPU in bfloat16, on a CPU in float32, for some models; slower.
    See docs/exactness.md."""
    sampler_parallel: int = Field(default=1, ge=1)
    """Tensor parallel ranks of the sampler, whose sums numerics `exact` repeats. In run.toml
    `inference.tensor_parallel` sets it."""
    gap_split_steps: Annotated[int, Field(ge=0)] = 10
    """Optimizer steps between two on-policy jobs that tell how much of the log-prob gap comes from
    the merged weights (metrics `gap_weights_mean` and `gap_arithmetic_mean`). Such a job scores one
    pack of its batch
    twice. 0: never."""
    remember_bytes: int = Field(default=0, ge=0)
    """Most bytes of host memory in which each rank keeps what it sent last.

    LoRA training in bf16 needs none to send changed elements (`publication.send`). Full-parameter
    training, FP8 weights, and a model whose pieces rank 0 gathers need as much as a rank sends.
    With less, they send whole tensors."""
    profile_versions: tuple[int, ...] = ()
    """Versions whose training rank 0 records, operator by operator and kernel by kernel, with
    torch.profiler: `profiles/N.json.gz` in the run's folder, for ui.perfetto.dev. Step N makes
    version N. Such a step is slower."""
    seed: int = 1234
    """Seeds new adapters, dropout, and the thresholds of `rounding`. A run keeps its thresholds: a
    checkpoint has their seed."""
    collective_timeout_s: float = Field(default=120.0, gt=0)
    """Timeout of the ranks' collectives, in seconds.

    A publication may take four fifths of it if the model is split over ranks and only Bridge can
    export.
    """

    @model_validator(mode="after")
    def _can_follow(self) -> TrainerConfig:
        alone = {"parallel": self.parallel.world_size == 1, "memory": self.memory != "exit"}
        if self.follow is not None and not all(alone.values()):
            what = " and ".join(name for name, fits in alone.items() if not fits)
            raise ValueError(
                f"trainer.follow does not go with {what}: one process sends what the store has; "
                "leave them out"
            )
        return self

    @model_validator(mode="after")
    def _can_serve(self) -> TrainerConfig:
        if self.numerics == "adapters":
            return self
        what, why = "", ""
        if self.finetuning_type == "full":
            what, why = "finetuning_type = 'full'", "which computes with the served weights anyway"
        elif self.lora.dropout:
            what, why = "lora.dropout", "which no served weights have"
        elif self.compile:
            what, why = "compile", "with which it was not tested"
        elif self.numerics == "exact":
            what, why = exact.trainer_obstacle(self) or ("", "")
        if what:
            raise ValueError(
                f"numerics = {self.numerics!r} does not go with {what}, {why}; drop one"
            )
        return self

    @model_validator(mode="after")
    def _can_serve_adapters(self) -> TrainerConfig:
        if self.serves_merged:
            return self
        refused = {
            "finetuning_type = 'full', which has no adapters": self.finetuning_type == "full",
            f"numerics = {self.numerics!r}, which trains on merged weights": (
                self.numerics != "adapters"
            ),
            "trainer.follow, whose store has merged weights": self.follow is not None,
            "the lora target lm_head": any(t.endswith(LM_HEAD) for t in self.lora.targets),
            f"a lora.rank above {VLLM_RANKS[-1]}": self.lora.rank > VLLM_RANKS[-1],
        }
        for what, is_there in refused.items():
            if is_there:
                raise ValueError(f"rollout_weights = 'lora' does not go with {what}; drop one")
        return self

    @property
    def tier(self) -> Tier:
        """Whose modules its Megatron has."""
        return "exact" if (self.device, self.numerics) == ("cuda", "exact") else self.device

    @property
    def serves_merged(self) -> bool:
        """Whether the replicas get merged weights, not base and adapters."""
        return self.rollout_weights == "merged"

    @property
    def adapter_arguments(self) -> tuple[str, ...]:
        """What vLLM's server needs to serve the adapters."""
        if self.serves_merged:
            return ()
        rank = next(r for r in VLLM_RANKS if r >= self.lora.rank)
        named = () if ALL_LINEAR in self.lora.targets else self.lora.targets
        ends = [t.rpartition(".")[2] for t in named]
        more = ("--lora-target-modules", *ends) if ends else ()
        return ("--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank), *more)


class InferenceConfig(Settings):
    """One inference node: a vLLM server, and the process that keeps it alive."""

    model: Path
    """HF checkpoint folder on the node's host, or a Hub id."""
    name: Annotated[str, AfterValidator(check_alias_name)]
    """The alias; versions are served as name@N."""
    device: Device = "cpu"
    """Where vLLM runs."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """vLLM's type of weights; the trainer's."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: vLLM reads no weights at its start, because the first version brings them all."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs of one vLLM server, which share each layer."""
    gpus: tuple[int, ...] = ()
    """CUDA devices of this node; empty on a CPU."""
    transport: Transport = "tcp"
    """How weights arrive; both sides take the same one."""
    host: str = "127.0.0.1"
    """Address on which the OpenAI API listens. 0.0.0.0: all of this host's addresses."""
    advertised_host: str = ""
    """Host in the URL that others get. Empty: `host`, or for 0.0.0.0 this host's address on the
    route to the orchestrator."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the OpenAI API. With 0 the kernel chooses; vLLM inherits the bound socket."""
    max_body_bytes: int = Field(default=16 * 2**20, ge=2**16)
    """Largest body of a request to the OpenAI API; a larger one gets 413. The default holds a list
    of two million tokens."""
    max_model_len: Annotated[int, Field(ge=16)] | Literal["auto"] = 512
    """Longest sequence in tokens, prompt and answer. auto: the model's own length, or less if the
    KV cache does not hold it."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Most sequences that vLLM generates at once."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    """Share of a GPU's memory that vLLM takes."""
    cpu_kv_cache_gb: float = Field(default=0.5, gt=0)
    """KV cache on a CPU, in GiB."""
    exact: bool = False
    """Whether vLLM computes with the operations of `trainer.numerics = "exact"`, which sets it."""
    enforce_eager: bool = True
    """False: vLLM captures CUDA graphs, which generate faster and start slower."""
    extra_args: tuple[str, ...] = ()
    """Additional arguments for vLLM's server."""
    allow_unverified: bool = False
    """True: serve a quantisation that splice cannot verify. vLLM then quantises the bf16 weights of
    each version itself, and the result names the tensors in `unverified`."""
    startup_timeout_s: float = Field(default=600.0, gt=0)
    """Longest start of vLLM, in seconds."""
    max_restarts: int = Field(default=5, ge=0)
    """Restarts of vLLM within an hour, counted since the last new version; after one more crash the
    node ends."""
    log_file: Path | None = None
    """File for vLLM's output. None: the node's stderr."""

    @model_validator(mode="after")
    def _can_be_exact(self) -> InferenceConfig:
        if self.exact and (found := exact.inference_obstacle(self)):
            what, why = found
            raise ValueError(f"numerics = 'exact' does not go with {what}, {why}; drop one")
        return self
