"""The model's weights under their HF names, adapters merged in on the way.

    manifest()             names, dtypes, shapes in wire order; from the first export, then cached
    merged_tensors()       these tensors, merged on rank 0; a collective that all ranks finish
    merged_tensors(part)   some of them; gathers only the parameters that they come from

Bridge's export gathers one HF tensor at a time over pipeline, tensor and expert ranks. This module
removes the padding, merges the adapter in, and checks the result against the manifest. The model is
never staged whole. In full-parameter training there is nothing to merge.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.errors import ManifestError, MergePlanError
from orchestrator.protocol.messages import Manifest, TensorSpec
from trainer_node.adapters.merge import merge_tensor, plan_merge
from trainer_node.model.model import Model
from trainer_node.model.whole_adapters import gather_deltas
from trainer_node.ranks import objects


class Exporter:
    """Exports one rank's model."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._manifest: Manifest | None = None
        self._tasks: list[
            int
        ] = []  # for each tensor of the manifest, the conversion task that brings it
        self._task = -1  # the one whose tensors come now
        self._adapter_of: dict[str, str] = {}
        self._ever: set[str] = set()
        """Tensors that had an adapter since the process began: served versions may have them."""
        self.merge_s = 0.0
        """Seconds that the last `merged_tensors` spent merging (on CUDA: queueing the merge)."""

    @torch.no_grad()
    def base_tensors(
        self, tasks: Collection[int] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The model without adapters under HF names, vocabulary padding removed. A collective;
        tensors may be views of the model.

        With finetuning_type "lora" that is the pristine base; with "full" the parameters as they
        are.

        Args:
            tasks: only what these of the model's conversion tasks bring, the same on every rank.
        """
        model = self._model
        for name, tensor in model.exported(self._noted(tasks)):
            is_vocab = name in model.checkpoint.vocab_tensors
            yield name, tensor[: model.vocab_size] if is_vocab else tensor

    def _noted(self, only: Collection[int] | None) -> Iterator[Any]:
        """Yield the conversion tasks to Bridge, one by one. `_task` is the current one."""
        for number, task in enumerate(self._model.conversion_tasks):
            if only is None or number in only:
                self._task = number
                yield task

    def manifest(self) -> Manifest:
        """Return the manifest of what `merged_tensors` yields. The first call is a collective (one
        export, nothing kept but names and shapes).

        `changed` is set with finetuning_type "lora": adapters are all that trains, so what has none
        stays what was loaded.

        Raises:
            MergePlanError: on every rank: an adapter has no target, or two.
        """
        if self._manifest is None:
            specs, self._tasks = [], []
            for name, tensor in self.base_tensors():
                specs.append(_spec(name, tensor))
                self._tasks.append(self._task)
            manifest = Manifest(tensors=tuple(specs))
            targets = self._plan(manifest)
            self._ever |= targets
            changed = tuple(i for i, spec in enumerate(specs) if spec.name in self._ever)
            self._manifest = Manifest(tensors=manifest.tensors, changed=changed or None)
            if self._model.device.type == "cuda":
                torch.cuda.empty_cache()  # what this export took is not needed again
        return self._manifest

    def forget(self) -> None:
        """Plan again, because the model has other adapters. Tensors that had an adapter before stay
        in the changed part, so that a partial update removes the old delta."""
        self._manifest = None

    def _plan(self, manifest: Manifest) -> frozenset[str]:
        """Plan the merge on rank 0; returns the tensors with an adapter.

        A refusal is every rank's, so that none waits in an export that the others do not enter.
        """
        deltas = gather_deltas(self._model)
        refused: str | None = None
        if dist.get_rank() == 0:
            try:
                ops = plan_merge(deltas=deltas, targets={s.name: s for s in manifest.tensors})
                self._adapter_of = {op.target: op.adapter for op in ops}
            except MergePlanError as error:
                refused = str(error)
        refused, targets = objects.broadcast(
            (refused, list(self._adapter_of)), group=self._model.control_group
        )
        if refused is not None:
            raise MergePlanError(refused)
        return frozenset(targets)

    @torch.no_grad()
    def merged_tensors(
        self, part: Sequence[int] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, merged tensor), in the manifest's order; of a part (indices, ascending) if one
        is given.

        A collective: every rank must iterate to the end. Off rank 0 the tensors are the unmerged
        base. With no delta a tensor may be a view of the model: read it, do not write it.

        Raises:
            ManifestError: the export differs from the manifest; names the tensor.
        """
        specs, tasks = self.manifest().tensors, None
        if part is not None:
            specs, tasks = tuple(specs[i] for i in part), {self._tasks[i] for i in part}
        wanted = None if part is None else {s.name for s in specs}
        deltas = gather_deltas(self._model)
        is_root = dist.get_rank() == 0
        self.merge_s, count = 0.0, 0
        for name, tensor in self.base_tensors(tasks):
            if wanted is not None and name not in wanted:
                continue
            if is_root:
                if count >= len(specs) or _spec(name, tensor) != specs[count]:
                    planned = specs[count] if count < len(specs) else "the end"
                    raise ManifestError(
                        f"tensor {count} is {_spec(name, tensor)} but the manifest says "
                        f"{planned}; plan again"
                    )
                if name in self._adapter_of:
                    started = time.monotonic()
                    tensor = merge_tensor(
                        tensor,
                        deltas[self._adapter_of[name]],
                        scale=self._model.scale,
                        rounding=self._model.rounding,
                        name=name,
                    )
                    self.merge_s += time.monotonic() - started
            count += 1
            yield name, tensor
        if is_root and count != len(specs):
            raise ManifestError(
                f"the export ended after {count} of {len(specs)} tensors; missing "
                f"{specs[count].name}"
            )


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape))  # type: ignore[arg-type]
