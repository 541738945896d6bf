"""Tensors that are spread over ranks, in torch.distributed.checkpoint's files (Megatron's `torch_dist` is the same store): written by any
number of ranks, read by any other.

Every tensor is stored whole, under a name, as boxes; each box comes from one rank. A reader asks for boxes of its own, cut otherwise, and
gets each from whatever stored boxes it overlaps. On saving, boxes that overlap or leave a gap are refused.

Nothing is unpickled but torch's index file, whose classes are looked up in a list; tensors are read with weights_only.
"""

from __future__ import annotations

import enum
import math
import pathlib
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
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
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from trainer_node.generations import CheckpointError

INDEX = ".metadata"


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


def save(boxes: Mapping[str, Box], folder: Path, *, group: Any) -> None:
    """Write each rank's boxes; they must make up whole tensors together. Flushed to the disk. A collective over a CPU group.

    Raises:
        CheckpointError: on every rank: one could not write, or boxes overlap or leave a gap; names the tensor.
    """
    boxes = {name: box for name, box in boxes.items() if math.prod(box.sizes)}
    try:
        state_dict_saver.save(
            {}, storage_writer=filesystem.FileSystemWriter(folder), planner=_SavePlanner(boxes), process_group=group
        )
    except CheckpointException as error:
        raise CheckpointError(f"writing {folder} failed: {_first(error)}") from error


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


def _first(error: CheckpointException) -> str:
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank} {type(cause).__name__}: {cause}"


class _SavePlanner(DefaultSavePlanner):
    """This rank's boxes; torch's planner puts the ranks' plans together and checks them."""

    def __init__(self, boxes: Mapping[str, Box]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._boxes = boxes

    def create_local_plan(self) -> SavePlan:
        """One write for each box."""
        items = []
        for name, box in self._boxes.items():
            properties = TensorProperties(dtype=torch.float32)
            data = TensorWriteData(chunk=box.chunk, properties=properties, size=torch.Size(box.shape))
            index = MetadataIndex(name, torch.Size(box.offsets))
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The box."""
        return self._boxes[write_item.index.fqn].tensor().detach()


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
            return _enum_member
        if not fine:
            raise pickle.UnpicklingError(f"{module}.{name} has no business in a checkpoint's index")
        return super().find_class(module, name)


def _enum_member(kind: Any, name: str) -> enum.Enum:
    """What `getattr` is for in a pickle of Python 3.11.0 to 3.11.3, which writes an enum's member so; for anything else it is not to be had."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"getattr({kind!r}, {name!r}) has no business in a checkpoint's index")
    return kind[name]


def _read_index(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not a checkpoint's index")
    return found
