"""How much host memory a rank may take: half of what is free, or of its container's limit, shared
among the host's ranks.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainer_node.ranks import host_memory


@pytest.fixture
def free_of_64(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host with 64 bytes free, and two ranks; the container's control group."""
    found = SimpleNamespace(available=64)
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: found)
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    monkeypatch.setattr(host_memory, "OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text("4:memory:/docker/1\n3:cpu:/docker/1\n0::/job/step\n")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    return tmp_path


def test_without_a_limit_it_is_the_hosts(free_of_64: Path) -> None:
    assert host_memory.room_bytes() == 16
    (free_of_64 / "memory.max").write_text("max\n")
    assert host_memory.room_bytes() == 16


def test_a_containers_limit_counts(free_of_64: Path) -> None:
    """Of 100 bytes 80 are used, 12 of them by files that can go."""
    (free_of_64 / "memory.max").write_text("100\n")
    (free_of_64 / "memory.current").write_text("80\n")
    (free_of_64 / "memory.stat").write_text("anon 60\ninactive_file 12\n")
    assert host_memory.room_bytes() == 8


def test_a_batch_jobs_limit_counts(free_of_64: Path) -> None:
    """Its group is below the root, which has no limit. The least one on the way counts."""
    for name, limit in (("job", "30"), ("job/step", "max")):
        (free_of_64 / name).mkdir()
        (free_of_64 / name / "memory.max").write_text(f"{limit}\n")
    (free_of_64 / "job" / "memory.current").write_text("14\n")
    (free_of_64 / "job" / "memory.stat").write_text("inactive_file 0\n")
    assert host_memory.room_bytes() == 4


def test_a_limit_of_version_1_counts(free_of_64: Path) -> None:
    """A container sees its own group as the root."""
    folder = free_of_64 / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text("100\n")
    (folder / "memory.usage_in_bytes").write_text("80\n")
    (folder / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 12\n")
    assert host_memory.room_bytes() == 8


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's driver pins")
def test_where_none_can_be_pinned_there_is_no_room_for_it(free_of_64: Path) -> None:
    assert host_memory.room_bytes(pinned=True) == 0 < host_memory.room_bytes()
