"""Takes HF tensors that are not views of parameters from Bridge's export, before each send.

They are few and small: norms that Megatron keeps zero-centred. Rank 0 keeps a buffer for each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from orchestrator.errors import ManifestError
from orchestrator.protocol.messages import TensorSpec
from trainer_node.model.model import Model
from trainer_node.ranks.lockstep import OutOfStep


class Streamed:
    """Converts these tensors. Every method is a collective.

    Args:
        tasks: numbers of the conversion tasks that bring them, the same on every rank.
        specs: what the manifest says of them.
    """

    def __init__(self, model: Model, tasks: Sequence[int], specs: Sequence[TensorSpec]) -> None:
        self._model, self._specs = model, {spec.name: spec for spec in specs}
        self._tasks = tasks if specs else ()
        self.buffers = {name: tensor.clone() for name, tensor in self._stream()}
        """The tensors. `take` refreshes those of rank 0."""
        self.take_s = 0.0
        """Seconds of the last `take`."""

    def take(self) -> None:
        """Convert the parameters as they are now.

        Raises:
            OutOfStep: a collective failed.
            ManifestError: a tensor is missing.
        """
        began = time.monotonic()
        left = set(self.buffers)
        for name, tensor in self._stream():
            self.buffers[name].copy_(tensor)
            left.discard(name)
        if left:
            raise ManifestError(f"Bridge's export gave no {min(left)}; plan again")
        self.take_s = time.monotonic() - began

    @torch.no_grad()
    def _stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        if not self._tasks:
            return
        tasks = [self._model.conversion_tasks[number] for number in self._tasks]
        try:
            for name, tensor in self._model.exported(tasks):
                spec = self._specs.get(name)
                if spec is not None:
                    yield name, tensor[: spec.shape[0]] if spec.shape else tensor
        except RuntimeError as error:
            if dist.get_world_size() == 1:
                raise
            raise OutOfStep(
                f"rank {dist.get_rank()}: a collective of Bridge's export failed: {error}"
            ) from error
