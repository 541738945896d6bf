"""Settings of a loop."""

from __future__ import annotations

import json
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import Settings
from orchestrator.protocol.messages import MIN_TEMPERATURE
from orchestrator.protocol.messages.mistakes import UserInput
from splice.client.advantages import AdvantageName
from splice.client.batches import ASK
from splice.rl.bodies import FIELDS, check_fields, json_of

SinkName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
OWN_FIELDS = frozenset({"model", "prompt", "messages", "n", "stream", *ASK})
"""Fields of a request that the loop sets."""
INEXACT: dict[str, tuple[Any, ...]] = {
    "top_p": (1, None),
    "top_k": (0, -1, None),
    "min_p": (0, None),
    "repetition_penalty": (1, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "logit_bias": ({}, None),
    "min_tokens": (0, None),
    "bad_words": ([], None),
    "structured_outputs": (None,),
    "response_format": ({"type": "text"}, None),
    "thinking_token_budget": (None,),
}
"""Fields with which vLLM samples from a different distribution from the trainer's -> the values
with which it does not."""


class SamplingConfig(UserInput, Settings):
    """How answers are sampled."""

    max_tokens: int = Field(default=256, ge=1)
    """Longest answer, in tokens."""
    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE)
    """Temperature of the samples. The batch carries it to the trainer."""
    seed: int | None = None
    """Seeds every request with its own number, so that a strict run can be repeated. vLLM samples
    seeded requests more slowly on a GPU; on a CPU, 0.32 ends when it cuts a seeded prompt in two
    (`--max-num-batched-tokens` in `inference.extra_args`). None: no seeds."""
    extra: dict[str, Any] = Field(default={})
    """More fields of each request, such as `stop` or `allowed_token_ids`. docs/sampling.md says
    which are exact."""

    @field_validator("extra")
    @classmethod
    def _leaves_ours_alone(cls, extra: dict[str, Any]) -> dict[str, Any]:
        fields = OWN_FIELDS | {"max_tokens", "temperature", "seed"}
        if taken := sorted(fields & extra.keys()):
            raise ValueError(f"sampling.extra: {taken} are set by the loop or by fields of its own")
        known = frozenset[str]().union(*FIELDS.values()) - {"max_completion_tokens"}
        try:
            check_fields(extra, known=known)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return dict(json.loads(json_of(extra)))


class LoopSettings(UserInput, Settings):
    """How much a loop samples, how stale a token may be, and what it does on failures."""

    max_staleness: int = Field(default=1, ge=0)
    """Most versions between the one that made a token and the one that trains on it. 0: strictly
    on-policy, the two sides take turns."""
    group_size: int = Field(default=8, ge=1)
    """Answers to each prompt."""
    groups_per_step: int = Field(default=8, ge=1)
    """Prompts in each step's batch."""
    dynamic_sampling: int = Field(default=0, ge=0)
    """Most prompts that are asked in place of one whose answers all have the same reward, because
    such a group teaches nothing: dynamic sampling, arXiv:2503.14476, 3.2. The last one stays,
    whatever its rewards. 0: none is replaced."""
    advantages: AdvantageName = "grpo"
    """How a reward becomes an advantage. grpo: relative to its group's mean, by its std; dr_grpo:
    without the division; rloo: relative to the others of its group; reinforce_pp: relative to the
    batch's mean, by its std; reinforce_pp_baseline: relative to the group's mean, by the batch's
    std; gae: by the trainer's value head (`loss.value`). `splice/client/advantages.py` has
    formulas and papers."""
    steps: int | None = Field(default=None, ge=1)
    """Steps after which the loop ends, counted over all starts. None: it continues."""
    overlong: Literal["train", "mask"] = "train"
    """What an answer does that `sampling.max_tokens` or the context cuts off. train: the same as
    others. mask: its reward counts in its group's mean, and its tokens carry no loss."""
    mixed: Literal["train", "mask"] = "train"
    """What tokens do that were sampled after an update within their sequence. With
    `publication.pause_mode = "keep_kv"` they attend to keys of older weights, so that no version
    gives their log-probs. train: the same as others. mask: they carry no loss, as far as the step
    has other tokens."""
    router_replay: bool = False
    """For MoE models: the trainer uses the experts that vLLM chose for each token. It needs vLLM
    0.28 or newer on a GPU, with `--enable-return-routed-experts` and `--enable-scale-out` in
    `inference.extra_args`."""
    shuffle_seed: int | None = None
    """Shuffles the prompts again for each pass. None: in their order."""
    mini_batch_sequences: int | None = Field(default=None, ge=1)
    """Sequences of one optimizer step. None: the whole batch."""
    epochs: int = Field(default=1, ge=1)
    """Passes over each batch."""
    on_error: Literal["stop", "drop"] = "stop"
    """What an exception of the reward or the environment does, a request that vLLM refuses, or a
    rollout that exceeds its deadline. stop: the loop raises `SampleFailed`. drop: the sample leaves
    its group, and the log says so."""
    max_in_flight: int = Field(default=256, ge=1)
    """Most rollouts at once, over all replicas. One without an environment is one request."""
    reward_threads: int = Field(default=4, ge=1)
    """Threads for rewards that are plain functions."""
    reward_processes: int = Field(default=0, ge=0)
    """Processes for rewards that are plain functions, instead of threads: for those that use
    signals (`math_verify`), hold Python's lock, or may never return. `reward_timeout_s` then ends
    the process. They import the reward. 0: threads."""
    rollout_timeout_s: float = Field(default=900.0, gt=0)
    """Longest time for one answer, with all its attempts, in seconds; for an environment, the time
    of the whole rollout."""
    reward_timeout_s: float = Field(default=300.0, gt=0)
    """Longest time for one reward, in seconds."""
    train_timeout_s: float = Field(default=7200.0, gt=0)
    """Longest training and publication of one step, in seconds."""
    train_attempts: int = Field(default=3, ge=1)
    """Attempts at a step whose trainer was lost before it took the step."""
    on_trainer_killed: Literal["set_aside", "stop"] = "set_aside"
    """What happens to a batch in which the trainer's process has ended twice, or with a sequence
    that does not fit into its memory. set_aside: its step makes no version, its file goes to
    `aside/`, and the log names its prompts. stop: the loop raises `JobFailed`, and samples the same
    prompts again at its next start."""
    most_aside: int = Field(default=8, ge=1)
    """Batches set aside in a row after which the loop ends, with the last one's error. Its next
    start continues with the next prompts."""
    sinks: tuple[SinkName, ...] = ("tensorboard",)
    """Where each step's numbers go; docs/loop.md says what each needs. (): nowhere."""
    keep_samples: int | None = Field(default=200, ge=0)
    """Steps whose samples stay on disk, the newest. None: all. 0: no samples are written."""

    @field_validator("dynamic_sampling", mode="before")
    @classmethod
    def _is_no_switch(cls, given: Any) -> Any:
        if isinstance(given, bool):
            raise ValueError("it is a number of prompts, such as 4; 0 turns it off")
        return given

    @model_validator(mode="after")
    def _compares(self) -> Self:
        if self.dynamic_sampling and self.group_size == 1:
            raise ValueError(
                "dynamic_sampling compares the rewards of a group, and group_size is 1: leave it "
                "out, or take more answers to a prompt"
            )
        return self


class LoopConfig(LoopSettings):
    """A loop: `LoopSettings`, and how it samples."""

    sampling: SamplingConfig = SamplingConfig()
    """How answers are sampled."""
