"""Files written by many threads hold what one would have written, and are read by those whose
formats they are.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import psutil
import pytest
import torch
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemReader, load

from trainer_node.adapters import peft_io
from trainer_node.files import hashing
from trainer_node.files.bulk_files import Extent, bulk_writer, spans
from trainer_node.state import sharded_state

CPU = torch.device("cpu")


def part(offset: int, nbytes: int) -> Extent:
    return Extent(
        offset=offset, nbytes=nbytes, source=bytes(range(offset % 256, offset % 256 + nbytes))
    )


def test_spans_are_full_and_end_to_end() -> None:
    cut = spans([part(7, 10), part(0, 7), part(17, 0), part(17, 4)], span_bytes=8)
    assert [(s.offset, s.nbytes) for s in cut] == [(0, 8), (8, 8), (16, 5)]
    assert [[(p.offset, first, size) for p, first, size in s.pieces] for s in cut] == [
        [(0, 0, 7), (7, 0, 1)],
        [(7, 1, 8)],
        [(7, 9, 1), (17, 0, 4)],
    ]
    assert spans([], span_bytes=8) == []
    for wrong in ([part(0, 7), part(8, 1)], [part(0, 7), part(6, 2)], [part(1, 1)]):
        with pytest.raises(ValueError, match="the file's extents end at byte"):
            spans(wrong, span_bytes=8)


def test_a_file_of_views_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "SPAN_BYTES", 1000)
    torch.manual_seed(0)
    stacked, strided = torch.randn(5, 7, 11), torch.randn(40, 30)[:, 3:20]
    parts = [
        Extent(offset=0, nbytes=13, source=b"thirteen byte"),
        Extent(offset=13, nbytes=4 * 385, source=lambda: stacked),
        Extent(offset=13 + 1540, nbytes=4 * 680, source=lambda: strided),
    ]
    before = set(threading.enumerate())
    with bulk_writer(CPU) as writer:
        files = [writer.start(tmp_path / str(i), parts) for i in range(3)]
        for file in files:
            file.wait()
    assert set(threading.enumerate()) <= before
    wanted = b"thirteen byte" + stacked.numpy().tobytes() + strided.contiguous().numpy().tobytes()
    assert [(tmp_path / str(i)).read_bytes() == wanted for i in range(3)] == [True] * 3


def test_a_full_disk_is_an_error_and_leaves_no_thread_or_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "SPAN_BYTES", 1000)
    real, before = os.pwrite, set(threading.enumerate())

    def full(handle: int, data: bytes, offset: int) -> int:
        if offset >= 5000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data[:700], offset)  # and short writes before

    monkeypatch.setattr(os, "pwrite", full)
    tensor = torch.arange(3000, dtype=torch.float32)
    whole = [Extent(offset=0, nbytes=12000, source=lambda: tensor)]
    with pytest.raises(OSError, match="No space left"), bulk_writer(CPU) as writer:
        writer.start(tmp_path / "large", whole).wait()
    with bulk_writer(CPU) as writer:
        writer.start(
            tmp_path / "small", [Extent(offset=0, nbytes=4800, source=lambda: tensor[:1200])]
        ).wait()
    assert (tmp_path / "small").read_bytes() == tensor[:1200].numpy().tobytes()
    assert set(threading.enumerate()) <= before
    assert not [
        file for file in psutil.Process().open_files() if Path(file.path).is_relative_to(tmp_path)
    ]


def test_stacks_are_a_safetensors_file(tmp_path: Path) -> None:
    """One expert's tensor is found inside its stack; pieces of several ranks make up one tensor."""
    torch.manual_seed(1)
    experts, dense = torch.randn(3, 4, 6), torch.randn(8, 4)
    names = tuple(f"model.layers.0.mlp.experts.{e}.up_proj" for e in range(3))
    stacks = [
        peft_io.Stack(
            names=names, matrix="A", shape=(4, 6), pieces=((0, experts[:2]), (48, experts[2:]))
        ),
        peft_io.Stack(
            names=("model.layers.0.self_attn.q_proj",),
            matrix="B",
            shape=(8, 4),
            pieces=((0, dense[:4]), (16, dense[4:])),
        ),
    ]
    with bulk_writer(CPU) as writer:
        writer.start(tmp_path / "a.safetensors", peft_io.layout(stacks)).wait()
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (safe_open is no mapping)
        assert file.metadata() == {"format": "pt"}
    prefix = "base_model.model.model.layers.0"
    wanted = {f"{prefix}.mlp.experts.{e}.up_proj.lora_A.weight": experts[e] for e in range(3)}
    wanted[f"{prefix}.self_attn.q_proj.lora_B.weight"] = dense
    assert found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)
    header = json.loads((tmp_path / "a.safetensors").read_bytes()[8:].split(b"}}")[0] + b"}}")
    assert len(header) == 5


def test_torch_reads_the_sharded_state_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are torch.distributed.checkpoint's, also where a large tensor was cut
    into several.
    """
    monkeypatch.setattr(sharded_state, "MOST_BYTES", 100)
    whole = torch.randn(9, 7)
    box = sharded_state.Shard(sizes=(9, 7), offsets=(0, 0), shape=(9, 7), tensor=lambda: whole)
    assert [b.sizes for b in box.cut()] == [(3, 7)] * 3
    sharded_state.save({("w", (0, 0)): box}, tmp_path, group=None)
    found = {"w": torch.empty(9, 7)}
    load(found, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    assert torch.equal(found["w"], whole)
