"""Encodes the elements of an update that differ from what was sent last.

    published.remember(version)          after a send: a copy of the adapters, in host memory
    encode(export, published, ...)       both merges of each buffer, and their differences

An old buffer is a copy of the new one in which everything with an adapter is merged again, with the
old adapters, the same base and the same thresholds of rounding. So it has the bits that were sent.

Axes: B = bytes, N = tensors of the manifest.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from orchestrator.protocol.messages import DTYPE_BYTES, Manifest
from trainer_node.adapters.rounding import Rounding
from trainer_node.export.merger import Merger
from trainer_node.export.sources import Delta
from trainer_node.export.wire_export import WireExport
from trainer_node.model.model import Model
from weight_transfer.changes import Buffers, Message, drop_zero_signs, encode_buffer, whole
from weight_transfer.digest import PreparedDigest
from weight_transfer.edges import Delivery, digest_of_pieces
from weight_transfer.layout import chunk_offsets, views_of


class Published:
    """The adapters that were sent last, and the merges with them."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._version: int | None = None
        self._rounding: Rounding | None = None
        self._olds: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        """id of a parameter -> it, its copy in host memory, and the tensor that merges read: on a
        CPU the copy itself, on a GPU empty between encodings."""
        self._mergers: weakref.WeakKeyDictionary[WireExport, Merger] = weakref.WeakKeyDictionary()

    def why_not(self, base_version: int) -> str | None:
        """Why changes against this version cannot be encoded; None if they can."""
        if self._version != base_version:
            return f"the trainer does not remember version {base_version}"
        return None

    def forget(self) -> None:
        """Encode nothing until the next `remember`, because other weights may have been sent."""
        self._version = None

    def forget_adapters(self) -> None:
        """Likewise, because the model has other adapters."""
        self.forget()
        self._olds.clear()
        self._mergers.clear()

    @torch.no_grad()
    def remember(self, version: int) -> None:
        """Keep the present adapters as those of a version that was sent."""
        self.forget()
        if self._model.trains_all:
            return
        is_cuda = self._model.device.type == "cuda"
        for trained in self._model.params:
            param = trained.param
            if id(param) not in self._olds:
                host = torch.empty_like(param, device="cpu", pin_memory=is_cuda)
                self._olds[id(param)] = param, host, param.new_empty(0) if is_cuda else host
            self._olds[id(param)][1].copy_(param, non_blocking=True)
        if is_cuda:
            torch.cuda.current_stream(self._model.device).synchronize()
        self._version, self._rounding = version, self._model.rounding

    @contextlib.contextmanager
    def merger(self, export: WireExport) -> Iterator[Merger]:
        """Merges with the old adapters what has an adapter; the rest of a buffer it leaves."""
        for param, host, old in self._olds.values():
            if old is not host:
                old.data = host.to(param.device, non_blocking=True)
        try:
            if export not in self._mergers:
                self._mergers[export] = export.merged_with(self._old, self._present_rounding)
            yield self._mergers[export]
        finally:
            for _, host, old in self._olds.values():
                if old is not host:
                    old.data = old.new_empty(0)

    def _present_rounding(self) -> Rounding:
        assert self._rounding is not None
        return self._rounding

    def _old(self, delta: Delta) -> Delta:
        a, b = self._olds[id(delta.lora_A)][2], self._olds[id(delta.lora_B)][2]
        return replace(delta, lora_A=a, lora_B=b)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The buffers that an export fills, and what a replica can read back of them."""

    export: WireExport
    manifest: Manifest
    order: Sequence[Sequence[int]]
    unsigned: frozenset[int]
    """Tensors of which a replica may not read back the sign of zero."""
    unread: frozenset[int]
    """Tensors that a replica cannot read back."""
    device: torch.device

    def tensors(self, k: int) -> Sequence[int]:
        """Indices of the tensors in buffer k."""
        steps = self.export.steps
        return self.order[k] if steps is None else [one.piece.index for one in steps[k].placed]

    def deliveries(self, k: int) -> Sequence[Delivery]:
        """What is sent of buffer k."""
        steps = self.export.steps
        return whole(self.export.chunk_nbytes(k)) if steps is None else steps[k].deliveries

    def word_bytes(self, k: int) -> int:
        """As in `encode_buffer`."""
        specs, indices = self.manifest.tensors, self.tensors(k)
        if not self.unread.isdisjoint(indices):
            return 0
        return min(2, *(DTYPE_BYTES[specs[i].dtype] for i in indices))

    def digest(self, k: int, buffer_B: torch.Tensor) -> PreparedDigest:
        """The digest of buffer k."""
        steps, specs = self.export.steps, self.manifest.tensors
        if steps is not None:
            return digest_of_pieces([buffer_B], [steps[k]], specs)
        tensors = views_of(buffer_B, [specs[i] for i in self.order[k]])
        return PreparedDigest(tensors, rows=self.order[k])

    def filled(self, k: int) -> torch.Tensor:
        """Buffer k with the present weights; perhaps a parameter's own memory."""
        there_B = self.export.resident(k)
        if there_B is not None:
            return there_B
        nbytes = self.export.chunk_nbytes(k)
        buffer_B = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.export.fill(k, buffer_B)
        return buffer_B

    def as_read(self, k: int, buffer_B: torch.Tensor) -> torch.Tensor:
        """Buffer k as a replica reads it back: -0.0 is 0.0 where it may not know."""
        steps, specs, fresh = self.export.steps, self.manifest.tensors, buffer_B
        for index, offset, numel in (
            zip(
                self.order[k],
                chunk_offsets([specs[i] for i in self.order[k]]),
                (specs[i].numel for i in self.order[k]),
                strict=True,
            )
            if steps is None
            else ((p.piece.index, p.offset, p.piece.box.numel) for p in steps[k].placed)
        ):
            if index in self.unsigned:
                fresh = buffer_B.clone() if fresh is buffer_B else fresh
                size = DTYPE_BYTES[specs[index].dtype]
                drop_zero_signs(fresh[offset : offset + numel * size], size)
        return fresh


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """An update of changed elements, as this rank sends it."""

    version: int
    layout: Layout
    buffers: Buffers
    digests_N: torch.Tensor
    """Of the new tensors, or of this rank's pieces of them; on the CPU."""
    elements: int
    nbytes: int
    """Bytes that travel to each replica."""


@torch.no_grad()
def encode(layout: Layout, published: Published, *, version: int, most_bytes: int) -> Encoded:
    """Encode every buffer of this rank; `layout.export` has been started.

    It stops early after more than `most_bytes`.
    """
    export, elements, nbytes = layout.export, 0, 0
    count = len(layout.manifest.tensors)
    digests_N = torch.zeros(count, dtype=torch.int64, device=layout.device)
    buffers: list[Sequence[Message]] = []
    with published.merger(export) as old:
        for k in range(export.num_chunks):
            if nbytes > most_bytes or not export.chunk_nbytes(k):
                buffers.append(())
                continue
            new_B, word_bytes = layout.filled(k), layout.word_bytes(k)
            layout.digest(k, new_B).launch(digests_N)
            old_B = new_B
            if word_bytes and old.members(k):
                old_B = new_B.clone()
                old.fill(k, old_B)
            messages, changed = encode_buffer(
                layout.as_read(k, old_B), new_B, layout.deliveries(k), word_bytes=word_bytes
            )
            buffers.append(messages)
            elements += changed
            nbytes += sum(message.sent_bytes for message in messages)
    return Encoded(
        version=version,
        layout=layout,
        buffers=buffers,
        digests_N=digests_N.cpu(),
        elements=elements,
        nbytes=nbytes,
    )
