"""Encodes the elements of an update that differ from what was sent last.

    published.remember(version, ...)     after a send
    published.recall(version, ...)       or from its checkpoint, in a process that did not send it
    encode(layout, published, ...)       old and new bytes of each buffer, and their differences

In LoRA training a copy of the adapters is kept. An old buffer is then a copy of the new one, in
which everything with an adapter is merged again, with the old adapters, the same base and the same
thresholds of rounding. So it has the bits that were sent.

Axes: B = bytes, N = tensors of the manifest.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeGuard

import torch

from orchestrator.protocol.messages import DTYPE_BYTES, Manifest
from trainer_node.adapters.peft_io import Key
from trainer_node.adapters.rounding import Rounding
from trainer_node.export.bridge_export import BridgeExport
from trainer_node.export.fp8_export import Fp8Export
from trainer_node.export.fp8_steps import Fp8Steps
from trainer_node.export.merger import Merger
from trainer_node.export.sources import Delta
from trainer_node.export.wire_export import WireExport
from trainer_node.model.model import Model
from weight_transfer import delta
from weight_transfer.changes import (
    Buffers,
    Compared,
    Encoding,
    Message,
    begin_encoding,
    compare,
    drop_zero_signs,
    whole,
)
from weight_transfer.digest import PreparedDigest
from weight_transfer.edges import Delivery, Step, digest_of_pieces
from weight_transfer.layout import VECTOR_BYTES, chunk_offsets, views_of

Export: TypeAlias = WireExport | BridgeExport | Fp8Export | Fp8Steps
"""What fills the chunks of an update."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The buffers that an export fills, and what a replica can read back of them."""

    export: Export
    steps: Sequence[Step] | None
    manifest: Manifest
    order: Sequence[Sequence[int]]
    unsigned: frozenset[int]
    """Tensors of which a replica may not read back the sign of zero."""
    unread: frozenset[int]
    """Tensors that a replica cannot read back."""
    device: torch.device

    @property
    def count(self) -> int:
        """Number of buffers."""
        return len(self.order if self.steps is None else self.steps)

    @functools.cached_property
    def sizes(self) -> Sequence[int]:
        """Bytes of each buffer. Cached, because 19,000 tensors take 15 ms."""
        if self.steps is not None:
            return [step.nbytes for step in self.steps]
        specs = self.manifest.tensors
        return [sum(specs[i].nbytes for i in chunk) for chunk in self.order]

    def tensors(self, k: int) -> Sequence[int]:
        """Indices of the tensors in buffer k."""
        steps = self.steps
        return self.order[k] if steps is None else [one.piece.index for one in steps[k].placed]

    def deliveries(self, k: int) -> Sequence[Delivery]:
        """What is sent of buffer k."""
        steps = self.steps
        return whole(self.sizes[k]) if steps is None else steps[k].deliveries

    def word_bytes(self, k: int) -> int:
        """As in `compare`."""
        specs, indices = self.manifest.tensors, self.tensors(k)
        if not self.unread.isdisjoint(indices):
            return 0
        return min(2, *(DTYPE_BYTES[specs[i].dtype] for i in indices))

    def digest(self, k: int, buffer_B: torch.Tensor) -> PreparedDigest:
        """The digest of buffer k."""
        steps, specs = self.steps, self.manifest.tensors
        if steps is not None:
            return digest_of_pieces([buffer_B], [steps[k]], specs)
        tensors = views_of(buffer_B, [specs[i] for i in self.order[k]])
        return PreparedDigest(tensors, rows=self.order[k])

    def room(self) -> torch.Tensor:
        """Memory for any one buffer."""
        return torch.empty(max(self.sizes, default=0), dtype=torch.uint8, device=self.device)

    def filled(self, k: int, room_B: torch.Tensor | None = None) -> torch.Tensor:
        """Buffer k with the present weights; perhaps a parameter's own memory.

        Args:
            room_B: where else it is filled. None: new memory.
        """
        there_B = self.export.resident(k)
        if there_B is not None:
            return there_B
        nbytes = self.sizes[k]
        if room_B is None:
            room_B = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.export.fill(k, room_B[:nbytes])
        return room_B[:nbytes]

    def as_read(self, k: int, buffer_B: torch.Tensor) -> torch.Tensor:
        """Buffer k as a replica reads it back: -0.0 is 0.0 where it may not know."""
        if not self.unsigned:
            return buffer_B
        steps, specs, fresh = self.steps, self.manifest.tensors, buffer_B
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


class Digests:
    """Digests of a layout's buffers, wherever those are in memory.

    On a GPU the tables of addresses are made once, because they take the host some 30 us for each
    tensor.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[int, PreparedDigest]] = {}
        """Buffer -> its address in the tables."""

    def add(self, layout: Layout, k: int, buffer_B: torch.Tensor, out_N: torch.Tensor) -> None:
        """Queue the digests of buffer k, which are added to out_N."""
        at = buffer_B.data_ptr()
        was, digest = self._made.get(k, (at, None))
        if digest is None or (at - was) % VECTOR_BYTES:
            digest = layout.digest(k, buffer_B)
            was = at
        if digest.moves:
            digest.move(at - was)
            self._made[k] = at, digest
        digest.launch(out_N)


class Published:
    """What was sent last, so that old buffers can be made again.

    Where every rank that sends merges its own tensors, the old adapters suffice. Elsewhere (full
    parameters, FP8 weights, pieces that rank 0 gathers) the buffers themselves are kept.

    Args:
        most_bytes: host memory of this rank for buffers.
    """

    def __init__(self, model: Model, *, most_bytes: int) -> None:
        self._model, self._most_bytes = model, most_bytes
        self._is_cuda = model.device.type == "cuda"
        self.stream = torch.cuda.Stream(model.device) if self._is_cuda else None
        """On which changes are encoded. Memory of one stream serves no other."""
        self._has_deltas = model.config.serves_merged and not model.trains_all
        self._version: int | None = None
        self._of: Export | None = None
        """The export whose buffers are kept, if they are."""
        self.is_recalled = False
        """Whether another process has sent that version, so that its bytes are to be proved."""
        self._rounding: Rounding | None = None
        self._olds: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        """id of a parameter -> it, its copy in host memory, and the tensor that merges read: on a
        CPU the copy itself, on a GPU empty between encodings."""
        self._digests: weakref.WeakKeyDictionary[Export, Digests] = weakref.WeakKeyDictionary()
        self._mergers: weakref.WeakKeyDictionary[WireExport, Merger] = weakref.WeakKeyDictionary()
        self._kept: dict[int, torch.Tensor] = {}
        """Number of a buffer -> its bytes, in host memory."""

    def _merges(self, export: Export) -> TypeGuard[WireExport]:
        is_own = isinstance(export, WireExport) and not export.gathers
        return is_own and self._has_deltas

    def lacks(self, version: int, layout: Layout) -> bool:
        """Whether the adapters of a version would help, and are not here."""
        return self._merges(layout.export) and self._version != version

    def why_not(self, base_version: int, layout: Layout) -> str | None:
        """Why changes against this version cannot be encoded; None if they can."""
        is_merged = self._merges(layout.export)
        if not is_merged and not self.keeps(layout):
            return (
                "these tensors' adapters do not tell what changed, and trainer.remember_bytes is "
                "too small to keep them"
            )
        is_kept = is_merged or self._of is layout.export
        if self._version != base_version or not is_kept:
            return f"the trainer does not remember version {base_version}"
        return None

    def keeps(self, layout: Layout) -> bool:
        """Whether a send must hand over its buffers to `keep`."""
        return not self._merges(layout.export) and sum(layout.sizes) <= self._most_bytes

    def keep(self, k: int, buffer_B: torch.Tensor) -> None:
        """Copy a buffer that is being sent, on the current stream."""
        old_B = self._kept.get(k)
        if old_B is None or old_B.numel() != buffer_B.numel():
            old_B = self._kept[k] = torch.empty_like(
                buffer_B, device="cpu", pin_memory=self._is_cuda
            )
        old_B.copy_(buffer_B, non_blocking=True)

    def kept(self, k: int) -> torch.Tensor:
        """What was kept of a buffer."""
        return self._kept[k].to(self._model.device)

    def forget(self) -> None:
        """Encode nothing until the next `remember`, because something else may have been sent."""
        self._version = None

    def free(self) -> None:
        """Free all that is kept: the model has other adapters, or nobody will ask for it."""
        self.forget()
        self._olds.clear()
        self._mergers.clear()
        self._digests.clear()
        self._kept.clear()

    @torch.no_grad()
    def remember(self, version: int, kept_of: Export | None) -> None:
        """Take the present adapters for those of a version, and the buffers that were kept.

        Args:
            kept_of: the export whose buffers were kept, if they were.
        """
        self.forget()
        if self._has_deltas:
            for trained in self._model.params:
                self._host(trained.param).copy_(trained.param, non_blocking=True)
        if self._is_cuda:
            torch.cuda.synchronize(self._model.device)
        self._version, self._rounding = version, self._model.rounding
        self._of, self.is_recalled = kept_of, False

    def recall(
        self, version: int, adapters: Mapping[Key, torch.Tensor], rounding: Rounding
    ) -> None:
        """Take whole adapters for those of a version that another process has sent.

        Args:
            rounding: how that version was merged.
        """
        self.forget()
        self._model.adapters.load(adapters, memory=self._host)
        self._version, self._rounding = version, rounding
        self._of, self.is_recalled = None, True

    def digests(self, layout: Layout) -> Digests:
        """The digests of a layout's buffers, which keep their tables."""
        return self._digests.setdefault(layout.export, Digests())

    def _host(self, param: torch.Tensor) -> torch.Tensor:
        """The copy of a parameter in host memory."""
        if id(param) not in self._olds:
            host = torch.empty_like(param, device="cpu", pin_memory=self._is_cuda)
            old = param.new_empty(0) if self._is_cuda else host
            self._olds[id(param)] = param, host, old
        return self._olds[id(param)][1]

    @contextlib.contextmanager
    def old_buffers(
        self, export: Export
    ) -> Iterator[Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]]:
        """Gives a function that makes the old bytes of a buffer, given its number, its new bytes
        and memory where it may make them.
        """
        if not self._merges(export):
            self.forget()  # until the new bytes, which are kept now, have been sent

            def replaced(k: int, new_B: torch.Tensor, room_B: torch.Tensor) -> torch.Tensor:
                old_B = room_B[: new_B.numel()].copy_(self._kept[k], non_blocking=True)
                self.keep(k, new_B)
                return old_B

            yield replaced
            return
        for param, host, old in self._olds.values():
            if old is not host:
                old.data = host.to(param.device, non_blocking=True)
        try:
            if export not in self._mergers:
                self._mergers[export] = export.merged_with(self._old, self._present_rounding)
            yield functools.partial(_merged_again, self._mergers[export])
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


def _merged_again(
    merger: Merger, k: int, new_B: torch.Tensor, room_B: torch.Tensor
) -> torch.Tensor:
    """The new bytes, with everything that has an adapter merged with the old one."""
    if not merger.members(k):
        return new_B
    old_B = room_B[: new_B.numel()]
    if merger.merged_nbytes(k) < new_B.numel():
        old_B.copy_(new_B)
    merger.fill(k, old_B)
    return old_B


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """An update of changed elements, as this rank sends it."""

    version: int
    layout: Layout
    buffers: Buffers
    digests_N: torch.Tensor
    """Of the new tensors, or of this rank's pieces of them; on the CPU."""
    old_digests_N: torch.Tensor | None
    """Of the old ones, if their bytes are to be proved."""
    elements: int
    nbytes: int
    """Bytes that travel to each replica."""
    fill: Callable[[int], torch.Tensor]
    """Returns the new bytes of a buffer once more."""


class _Encoder:
    """Has a thread compare and encode buffers, on a second stream, so that the device fills the
    next buffers while the host waits for numbers of the last ones. What changed in several buffers
    is encoded together, because each encoding takes the host a hundred calls.

    Args:
        fill: returns the new bytes of a buffer once more.
        stream: that stream, of a GPU.
        thread: with one worker.
    """

    def __init__(
        self,
        layout: Layout,
        fill: Callable[[int], torch.Tensor],
        stream: torch.cuda.Stream | None,
        thread: ThreadPoolExecutor,
    ) -> None:
        self._layout, self._fill, self._stream, self._thread = layout, fill, stream, thread
        self._tables: delta.Tables = {}
        self._comparing = deque[Future[tuple[int, Compared, torch.cuda.Event | None]]]()
        self._compared: dict[int, Compared] = {}
        self._changes = 0
        """Of what was compared."""
        self._encoding: Future[dict[int, Encoding]] | None = None
        self._done: dict[int, Encoding] = {}
        self.sent_bytes = 0
        """Of the buffers whose codes have their sizes: all but those of the last two encodings."""

    def add(self, k: int, old_B: torch.Tensor, new_B: torch.Tensor) -> None:
        """Have buffer k encoded, as soon as the current stream has filled it."""
        filled = None
        if self._stream is not None:
            filled = torch.cuda.current_stream(self._layout.device).record_event()
        self._comparing.append(self._thread.submit(self._compare, k, old_B, new_B, filled))

    def wait(self, left: int) -> None:
        """Wait until `left` buffers are not compared. The others may then change on this stream."""
        while len(self._comparing) > left:
            k, compared, read = self._comparing.popleft().result()
            if read is not None:
                read.wait()
            changes, most = compared[1], delta.MOST_AT_ONCE // 2
            # What travels as it is counts at once for the most bytes.
            count = most if changes is None else changes.at_C.numel()
            if self._changes + count > delta.MOST_AT_ONCE:  # a large buffer is a batch
                self._begin()
            self._compared[k] = compared
            self._changes += count
            if self._changes >= most:
                self._begin()

    def finish(self) -> None:
        """Wait for every buffer."""
        self.wait(0)
        self._begin()
        self._end()

    def _begin(self) -> None:
        """Encode what was compared, after the encoding before."""
        self._end()
        self._encoding = self._thread.submit(self._encode, self._compared)
        self._compared, self._changes = {}, 0

    def _end(self) -> None:
        done = {} if self._encoding is None else self._encoding.result()
        self.sent_bytes += sum(one.sent_bytes for one in done.values())
        self._done |= done

    @torch.no_grad()
    def _compare(
        self, k: int, old_B: torch.Tensor, new_B: torch.Tensor, filled: torch.cuda.Event | None
    ) -> tuple[int, Compared, torch.cuda.Event | None]:
        layout = self._layout
        with self._on_stream():
            if filled is not None:
                filled.wait()
            compared = compare(
                layout.as_read(k, old_B),
                new_B,
                layout.deliveries(k),
                word_bytes=layout.word_bytes(k),
            )
            return k, compared, None if self._stream is None else self._stream.record_event()

    @torch.no_grad()
    def _encode(self, compared: Mapping[int, Compared]) -> dict[int, Encoding]:
        with self._on_stream():
            encodings = begin_encoding(list(compared.values()), tables=self._tables)
            return dict(zip(compared, encodings, strict=True))

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        torch.cuda.set_device(self._layout.device)  # else a context of GPU 0 is made
        with torch.cuda.stream(self._stream):
            yield

    def messages(self) -> tuple[Buffers, int]:
        """Of every buffer, and the number of changed words; `finish` came before."""
        buffers: list[Sequence[Message]] = [()] * self._layout.count
        for k, encoding in self._done.items():
            buffers[k] = encoding.messages(functools.partial(self._fill, k))
        return buffers, sum(encoding.changed for encoding in self._done.values())


@torch.no_grad()
def encode(
    layout: Layout, published: Published, *, version: int, most_bytes: int, proves: bool = False
) -> Encoded:
    """Encode every buffer of this rank; `layout.export` has been started.

    It stops early after more than `most_bytes`, up to two encodings of several buffers late.

    Args:
        proves: digest the old tensors, also if this process has sent them.
    """
    proves = proves or published.is_recalled
    export, count = layout.export, len(layout.manifest.tensors)
    digests_N = torch.zeros(count, dtype=torch.int64, device=layout.device)
    old_digests_N = torch.zeros_like(digests_N)
    rooms = [(layout.room(), layout.room()) for _ in range(2)]
    digests = published.digests(layout)
    again = published.kept if published.keeps(layout) else layout.filled
    filled = (k for k in range(layout.count) if layout.sizes[k])
    with (
        ThreadPoolExecutor(1, "splice-encode") as thread,
        published.old_buffers(export) as old_bytes,
    ):
        encoder = _Encoder(layout, again, published.stream, thread)
        for k, (new_room_B, old_room_B) in zip(filled, itertools.cycle(rooms), strict=False):
            encoder.wait(len(rooms) - 1)
            if encoder.sent_bytes > most_bytes:
                break
            new_B = layout.filled(k, new_room_B)
            digests.add(layout, k, new_B, digests_N)
            old_B = old_bytes(k, new_B, old_room_B)
            if proves:
                digests.add(layout, k, old_B, old_digests_N)
            encoder.add(k, old_B, new_B)
        encoder.finish()
    buffers, elements = encoder.messages()
    return Encoded(
        version=version,
        layout=layout,
        buffers=buffers,
        digests_N=digests_N.cpu(),
        old_digests_N=old_digests_N.cpu() if proves else None,
        elements=elements,
        nbytes=encoder.sent_bytes,
        fill=again,
    )
