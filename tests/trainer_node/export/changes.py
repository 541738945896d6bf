"""One rank of a check that changed elements, put onto what was sent, are what would be sent.

torchrun ... -m tests.trainer_node.export.changes MODEL ...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from orchestrator.protocol.config import LoraConfig
from orchestrator.protocol.messages import Manifest
from tests.trainer_node.export.wire_orders import shuffled_order, vllm_order
from tests.trainer_node.worker import make_trainer, random_adapters
from trainer_node.adapters.rounding import Rounding
from trainer_node.export.changes import Encoded, Layout, Published, encode
from trainer_node.export.merged import Exporter
from trainer_node.export.wire_export import WireExport
from trainer_node.files.generations import CheckpointError
from trainer_node.state import checkpoint, loading
from trainer_node.training.trainer import Trainer
from weight_transfer import delta
from weight_transfer.changes import Message, drop_zero_signs, restore
from weight_transfer.digest import tensor_digest
from weight_transfer.layout import views_of

EVERYTHING = 1 << 40
STEP = 3e-5
STEPS = 100


def main() -> None:
    for model in map(Path, sys.argv[1:]):
        for dtype in ("bfloat16", "float32"):
            check(model, dtype)
    check_kept_buffers(Path(sys.argv[1]))
    check_many_steps(Path(sys.argv[1]))
    for model in map(Path, sys.argv[1:]):
        check_recalled(model)


def check(model: Path, dtype: str) -> None:
    trainer = make_trainer(model, 1, 1, 1, dtype=dtype, lora=LoraConfig(rank=4, alpha=6))
    random_adapters(trainer)
    manifest = Exporter(trainer.model).manifest()
    part = manifest.part(manifest.changed or ())
    names = [spec.name for spec in manifest.tensors]
    published = Published(trainer.model, most_bytes=0)
    for sent, order in (
        (manifest, vllm_order(names)),
        (part, shuffled_order(len(part.tensors), 5, seed=1)),
    ):
        layout = of_chunks(trainer, sent, order)
        live = filled(layout)
        for version in (0, 1):
            published.remember(version, None)
            assert published.why_not(version, layout) is None
            assert published.why_not(version + 1, layout) is not None
            move(trainer, STEP)
            if version == 1:  # what was sent keeps its own rounding
                trainer.model.adapters.rounding = Rounding(seed=123)
            encoded = encode(layout, published, version=version + 1, most_bytes=EVERYTHING)
            check_restored(layout, live, encoded)
            live = filled(layout)
        check_small_and_large_changes(trainer, layout, published, dtype)
        check_what_is_not_read(layout, published)
    published.free()
    assert published.why_not(8, layout) == "the trainer does not remember version 8"
    assert not published.keeps(layout)
    trainer.model.close()


def move(trainer: Trainer, by: float) -> None:
    """Change every adapter a little, in place as an optimizer does."""
    for trained in trainer.model.params:
        trained.param.data.add_((by * torch.randn(trained.param.shape)).to(trained.param.dtype))


def check_kept_buffers(model: Path) -> None:
    """Full parameters have no adapters, so the trainer keeps what it sends."""
    trainer = make_trainer(model, 1, 1, 1, dtype="bfloat16", finetuning_type="full")
    manifest = Exporter(trainer.model).manifest()
    order = vllm_order([spec.name for spec in manifest.tensors])
    layout = of_chunks(trainer, manifest, order)
    short = Published(trainer.model, most_bytes=manifest.nbytes - 1)
    why = short.why_not(0, layout)
    assert not short.keeps(layout) and why is not None and "trainer.remember_bytes" in why
    published = Published(trainer.model, most_bytes=manifest.nbytes)
    assert published.keeps(layout)
    live = filled(layout)
    for k, buffer_B in enumerate(live):
        published.keep(k, buffer_B)
    for version in (0, 1):
        published.remember(version, layout.export)
        assert published.why_not(version, layout) is None
        move(trainer, 1e-4)
        encoded = encode(layout, published, version=version + 1, most_bytes=EVERYTHING)
        # Until they are sent, nobody has the bytes that are kept now.
        assert published.why_not(version, layout) is not None
        check_restored(layout, live, encoded)
        live = filled(layout)
        assert all(torch.equal(encoded.fill(k), live[k]) for k in range(layout.count))
    published.remember(2, None)
    assert published.why_not(2, layout) is not None
    trainer.model.close()


def check_recalled(model: Path) -> None:
    """A checkpoint has the adapters of what another process has sent."""
    trainer = make_trainer(model, 1, 1, 1, dtype="bfloat16", lora=LoraConfig(rank=4, alpha=6))
    random_adapters(trainer)
    manifest = Exporter(trainer.model).manifest()
    layout = of_chunks(trainer, manifest, vllm_order([s.name for s in manifest.tensors]))
    live = filled(layout)
    with TemporaryDirectory() as name:
        folder = Path(name) / "3"
        checkpoint.save(trainer, folder, version=3)
        move(trainer, STEP)
        trainer.model.adapters.rounding = Rounding(seed=123)  # not that of the version
        new, published = filled(layout), Published(trainer.model, most_bytes=0)
        assert published.lacks(3, layout)
        published.recall(3, *loading.read_adapters(trainer.model, folder))
        assert all(map(torch.equal, filled(layout), new)), "the trainer has other adapters now"
        assert not published.lacks(3, layout) and published.why_not(3, layout) is None
        encoded = encode(layout, published, version=4, most_bytes=EVERYTHING)
        check_restored(layout, live, encoded)
        assert encoded.old_digests_N is not None
        for k, old_B in enumerate(live):
            for index, tensor in zip(layout.order[k], views(layout, k, old_B), strict=True):
                assert int(encoded.old_digests_N[index]) == int(tensor_digest(tensor))
        published.remember(4, None)
        move(trainer, STEP)
        sent = encode(layout, published, version=5, most_bytes=EVERYTHING)
        assert sent.old_digests_N is None, "this process has sent them"
        proved = encode(layout, published, version=5, most_bytes=EVERYTHING, proves=True)
        assert proved.old_digests_N is not None
        assert torch.equal(proved.old_digests_N, encoded.digests_N), "as an orchestrator asks"
        assert torch.equal(proved.digests_N, sent.digests_N)
        meta = json.loads((folder / "meta.json").read_text())
        meta["lora"]["alpha"] = 8.0
        (folder / "meta.json").write_text(json.dumps(meta))
        with pytest.raises(CheckpointError, match="was written with lora"):
            loading.read_adapters(trainer.model, folder)
        with pytest.raises(CheckpointError, match="reading"):
            loading.read_adapters(trainer.model, folder.with_name("4"))
    trainer.model.close()


def check_many_steps(model: Path) -> None:
    """What is live is only ever changed by codes, and in the end has every byte of the trainer."""
    trainer = make_trainer(model, 1, 1, 1, dtype="bfloat16", lora=LoraConfig(rank=4, alpha=6))
    random_adapters(trainer)
    manifest = Exporter(trainer.model).manifest()
    part = manifest.part(manifest.changed or ())
    layout = of_chunks(trainer, part, shuffled_order(len(part.tensors), 3, seed=2))
    published, live, nbytes = Published(trainer.model, most_bytes=0), filled(layout), 0
    first = filled(layout)
    for version in range(STEPS):
        published.remember(version, None)
        move(trainer, 1e-5)
        encoded = encode(layout, published, version=version + 1, most_bytes=EVERYTHING)
        for k, messages in enumerate(encoded.buffers):
            assert all(m.is_code for m in messages)
            restore(messages, live[k])
        nbytes += encoded.nbytes
    assert nbytes < 0.3 * STEPS * part.nbytes
    for ours, new, old in zip(live, filled(layout), first, strict=True):
        assert torch.equal(ours, new) and not torch.equal(ours, old)
    trainer.model.close()


def of_chunks(trainer: Trainer, manifest: Manifest, order: Sequence[Sequence[int]]) -> Layout:
    """The layout of whole chunks, of which a replica can read everything."""
    return Layout(
        export=WireExport(trainer.model, manifest, order),
        steps=None,
        manifest=manifest,
        order=order,
        unsigned=frozenset(),
        unread=frozenset(),
        device=torch.device("cpu"),
    )


def filled(layout: Layout) -> list[torch.Tensor]:
    return [layout.filled(k).clone() for k in range(layout.export.num_chunks)]


def check_restored(layout: Layout, live: Sequence[torch.Tensor], encoded: Encoded) -> None:
    elements = 0
    for k, (messages, old_B) in enumerate(zip(encoded.buffers, live, strict=True)):
        there_B, new_B = old_B.clone(), layout.filled(k)
        restore([with_body(m, new_B) for m in messages], there_B)
        assert torch.equal(there_B, new_B), f"buffer {k}"
        elements += int((old_B.view(torch.int16) != new_B.view(torch.int16)).sum())
        for index, tensor in zip(layout.order[k], views(layout, k, new_B), strict=True):
            assert int(encoded.digests_N[index]) == int(tensor_digest(tensor))
    assert encoded.elements == elements > 0
    assert encoded.nbytes == sum(m.nbytes for messages in encoded.buffers for m in messages)


def with_body(message: Message, new_B: torch.Tensor) -> Message:
    """As a worker has it."""
    if message.body_B is not None:
        return message
    return replace(message, body_B=new_B[message.delivery.begin : message.delivery.end])


def views(layout: Layout, k: int, buffer_B: torch.Tensor) -> list[torch.Tensor]:
    return views_of(buffer_B, [layout.manifest.tensors[i] for i in layout.order[k]])


def check_small_and_large_changes(
    trainer: Trainer, layout: Layout, published: Published, dtype: str
) -> None:
    published.remember(7, None)
    encoded = encode(layout, published, version=8, most_bytes=EVERYTHING)
    assert (encoded.nbytes, encoded.elements) == (0, 0)
    move(trainer, 1e-6)
    small = encode(layout, published, version=8, most_bytes=EVERYTHING)
    if dtype == "bfloat16":
        assert 0 < small.nbytes < 0.2 * layout.manifest.nbytes
    move(trainer, 0.5)
    large = encode(layout, published, version=8, most_bytes=EVERYTHING)
    assert small.nbytes < large.nbytes <= layout.manifest.nbytes
    if layout.count > 3:  # one is filled, one compared and one encoded at a time
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(delta, "MOST_AT_ONCE", 1)
            stopped = encode(layout, published, version=8, most_bytes=1)
        assert 1 < stopped.nbytes < large.nbytes and not stopped.buffers[-1]


def check_what_is_not_read(layout: Layout, published: Published) -> None:
    """A buffer with a tensor that is not read travels as it is."""
    published.remember(8, None)
    index = layout.order[0][0]
    unread = encode(
        replace(layout, unread=frozenset({index})), published, version=9, most_bytes=EVERYTHING
    )
    kinds = [[m.is_code for m in messages] for messages in unread.buffers]
    assert kinds == [[False], *([[True]] * (len(kinds) - 1))]
    unsigned = replace(layout, unsigned=frozenset({index}))
    buffer_B = layout.filled(0).clone()
    spec = layout.manifest.tensors[index]
    size = spec.nbytes // spec.numel
    view_B = buffer_B[: spec.nbytes]
    bits = view_B.view({2: torch.int16, 4: torch.int32}[size])
    bits[0] = torch.iinfo(bits.dtype).min
    wanted_B = buffer_B.clone()
    drop_zero_signs(wanted_B[: spec.nbytes], size)
    assert not torch.equal(wanted_B, buffer_B)
    assert torch.equal(unsigned.as_read(0, buffer_B), wanted_B)
    assert layout.as_read(0, buffer_B) is buffer_B


if __name__ == "__main__":
    main()
