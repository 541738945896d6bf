"""The adapters' matrices as tensors of the manifest: publication.rollout_weights = "lora".

They have PEFT's names and the model's dtype. B is multiplied by alpha / rank in fp32 and rounded
once, because vLLM's kernels multiply by nothing else. Rank 0 sends them, and holds the buffers.

    manifest(model, base)        what `Exporter.manifest` has, and the matrices, which alone change
    AdapterTensors(model, specs)
        .take()                  before each send, on every rank
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from orchestrator.protocol.messages import Manifest, TensorSpec
from trainer_node.adapters.merge import LoraDelta
from trainer_node.hf.names import strip_wrappers
from trainer_node.model.model import Model
from trainer_node.model.whole_adapters import gather_deltas
from trainer_node.ranks import objects
from weight_transfer.layout import torch_dtype

_NAME = "base_model.model.{}.lora_{}.weight"
_ENDS = (".lora_A.weight", ".lora_B.weight")


def manifest(model: Model, base: Manifest) -> Manifest:
    """The base's tensors, then the matrices. A collective."""
    dtype = model.config.dtype
    shapes = [(name, tuple(t.shape)) for name, (t, _) in _matrices(gather_deltas(model)).items()]
    shapes = objects.broadcast(shapes, group=model.control_group)
    own = tuple(TensorSpec(name=name, dtype=dtype, shape=shape) for name, shape in shapes)
    first = len(base.tensors)
    changed = tuple(range(first, first + len(own)))
    return Manifest(tensors=(*base.tensors, *own), changed=changed or None)


class AdapterTensors:
    """The matrices that some specs of a manifest name. The methods are collectives."""

    def __init__(self, model: Model, specs: Iterable[TensorSpec]) -> None:
        self._model = model
        device = model.device if dist.get_rank() == 0 else "meta"
        self.buffers = {
            spec.name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=device)
            for spec in specs
            if is_matrix(spec.name)
        }
        """What is sent. On rank 0; elsewhere on meta."""

    @torch.no_grad()
    def take(self) -> None:
        """Copy the adapters as they are now."""
        if not self.buffers:
            return
        found = _matrices(gather_deltas(self._model))
        for name, buffer in self.buffers.items() if dist.get_rank() == 0 else ():
            matrix, is_b = found[name]
            buffer.untyped_storage().resize_(buffer.nbytes)
            buffer.copy_(matrix.float() * self._model.scale if is_b else matrix)

    def release(self) -> None:
        """Free the memory. `take` takes it again."""
        for buffer in self.buffers.values():
            buffer.untyped_storage().resize_(0)


def is_matrix(name: str) -> bool:
    """Whether a tensor of a manifest is an adapter's."""
    return name.endswith(_ENDS)


def _matrices(deltas: dict[str, LoraDelta]) -> dict[str, tuple[torch.Tensor, bool]]:
    """Name -> the matrix, and whether it is B."""
    return {
        _NAME.format(strip_wrappers(linear), which): (matrix, which == "B")
        for linear, delta in deltas.items()
        for which, matrix in (("A", delta.lora_A_RI), ("B", delta.lora_B_OR))
    }
