"""What goes between ranks runs no code of the sender's. See `objects.py` for several ranks."""

from __future__ import annotations

import ast
import enum
import io
import os
import pickle
import subprocess
import traceback
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from orchestrator.errors import ConfigError
from tests.trainer_node.conftest import REPO
from trainer_node.ranks.objects import Unpickler, enum_member

PICKLING = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}


def read(value: object) -> object:
    return Unpickler(io.BytesIO(pickle.dumps(value))).load()


class Reduced:
    def __init__(self, function: object, *arguments: object) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> tuple[object, ...]:
        return self.reduced


def test_values_between_ranks(torchrun, tmp_path):
    torchrun(3, "ranks.objects", tmp_path / "marker")
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "evil",
    [
        Reduced(os.system, "true"),
        Reduced(eval, "1"),
        Reduced(subprocess.Popen, ["true"]),
        Reduced(torch.load, "x"),
        Reduced(Path.touch, "x"),
        Reduced(__import__, "os"),
        os.system,
        Path.home().__class__.unlink,
    ],
)
def test_nothing_that_acts_is_made(evil):
    with pytest.raises(pickle.UnpicklingError, match="is not allowed"):
        read(evil)


def test_nothing_is_imported():
    with pytest.raises(pickle.UnpicklingError, match=r"antigravity\.Error is not allowed"):
        Unpickler(io.BytesIO(b"cantigravity\nError\n.")).load()


def test_what_torchs_checkpoint_planner_sends_is_made():
    size = torch.Size([2, 3])
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=size, sizes=size),
        properties=TensorProperties(dtype=torch.float32),
        size=size,
    )
    item = WriteItem(index=MetadataIndex("w", size), type=WriteItemType.SHARD, tensor_data=data)
    plan = SavePlan([item])
    assert read(plan) == plan and read(LoadItemType.TENSOR) is LoadItemType.TENSOR
    assert read(({"a": 1.5}, {1, 2}, frozenset("x"), Path("/x"), torch.int64)) == (
        {"a": 1.5},
        {1, 2},
        frozenset("x"),
        Path("/x"),
        torch.int64,
    )


def test_errors_are_made_with_their_traceback():
    try:
        raise ConfigError("no space left")
    except ConfigError as error:
        failure = (error, traceback.extract_tb(error.__traceback__))
    error, stack = read(failure)
    assert (
        type(error) is ConfigError
        and str(error) == "no space left"
        and stack[0].name == "test_errors_are_made_with_their_traceback"
    )


def test_only_an_enums_member_is_had_by_name():
    assert enum_member(WriteItemType, "SHARD") is WriteItemType.SHARD
    for kind, name in ((WriteItemType, "__class__"), (os, "system"), (enum.Enum, "mro")):
        with pytest.raises(pickle.UnpicklingError):
            enum_member(kind, name)


def test_no_module_uses_torchs_object_collectives():
    found = [
        f"{path.name}:{node.lineno}"
        for path in sorted((REPO / "trainer_node").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in PICKLING
    ]
    assert not found
