"""Finds each HF tensor's elements in Megatron's parameters, by Bridge's own conversion of indices.

    probe(model)    on each rank, without collectives -> what it holds, and what it cannot tell

`layouts` says what one parameter is made into. Bridge's export then runs with small markers in the
tensors' place. Hooks, tied heads and names are therefore handled by Bridge itself. An alias returns
a marker under another name. A tensor that no marker changes comes from the checkpoint.

What only Bridge can convert is named as a task to be streamed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer_node.layout.layouts import ERRORS, Answer, alone, is_grouped, layouts
from trainer_node.layout.strides import Axis, Layout, Piece
from trainer_node.model.model import Model
from weight_transfer.boxes import Box, matrix


@dataclass(slots=True)
class HfTensor:
    """This rank's pieces of an HF tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor, with Megatron's padding."""
    pieces: list[tuple[torch.Tensor, Piece]] = field(default_factory=list)
    """(parameter, where in it)"""

    @staticmethod
    def whole(tensor: torch.Tensor) -> HfTensor:
        """A contiguous tensor that this rank has as it is exported."""
        height, width = matrix(tensor.shape)
        rows = Axis(1, height, 0, width if height > 1 else 0)
        columns = Axis(1, width, 0, 1 if width > 1 else 0)
        return HfTensor(
            tuple(tensor.shape), [(tensor, Piece(0, Box(0, height, 0, width), 0, rows, columns))]
        )


@dataclass(slots=True)
class Probed:
    """What one rank holds."""

    held: dict[str, HfTensor] = field(default_factory=dict)
    streamed: dict[int, str] = field(default_factory=dict)
    """Conversion tasks of this rank with a tensor that is not held -> why not."""
    refused: str | None = None
    """Why Bridge cannot export the model task by task."""


def probe(model: Model) -> Probed:
    """Probe this rank's conversion tasks. Parameters are read where they are, later."""
    probed = Probed()
    answers: dict[int, dict[str, Answer]] = {}
    for number, task in enumerate(model.conversion_tasks):
        if task is None:
            probed.refused = "a parameter of the model has no HF name"
            continue
        if task.param_weight is None:  # another pipeline stage's
            continue
        data = task.param_weight.data
        if type(data) is not torch.Tensor or not data.is_contiguous():
            kind = f"{type(data).__name__} of strides {tuple(data.stride())}"
            probed.streamed[number] = f"{task.global_param_name} is a {kind}"
            continue
        answers[number] = layouts(task, model.bridge, model.checkpoint.state)
        if not answers[number]:
            probed.streamed[number] = f"{task.global_param_name} brings nothing by itself"
    for number, name, origin in _names(model, {n: a for n, a in answers.items() if a}):
        task = model.conversion_tasks[number]
        answer = answers[number][origin] if isinstance(origin, str) else origin
        if isinstance(answer, torch.Tensor):
            probed.held[name] = HfTensor.whole(answer.to(model.device).contiguous())
        elif isinstance(answer, Layout):
            mine = [(task.param_weight, p) for p in answer.of_part(task.mapping.tp_rank)]
            if not is_grouped(task) or name not in probed.held:
                probed.held[name] = HfTensor(answer.shape)
            probed.held[name].pieces += mine
        else:
            why = answer or "the bridge changes it after its mapping"
            probed.streamed[number] = f"{name} of {task.global_param_name}: {why}"
    probed.held = {name: tensor for name, tensor in probed.held.items() if tensor.pieces}
    return probed


# ------------------------------------------------------------ the bridge, on markers


class _Marked:
    """A mapping whose conversion gives markers."""

    def __init__(self, mapping: Any, markers: dict[str, torch.Tensor]) -> None:
        self._mapping, self._markers = mapping, markers

    def megatron_to_hf(self, weights: Any, _module: Any) -> dict[str, torch.Tensor]:
        return {} if weights is None else {n: marker.clone() for n, marker in self._markers.items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mapping, name)


def _names(
    model: Model, answers: Mapping[int, Mapping[str, Answer]]
) -> Iterator[tuple[int, str, str | torch.Tensor | None]]:
    """Yield (task, HF name, origin) of each tensor that Bridge exports.

    The origin is the mapping's name for it, or a tensor out of the checkpoint, or None.
    """
    doubtful: dict[int, dict[str, torch.Tensor | None]] = defaultdict(dict)
    for number, name, tensor in _exported(model, answers, list(answers), seed=1):
        origin = _origin(answers[number], tensor, seed=1)
        if origin is None:
            doubtful[number][name] = tensor
        else:
            yield number, name, origin
    for number, name, tensor in _exported(model, answers, list(doubtful), seed=2):
        before = doubtful[number].pop(name, None)
        if before is not None and tensor is not None:
            yield number, name, tensor if torch.equal(before, tensor) else None
    yield from ((number, name, None) for number, names in doubtful.items() for name in names)


def _origin(answers: Mapping[str, Answer], tensor: torch.Tensor | None, *, seed: int) -> str | None:
    """The mapping's name of the marker that a tensor equals."""
    for place, (name, answer) in enumerate(answers.items()):
        marker = _marker(place, answer, seed=seed)
        if tensor is not None and tensor.dtype == marker.dtype and torch.equal(tensor, marker):
            return name
    return None


def _marker(place: int, answer: Answer, *, seed: int) -> torch.Tensor:
    return _marker_of(place, len(answer.shape) if isinstance(answer, Layout) else 1, seed)


@functools.cache
def _marker_of(place: int, dims: int, seed: int) -> torch.Tensor:
    """A small tensor, all dimensions of another size."""
    shape = (2, 3, 4, 5, 6)[:dims]
    values = torch.arange(math.prod(shape), dtype=torch.float64)
    return values.view(shape) * seed + 1000 * (place + seed)


def _exported(
    model: Model, answers: Mapping[int, Mapping[str, Answer]], todo: Sequence[int], *, seed: int
) -> list[tuple[int, str, torch.Tensor | None]]:
    """(task, HF name, tensor) of Bridge's export of markers; no tensor where it fails."""
    begun: list[int] = []
    got: list[tuple[int, str, torch.Tensor | None]] = []

    def tasks() -> Iterator[Any]:
        for number in todo[len(begun) :]:
            begun.append(number)
            task, named = model.conversion_tasks[number], enumerate(answers[number].items())
            markers = {name: _marker(place, answer, seed=seed) for place, (name, answer) in named}
            yield dataclasses.replace(task, mapping=_Marked(task.mapping, markers))

    with alone(numel=0), _each_expert_alone(model.bridge):
        while len(begun) < len(todo):
            pairs = model.exported(tasks())
            seen = len(begun)
            try:
                got += ((begun[-1], name, tensor) for name, tensor in pairs)
            except ERRORS:
                if len(begun) == seen:  # before the first task: it would fail for ever
                    raise
                got += ((begun[-1], name, None) for name in answers[begun[-1]])
    return got


@contextlib.contextmanager
def _each_expert_alone(bridge: Any) -> Iterator[None]:
    """Within the block Bridge 0.6 does not wait for the other experts' tensors."""
    name = "_accumulate_grouped_export"
    if hasattr(bridge, name):
        setattr(bridge, name, lambda _task, converted, *_: converted)
    try:
        yield
    finally:
        vars(bridge).pop(name, None)
