"""Whoever keeps an exception lets go of its frames, without a garbage collection."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from orchestrator.errors import without_frames
from trainer_node.export.gathering import Exchange
from trainer_node.files.behind import Behind
from trainer_node.files.bulk_files import Extent, bulk_writer
from trainer_node.ranks.lockstep import Failure, agree


class Held:
    """Stand-in for a tensor in a failed function."""


class Fails:
    """Fails with a local variable; `is_free`: nobody holds it any more."""

    def __init__(self) -> None:
        self._held: list[weakref.ref[Held]] = []

    def __call__(self, *_: Any) -> Any:
        held = Held()
        self._held.append(weakref.ref(held))
        raise RuntimeError("a test said so")

    @property
    def is_free(self) -> bool:
        assert self._held
        return all(ref() is None for ref in self._held)


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def group() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _itself(_: Sequence[Failure], own: Exception | None) -> Exception:
    assert own is not None
    return own


def test_a_failed_block(group: None) -> None:
    fails = Fails()
    with pytest.raises(RuntimeError, match="a test said so") as raised, agree(None, _itself):
        fails()
    del raised
    assert fails.is_free


def test_a_failed_block_with_another_error(group: None) -> None:
    """contextlib's frame holds the first error, so whoever ends the second one drops its frames."""
    fails = Fails()
    try:
        with agree(None, lambda failures, own: ValueError("another")):
            fails()
    except ValueError as error:
        without_frames(error)
    assert fails.is_free


def test_a_failed_save_in_the_background(tmp_path: Path) -> None:
    fails, behind = Fails(), Behind()
    behind.start(tmp_path, [torch.ones(1)], fails)
    assert behind.wait(timeout_s=10)
    assert fails.is_free
    assert behind.settle() == "RuntimeError: a test said so"


def test_a_failed_file(tmp_path: Path) -> None:
    fails = Fails()
    with pytest.raises(RuntimeError, match="a test said so") as raised:
        with bulk_writer(torch.device("cpu")) as writer:
            writer.start(tmp_path / "file", [Extent(offset=0, nbytes=4, source=fails)]).wait()
    del raised
    assert fails.is_free


def test_a_failed_merge_of_one_rank(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = Fails()
    monkeypatch.setattr(Exchange, "_begin", lambda self, ops: [])  # a lone rank sends nothing
    monkeypatch.setattr(dist, "P2POp", lambda *_: None)
    exchange = Exchange([[8]], group=None, device="cpu")
    exchange.start(limit=float("inf"))
    with pytest.raises(RuntimeError, match="a test said so") as raised:
        exchange.send(fails)
    del raised
    assert fails.is_free
