"""vLLM's place for an adapter, as parameters of the model: publication.rollout_weights = "lora".

vLLM wraps each layer that an adapter may change, and keeps the adapter's matrices in the wrapper.
The server starts with room for one adapter. Splice holds that room under `names.ADAPTER_ID`, and
every request names it. An adapter's tensors are then tensors of the manifest like any others:
placed, written in place and digested where the kernels read them.

    slots = Slots.of(model)
    with slots.shown(): ...      layers have a checkpoint's names, each matrix is a parameter, and
                                 `model.load_weights` takes the adapter's tensors too
    slots.clear(plan)            whatever the adapter does not have is zero

Outside the block the model is as vLLM made it, and computes with vLLM's wrappers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from inference_node.worker import dialect
from inference_node.worker.placement import OPTIONAL, PlacementPlan

TREE = "splice_adapter"
"""The matrices' module within the model."""
Weights = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of one HF linear's A and B: slice `index` of the `count` of a wrapped layer."""

    wrapper: Any
    matrices: torch.nn.Module
    index: int
    count: int

    def cut(self, tensor: torch.Tensor, *, is_a: bool) -> torch.Tensor:
        """This worker's part of A or B, as vLLM cuts it."""
        if self.wrapper.tp_size == 1:
            return tensor
        cut = self.wrapper.slice_lora_a if is_a else self.wrapper.slice_lora_b
        if self.count == 1:
            return cut(tensor)  # type: ignore[no-any-return]
        of_layer: list[torch.Tensor | None] = [None] * self.count
        of_layer[self.index] = tensor
        return cut(of_layer)[self.index]  # type: ignore[no-any-return]

    def load(self, tensor: torch.Tensor, *, is_a: bool) -> None:
        """Copy A [R, I] or B [O, R]; a smaller R than vLLM's leaves the rest.

        Raises:
            ValueError: R is larger.
        """
        there = self.matrices._parameters[_param(self.index, is_a=is_a)]
        assert there is not None
        rank, most = tensor.shape[0 if is_a else 1], there.shape[0 if is_a else 1]
        if rank > most:
            raise ValueError(
                f"its rank is {rank}, and vLLM has room for {most}; start the inference nodes with "
                f"trainer.lora.rank = {rank}"
            )
        tensor = self.cut(tensor, is_a=is_a)
        there[: tensor.shape[0], : tensor.shape[1]].copy_(tensor)


class Slots:
    """The room for one adapter in a model that vLLM has wrapped."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._manager = model, dialect.lora_manager(model)
        _unwrap_head(model)
        wrappers = set(map(id, self._manager.modules.values()))
        self._wrapped: list[tuple[torch.nn.Module, str, Any]] = [
            (parent, name, child)
            for parent in model.modules()
            for name, child in parent._modules.items()
            if id(child) in wrappers or hasattr(child, "lora_a_stacked")
        ]
        self._places: dict[str, _Place] = {}
        self._tree = torch.nn.Module()
        for path, wrapper in self._manager.modules.items():
            wrapper.reset_lora(0)  # vLLM's warm-up leaves its own values
            self._add(wrapper, self._manager.packed_modules.get(path, [path]))
        dialect.record_as_loaded(self._tree)
        self._depth = 0
        dialect.hold_adapter(self._manager)

    @staticmethod
    def of(model: torch.nn.Module) -> Slots | None:
        """The model's; None without --enable-lora."""
        return None if dialect.lora_manager(model) is None else Slots(model)

    def _add(self, wrapper: Any, linears: list[str]) -> None:
        """A wrapped layer and the HF linears in it, if vLLM keeps A and B of each."""
        stacks = (wrapper.lora_a_stacked, wrapper.lora_b_stacked)
        if any(
            isinstance(s, torch.Tensor) or len(s) != len(linears) or any(t.dim() != 4 for t in s)
            for s in stacks
        ):
            return
        matrices = torch.nn.Module()
        for index, linear in enumerate(linears):
            for is_a, stack in zip((True, False), stacks, strict=True):
                matrix = torch.nn.Parameter(stack[index][0, 0], requires_grad=False)
                setattr(matrix, OPTIONAL, True)
                matrices.register_parameter(_param(index, is_a=is_a), matrix)
            self._places[linear] = _Place(wrapper, matrices, index, len(linears))
        self._tree.add_module(linears[0].replace(".", "/"), matrices)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Within the block, the model has its layers without wrappers, and the matrices."""
        self._depth += 1
        try:
            for parent, name, wrapper in self._wrapped:
                parent._modules[name] = wrapper.base_layer
            self._model._modules[TREE] = self._tree
            vars(self._model)["load_weights"] = self._load_weights
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                del vars(self._model)["load_weights"], self._model._modules[TREE]
                for parent, name, wrapper in self._wrapped:
                    parent._modules[name] = wrapper
                dialect.hold_adapter(self._manager)  # vLLM drops all adapters after an update

    def _load_weights(self, weights: Weights) -> Any:
        load = type(self._model).load_weights  # type: ignore[attr-defined]
        return load(self._model, self._without_adapter(weights))

    def _without_adapter(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if not name.endswith((".lora_A.weight", ".lora_B.weight")):
                yield name, tensor
                continue
            linear, is_a = dialect.lora_name(self._model, name)
            place = self._places.get(linear)
            if place is None:
                raise ValueError(
                    "splice cannot fill vLLM's adapter there; leave it out of trainer.lora.targets,"
                    ' or publish with rollout_weights = "merged"'
                )
            place.load(tensor, is_a=is_a)

    @torch.no_grad()
    def clear(self, plan: PlacementPlan) -> None:
        """Set to zero what no tensor of the plan fills: other linears, and ranks beyond its own."""
        filled: dict[tuple[str, str], list[Any]] = {}
        for region in plan.regions:
            if region.module.startswith(f"{TREE}."):
                filled.setdefault(region.key, []).append(region)
        for path, layer in self._tree.named_modules(prefix=TREE):
            for name, matrix in layer._parameters.items():
                assert matrix is not None
                regions = filled.get((path, name), [])
                if sum(r.numel for r in regions) == matrix.numel():
                    continue
                rest = torch.ones(matrix.shape, dtype=torch.bool, device=matrix.device)
                for region in regions:
                    region.view_in(rest).fill_(False)
                matrix.masked_fill_(rest, 0)


def _unwrap_head(model: torch.nn.Module) -> None:
    """Take the output layer's wrappers off for good.

    The logits' wrapper fails on requests with prompt log-probs: it counts sampled tokens only (seen
    on 0.32). Without it nothing takes off the one that 0.26 puts around a tied `lm_head`. An
    adapter of `lm_head` is refused, so nothing is lost. This can go when vLLM counts all.
    """
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            is_logits = type(child).__name__ == "LogitsProcessorWithLoRA"
            if is_logits or (name == "lm_head" and hasattr(child, "base_layer")):
                parent._modules[name] = child.base_layer  # type: ignore[union-attr, assignment]


def _param(index: int, *, is_a: bool) -> str:
    return f"{'A' if is_a else 'B'}{index}"
