"""The tables of run.toml that `splice train` reads in addition to a run's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from orchestrator.protocol.config import Settings
from orchestrator.protocol.messages import LossSpec, OptimParams
from orchestrator.protocol.messages.mistakes import UserInput
from splice.client.advantages import GAE
from splice.client.run_file import RunFile
from splice.rl.config import LoopSettings, SamplingConfig
from splice.train.schedules import ScheduleName, factor

LOSS = "truncated_importance_sampling"
"""Corrects for tokens of an older version, as `loop.max_staleness` = 1 has them."""
SFT_LOSS = "cross_entropy"


class DataSection(UserInput, Settings):
    """Rows, and how they become prompts."""

    path: str
    """A .jsonl, .json, .csv or .parquet file, relative to this file; `"my.py:rows"`, a function
    without arguments that returns rows; or else what `datasets` loads: a dataset's name on the Hub,
    or a folder."""
    subset: str | None = None
    """The dataset's configuration, such as `main` of openai/gsm8k."""
    split: str = "train"
    """The dataset's split. A file has none."""
    prompt: str | None = None
    """The prompt's text, with columns of the row in braces: `"Q: {question}\\nA:"`. None: the row
    has `prompt`, or a chat's `messages`."""
    system: str | None = None
    """System prompt. The prompt then goes to the model's chat template as the user's message."""
    chat: bool = False
    """Whether the prompt goes to the chat template without a system prompt."""
    rows: int | None = Field(default=None, ge=1)
    """Most rows, from the first. None: all."""


class LoopSection(LoopSettings):
    """The loop, and its reward."""

    steps: int | None = Field(default=None, ge=1)
    """Steps of the run, over all starts. None: `passes` over the rows."""
    passes: int = Field(default=1, ge=1)
    """Passes over the rows, where `steps` is not set. `epochs` are those over each batch."""
    overlong_penalty: float = Field(default=0.0, ge=0)
    """Taken from the reward of an answer that `sampling.max_tokens` cuts off. It says that such an
    answer is bad; `overlong = "mask"` says that nothing is known of it."""
    reward: str | dict[str, float]
    """`"my.py:accuracy"`, relative to this file, or `"package.module:function"`; or a table of
    several with their weights. A function takes (row, completion), or what TRL's rewards take."""

    @field_validator("reward", mode="before")
    @classmethod
    def _one_or_weighted(cls, reward: Any) -> Any:
        if isinstance(reward, list):
            named = ", ".join(f'"{name}" = 1.0' for name in reward)
            raise ValueError(f"a list has no weights; write reward = {{ {named} }}")
        return reward

    @model_validator(mode="after")
    def _one_way_for_overlong(self) -> Self:
        if self.overlong == "mask" and self.overlong_penalty:
            raise ValueError(
                'overlong_penalty trains on answers that are cut off, and overlong = "mask" leaves '
                "them out; choose one"
            )
        return self


class OptimSection(OptimParams):
    """AdamW's parameters, and how the learning rate changes over the steps."""

    schedule: ScheduleName = "constant"
    """As transformers' `get_scheduler` has it, over `loop.steps`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the learning rate rises evenly."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of `lr` that linear and cosine fall to."""

    def of_step(self, steps: int) -> Callable[[int], OptimParams]:
        """Return a function from a step's number to its parameters; `steps` is the number of
        steps."""
        own = set(OptimSection.model_fields) - set(OptimParams.model_fields)
        plain = self.model_dump(exclude=own | {"lr", "value_lr"})

        def params(step: int) -> OptimParams:
            share = factor(
                self.schedule,
                min(step, steps),
                steps=steps,
                warmup=self.warmup_steps,
                least=self.min_lr_ratio,
            )
            value_lr = None if self.value_lr is None else self.value_lr * share
            return OptimParams(lr=self.lr * share, value_lr=value_lr, **plain)

        return params


class EvalSection(DataSection):
    """Rows that are not trained on. Left out, `prompt`, `system` and `chat` are those of `data`."""

    every: int = Field(default=10, ge=1)
    """Steps between two evaluations. There is one before the first step and after the last one."""
    n: int = Field(default=1, ge=1)
    """Answers to each row. With several, `eval_best_of_N` has the mean of each row's best."""
    temperature: float = Field(default=0.0, ge=0)
    """0: greedy."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest answer, in tokens. None: `sampling.max_tokens`."""
    pass_at: tuple[int, ...] = ()
    """`[1, 4]`: `eval_pass_at_1` and `eval_pass_at_4`, the chance that at least one of that many
    answers passes, estimated from `n` answers without bias."""
    pass_reward: float = 1.0
    """An answer passes with this reward or a larger one."""
    waits: bool = False
    """Whether the next step waits for an evaluation. false: it trains meanwhile, and answers that
    take longer than the step have tokens of the next version; `eval_later` is their share."""
    keep_best: bool = False
    """Whether the version with the largest `eval_reward` stays on disk, with its trainer's state,
    whatever `orchestrator.keep_versions` says."""

    @model_validator(mode="after")
    def _enough_answers(self) -> Self:
        if wrong := [k for k in self.pass_at if not 1 <= k <= self.n]:
            raise ValueError(
                f"pass_at has {wrong[0]}, and there are {self.n} answers to each row (eval.n); "
                f"take numbers from 1 to {self.n}, or a larger n"
            )
        if self.n > 1 and self.temperature == 0:
            raise ValueError(
                f"all {self.n} answers to a row (eval.n) would be the same: they are greedy. Set "
                "eval.temperature, such as 1.0, or leave n out"
            )
        return self


class TrainFile(RunFile):
    """A run, and what it trains."""

    data: DataSection
    """Rows to train on."""
    loop: LoopSection
    """The loop."""
    sampling: SamplingConfig = SamplingConfig()
    """How answers are sampled."""
    loss: LossSpec = LossSpec(name=LOSS)
    """The loss."""
    optim: OptimSection = OptimSection()
    """AdamW."""
    eval: EvalSection | None = None
    """Evaluation."""

    @model_validator(mode="before")
    @classmethod
    def _same_prompts(cls, values: Any) -> Any:
        tables = values.get("data"), values.get("eval")
        if all(isinstance(table, dict) for table in tables):
            data, own = tables
            same = {key: data[key] for key in ("prompt", "system", "chat") if key in data}
            values = values | {"eval": same | own}
        return values

    @model_validator(mode="after")
    def _values(self) -> Self:
        is_gae = self.loop.advantages == GAE
        if self.loss.value is not None and not is_gae:
            raise ValueError(
                f'loss.value makes the advantages; set loop.advantages = "{GAE}", or leave '
                "[loss.value] out"
            )
        if is_gae and not self.trainer.value_head:
            raise ValueError(
                f'loop.advantages = "{GAE}" needs trainer.value_head; leave that key out'
            )
        return self

    @field_validator("loss", mode="before")
    @classmethod
    def _named(cls, loss: Any) -> Any:
        return (
            {"name": cls.model_fields["loss"].default.name, **loss}
            if isinstance(loss, dict)
            else loss
        )


class SftLoopSection(LoopSection):
    """The loop of `splice sft`: each row has its answer."""

    reward: str | dict[str, float] = ""
    """For `eval`, whose answers are sampled."""
    group_size: Literal[1] = 1
    """A row has one answer."""


class SftFile(TrainFile):
    """A run, and the answers that it trains on."""

    LOOP = "sft"
    loop: SftLoopSection = SftLoopSection()
    """The loop."""
    loss: LossSpec = LossSpec(name=SFT_LOSS)
    """The loss."""

    @field_validator("loss", mode="after")
    @classmethod
    def _of_given_answers(cls, loss: LossSpec) -> LossSpec:
        if loss.name != SFT_LOSS:
            raise ValueError(f"given answers have no log-probs; leave [loss] out, or {SFT_LOSS}")
        return loss

    @model_validator(mode="after")
    def _evaluates_by_reward(self) -> Self:
        if self.eval is not None and not self.loop.reward:
            raise ValueError("eval needs loop.reward: its rows' answers are sampled and scored")
        return self
