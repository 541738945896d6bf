"""Puts a publication's weights in the place of the base, for a pass over them.

    served = of(model)            planned once for each set of adapters
    with served.all(): ...        forward and backward; merges at the beginning
    with served.one_by_one(): ... forward only, with memory for one module

W' = round(W + delta) has the bits that the next publication sends. In its forward pass the trainer
then computes with what the server has. A and B get the gradients of W + delta: a straight-through
estimator. The base itself stays where it is: `all` swaps pointers, and needs the memory of the
adapted weights once more.

The head and gates of shared experts have a publication's bits in any case (`WeightAdapter`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from orchestrator.errors import ConfigError
from trainer_node.export.merger import Merger
from trainer_node.export.runs import Run, is_readable, runs_in, weights_of
from trainer_node.model.model import Model

_Kind = tuple[type[nn.Module], torch.dtype]


class Slot(NamedTuple):
    """Where a forward pass takes weights from: an attribute, with one tensor of them."""

    owner: Any
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        """What is there now."""
        found: torch.Tensor = getattr(self.owner, self.name)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The adapted weights of one module, and their place in a buffer: slot after slot."""

    module: nn.Module
    """Reads the slots in its forward pass."""
    slots: Sequence[Slot]
    runs: Sequence[Run]
    offsets: Sequence[int]
    """First element of each run in the buffer."""
    turned: Sequence[tuple[Run, int]]
    """Runs that HF has [in, out], with their offsets."""
    numel: int
    """Elements of all slots."""
    is_whole: bool
    """Whether every element is in a run."""
    dtype: torch.dtype
    """Of the slots."""

    @property
    def kind(self) -> _Kind:
        """Parts of one kind never run within each other."""
        return type(self.module), self.dtype

    def views(self, buffer_N: torch.Tensor) -> list[torch.Tensor]:
        """Each slot's part of a buffer."""
        tensors = [slot.tensor for slot in self.slots]
        cut = buffer_N[: self.numel].split([t.numel() for t in tensors])
        return [one.view(t.shape) for one, t in zip(cut, tensors, strict=True)]


def obstacle(model: Model) -> str:
    """Why this rank's weights cannot be merged in place; empty: they can."""
    adapters = model.adapters
    for adapter in adapters.by_module.values():
        for weight in weights_of(adapters, adapter):
            if not is_readable(weight):
                return (
                    f"a weight of {adapter.names[0]} is a {type(weight.data).__name__} of strides "
                    f"{weight.stride()}"
                )
    return ""


class ServedWeights:
    """The merged weights of one rank.

    Raises:
        ConfigError: a weight cannot be merged in place.
    """

    def __init__(self, model: Model) -> None:
        if why := obstacle(model):
            raise ConfigError(f"{why}, which numerics = 'served' cannot merge; use 'adapters'")
        self._model, self._parts = model, list(_parts(model))
        size = [part.dtype.itemsize for part in self._parts]
        self._merger = Merger(
            (
                (
                    part.numel * size[k],
                    [r.member(at * size[k]) for r, at in zip(part.runs, part.offsets, strict=True)],
                )
                for k, part in enumerate(self._parts)
            ),
            scale=model.scale,
            rounding=lambda: model.rounding,
            device=model.device,
        )
        self._buffers: list[torch.Tensor] = []

    @contextlib.contextmanager
    def all(self, *, merges: bool = True) -> Iterator[None]:
        """Within the block the model runs and learns with the merged weights.

        Args:
            merges: False: the adapters are as they were in the last block.
        """
        if not self._buffers:
            self._buffers = [self._buffer(part.numel, part.dtype) for part in self._parts]
            merges = True
        pairs = list(zip(self._parts, self._buffers, strict=True))
        for k, (_, buffer_N) in enumerate(pairs) if merges else ():
            self._merge(k, buffer_N)
        with contextlib.ExitStack() as stack:
            for part, buffer_N in pairs:
                stack.enter_context(_in_place(part, buffer_N))
            stack.enter_context(self._model.adapters.switched("served"))
            yield

    @contextlib.contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Within the block each module merges its weights before its forward pass. Its backward
        pass would find the base."""
        # A layer of experts contains linears of shared experts, so each kind has its buffer.
        sizes: dict[_Kind, int] = {}
        for part in self._parts:
            sizes[part.kind] = max(part.numel, sizes.get(part.kind, 0))
        buffers = {kind: self._buffer(numel, kind[1]) for kind, numel in sizes.items()}
        with contextlib.ExitStack() as stack:
            for k, part in enumerate(self._parts):
                inside = stack.enter_context(contextlib.ExitStack())
                for hook in self._hooks(k, part, buffers[part.kind], inside):
                    stack.callback(hook.remove)
            stack.enter_context(self._model.adapters.switched("served"))
            yield

    @property
    def nbytes(self) -> int:
        """Bytes of the memory of `all`."""
        return sum(buffer_N.nbytes for buffer_N in self._buffers)

    def release(self) -> None:
        """Free the memory of `all`, which makes it again."""
        self._buffers = []

    def _buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self._model.device)

    @torch.no_grad()
    def _merge(self, k: int, buffer_N: torch.Tensor) -> None:
        """Write part `k`. Elements without an adapter are the base's."""
        part = self._parts[k]
        if not part.is_whole:
            for view, slot in zip(part.views(buffer_N), part.slots, strict=True):
                view.copy_(slot.tensor)
        whole_N = buffer_N[: part.numel]
        into_N = whole_N.clone() if part.turned else whole_N
        self._merger.fill(k, into_N.view(torch.uint8))
        if part.turned:
            whole_N.copy_(into_N)
        for run, at in part.turned:
            there = slice(at, at + run.numel)
            whole_N[there].view(run.rows, -1).copy_(into_N[there].view(-1, run.rows).t())

    def _hooks(
        self, k: int, part: Part, buffer_N: torch.Tensor, inside: contextlib.ExitStack
    ) -> Iterator[Any]:
        """`inside` undoes what a forward pass has not undone when it ended."""

        def before(*_: Any) -> None:
            self._merge(k, buffer_N)
            inside.enter_context(_in_place(part, buffer_N))

        yield part.module.register_forward_pre_hook(before)
        yield part.module.register_forward_hook(lambda *_: inside.close(), always_call=True)


@contextlib.contextmanager
def _in_place(part: Part, buffer_N: torch.Tensor) -> Iterator[None]:
    """Let the module see the buffer within the block."""
    bases = [slot.tensor for slot in part.slots]
    try:
        for slot, view in zip(part.slots, part.views(buffer_N), strict=True):
            setattr(slot.owner, slot.name, view)
        yield
    finally:
        for slot, base in zip(part.slots, bases, strict=True):
            setattr(slot.owner, slot.name, base)


def of(model: Model) -> ServedWeights:
    """The merged weights of the model's present adapters."""
    if model.adapters.served is None:
        model.adapters.served = ServedWeights(model)
    found: ServedWeights = model.adapters.served
    return found


def nbytes(model: Model) -> int:
    """Bytes that they hold."""
    served: ServedWeights | None = model.adapters.served
    return 0 if served is None else served.nbytes


def release(model: Model) -> None:
    """Free the memory that they hold."""
    if model.adapters.served is not None:
        model.adapters.served.release()


def _parts(model: Model) -> Iterator[Part]:
    """A part for each module that reads adapted weights."""
    adapters = model.adapters
    stacks = {
        linear: (experts.layer, Slot(experts, name))
        for experts in model.experts
        for linear, name in (
            (experts.layer.experts.linear_fc1, "fc1_E2FH"),
            (experts.layer.experts.linear_fc2, "fc2_EHF"),
        )
    }
    found: dict[nn.Module, tuple[list[Slot], list[Run], list[int]]] = {}
    for linear, adapter in adapters.by_module.items():
        weights = weights_of(adapters, adapter)
        reader, slot = stacks.get(linear, (linear, None))
        slots, runs, offsets = found.setdefault(reader, ([], [], []))
        begin = sum(own.tensor.numel() for own in slots)
        slots += [Slot(weight, "data") for weight in weights] if slot is None else [slot]
        starts = itertools.accumulate((weight.numel() for weight in weights), initial=begin)
        first = {id(weight): start for weight, start in zip(weights, starts, strict=False)}
        own_runs = list(runs_in(adapters, adapter))
        runs += own_runs
        offsets += [first[id(run.weight)] + run.first * run.columns for run in own_runs]
    for reader, (slots, runs, offsets) in found.items():
        numel = sum(slot.tensor.numel() for slot in slots)
        yield Part(
            module=reader,
            slots=slots,
            runs=runs,
            offsets=offsets,
            turned=[p for p in zip(runs, offsets, strict=True) if p[0].delta.transposed],
            numel=numel,
            is_whole=sum(run.numel for run in runs) == numel,
            dtype=slots[0].tensor.dtype,
        )
