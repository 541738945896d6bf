"""Says what is wrong with values that a user gave: source, key, allowed values, nearest name.

run.toml: trainer.lora.rnk: unknown key; did you mean `rank`? Known keys: alpha, dropout, ...
run.toml: trainer.dtype: got 'bf16'; allowed: float32, bfloat16; did you mean 'bfloat16'?
OptimParams: learning_rate: unknown key; splice has it as 'lr'.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from orchestrator.errors import ConfigError
from orchestrator.protocol.messages.base import Message
from orchestrator.protocol.messages.hints import hint

T = TypeVar("T", bound=BaseModel)
MOST = 8
"""Most mistakes named at once."""
INPUT_CHARS = 80
"""Longest repetition of a wrong value."""


class UserInput(Message):
    """Base of what users construct: a mistake is a `ConfigError` that names class and field.

    Messages from the wire are validated without it.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    if not TYPE_CHECKING:

        def __init__(self, **values):
            try:
                super().__init__(**values)
            except ValidationError as error:
                name = type(self).__name__
                raise config_error(error, model=type(self), source=name) from None

        __init__.__pydantic_base_init__ = True  # validation of a model around it does not call this


def read_json(path: Path, model: type[T]) -> T:
    """Read a model from a JSON file.

    Raises:
        ConfigError: the file cannot be read, is not JSON, or is not such a model.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise config_error(error, model=model, source=str(path)) from None


def config_error(error: ValidationError, *, model: type[BaseModel], source: str) -> ConfigError:
    """Return what is wrong as a `ConfigError`.

    Args:
        source: the file, or another name by which the user knows the values.
    """
    return ConfigError("; ".join(f"{source}: {text}" for text in mistakes(error, model=model)))


def mistakes(error: ValidationError, *, model: type[BaseModel]) -> list[str]:
    """Return one line for each mistake, as in the module's docstring."""
    details = _without_repeats(error.errors(include_url=False))
    lines = list(dict.fromkeys(_say(detail, model) for detail in details))
    return lines[:MOST] + ([f"and {len(lines) - MOST} more"] if len(lines) > MOST else [])


def _without_repeats(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Leave out what a table merely takes from the top of the file, and the top has wrong."""
    top = {detail["loc"][0]: detail for detail in details if len(detail["loc"]) == 1}

    def is_repeat(detail: ErrorDetails) -> bool:
        first = top.get(detail["loc"][-1]) if len(detail["loc"]) == 2 else None
        if first is None or first["type"] != detail["type"]:
            return False
        return detail["type"] == "missing" or first["input"] == detail["input"]

    return [detail for detail in details if not is_repeat(detail)]


def nearest(word: str, known: Sequence[str]) -> str:
    """Return "; did you mean ...?" with the most similar known word, or nothing."""
    close = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_loss_name(name: str, known: Sequence[str]) -> None:
    """Refuse a loss that is not among those that the trainer knows.

    Raises:
        ConfigError: names it, the nearest one, and all known ones.
    """
    if name not in known:
        raise ConfigError(
            f"loss.name: no loss {name!r}{nearest(name, known) or ';'} there are {sorted(known)} "
            "(losses of your own: trainer.loss_modules)"
        )


def _say(detail: ErrorDetails, model: type[BaseModel]) -> str:
    parts, holder, inner = _where(detail["loc"], model)
    key = ".".join(parts)
    kind, text = detail["type"], detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if kind == "json_invalid":
        return f"not JSON: {text.removeprefix('Invalid JSON: ')}"
    if kind == "extra_forbidden":
        known = sorted(inner.model_fields if inner is not None else holder.model_fields)
        word = str(detail["loc"][-1])
        if len(parts) == 1 and (places := _tables_with(word, model)):
            return f"{key}: unknown key; did you mean {' or '.join(places)}?"
        # LoopConfig and its like have no table for the optimizer.
        in_file = "optim" in model.model_fields
        if elsewhere := hint(word, model=(inner or holder).__name__, in_file=in_file):
            return f"{key}: unknown key{elsewhere}"
        return f"{key}: unknown key{nearest(word, known) or '.'} Known keys: {', '.join(known)}"
    if kind == "missing":
        return f"{key}: missing; this key must be set"
    got = repr(detail["input"])
    got = got if len(got) <= INPUT_CHARS else f"{got[:INPUT_CHARS]}..."
    if kind == "string_pattern_mismatch":
        return f"{key}: got {got}; it must match {detail['ctx']['pattern']}"
    if kind == "literal_error":
        allowed = _choices(holder, [part for part in parts if not part.isdigit()][-1])
        near = nearest(str(detail["input"]), allowed)
        return f"{key}: got {got}; allowed: {', '.join(allowed)}{near}"
    if not key:
        return text
    return f"{key}: {text}; got {got}" if kind != "value_error" else f"{key}: {text}"


def _where(
    loc: tuple[int | str, ...], model: type[BaseModel]
) -> tuple[list[str], type[BaseModel], type[BaseModel] | None]:
    """Return the key's parts, the model that holds the key, and the model that the parent key is.

    Pydantic adds the members of a union to a location; they are not keys and are left out.
    """
    parts: list[str] = []
    holder: type[BaseModel] = model
    inner: type[BaseModel] | None = model
    for part in loc:
        if isinstance(part, int):
            parts.append(str(part))
        elif inner is not None and part in inner.model_fields:
            holder = inner
            inner = _model_in(inner.model_fields[part].annotation)
            parts.append(part)
        elif inner is not None:  # an unknown key
            parts.append(part)
    return parts, holder, inner


def _tables_with(word: str, model: type[BaseModel]) -> list[str]:
    """Return the tables of a file that have this key."""
    tables = {name: _model_in(field.annotation) for name, field in model.model_fields.items()}
    return [f"{name}.{word}" for name, of in tables.items() if of and word in of.model_fields]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model within an annotation such as `tuple[Model, ...] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(argument) for argument in get_args(annotation))
    return next((model for model in found if model is not None), None)


def _choices(model: type[BaseModel], field: str) -> list[str]:
    """Return the strings of the `Literal`s in a field's annotation."""
    info = model.model_fields.get(field)
    return [] if info is None else _literals(info.annotation)


def _literals(annotation: Any) -> list[str]:
    choices: list[str] = []
    for argument in get_args(annotation):
        if isinstance(argument, str):
            choices.append(argument)
        elif not isinstance(argument, type | int | float):
            choices += _literals(argument)
    return choices
