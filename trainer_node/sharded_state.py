"""Tensors that are spread over ranks, in torch.distributed.checkpoint's files (Megatron's `torch_dist` is the same store): written by any
number of ranks, read by any other.

Every tensor is stored whole, under a name, as boxes; each box comes from one rank. A reader asks for boxes of its own, cut otherwise, and
gets each from whatever stored boxes it overlaps. On saving, boxes that overlap or leave a gap are refused.

Nothing is unpickled but torch's index file, whose classes are looked up in a list; tensors are read with weights_only.
"""

from __future__ import annotations

import functools
import io
import math
import pathlib
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem, metadata, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trainer_node.bulk_files import BulkWriter, Part, bulk_writer
from trainer_node.generations import CheckpointError
from trainer_node.objects import enum_member

INDEX = ".metadata"
MOST_BYTES = 64 << 20
"""Of a box in a file; larger ones are cut along their rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A part of a whole fp32 tensor."""

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    """Where in the whole it begins."""
    shape: tuple[int, ...]
    """Of the whole."""
    tensor: Callable[[], torch.Tensor]
    """Its elements, asked for when they are written; or the memory to read them into."""

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """What torch calls it."""
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=torch.Size(self.sizes))

    def cut(self) -> Iterator[Box]:
        """The same as boxes of at most `MOST_BYTES`, unless one row is more."""
        num_rows, row = self.sizes[0] if self.sizes else 1, 4 * math.prod(self.sizes[1:])
        step = max(MOST_BYTES // row, 1)
        if num_rows <= step:
            yield self
            return
        for first in range(0, num_rows, step):
            count = min(step, num_rows - first)
            yield Box(
                sizes=(count, *self.sizes[1:]),
                offsets=(self.offsets[0] + first, *self.offsets[1:]),
                shape=self.shape,
                tensor=functools.partial(_rows, self.tensor, first, count),
            )


def _rows(tensor: Callable[[], torch.Tensor], first: int, count: int) -> torch.Tensor:
    return tensor().narrow(0, first, count)


def save(boxes: Mapping[str, Box], folder: Path, *, group: Any, writer: BulkWriter | None = None) -> dict[str, str]:
    """Write each rank's boxes; they must make up whole tensors together. Flushed to the disk. A collective over a CPU group.

    Returns name -> hash (`hashing`) of the files that this rank wrote, the index aside.

    Args:
        writer: shared with other files; None: one of its own, for boxes in CPU memory.

    Raises:
        CheckpointError: on every rank: one could not write, or boxes overlap or leave a gap; names the tensor.
    """
    boxes = {name: box for name, box in boxes.items() if math.prod(box.sizes)}
    if writer is None:
        with bulk_writer(torch.device("cpu")) as own:
            return save(boxes, folder, group=group, writer=own)
    storage = _Writer(folder, writer)
    try:
        with warnings.catch_warnings():  # of `no_dist`, which is meant
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            state_dict_saver.save(
                {},
                storage_writer=storage,
                planner=_SavePlanner(boxes),
                process_group=group,
                no_dist=_alone(group),
            )
    except CheckpointException as error:
        raise CheckpointError(f"writing {folder} failed: {_first(error)}") from error
    return storage.hashes


def plan(boxes: Mapping[str, Box], folder: Path) -> LoadPlan:
    """What to read into these boxes; reads the index only, and is no collective.

    Raises:
        CheckpointError: a tensor is not there, not whole, or has another shape; names it.
    """
    stored = _read_index(folder / INDEX).state_dict_metadata
    items: list[ReadItem] = []
    for name, box in boxes.items():
        found = stored.get(name)
        if not isinstance(found, TensorStorageMetadata) or tuple(found.size) != box.shape:
            what = tuple(found.size) if isinstance(found, TensorStorageMetadata) else "nothing"
            raise CheckpointError(f"{folder}: {name} should have shape {box.shape}; found {what}")
        reads = create_read_items_for_chunk_list(name, found, [box.chunk]) if math.prod(box.sizes) else []
        if sum(math.prod(read.lengths) for read in reads) != math.prod(box.sizes):
            raise CheckpointError(f"{folder}: {name} is not whole; a part of {box.sizes} at {box.offsets} was never written")
        items += reads
    return LoadPlan(items, planner_data=boxes)


def load(plan: LoadPlan, folder: Path, *, group: Any) -> None:
    """Read what was planned into its boxes. A collective over a CPU group.

    Raises:
        CheckpointError: on every rank, if one could not read; the boxes then hold a mixture.
    """
    try:
        state_dict_loader.load({}, storage_reader=_Reader(folder), planner=_LoadPlanner(plan), process_group=group)
    except CheckpointException as error:
        raise CheckpointError(f"reading {folder} failed: {_first(error)}") from error


def _alone(group: Any) -> bool:
    """One rank's plans need not be sent to itself: of 1,344 tensors that took 0.4 s."""
    return not dist.is_initialized() or dist.get_world_size(group) == 1


def _first(error: CheckpointException) -> str:
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank} {type(cause).__name__}: {cause}"


class _SavePlanner(DefaultSavePlanner):
    """This rank's boxes; torch's planner puts the ranks' plans together and checks them."""

    def __init__(self, boxes: Mapping[str, Box]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        cut = ((name, box) for name, whole in boxes.items() for box in whole.cut())
        self._boxes = {(name, torch.Size(box.offsets)): box for name, box in cut}

    def create_local_plan(self) -> SavePlan:
        """One write for each box."""
        items = []
        properties = TensorProperties(dtype=torch.float32)
        for (name, _), box in self._boxes.items():
            data = TensorWriteData(chunk=box.chunk, properties=properties, size=torch.Size(box.shape))
            index = MetadataIndex(name, torch.Size(box.offsets))
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The box."""
        index = write_item.index
        assert index.offset is not None
        return self._boxes[index.fqn, index.offset].tensor().detach()


class _LoadPlanner(DefaultLoadPlanner):
    """A plan made before, by `plan`."""

    def __init__(self, plan: LoadPlan) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._plan, self._boxes = plan, plan.planner_data

    def create_local_plan(self) -> LoadPlan:
        """That plan."""
        return LoadPlan(self._plan.items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The box's memory."""
        box: Box = self._boxes[index.fqn]
        return box.tensor()


class _Writer(filesystem.FileSystemWriter):
    """torch's files, a rank's tensors written by many threads: its own writer calls `torch.save` for one after the other, which checks them
    with a CRC that nothing reads."""

    def __init__(self, folder: Path, writer: BulkWriter) -> None:
        super().__init__(folder)
        self._writer = writer
        self.hashes: dict[str, str] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Each tensor as `torch.save` would write it, end to end in one file."""
        name = f"{plan.storage_data.prefix}0{filesystem.DEFAULT_SUFFIX}"
        parts: list[Part] = []
        results, end = [], 0
        for item in plan.items:
            assert item.tensor_data is not None
            sizes = item.tensor_data.chunk.sizes
            head, tail = _around(sizes)
            begin, nbytes = end, 4 * math.prod(sizes)
            tensor: Callable[[], Any] = functools.partial(planner.resolve_data, item)
            pieces: tuple[tuple[int, bytes | Callable[[], Any]], ...] = ((len(head), head), (nbytes, tensor), (len(tail), tail))
            for part, source in pieces:
                parts.append(Part(offset=end, nbytes=part, source=source))
                end += part
            info = filesystem._StorageInfo(name, begin, end - begin)
            results.append(WriteResult(index=item.index, size_in_bytes=end - begin, storage_data=info))
        self.hashes[name] = self._writer.start(Path(self.path) / name, parts).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


@functools.lru_cache(maxsize=1 << 14)
def _around(sizes: torch.Size) -> tuple[bytes, bytes]:
    """What `torch.save` writes before and after an fp32 tensor's elements; as with `torch.serialization.set_crc32_options(False)`, which
    `torch.load` knows, the checksum is not the elements'."""
    file, before = io.BytesIO(), torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.zeros(sizes), file)
    finally:
        torch.serialization.set_crc32_options(before)
    file.seek(0)
    begin = torch._C.PyTorchFileReader(file).get_record_offset("data/0")  # type: ignore[attr-defined]
    whole = file.getbuffer()
    return bytes(whole[:begin]), bytes(whole[begin + 4 * math.prod(sizes) :])


class _Reader(filesystem.FileSystemReader):
    """torch's, with the index read by `_read_index`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index."""
        found = _read_index(Path(self.path) / INDEX)
        if found.storage_meta is not None:
            found.storage_meta.load_id = self.load_id
        return found


class _Unpickler(pickle.Unpickler):
    """Makes torch's index classes and nothing else: a foreign file cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        """A class or dtype of the list."""
        source = {m.__name__: m for m in (metadata, filesystem, torch, pathlib)}.get(module)
        found = getattr(source, name, None)
        fine = (
            (source is metadata and isinstance(found, type))
            or (source is filesystem and name == "_StorageInfo")
            or (source is torch and (isinstance(found, torch.dtype) or name == "Size"))
            or (module in ("pathlib", "pathlib._local") and name in ("PosixPath", "PurePosixPath"))
            or (module, name) == ("torch.serialization", "_get_layout")
        )
        if (module, name) == ("builtins", "getattr"):
            return enum_member
        if not fine:
            raise pickle.UnpicklingError(f"{module}.{name} has no business in a checkpoint's index")
        return super().find_class(module, name)


def _read_index(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not a checkpoint's index")
    return found
