"""Finds HF tensors' elements in one of Megatron's parameters, by Bridge's mapping of indices.

A mapping's `megatron_to_hf` runs on index tensors, with the other ranks' shards simulated. What it
returns says where each element came from: fused, interleaved, transposed, stacked. It runs again
with coded indices: anything that is not only a rearrangement (a norm with 1 added) then differs. No
mapping class is known here. One run serves all layers and experts with the same names but for their
numbers.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from trainer_node.layout.strides import Layout, NotStridedError, check, derive, widened
from weight_transfer.boxes import matrix

CODE = 0x15555555
"""Indices of the second run are xored with it. Arithmetic does not commute with that."""
LARGE = 1 << 22
"""Elements of a fused parameter, from which on a few columns are tried first."""
FEW = (16, 24)
"""Columns of the two tries, whose answers must agree."""
APART = 251
"""By how much the shards of two ranks differ where all columns are compared."""
ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError,
          ValueError)  # fmt: skip # a list of names
"""What a mapping or a hook may raise on indices."""
COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all",
    "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list",
    "gather", "gather_object", "irecv", "isend", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
)  # fmt: skip # a list of names
CHANGED = "its values are not the parameter's"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|(?<=\.weight)\d+$|(?<=\.bias)\d+$")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.|\.(?:weight|bias)(\d+)$")

Answer = Layout | str
"""A layout, or why there is none."""

_KNOWN: WeakKeyDictionary[Any, dict[Any, tuple[Any, dict[str, Answer]]]] = WeakKeyDictionary()
"""Bridge -> a task's signature -> (its config, which must outlive its id; role -> answer)."""


def layouts(task: Any, bridge: Any, state: Mapping[str, torch.Tensor]) -> dict[str, Answer]:
    """HF name -> layout in the parameter of one task, on all ranks of its tensor-parallel group.

    The names are the mapping's, before hooks. Tasks that differ by numbers in their names share one
    probe.
    """
    known, signature = _KNOWN.setdefault(bridge, {}), _signature(task)
    roles = _roles(task.mapping)
    if signature not in known:
        config = getattr(task.megatron_module, "config", None)
        answers = _probe(task, state)
        if not answers.keys() <= roles.keys():
            return _stacked(task, answers)  # names that it makes itself
        known[signature] = (config, {roles[name]: answer for name, answer in answers.items()})
    by_role = known[signature][1]
    named = {name: by_role[role] for name, role in roles.items() if role in by_role}
    return _stacked(task, named)


def _roles(mapping: Any) -> dict[str, str]:
    names = mapping.hf_param
    return {str(names): ""} if not isinstance(names, dict) else {n: k for k, n in names.items()}


def _signature(task: Any) -> Any:
    mapping, module = task.mapping, task.megatron_module
    settings = {k: v for k, v in vars(mapping).items() if not k.startswith("_")}
    return (
        type(mapping),
        _NUMBER.sub("#", task.global_param_name),
        tuple((role, _NUMBER.sub("#", name)) for name, role in _roles(mapping).items()),
        tuple((k, _plain(v)) for k, v in sorted(settings.items())),
        tuple(task.param_weight.shape),
        (mapping.tp_size, mapping.is_expert),
        (type(module), *(getattr(module, k, None) for k in ("parallel_mode", "partition_dim"))),
        id(getattr(module, "config", None)),
    )


def _plain(value: Any) -> Any:
    """A mapping's setting as part of a key; of an object its class."""
    if isinstance(value, Mapping):
        return tuple(sorted((str(k), _plain(v)) for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if isinstance(value, str):
        return _NUMBER.sub("#", value)
    return value if isinstance(value, (bool, int, float, type(None))) else type(value)


def _stacked(task: Any, answers: dict[str, Answer]) -> dict[str, Answer]:
    """An expert's layouts in the tensors of all experts, where Bridge exports these."""
    if not is_grouped(task):
        return answers
    found = _EXPERT.search(task.global_param_name)
    config = task.mapping._get_config(task.megatron_module)
    if found is None:
        return dict.fromkeys(answers, "its expert's number is not in its name")
    expert = int(found[1] or found[2])
    return {
        name: a.stacked(expert, config.num_moe_experts) if isinstance(a, Layout) else a
        for name, a in answers.items()
    }


def is_grouped(task: Any) -> bool:
    """Whether Bridge (0.6) gathers the experts' tensors into one."""
    return bool(getattr(task.mapping, "is_grouped_export", False))


def _probe(task: Any, state: Mapping[str, torch.Tensor]) -> dict[str, Answer]:
    shape, parts = tuple(task.param_weight.shape), task.mapping.tp_size
    if math.prod(shape) * parts >= LARGE and len(shape) == 2 and not is_grouped(task):
        few, more = ({n: _widened(a, c, shape[1]) for n, a in _probe_shape(
            task, (shape[0], c), state).items()} for c in FEW)  # fmt: skip
        if few == more and _holds(task, shape, few):
            return few
    return _probe_shape(task, shape, state)


def _holds(task: Any, shape: tuple[int, ...], answers: Mapping[str, Answer]) -> bool:
    """Whether the layouts reproduce what the mapping does to random numbers of the whole shape.

    A probe of a few columns cannot show what a mapping does in later ones.
    """
    data = torch.randint(-(1 << 14), 1 << 14, shape, dtype=torch.int16)
    try:
        with alone(numel=APART):
            made = dict(_detached(task.mapping).megatron_to_hf(data, task.megatron_module))
    except ERRORS:
        return False
    return made.keys() == answers.keys() and all(
        isinstance(a, Layout) and _is_made_of(made[name], a, data) for name, a in answers.items()
    )


def _is_made_of(tensor: torch.Tensor, layout: Layout, data: torch.Tensor) -> bool:
    """Whether the tensor's elements are where the layout says, in rank r's shard `data + APART r`,
    and none is left out."""
    if tuple(tensor.shape) != layout.shape:
        return False
    hf = tensor.reshape(matrix(layout.shape))
    boxes = [piece.box for piece in layout.pieces]
    return sum(box.numel for box in boxes) == hf.numel() and all(
        torch.equal(
            hf[b.first_row : b.first_row + b.rows, b.first_column : b.first_column + b.columns],
            piece.view(data).reshape(b.rows, b.columns) + APART * piece.part,
        )
        for b, piece in zip(boxes, layout.pieces, strict=True)
    )


def _widened(answer: Answer, columns: int, to: int) -> Answer:
    wide = widened(answer, columns, to) if isinstance(answer, Layout) else None
    return wide or "its columns are not alike"


def _probe_shape(
    task: Any, shape: tuple[int, ...], state: Mapping[str, torch.Tensor]
) -> dict[str, Answer]:
    numel = math.prod(shape)
    try:
        first = _converted(task, shape, state, code=0)
        answers = {
            name: _derived(index, numel, task.mapping.tp_size) for name, index in first.items()
        }
        del first
        coded = _converted(task, shape, state, code=CODE)
        return {name: _confirmed(answers[name], coded.get(name), numel) for name in answers}
    except ERRORS as error:
        why = f"{type(task.mapping).__name__} fails on indices: {error!r}"
        return dict.fromkeys(_roles(task.mapping), why)


def _derived(index: torch.Tensor, numel: int, parts: int) -> Answer:
    if index.dtype not in (torch.int32, torch.int64):
        return f"its mapping makes {index.dtype} of it"
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < numel * parts:
        return CHANGED
    try:
        return derive(index, numel)
    except NotStridedError as error:
        return str(error)


def _confirmed(answer: Answer, coded: torch.Tensor | None, numel: int) -> Answer:
    """The answer, if the second run agrees."""
    if isinstance(answer, str) or coded is None or coded.dtype not in (torch.int32, torch.int64):
        return answer if isinstance(answer, str) else CHANGED
    try:
        check(answer, coded ^ CODE, numel)
    except NotStridedError as error:
        return str(error)
    return answer


def _converted(
    task: Any, shape: tuple[int, ...], state: Mapping[str, torch.Tensor], *, code: int
) -> dict[str, torch.Tensor]:
    """What the mapping makes of the indices of a parameter, xored with a code."""
    mapping, numel = task.mapping, math.prod(shape)
    dtype = torch.int32 if numel * mapping.tp_size < CODE else torch.int64
    index = torch.arange(numel, dtype=dtype).view(shape) ^ code
    with alone(numel=numel, code=code):
        converted = _detached(mapping).megatron_to_hf(index, task.megatron_module)
    if is_grouped(task) and getattr(mapping, "transpose_on_export", False):
        return {name: _turned(name, tensor, state) for name, tensor in converted.items()}
    return dict(converted)


def _turned(name: str, tensor: torch.Tensor, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Transpose the stack of all experts' tensors as Bridge 0.6's `_accumulate_grouped_export`
    does. A stack that the checkpoint has is transposed only if that gives it the checkpoint's
    shape."""
    turned = tensor.transpose(-1, -2)
    if name in state:
        shape = state[name].shape[1:]
        return turned if tensor.shape != shape and turned.shape == shape else tensor
    return turned


def _detached(mapping: Any) -> Any:
    """A copy that contains copies of the mappings. What they record then does not reach Bridge's
    collectives, which every rank must enter in the same way."""
    from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping

    twin = copy.copy(mapping)
    for name, value in vars(mapping).items():
        if isinstance(value, MegatronParamMapping):
            setattr(twin, name, _detached(value))
        elif isinstance(value, dict):
            setattr(twin, name, dict(value))
    return twin


@contextlib.contextmanager
def alone(*, numel: int, code: int = 0) -> Iterator[None]:
    """Within the block mappings talk to no rank; the others' shards are simulated."""
    from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping

    def gather(mapping: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
        others = (((tensor ^ code) + rank * numel) ^ code for rank in range(mapping.tp_size))
        return [tensor] if mapping.tp_size == 1 else list(others)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("it talks to other ranks by itself")

    def same(_mapping: Any, value: Any, *_: Any, **__: Any) -> Any:
        return value

    def one(_mapping: Any, tensor: torch.Tensor, _module: Any, name: Any) -> Any:
        return {str(name): tensor}

    methods = {
        "gather_from_tp_ranks": gather,
        "broadcast_tensor_to_tp_ranks": same,
        "broadcast_from_pp_rank": same,
        "broadcast_obj_from_pp_rank": same,
        "gather_from_ep_ranks": one,
    }
    with contextlib.ExitStack() as undo:
        for owner, names in (
            (MegatronParamMapping, methods),
            (torch.distributed, dict.fromkeys(COLLECTIVES, refuse)),
        ):
            for name, stand_in in names.items():
                undo.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, stand_in)
        yield
