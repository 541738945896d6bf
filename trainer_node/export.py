"""The model's weights under their HF names, adapters merged in on the way.

    manifest()        names, dtypes, shapes in wire order; from the first export, then cached
    merged_tensors()  the tensors in that order; a collective: every rank iterates to the end, rank 0's tensors are the real ones

Bridge's export gathers one HF tensor at a time over pipeline, tensor and expert ranks; here its padding goes, its adapter is merged in,
and it is checked against the manifest. The model is never staged whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from orchestrator.errors import ManifestError
from orchestrator.protocol.messages import Manifest, TensorSpec
from trainer_node.hf import VOCAB_TENSORS
from trainer_node.merge import merge_tensor, plan_merge
from trainer_node.runtime import TrainerRuntime


class Exporter:
    """Exports one runtime's model."""

    def __init__(self, runtime: TrainerRuntime) -> None:
        self._runtime = runtime
        self._manifest: Manifest | None = None
        self.seconds: dict[str, float] = {}

    def base_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The pristine base under HF names, vocabulary padding removed. A collective; tensors may be views of the model."""
        runtime = self._runtime
        pairs = runtime.bridge.stream_weights_megatron_to_hf(
            runtime.model,
            runtime.checkpoint,
            cpu=False,
            show_progress=False,
            conversion_tasks=runtime.conversion_tasks,
            merge_adapter_weights=False,
        )
        with torch.no_grad():
            for name, tensor in pairs:
                yield name, tensor[: runtime.vocab_size] if name in VOCAB_TENSORS else tensor

    def manifest(self) -> Manifest:
        """What `merged_tensors` will yield. The first call is a collective (one export, nothing kept but names and shapes)."""
        if self._manifest is None:
            specs = [_spec(name, tensor) for name, tensor in self.base_tensors()]
            self._manifest = Manifest(tensors=tuple(specs))
        return self._manifest

    def merged_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, merged tensor), in the manifest's order.

        A collective: every rank must iterate to the end. Off rank 0 the tensors are the unmerged base.
        With no delta a tensor may be a view of the model: read it, do not write it.

        Raises:
            MergePlanError: an adapter has no target, before the first tensor.
            ManifestError: the export differs from the manifest; names the tensor.
        """
        specs = self.manifest().tensors
        deltas = self._runtime.adapters.gather()
        adapters = {op.target: deltas[op.adapter] for op in plan_merge(deltas=deltas, targets={s.name: s for s in specs})}
        is_root = dist.get_rank() == 0
        count = 0
        for name, tensor in self.base_tensors():
            if is_root:
                if count >= len(specs) or _spec(name, tensor) != specs[count]:
                    planned = specs[count] if count < len(specs) else "the end"
                    raise ManifestError(f"tensor {count} is {_spec(name, tensor)} but the manifest says {planned}; plan again")
                if name in adapters:
                    tensor = merge_tensor(tensor, adapters[name], self._runtime.scale)
            count += 1
            yield name, tensor
        if is_root and count != len(specs):
            raise ManifestError(f"the export ended after {count} of {len(specs)} tensors; missing {specs[count].name}")


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape))  # type: ignore[arg-type]
