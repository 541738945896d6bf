"""Fills byte buffers with merged tensors through Bridge's export, for models that `wire_export`
does not know.

`BridgeExport` has the methods of `WireExport`. The chunks follow the manifest's order, so a
receiver with another order must plan again. Each tensor is copied into its chunk before the next
one is gathered.

Axes: B = bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from orchestrator.errors import SpliceError
from orchestrator.protocol.messages import Manifest
from trainer_node.export.merged import Exporter
from trainer_node.ranks.lockstep import OutOfStep
from weight_transfer.layout import as_bytes, chunk_offsets

TIMEOUT_SHARE = 0.8
"""Part of the collectives' timeout that a send may take on several ranks."""


def is_manifest_order(order: Sequence[Sequence[int]], manifest: Manifest) -> bool:
    """Whether each chunk has the tensors that follow those of the chunk before it. Pure."""
    return [i for chunk in order for i in sorted(chunk)] == list(range(len(manifest.tensors)))


class BridgeExport:
    """The merged tensors of a model, chunk by chunk on rank 0.

    Args:
        manifest: what is sent.
        order: chunks of its indices, for which `is_manifest_order` holds.
        part: the manifest's indices in `Exporter.manifest()`; None: it is the whole one.
        timeout_s: of the collectives between several ranks; None: there are none.
    """

    def __init__(
        self,
        exporter: Exporter,
        manifest: Manifest,
        order: Sequence[Sequence[int]],
        *,
        part: Sequence[int] | None,
        timeout_s: float | None,
    ) -> None:
        self._exporter = exporter
        self._specs = manifest.tensors
        self._order = order
        self._part = part
        self._tensors: Iterator[tuple[str, torch.Tensor]] = iter(())
        self.longest_s = math.inf if timeout_s is None else TIMEOUT_SHARE * timeout_s
        """Longest that a send may take: while rank 0 waits for the wire, the other ranks wait in
        the export's collectives."""

    def start(self, *, limit: float) -> None:
        """See `WireExport.start`. The collectives have their own timeout."""
        self._tensors = self._export()

    def resident(self, chunk: int) -> torch.Tensor | None:
        """See `WireExport.resident`: nothing is in memory as it is sent."""
        return None

    def fill(self, chunk: int, out_B: torch.Tensor) -> None:
        """See `WireExport.fill`. The caller fills the chunks in their order.

        Raises:
            ManifestError: the export differs from the manifest.
            OutOfStep: a collective failed.
        """
        indices = self._order[chunk]
        begins = dict(zip(indices, chunk_offsets(self._specs[i] for i in indices), strict=True))
        for index in sorted(indices):
            _, tensor = next(self._tensors)
            out_B[begins[index] :][: self._specs[index].nbytes].copy_(as_bytes(tensor))

    def drain(self) -> None:
        """Run the rest of the export, which the other ranks are in. Raises as `fill` does."""
        for _ in self._tensors:
            pass

    contribute = drain

    def release(self) -> None:
        """Nothing is held between two sends."""

    def seconds(self, fill_s: float) -> dict[str, float]:
        """The seconds of all `fill`s, by phase."""
        return {
            "export": max(0.0, fill_s - self._exporter.merge_s),
            "merge": self._exporter.merge_s,
        }

    def _export(self) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            yield from self._exporter.merged_tensors(self._part)
        except RuntimeError as error:
            if isinstance(error, SpliceError) or dist.get_world_size() == 1:
                raise
            raise OutOfStep(
                f"rank {dist.get_rank()}: a collective of the export failed: {error}"
            ) from error
