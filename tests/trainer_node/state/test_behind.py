"""See `behind.py`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from orchestrator.protocol.messages import LoadCheckpoint, SaveCheckpoint, Shutdown, TrainMerged
from tests.trainer_node.data import arrays, training
from tests.trainer_node.served_node import node, rank_process
from tests.trainer_node.state import slow_save
from trainer_node.files import generations
from trainer_node.files.behind import Behind
from trainer_node.files.bulk_files import Extent, bulk_writer
from trainer_node.publication import Publication
from trainer_node.request import Outcome


@pytest.mark.parametrize(
    "what",
    [
        "crashes",
        "again",
        "lost",
        "replayed",
        "full_disk",
        "stays_full",
        "mixtures",
        "waits",
        "no_base",
    ],
)
def test_one_rank(what: str, models, torchrun, tmp_path: Path) -> None:
    # The files' order and renames, which a crash interrupts, are the same in every model.
    name = "dense_tied" if what in ("crashes", "again") else "moe"
    torchrun(1, "state.behind", tmp_path, models[name], 1, 1, 1, what)


@pytest.mark.parametrize("what", ["lost", "replayed", "full_disk"])
@pytest.mark.parametrize(("ranks", "expert"), [(2, 1), (2, 2)], ids=["dp2", "ep2"])
def test_two_ranks(what: str, ranks: int, expert: int, models, torchrun, tmp_path: Path) -> None:
    torchrun(ranks, "state.behind", tmp_path, models["moe"], 1, 1, expert, what)


@pytest.mark.parametrize("what", ["lost", "full_disk"])
def test_all_parameters(what: str, models, torchrun, tmp_path: Path) -> None:
    torchrun(2, "state.behind", tmp_path, models["dense_tied"], 1, 1, 1, what, "full")


def test_a_value_head(models, torchrun, tmp_path: Path) -> None:
    """Its weights are durable with the adapters', and its step is made again."""
    torchrun(
        2, "state.behind", tmp_path, models["dense_tied"], 2, 1, 1, "replayed", "lost", "valued"
    )


def test_the_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """All copy at once, and none sees what the others are about to take."""
    memory = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    for ranks, has_room in (("1", True), ("8", False)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert _written([torch.ones(100)])[0] is has_room


def test_without_memory_for_a_copy_the_moments_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise this rank's thread would leave, and the other ranks' would wait for it."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(torch.Tensor, "clone", refuse)
    assert _written([torch.ones(100)]) == (False, "")


def _written(moments: list[torch.Tensor]) -> tuple[bool, str]:
    """Whether a copy was written, and what failed."""
    given: list[torch.Tensor] = []
    behind = Behind()
    behind.start(Path("checkpoint"), moments, given.extend)
    why = behind.settle()
    assert len(given) == len(moments)
    return given[0] is not moments[0], why


def test_nothing_is_written_while_weights_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies, plans and hashes next to a send take milliseconds of the pause."""
    behind, file, begun = Behind(), tmp_path / "state", threading.Event()

    def write(copies: Sequence[torch.Tensor]) -> None:
        begun.set()
        extents = [Extent(offset=0, nbytes=400, source=lambda: copies[0])]
        with bulk_writer(torch.device("cpu"), wait_turn=behind.wait_turn) as writer:
            writer.start(file, extents).wait()

    def send(_: Publication, request: Any) -> Outcome:
        behind.start(file, [torch.ones(100)], write)
        assert not begun.wait(0.3), "its files are planned meanwhile"
        return Outcome()

    monkeypatch.setattr(Publication, "_send", send)
    publication = object.__new__(Publication)
    publication._trainer = SimpleNamespace(behind=behind)  # type: ignore[assignment]
    publication.send(None)  # type: ignore[arg-type]
    assert behind.settle() == ""
    assert file.read_bytes() == torch.ones(100).numpy().tobytes()


def test_no_span_is_written_while_weights_are_sent(tmp_path: Path) -> None:
    """A save that had begun before the send."""
    behind, file = Behind(), tmp_path / "state"
    begun, is_held = threading.Event(), threading.Event()

    def write(copies: Sequence[torch.Tensor]) -> None:
        begun.set()
        assert is_held.wait(30)
        extents = [Extent(offset=0, nbytes=400, source=lambda: copies[0])]
        with bulk_writer(torch.device("cpu"), wait_turn=behind.wait_turn) as writer:
            writer.start(file, extents).wait()

    behind.start(file, [torch.ones(100)], write)
    assert begun.wait(30)
    with behind.held():
        is_held.set()
        assert not behind.wait(timeout_s=0.3)
        assert not any(file.read_bytes())
    assert behind.settle() == ""
    assert file.read_bytes() == torch.ones(100).numpy().tobytes()


def job(version: int, folder: Path) -> tuple[dict[str, Any], list[bytes]]:
    """A step with its own batch, towards a version."""
    fields, buffers = training(arrays(version), name="cross_entropy")
    place = {"version": version, "checkpoint_dir": str(folder / str(version))}
    return {**fields, **place}, buffers


def test_a_killed_trainer_makes_its_step_again(models, torchrun, tmp_path: Path) -> None:
    """A real process of two ranks dies by SIGKILL while it writes moments; one that is told to end
    writes them first.
    """
    slow = tmp_path / "slow"
    slow.touch()
    settings = {"ranks": 2, "module": "tests.trainer_node.state.slow_save", "expert": 2}
    settings["env"] = {slow_save.FILE: str(slow)}
    with node(models["moe"], tmp_path, torchrun, **settings) as (control, process):
        control.ok(SaveCheckpoint, version=0, checkpoint_dir=str(tmp_path / "0"))
        fields, buffers = job(1, tmp_path)
        control.ok(TrainMerged, buffers, **fields)
        assert not (tmp_path / "1" / "state").exists(), "the answer does not wait for the moments"
        ranks = [rank_process(process, rank) for rank in (0, 1)]
        for rank in ranks:
            rank.kill()
        assert not psutil.wait_procs(ranks, timeout=30)[1]
    slow.unlink()
    with node(models["moe"], tmp_path, torchrun, **settings) as (control, process):
        loaded, _ = control.ok(LoadCheckpoint, checkpoint_dir=str(tmp_path / "1"))
        assert "bit for bit" in loaded["warnings"][0]
        loaded, _ = control.ok(LoadCheckpoint, checkpoint_dir=str(tmp_path / "1"))
        assert loaded["warnings"] == [], "the moments are written"
        fields, buffers = job(2, tmp_path)
        slow.touch()
        control.ok(TrainMerged, buffers, **fields)
        control.urgent(Shutdown())
        slow.unlink()
        assert process.wait(60) == 0
    generations.check_contents(tmp_path / "2")
    assert generations.is_whole(tmp_path / "2" / "state"), "an orderly end waits for the save"
