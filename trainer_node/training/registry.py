"""The registry of losses. It loads no torch, so that a module that registers one loads everywhere.

A loss is a function of `log_probs_N` and of the INPUTS in its signature. Other names in the
signature are its parameters:

    @register_loss("soft_clip")
    def soft_clip(log_probs_N, *, advantages_N, sharpness: float = 2.0) -> LossOutput: ...

    LossSpec(name="soft_clip", params={"sharpness": 3.0})
    TrainerConfig(loss_modules=("my_losses",))

`trainer_node/training/losses.py` has the inputs' meaning, and the built-in losses.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.errors import ConfigError
from orchestrator.protocol.messages.mistakes import check_loss_name

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """A loss summed over tokens, and the number of tokens whose ratio was clipped."""

    loss: torch.Tensor
    num_clipped: torch.Tensor


INPUTS = ("sampler_logprobs_N", "advantages_N", "old_logprobs_N", "sequence_N", "num_sequences")
LossFunction = Callable[..., LossOutput]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredLoss:
    """A loss and what its signature declares."""

    name: str
    function: LossFunction
    inputs: tuple[str, ...]
    parameters: Mapping[str, Any]
    """Name -> default; `inspect.Parameter.empty` where the caller must give it."""

    @property
    def takes_sampler(self) -> bool:
        """Whether the batch's sampler_logprobs mean something to it."""
        return "sampler_logprobs_N" in self.inputs


_LOSSES: dict[str, RegisteredLoss] = {}


def register_loss(name: str) -> Callable[[LossFunction], LossFunction]:
    """Decorator: make `function` the loss called `name`. A built-in or registered name is never
    replaced.

    Raises:
        ConfigError: the name is taken, or the signature is not (log_probs_N, *, inputs and
            parameters by keyword).
    """

    def register(function: LossFunction) -> LossFunction:
        known = _LOSSES.get(name)
        if known is not None and (known.function.__module__, known.function.__qualname__) != (
            function.__module__,
            function.__qualname__,
        ):
            raise ConfigError(
                f"the loss name {name!r} is taken by "
                f"{known.function.__module__}.{known.function.__qualname__}"
            )
        first, *rest = inspect.signature(function).parameters.values()
        wrong = [p.name for p in rest if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        if first.name != "log_probs_N" or wrong:
            raise ConfigError(
                f"the loss {name!r} must be called as (log_probs_N, *, keywords); "
                f"{wrong or first.name} is not"
            )
        _LOSSES[name] = RegisteredLoss(
            name=name,
            function=function,
            inputs=tuple(p.name for p in rest if p.name in INPUTS),
            parameters={p.name: p.default for p in rest if p.name not in INPUTS},
        )
        return function

    return register


def import_losses(modules: Sequence[str]) -> None:
    """Import the modules that register losses of the user's own.

    Raises:
        ConfigError: one cannot be imported, or takes the name of another loss; names it.
    """
    importlib.import_module("trainer_node.training.losses")  # first: their names are taken
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(
                f"loss_modules: {module} cannot be imported: {error}; is it on PYTHONPATH of the "
                "trainer?"
            ) from error


def loss_names() -> list[str]:
    """The names of the built-in losses and of the user's."""
    return sorted(_LOSSES)


def registered(name: str) -> RegisteredLoss:
    """Return the loss with this name.

    Raises:
        ConfigError: no such loss. Lists the known ones.
    """
    check_loss_name(name, loss_names())
    return _LOSSES[name]
