"""Stores tensors that are spread over ranks, in torch.distributed.checkpoint's files.

Megatron's `torch_dist` is the same format. Any number of ranks reads what any other number wrote.

Every tensor is stored whole, under a name, as shards. Each shard comes from one rank. A reader asks
for its own shards and gets each from the stored shards that overlap it. `save` refuses shards that
overlap or leave a gap. Only torch's index file is unpickled, with a list of allowed classes.
Tensors are read with weights_only.
"""

from __future__ import annotations

import functools
import io
import math
import pathlib
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from trainer_node.files.bulk_files import BulkWriter, Extent, Writing, bulk_writer
from trainer_node.files.generations import CheckpointError
from trainer_node.ranks.objects import enum_member

INDEX = ".metadata"
MOST_BYTES = 64 << 20
"""Largest shard in a file, in bytes; larger ones are cut along their rows."""


Place = tuple[str, tuple[int, ...]]
"""A whole tensor's name, and a shard's first index in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A part of a whole fp32 tensor."""

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    """First index in the whole tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    tensor: Callable[[], torch.Tensor]
    """Returns the elements to write, or the memory to read into."""

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Return torch's description of the shard."""
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=torch.Size(self.sizes))

    def cut(self) -> Iterator[Shard]:
        """Cut into shards of at most `MOST_BYTES`, or of one row."""
        num_rows, row = self.sizes[0] if self.sizes else 1, 4 * math.prod(self.sizes[1:])
        step = max(MOST_BYTES // row, 1)
        if num_rows <= step:
            yield self
            return
        for first in range(0, num_rows, step):
            count = min(step, num_rows - first)
            yield Shard(
                sizes=(count, *self.sizes[1:]),
                offsets=(self.offsets[0] + first, *self.offsets[1:]),
                shape=self.shape,
                tensor=functools.partial(_rows, self.tensor, first, count),
            )


def _rows(tensor: Callable[[], torch.Tensor], first: int, count: int) -> torch.Tensor:
    return tensor().narrow(0, first, count)


def save(
    shards: Mapping[Place, Shard],
    folder: Path,
    *,
    group: Any,
    writer: BulkWriter | None = None,
    meanwhile: Callable[[Sequence[Writing]], None] = lambda writings: None,
) -> dict[str, str]:
    """Write each rank's shards and flush them. They must make up whole tensors. A collective over a
    CPU group.

    Returns name -> hash (`hashing`) of the files that this rank wrote, the index aside.

    Args:
        writer: shared with other files; None: its own one, for shards in CPU memory.
        meanwhile: called on every rank, also one that cannot write, with what the rank writes.

    Raises:
        CheckpointError: on every rank, if one could not write, or shards overlap or leave a gap.
            Names the tensor.
    """
    shards = {place: shard for place, shard in shards.items() if math.prod(shard.sizes)}
    if writer is None:
        with bulk_writer(torch.device("cpu")) as own:
            return save(shards, folder, group=group, writer=own, meanwhile=meanwhile)
    storage = _Writer(folder, writer, meanwhile)
    try:
        with warnings.catch_warnings():  # of `no_dist`, which is meant
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            state_dict_saver.save(
                {},
                storage_writer=storage,
                planner=_SavePlanner(shards),
                process_group=group,
                no_dist=_alone(group),
            )
    except CheckpointException as error:
        raise CheckpointError(f"writing {folder} failed: {_first(error)}") from error
    return storage.hashes


def plan(shards: Mapping[Place, Shard], folder: Path) -> LoadPlan:
    """Plan the reads into these shards, only from the index. Not a collective.

    Raises:
        CheckpointError: a tensor is not there, not whole, or has another shape; names it.
    """
    stored = _read_index(folder / INDEX).state_dict_metadata
    items: list[ReadItem] = []
    for (name, _), shard in shards.items():
        found = stored.get(name)
        if not isinstance(found, TensorStorageMetadata) or tuple(found.size) != shard.shape:
            what = tuple(found.size) if isinstance(found, TensorStorageMetadata) else "nothing"
            raise CheckpointError(f"{folder}: {name} should have shape {shard.shape}; found {what}")
        reads = (
            create_read_items_for_chunk_list(name, found, [shard.chunk])
            if math.prod(shard.sizes)
            else []
        )
        if sum(math.prod(read.lengths) for read in reads) != math.prod(shard.sizes):
            raise CheckpointError(
                f"{folder}: {name} is not whole; a part of {shard.sizes} at {shard.offsets} was "
                "never written"
            )
        items += reads
    return LoadPlan(items, planner_data=shards)


def load(plan: LoadPlan, folder: Path, *, group: Any) -> None:
    """Read what was planned into its shards. A collective over a CPU group.

    Raises:
        CheckpointError: on every rank, if one could not read; the shards then hold a mixture.
    """
    try:
        state_dict_loader.load(
            {}, storage_reader=_Reader(folder), planner=_LoadPlanner(plan), process_group=group
        )
    except CheckpointException as error:
        raise CheckpointError(f"reading {folder} failed: {_first(error)}") from error


def _alone(group: Any) -> bool:
    """One rank's plans need not be sent to itself: of 1,344 tensors that took 0.4 s."""
    return not dist.is_initialized() or dist.get_world_size(group) == 1


def _first(error: CheckpointException) -> str:
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank} {type(cause).__name__}: {cause}"


class _SavePlanner(DefaultSavePlanner):
    """Plans this rank's shards. torch's planner joins and checks the ranks' plans."""

    def __init__(self, shards: Mapping[Place, Shard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        cut = ((name, shard) for (name, _), whole in shards.items() for shard in whole.cut())
        self._shards = {(name, torch.Size(shard.offsets)): shard for name, shard in cut}

    def create_local_plan(self) -> SavePlan:
        """One write for each shard."""
        items = []
        properties = TensorProperties(dtype=torch.float32)
        for (name, _), shard in self._shards.items():
            data = TensorWriteData(
                chunk=shard.chunk, properties=properties, size=torch.Size(shard.shape)
            )
            index = MetadataIndex(name, torch.Size(shard.offsets))
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The shard."""
        index = write_item.index
        assert index.offset is not None
        return self._shards[index.fqn, index.offset].tensor().detach()


class _LoadPlanner(DefaultLoadPlanner):
    """A plan made before, by `plan`."""

    def __init__(self, plan: LoadPlan) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._plan, self._shards = plan, plan.planner_data

    def create_local_plan(self) -> LoadPlan:
        """Return the finished plan."""
        return LoadPlan(self._plan.items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The shard's memory."""
        shard: Shard = self._shards[index.fqn, tuple(index.offset or ())]
        return shard.tensor()


class _Writer(filesystem.FileSystemWriter):
    """torch's files, a rank's tensors written by many threads: its own writer calls `torch.save`
    for one after the other, which checks them with a CRC that nothing reads."""

    def __init__(
        self, folder: Path, writer: BulkWriter, meanwhile: Callable[[Sequence[Writing]], None]
    ) -> None:
        super().__init__(folder)
        self._writer, self._meanwhile = writer, meanwhile
        self.hashes: dict[str, str] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Each tensor as `torch.save` would write it, end to end in one file."""
        name = f"{plan.storage_data.prefix}0{filesystem.DEFAULT_SUFFIX}"
        parts: list[Extent] = []
        results, end = [], 0
        for item in plan.items:
            assert item.tensor_data is not None
            sizes = item.tensor_data.chunk.sizes
            head, tail = _around(sizes)
            begin, nbytes = end, 4 * math.prod(sizes)
            tensor: Callable[[], Any] = functools.partial(planner.resolve_data, item)
            pieces: tuple[tuple[int, bytes | Callable[[], Any]], ...] = (
                (len(head), head),
                (nbytes, tensor),
                (len(tail), tail),
            )
            for part, source in pieces:
                parts.append(Extent(offset=end, nbytes=part, source=source))
                end += part
            info = filesystem._StorageInfo(name, begin, end - begin)
            results.append(
                WriteResult(index=item.index, size_in_bytes=end - begin, storage_data=info)
            )
        started: list[Writing] = []
        try:
            started.append(self._writer.start(Path(self.path) / name, parts))
        finally:  # a collective, whatever happens to this rank's file
            self._meanwhile(started)
        self.hashes[name] = started[0].wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


@functools.lru_cache(maxsize=1 << 14)
def _around(sizes: torch.Size) -> tuple[bytes, bytes]:
    """Return the bytes that `torch.save` writes before and after an fp32 tensor's elements; as with
    `torch.serialization.set_crc32_options(False)`, which `torch.load` knows, the checksum is not
    the elements'."""
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
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint's index")
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
