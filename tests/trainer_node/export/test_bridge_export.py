"""Bridge's export as chunks: what the export yields is what the buffers hold, whatever the shapes,
and every failure ends it.
"""

from __future__ import annotations

import pytest
import torch

from orchestrator.errors import ManifestError
from orchestrator.protocol.messages import Manifest, TensorSpec
from trainer_node.export import bridge_export
from trainer_node.export.bridge_export import BridgeExport, is_manifest_order
from trainer_node.ranks.lockstep import OutOfStep
from weight_transfer.layout import as_bytes

TENSORS = {
    "a": torch.arange(3, dtype=torch.uint8),
    "b": torch.randn(5, 7).t(),  # strided
    "c": torch.tensor(7.5, dtype=torch.float64),
    "d": torch.randn(4, 2).to(torch.bfloat16),
    "e": torch.zeros(0, 4),
}
MANIFEST = Manifest(
    tensors=tuple(
        TensorSpec(name=n, dtype=str(t.dtype)[6:], shape=tuple(t.shape)) for n, t in TENSORS.items()
    )  # type: ignore[arg-type]
)
ORDER = [[1, 0], [2, 3, 4]]
"""Wide elements first."""


class Export:
    """Stand-in for `Exporter`: yields the tensors, or fails before one of them; counts those that
    were taken.
    """

    merge_s = 2.0

    def __init__(self, error: Exception | None = None, at: int = 0) -> None:
        self.error, self.at, self.taken, self.part = error, at, 0, None

    def merged_tensors(self, part):
        self.part = part
        for n, item in enumerate(TENSORS.items()):
            if self.error is not None and n == self.at:
                raise self.error
            self.taken += 1
            yield item


def bridged(export: Export, **options) -> BridgeExport:
    options = {"part": None, "timeout_s": None} | options
    return BridgeExport(export, MANIFEST, ORDER, **options)


def filled(export: BridgeExport) -> list[torch.Tensor]:
    export.start(limit=0.0)
    chunks = [
        torch.zeros(sum(MANIFEST.tensors[i].nbytes for i in c), dtype=torch.uint8) for c in ORDER
    ]
    for k, out_B in enumerate(chunks):
        assert export.resident(k) is None
        export.fill(k, out_B)
    export.drain()
    return chunks


def test_every_send_has_the_bytes_of_the_export():
    source, tensors = Export(), list(TENSORS.values())
    export = bridged(source, part=(1, 2, 3, 4, 5))
    for _ in range(2):
        wanted = [torch.cat([as_bytes(tensors[i]) for i in chunk]) for chunk in ORDER]
        assert all(torch.equal(a, b) for a, b in zip(filled(export), wanted, strict=True))
    assert source.part == (1, 2, 3, 4, 5)
    assert (
        export.seconds(5.0) == {"export": 3.0, "merge": 2.0}
        and export.seconds(1.0)["export"] == 0.0
    )


def test_a_send_that_fails_runs_the_export_to_its_end():
    """The other ranks are in its collectives."""
    for run in (BridgeExport.drain, BridgeExport.contribute):
        source = Export()
        export = bridged(source)
        export.start(limit=0.0)
        run(export)
        assert source.taken == len(TENSORS)


def test_only_manifest_order_can_be_sent():
    assert is_manifest_order(ORDER, MANIFEST) and is_manifest_order(
        [[n] for n in range(5)], MANIFEST
    )
    for order in (
        [[2, 3, 4], [1, 0]],
        [[0, 2], [1, 3, 4]],
        [[0, 1], [2, 3]],
        [[0, 1, 2, 3, 4], [4]],
    ):
        assert not is_manifest_order(order, MANIFEST)


@pytest.mark.parametrize("at", [0, 4])
def test_what_fails_in_the_export_fails_the_fill(monkeypatch, at):
    for ranks, error, expected in (
        (1, RuntimeError("out of memory"), RuntimeError),
        (2, ManifestError("tensor 4 is not what was planned"), ManifestError),
        (2, RuntimeError("the other rank is gone"), OutOfStep),
    ):
        monkeypatch.setattr(bridge_export.dist, "get_world_size", lambda ranks=ranks: ranks)
        monkeypatch.setattr(bridge_export.dist, "get_rank", lambda: 0)
        export = bridged(Export(error, at=at), timeout_s=30.0)
        with pytest.raises(expected, match=str(error)) as caught:
            filled(export)
        assert type(caught.value) is expected
        export.drain()  # nothing is left of it
    assert export.longest_s == 24.0 and bridged(Export()).longest_s > 1e9
