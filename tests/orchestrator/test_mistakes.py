"""Wrong values of a user's: the field, the nearest name, and where splice has another library's."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from orchestrator.protocol.messages import hints
from orchestrator.protocol.messages.mistakes import _model_in, config_error
from splice import ConfigError, KlSpec, LossSpec, OptimParams, ValueSpec
from splice.client.run_file import RunFile, build
from splice.rl import LoopConfig, SamplingConfig
from splice.train.sections import TrainFile

_CLASSES = (OptimParams, LossSpec, KlSpec, ValueSpec, LoopConfig, SamplingConfig)
CLASSES = {c.__name__: c for c in _CLASSES}


@pytest.mark.parametrize(
    ("model", "values", "text"),
    [
        (OptimParams, {"learning_rate": 1}, "learning_rate: unknown key; splice has it as 'lr'"),
        (OptimParams, {"warmup_steps": 9}, r"optim=lambda step: OptimParams\(lr=...\)"),
        (OptimParams, {"weight_decya": 1}, "did you mean 'weight_decay'"),
        (OptimParams, {"betas": (0.9, 0.95)}, "has it as 'beta1' and beta2"),
        (OptimParams, {"lr": 0}, "^OptimParams: lr: should be greater than 0; got 0$"),
        (LossSpec, {"beta": 0.1}, r"KlSpec\(coefficient=...\), given as LossSpec\(kl=KlSpec"),
        (LossSpec, {"value": {"gae_lambda": 0.9}}, "has it as 'lam'"),
        (LossSpec, {"epsilon": 0.2}, "has it as 'clip_low' and clip_high"),
        (LossSpec, {"name": "Grpo"}, "name: got 'Grpo'; it must match"),
        (LossSpec, {"kl": {"coef": 1}}, "kl.coef: unknown key; did you mean 'coefficient'"),
        (KlSpec, {"kl_coef": 0.1}, "kl_coef: unknown key; splice has it as 'coefficient'"),
        (LoopConfig, {"num_generations": 8}, "has it as 'group_size'"),
        (LoopConfig, {"per_device_train_batch_size": 8}, "has it as 'groups_per_step'"),
        (LoopConfig, {"max_completion_length": 8}, r"SamplingConfig\(max_tokens=...\)"),
    ],
)
def test_a_wrong_value_is_named(model: type[BaseModel], values: dict, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        model(**values)
    assert "pydantic" not in str(caught.value)


@pytest.mark.parametrize(
    ("table", "key", "text"),
    [
        ("", "lr", r"run.toml: lr: .* splice has it as OptimParams\(lr=...\) in your loop"),
        ("", "batch_size", r"LoopConfig\(groups_per_step=...\) in your loop"),
        ("trainer", "lora_rank", "trainer.lora_rank: .* as trainer.lora.rank in run.toml"),
        ("inference", "tp", "trainer.parallel.tensor .* vLLM's as inference.tensor_parallel"),
        ("inference", "max_seq_len", "as inference.max_model_len in run.toml"),
    ],
)
def test_run_toml_too(table: str, key: str, text: str) -> None:
    values = {"name": "n", "model": "m"} | ({table: {key: 1}} if table else {key: 1})
    with pytest.raises(ConfigError, match=text):
        build(values, source=Path("run.toml"))


@pytest.mark.parametrize(
    ("table", "key", "text"),
    [
        ("", "reward", "reward: unknown key; did you mean loop.reward"),
        ("", "seed", "did you mean trainer.seed or sampling.seed"),
        ("", "learning_rate", "has it as optim.lr in run.toml"),
        ("sampling", "top_p", "sampling.top_p: .* has it as sampling.extra.top_p in run.toml"),
        ("sampling", "min_p", "has it as sampling.extra.min_p in run.toml"),
        ("loop", "top_k", "loop.top_k: .* has it as sampling.extra.top_k in run.toml"),
        ("loop", "beta", "has it as loss.kl.coefficient in run.toml"),
        ("optim", "lr_scheduler_type", "has it as optim.schedule in run.toml"),
    ],
)
def test_and_what_it_trains(table: str, key: str, text: str) -> None:
    values: dict = {"name": "n", "model": "m", "data": {"path": "d"}, "loop": {"reward": "r"}}
    (values.setdefault(table, {}) if table else values)[key] = 1
    with pytest.raises(ValidationError) as caught:
        TrainFile.model_validate(values)
    with pytest.raises(ConfigError, match=text):
        raise config_error(caught.value, model=TrainFile, source="run.toml")


def test_every_hint_leads_to_a_field() -> None:
    for place in {*hints.PLACES.values(), *hints._NOTES}:
        first, _, rest = place.partition(".")
        model, keys = (CLASSES[first], rest) if first in CLASSES else (RunFile, place)
        for key in keys.split("."):
            assert model is not None and key in model.model_fields, place
            model = _model_in(model.model_fields[key].annotation)
